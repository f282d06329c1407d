// A Python object that exports a stretch of a segment through the buffer protocol and keeps its mapping alive, and the
// Record tuple. Written against the C API: a consumer makes one of each per record.
#pragma once

#include <Python.h>

#include <functional>
#include <memory>
#include <utility>

#include "ring.h"

namespace staleflow {

struct Span {
  PyObject_HEAD
  uint8_t* data;
  Py_ssize_t bytes;
  int readonly;
  std::shared_ptr<void>* keep;
};

inline int span_getbuffer(PyObject* self, Py_buffer* view, int flags) {
  auto* span = reinterpret_cast<Span*>(self);
  return PyBuffer_FillInfo(view, self, span->data, span->bytes, span->readonly, flags);
}

inline void span_dealloc(PyObject* self) {
  delete reinterpret_cast<Span*>(self)->keep;
  Py_TYPE(self)->tp_free(self);
}

inline PyTypeObject* span_type() {
  static PyBufferProcs procs = {span_getbuffer, nullptr};
  static PyTypeObject type = [] {
    PyTypeObject made{};
    made.ob_base.ob_base.ob_refcnt = 1;
    made.tp_name = "staleflow._ring.Span";
    made.tp_basicsize = sizeof(Span);
    made.tp_flags = Py_TPFLAGS_DEFAULT;
    made.tp_dealloc = span_dealloc;
    made.tp_as_buffer = &procs;
    return made;
  }();
  return &type;
}

// New reference to a memoryview of `bytes` bytes at `data`; `keep` lives as long as the view.
inline PyObject* make_view(uint8_t* data, uint64_t bytes, bool readonly, std::shared_ptr<void> keep) {
  auto* span = reinterpret_cast<Span*>(span_type()->tp_alloc(span_type(), 0));
  if (!span) return nullptr;
  span->data = data;
  span->bytes = static_cast<Py_ssize_t>(bytes);
  span->readonly = readonly ? 1 : 0;
  span->keep = new std::shared_ptr<void>(std::move(keep));
  PyObject* view = PyMemoryView_FromObject(reinterpret_cast<PyObject*>(span));
  Py_DECREF(span);
  return view;
}

inline PyTypeObject* record_type() {
  static PyStructSequence_Field fields[] = {
      {"sequence", "number of the record in its ring: 1, 2, 3, ..."},
      {"kind", "what the payload is; chosen by the caller"},
      {"flags", "chosen by the caller"},
      {"id0", "chosen by the caller"},
      {"id1", "chosen by the caller"},
      {"payload", "peek: read-only memoryview into the ring, valid until released; pop_batch: bytes"},
      {"offset", "where the payload begins in ring.data"},
      {nullptr, nullptr}};
  static PyStructSequence_Desc description = {"staleflow._ring.Record", "One record of a ring.", fields, 7};
  static PyTypeObject* type = PyStructSequence_NewType(&description);
  return type;
}

// New reference; steals `payload`.
inline PyObject* make_record(const RecordView& record, PyObject* payload, uint64_t offset) {
  PyObject* made = payload ? PyStructSequence_New(record_type()) : nullptr;
  if (!made) {
    Py_XDECREF(payload);
    return nullptr;
  }
  PyStructSequence_SetItem(made, 0, PyLong_FromUnsignedLongLong(record.sequence));
  PyStructSequence_SetItem(made, 1, PyLong_FromUnsignedLong(record.meta.kind));
  PyStructSequence_SetItem(made, 2, PyLong_FromUnsignedLong(record.meta.flags));
  PyStructSequence_SetItem(made, 3, PyLong_FromUnsignedLongLong(record.meta.id0));
  PyStructSequence_SetItem(made, 4, PyLong_FromUnsignedLongLong(record.meta.id1));
  PyStructSequence_SetItem(made, 5, payload);
  PyStructSequence_SetItem(made, 6, PyLong_FromUnsignedLongLong(offset));
  return made;
}

}  // namespace staleflow

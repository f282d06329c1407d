// What the binding files share.
#pragma once

#include <pybind11/pybind11.h>

#include "copy.h"
#include "python_span.h"

namespace staleflow {

namespace py = pybind11;

constexpr uint64_t kReleaseGilBytes = 64 << 10;  // below this a copy is cheaper than handing the GIL over

[[noreturn]] inline void raise_python() { throw py::error_already_set(); }

inline py::object steal_or_raise(PyObject* made) {
  if (!made) raise_python();
  return py::reinterpret_steal<py::object>(made);
}

class BufferArg {
 public:
  explicit BufferArg(PyObject* object) {
    if (PyObject_GetBuffer(object, &view_, PyBUF_C_CONTIGUOUS) != 0) raise_python();
  }
  BufferArg(BufferArg&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
  BufferArg(const BufferArg&) = delete;
  ~BufferArg() {
    if (view_.obj) PyBuffer_Release(&view_);
  }
  const void* data() const { return view_.buf; }
  uint64_t bytes() const { return static_cast<uint64_t>(view_.len); }

 private:
  Py_buffer view_;
};

inline void copy_bytes(uint8_t* to, const void* from, uint64_t bytes, uint64_t room) {
  if (bytes < kReleaseGilBytes) return copy_for_others(to, from, bytes, room);
  py::gil_scoped_release unlocked;
  copy_for_others(to, from, bytes, room);
}

void bind_arena(py::module_& module);
void bind_loops(py::module_& module);

}  // namespace staleflow

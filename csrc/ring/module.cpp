// staleflow._ring: the Python face of the rings. Thin; its documentation is in staleflow/trajectories/ring.py.
#include "bindings.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <variant>
#include <vector>

#include "ring.h"

using namespace staleflow;

namespace {

struct RingFull : RingError {
  using RingError::RingError;
};

constexpr int64_t kSignalCheckNs = 100000000;  // Ctrl-C waits at most this long

std::vector<BufferArg> gather(const py::args& arguments) {
  std::vector<BufferArg> buffers;
  buffers.reserve(arguments.size());
  for (py::handle argument : arguments) buffers.emplace_back(argument.ptr());
  return buffers;
}

uint64_t total_bytes(const std::vector<BufferArg>& buffers) {
  uint64_t total = 0;
  for (const BufferArg& buffer : buffers) total += buffer.bytes();
  return total;
}

void copy_all(uint8_t* to, const std::vector<BufferArg>& buffers, uint64_t room) {
  for (const BufferArg& buffer : buffers) {
    copy_bytes(to, buffer.data(), buffer.bytes(), room);
    to += buffer.bytes();
  }
}

// Repeats `step(ns)` in slices until it is true or the time is over, without the GIL, looking for signals in between.
template <class Step>
bool wait_in_slices(std::optional<double> timeout_s, Step step) {
  if (timeout_s && !(*timeout_s >= 0)) throw std::invalid_argument("timeout_s must be None or >= 0");
  const double limit_ns = timeout_s ? std::min(*timeout_s * 1e9, 9e18) : 9e18;
  const int64_t start = monotonic_ns();
  for (;;) {
    const int64_t left = static_cast<int64_t>(limit_ns) - (monotonic_ns() - start);
    bool done, last = left <= kSignalCheckNs;
    {
      py::gil_scoped_release unlocked;
      done = step(std::max<int64_t>(0, std::min(left, kSignalCheckNs)));
    }
    if (PyErr_CheckSignals() != 0) raise_python();
    if (done || last) return done;
  }
}

bool push(Ring& ring, const RecordMeta& meta, const std::vector<BufferArg>& buffers, uint64_t bytes) {
  uint8_t* to = ring.reserve(bytes, meta);
  if (!to) return false;
  copy_all(to, buffers, ring.capacity());
  ring.commit();
  return true;
}

void put(Ring& ring, const RecordMeta& meta, const std::vector<BufferArg>& buffers, std::optional<double> timeout_s) {
  const uint64_t bytes = total_bytes(buffers);
  if (push(ring, meta, buffers, bytes)) return;
  const int64_t start = monotonic_ns();
  auto left_s = [&]() -> std::optional<double> {
    if (!timeout_s) return std::nullopt;
    return std::max(0.0, *timeout_s - static_cast<double>(monotonic_ns() - start) * 1e-9);
  };
  if (wait_in_slices(left_s(), [&](int64_t ns) { return ring.wait_writable(bytes, ns) || ring.stop_unseen(); }) &&
      push(ring, meta, buffers, bytes))
    return;
  throw RingFull("ring '" + ring.segment()->name() + "' is full: " + std::to_string(ring.used()) + " of " +
                 std::to_string(ring.capacity()) + " bytes used, no room for a record of " + std::to_string(bytes) +
                 " bytes");
}

template <class Number>
Number to_unsigned(PyObject* object) {
  unsigned long long value = PyLong_AsUnsignedLongLong(object);
  if (value == std::numeric_limits<unsigned long long>::max() && PyErr_Occurred()) raise_python();
  if (value > std::numeric_limits<Number>::max()) throw std::invalid_argument("push_batch: number out of range");
  return static_cast<Number>(value);
}

RecordMeta meta_of(PyObject* item) {
  if (!PyTuple_Check(item) || (PyTuple_GET_SIZE(item) != 2 && PyTuple_GET_SIZE(item) != 5))
    throw std::invalid_argument("push_batch takes tuples (kind, payload) or (kind, payload, flags, id0, id1)");
  RecordMeta meta;
  meta.kind = to_unsigned<uint32_t>(PyTuple_GET_ITEM(item, 0));
  if (PyTuple_GET_SIZE(item) == 5) {
    meta.flags = to_unsigned<uint32_t>(PyTuple_GET_ITEM(item, 2));
    meta.id0 = to_unsigned<uint64_t>(PyTuple_GET_ITEM(item, 3));
    meta.id1 = to_unsigned<uint64_t>(PyTuple_GET_ITEM(item, 4));
  }
  return meta;
}

bool reserve_copy(Ring& ring, const RecordMeta& meta, const void* from, uint64_t bytes) {
  uint8_t* to = ring.reserve(bytes, meta);
  if (to) copy_bytes(to, from, bytes, ring.capacity());
  return to != nullptr;
}

bool stage_one(Ring& ring, PyObject* item) {
  const RecordMeta meta = meta_of(item);
  PyObject* payload = PyTuple_GET_ITEM(item, 1);
  if (PyBytes_Check(payload)) {
    if (!reserve_copy(ring, meta, PyBytes_AS_STRING(payload), static_cast<uint64_t>(PyBytes_GET_SIZE(payload)))) return false;
  } else {
    BufferArg buffer(payload);
    if (!reserve_copy(ring, meta, buffer.data(), buffer.bytes())) return false;
  }
  ring.stage();
  return true;
}

// What was staged before an error is published: the caller learns of it by the ring's sequence, and nothing is lost.
size_t push_batch(Ring& ring, const py::object& items) {
  py::object fast = steal_or_raise(PySequence_Fast(items.ptr(), "push_batch takes a sequence of tuples"));
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(fast.ptr());
  Py_ssize_t done = 0;
  try {
    while (done < count && stage_one(ring, PySequence_Fast_GET_ITEM(fast.ptr(), done))) ++done;
  } catch (...) {
    if (done) ring.publish();
    throw;
  }
  if (done) ring.publish();
  return static_cast<size_t>(done);
}

template <class MakePayload>
py::object collect(Ring& ring, Py_ssize_t limit, MakePayload make_payload) {
  if (limit < 1) throw std::invalid_argument("limit must be at least 1, not " + std::to_string(limit));
  py::object list = steal_or_raise(PyList_New(0));
  RecordView record;
  while (limit-- > 0 && ring.next(&record)) {
    const auto offset = static_cast<uint64_t>(record.payload - ring.data());
    py::object made = steal_or_raise(make_record(record, make_payload(record), offset));
    if (PyList_Append(list.ptr(), made.ptr()) != 0) raise_python();
  }
  return list;
}

py::object peek(Ring& ring, Py_ssize_t limit) {
  return collect(ring, limit, [&](const RecordView& record) {
    return make_view(const_cast<uint8_t*>(record.payload), record.payload_bytes, true, ring.segment());
  });
}

py::object pop_batch(Ring& ring, Py_ssize_t limit) {
  if (ring.unreleased()) throw std::logic_error("pop_batch: records handed out by peek are not yet released");
  py::object list = collect(ring, limit, [](const RecordView& record) {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(record.payload),
                                     static_cast<Py_ssize_t>(record.payload_bytes));
  });
  if (ring.unreleased()) ring.release_all();
  return list;
}

py::object reserve(Ring& ring, uint64_t bytes, uint32_t kind, uint32_t flags, uint64_t id0, uint64_t id1) {
  uint8_t* to = ring.reserve(bytes, {kind, flags, id0, id1});
  if (!to) return py::none();
  return steal_or_raise(make_view(to, bytes, false, ring.segment()));
}

RingOptions options_of(uint64_t run_id, uint64_t schema_hash, const std::string& label, const std::string& directory,
                       int numa_node = -1) {
  return {run_id, schema_hash, label, {directory, numa_node}};
}

std::shared_ptr<Ring> create(const std::string& name, uint64_t capacity, uint64_t run_id, uint64_t schema_hash,
                             const std::string& label, const std::string& directory, int numa_node) {
  py::gil_scoped_release unlocked;
  return Ring::create(name, capacity, options_of(run_id, schema_hash, label, directory, numa_node));
}

std::shared_ptr<Ring> attach(const std::variant<int, std::string>& target, uint64_t run_id, uint64_t schema_hash,
                             const std::string& label, const std::string& directory) {
  py::gil_scoped_release unlocked;
  const RingOptions options = options_of(run_id, schema_hash, label, directory);
  return std::visit([&](const auto& where) { return Ring::attach(where, options); }, target);
}

std::vector<std::shared_ptr<Ring>> wait_any(const std::vector<std::shared_ptr<Ring>>& rings,
                                            std::optional<double> timeout_s) {
  std::vector<Ring*> plain;
  for (const auto& ring : rings) plain.push_back(ring.get());
  std::vector<bool> found;
  wait_in_slices(timeout_s, [&](int64_t ns) {
    found = Ring::wait_any(plain, ns);
    return std::find(found.begin(), found.end(), true) != found.end();
  });
  std::vector<std::shared_ptr<Ring>> ready;
  for (size_t i = 0; i < rings.size(); ++i)
    if (found[i]) ready.push_back(rings[i]);
  return ready;
}

void bind_ring(py::module_& module) {
  py::class_<Ring, std::shared_ptr<Ring>> ring(module, "Ring");
  ring.def_static("create", create, py::arg("name"), py::arg("capacity"), py::kw_only(), py::arg("run_id"),
                  py::arg("schema_hash") = 0, py::arg("label") = "", py::arg("directory") = "/dev/shm",
                  py::arg("numa_node") = -1);
  ring.def_static("attach", attach, py::arg("target"), py::kw_only(), py::arg("run_id"), py::arg("schema_hash") = 0,
                  py::arg("label") = "", py::arg("directory") = "/dev/shm");
  ring.def("reserve", reserve, py::arg("nbytes"), py::arg("kind"), py::arg("flags") = 0, py::arg("id0") = 0,
           py::arg("id1") = 0);
  ring.def("commit", &Ring::commit);
  ring.def("abort", &Ring::abort);
  ring.def(
      "push",
      [](Ring& self, uint32_t kind, const py::args& buffers, uint32_t flags, uint64_t id0, uint64_t id1) {
        std::vector<BufferArg> held = gather(buffers);
        return push(self, {kind, flags, id0, id1}, held, total_bytes(held));
      },
      py::arg("kind"), py::arg("flags") = 0, py::arg("id0") = 0, py::arg("id1") = 0);
  ring.def(
      "put",
      [](Ring& self, uint32_t kind, const py::args& buffers, std::optional<double> timeout_s, uint32_t flags,
         uint64_t id0, uint64_t id1) { put(self, {kind, flags, id0, id1}, gather(buffers), timeout_s); },
      py::arg("kind"), py::arg("timeout_s"), py::arg("flags") = 0, py::arg("id0") = 0, py::arg("id1") = 0);
  ring.def("push_batch", push_batch, py::arg("items"));
  ring.def("peek", peek, py::arg("limit") = 1);
  ring.def("pop_batch", pop_batch, py::arg("limit"));
  ring.def("release", &Ring::release, py::arg("sequence"));
  ring.def("rewind", &Ring::rewind);
  ring.def(
      "wait",
      [](Ring& self, std::optional<double> timeout_s) {
        return wait_in_slices(timeout_s, [&](int64_t ns) { return self.wait(ns) || self.stop_unseen(); }) && self.has_data();
      },
      py::arg("timeout_s"));
  ring.def(
      "wait_writable",
      [](Ring& self, uint64_t bytes, std::optional<double> timeout_s) {
        return wait_in_slices(timeout_s, [&](int64_t ns) { return self.wait_writable(bytes, ns) || self.stop_unseen(); }) &&
               self.has_room(bytes);
      },
      py::arg("nbytes"), py::arg("timeout_s"));
  ring.def("claim_producer", [](Ring& self) { self.claim(Role::producer); });
  ring.def("claim_consumer", [](Ring& self) { self.claim(Role::consumer); });
  ring.def("check_peer", [](Ring& self) {
    for (Role role : {Role::producer, Role::consumer})
      if (self.claimed(role)) self.require_open(role);
  });
  ring.def("set_stop", &Ring::set_stop, py::arg("code"));
  ring.def("close", &Ring::close, py::arg("reason") = "");
  ring.def("unlink", &Ring::unlink);
  ring.def("fileno", [](const Ring& self) { return self.segment()->descriptor(); });
  ring.def_property_readonly("stop_code", &Ring::stop_code);
  ring.def_property_readonly("closed", [](Ring& self) { return self.why_closed(); });
  ring.def_property_readonly("used", &Ring::used);
  ring.def_property_readonly("capacity", &Ring::capacity);
  ring.def_property_readonly("max_record", &Ring::max_record);
  ring.def_property_readonly("unreleased", &Ring::unreleased);
  ring.def_property_readonly("name", [](const Ring& self) { return self.segment()->name(); });
  ring.def_property_readonly("run_id", &Ring::run_id);
  ring.def_property_readonly("data", [](const Ring& self) {
    return steal_or_raise(make_view(self.data(), self.capacity(), false, self.segment()));
  });
  ring.def_property_readonly("header", [](const Ring& self) {
    return steal_or_raise(make_view(self.segment()->data(), kHeaderBytes, true, self.segment()));
  });
  ring.def_property(
      "spin_s", [](const Ring& self) { return static_cast<double>(self.spin_ns) * 1e-9; },
      [](Ring& self, double seconds) { self.spin_ns = static_cast<uint64_t>(std::llround(seconds * 1e9)); });
}

}  // namespace

PYBIND11_MODULE(_ring, module) {
  if (PyType_Ready(span_type()) != 0) raise_python();
  auto base = py::register_exception<RingError>(module, "RingError", PyExc_RuntimeError);
  py::register_exception<RingCorrupt>(module, "RingCorrupt", base);
  py::register_exception<RingClosed>(module, "RingClosed", base);
  py::register_exception<SegmentError>(module, "SegmentError", base);
  py::register_exception<RingFull>(module, "RingFull", base);
  module.add_object("Record", py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(record_type())));
  bind_ring(module);
  bind_arena(module);
  bind_loops(module);
  module.def("wait_any", wait_any, py::arg("rings"), py::arg("timeout_s"));
}

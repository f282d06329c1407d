// The arena and the partition in staleflow._ring; documentation in staleflow/trajectories/arena.py and partition.py.
#include "bindings.h"

#include <pybind11/stl.h>

#include "arena.h"
#include "partition.h"

namespace staleflow {
namespace {

// A view holds its block: neither moved nor given away while the view lives.
py::object view_of(const std::shared_ptr<Arena>& arena, const std::shared_ptr<Block>& block) {
  arena->pin(block);
  std::shared_ptr<void> pinned(nullptr, [arena, block](void*) { arena->unpin(block); });
  return steal_or_raise(make_view(arena->data() + block->offset, block->bytes, false, std::move(pinned)));
}

py::object take(const std::shared_ptr<Arena>& arena, const py::object& record) {
  py::object payload = py::hasattr(record, "payload") ? record.attr("payload") : record;
  BufferArg from(payload.ptr());
  std::shared_ptr<Block> block = arena->allocate(from.bytes());
  if (!block) return py::none();
  arena->pin(block);
  copy_bytes(arena->data() + block->offset, from.data(), from.bytes(), arena->capacity());
  arena->unpin(block);
  return py::cast(block);
}

std::shared_ptr<Arena> create(const std::string& name, uint64_t capacity, uint64_t run_id, const std::string& directory,
                              int numa_node) {
  py::gil_scoped_release unlocked;
  return Arena::create(name, capacity, run_id, {directory, numa_node});
}

py::bytes partition(const py::object& weights, int32_t groups, bool exact) {
  BufferArg buffer(weights.ptr());
  const auto* begin = static_cast<const int64_t*>(buffer.data());
  const std::vector<int64_t> copy(begin, begin + buffer.bytes() / sizeof(int64_t));
  std::vector<int32_t> group_of;
  {
    py::gil_scoped_release unlocked;
    group_of = exact ? karmarkar_karp(copy, groups) : longest_first(copy, groups);
  }
  return py::bytes(reinterpret_cast<const char*>(group_of.data()), group_of.size() * sizeof(int32_t));
}

}  // namespace

void bind_arena(py::module_& module) {
  py::class_<Block, std::shared_ptr<Block>>(module, "Block")
      .def_readonly("offset", &Block::offset)
      .def_readonly("nbytes", &Block::bytes)
      .def_readonly("pins", &Block::pins)
      .def_readonly("freed", &Block::freed);
  py::class_<Arena, std::shared_ptr<Arena>>(module, "Arena")
      .def_static("create", create, py::arg("name"), py::arg("capacity"), py::kw_only(), py::arg("run_id"),
                  py::arg("directory") = "/dev/shm", py::arg("numa_node") = -1)
      .def("allocate", &Arena::allocate, py::arg("nbytes"))
      .def("free", &Arena::free, py::arg("block"))
      .def("view", view_of, py::arg("block"))
      .def("take", take, py::arg("record"))
      .def("unlink", [](Arena& self) { self.segment()->unlink(); })
      .def("fileno", [](const Arena& self) { return self.segment()->descriptor(); })
      .def_property_readonly("data", [](const std::shared_ptr<Arena>& self) {
        return steal_or_raise(make_view(self->data(), self->capacity(), false, self));
      })
      .def_property_readonly("name", [](const Arena& self) { return self.segment()->name(); })
      .def_property_readonly("capacity", &Arena::capacity)
      .def_property_readonly("used", &Arena::used)
      .def_property_readonly("blocks", &Arena::blocks)
      .def_property_readonly("largest_hole", &Arena::largest_hole)
      .def_property_readonly("moved_bytes", &Arena::moved_bytes)
      .def_property_readonly("fragmentation", &Arena::fragmentation);
  module.def("partition", partition, py::arg("weights"), py::arg("groups"), py::arg("exact"));
}

}  // namespace staleflow

// Producer and consumer loops without the interpreter in them: for the benches and for the two-process tests, where
// every record carries its number and is checked.
#include "bindings.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <vector>

#include "ring.h"

namespace staleflow {
namespace {

constexpr uint32_t kLoopKind = 1;
constexpr uint64_t kBatch = 256;
constexpr int64_t kPatienceNs = 20000000000;

void require_step(bool went, const char* what) {
  if (!went) throw RingError(std::string(what) + ": nothing moved for 20 s");
}

uint8_t* reserve_waiting(Ring& ring, uint64_t bytes, const RecordMeta& meta) {
  uint8_t* to = ring.reserve(bytes, meta);
  if (!to) {
    ring.publish();
    require_step(ring.wait_writable(bytes, kPatienceNs), "produce");
    to = ring.reserve(bytes, meta);
  }
  return to;
}

// `count` records of `bytes` (at least 8), each beginning with its number from `first` on; published in batches.
void produce(Ring& ring, uint64_t count, uint64_t bytes, uint64_t first) {
  if (bytes < 8) throw std::invalid_argument("produce: records need at least 8 bytes");
  py::gil_scoped_release unlocked;
  const std::vector<uint8_t> source(bytes, 0x5A);
  const uint64_t batch = std::max<uint64_t>(1, std::min(kBatch, ring.capacity() / 16 / record_bytes(bytes)));
  for (uint64_t i = 0; i < count; ++i) {
    uint8_t* to = reserve_waiting(ring, bytes, {kLoopKind, 0, 0, 0});
    copy_for_others(to, source.data(), bytes, ring.capacity());
    const uint64_t number = first + i;
    std::memcpy(to, &number, sizeof number);
    ring.stage();
    if ((i + 1) % batch == 0) ring.publish();
  }
  ring.publish();
}

// Reads `count` records, copying each payload out; throws unless they are numbered `first`, `first` + 1, ...
void consume(Ring& ring, uint64_t count, uint64_t first) {
  py::gil_scoped_release unlocked;
  std::vector<uint8_t> sink(ring.max_record());
  for (uint64_t done = 0; done < count;) {
    require_step(ring.wait(kPatienceNs), "consume");
    RecordView record;
    uint64_t last = 0;
    for (uint64_t in_batch = 0; in_batch < kBatch && done < count && ring.next(&record); ++in_batch, ++done) {
      std::memcpy(sink.data(), record.payload, record.payload_bytes);
      uint64_t number;
      std::memcpy(&number, sink.data(), sizeof number);
      if (number != first + done)
        throw RingError("record " + std::to_string(number) + " came where " + std::to_string(first + done) + " belongs");
      last = record.sequence;
    }
    ring.release(last);
  }
}

// One small record every `gap_ns`, stamped with the time just before it is committed.
void produce_stamped(Ring& ring, uint64_t count, int64_t gap_ns) {
  py::gil_scoped_release unlocked;
  for (uint64_t i = 0; i < count; ++i) {
    const int64_t next = monotonic_ns() + gap_ns;
    while (monotonic_ns() < next) cpu_relax();
    uint8_t* to = reserve_waiting(ring, sizeof(int64_t), {kLoopKind, 0, 0, 0});
    const int64_t stamp = monotonic_ns();
    std::memcpy(to, &stamp, sizeof stamp);
    ring.commit();
  }
}

// Nanoseconds from stamp to sight of each of `count` records.
std::vector<int64_t> consume_stamped(Ring& ring, uint64_t count) {
  py::gil_scoped_release unlocked;
  std::vector<int64_t> delays;
  delays.reserve(count);
  while (delays.size() < count) {
    require_step(ring.wait(kPatienceNs), "consume_stamped");
    RecordView record;
    while (ring.next(&record)) {
      int64_t stamp;
      std::memcpy(&stamp, record.payload, sizeof stamp);
      delays.push_back(monotonic_ns() - stamp);
      ring.release(record.sequence);
    }
  }
  return delays;
}

}  // namespace

void bind_loops(py::module_& module) {
  module.def("produce", produce, py::arg("ring"), py::arg("count"), py::arg("nbytes"), py::arg("first") = 1);
  module.def("consume", consume, py::arg("ring"), py::arg("count"), py::arg("first") = 1);
  module.def("produce_stamped", produce_stamped, py::arg("ring"), py::arg("count"), py::arg("gap_ns"));
  module.def("consume_stamped", consume_stamped, py::arg("ring"), py::arg("count"));
}

}  // namespace staleflow

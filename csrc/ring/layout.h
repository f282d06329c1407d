// Layout of a ring segment in shared memory (ABI 1), little-endian; tests/ring/test_golden.py freezes these bytes.
//
//   0     identity      magic, ABI, header size, capacity, run id, schema hash; written once, before the name exists
//   128   producer      tail: bytes published ever; last_start: where the last published record begins
//   256   consumer      head: bytes released ever
//   384   consumer bell what a sleeping consumer waits on (shared futex)
//   512   producer bell what a sleeping producer waits on
//   640   stop word     overtakes whatever is queued
//   768   producer side who it is, whether it closed and why
//   1024  consumer side
//   4096  data          `capacity` bytes (a power of two); records begin at multiples of 64 and never cross the end
//
// tail and head only grow; the place of a position in the data is `position & (capacity - 1)`.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace staleflow {

constexpr uint64_t kRingMagic = 0x31474E4952574653;  // "SFWRING1"
constexpr uint32_t kAbi = 1;
constexpr uint64_t kHeaderBytes = 4096;
constexpr uint64_t kRecordAlign = 64;
constexpr uint64_t kMinCapacity = 4096;
constexpr uint64_t kMaxCapacity = uint64_t{1} << 40;
constexpr uint32_t kPaddingKind = 0xFFFFFFFF;

struct RecordHeader {
  uint64_t payload_bytes;
  uint32_t kind;
  uint32_t flags;
  uint64_t sequence;  // 1, 2, 3, ...; 0 in padding
  uint64_t id0;
  uint64_t id1;
  uint32_t crc;  // CRC-32C of the 40 bytes before it
  uint32_t reserved0;
  uint64_t reserved1[2];
};
static_assert(sizeof(RecordHeader) == 64);
static_assert(offsetof(RecordHeader, crc) == 40);

struct Side {
  std::atomic<uint32_t> pid;  // 0: nobody has taken this side yet
  std::atomic<uint32_t> closed;
  std::atomic<uint64_t> start_ticks;    // start time from /proc/PID/stat: a recycled pid is not the same process
  std::atomic<uint64_t> pid_namespace;  // pids mean something only inside it
  char label[64];
  char reason[160];
  uint64_t reserved;
};
static_assert(sizeof(Side) == 256);

struct Bell {
  std::atomic<uint32_t> event;    // the futex word; grows with each wake
  std::atomic<uint32_t> waiting;  // 1 while its owner sleeps or is about to
};

struct RingHeader {
  uint64_t magic;
  uint32_t abi;
  uint32_t header_bytes;
  uint64_t capacity;
  uint64_t run_id;
  uint64_t schema_hash;
  alignas(128) std::atomic<uint64_t> tail;
  std::atomic<uint64_t> last_start;
  alignas(128) std::atomic<uint64_t> head;
  alignas(128) Bell consumer_bell;
  alignas(128) Bell producer_bell;
  alignas(128) std::atomic<uint32_t> stop_code;
  alignas(128) Side producer;
  Side consumer;
};
static_assert(offsetof(RingHeader, tail) == 128);
static_assert(offsetof(RingHeader, head) == 256);
static_assert(offsetof(RingHeader, consumer_bell) == 384);
static_assert(offsetof(RingHeader, producer_bell) == 512);
static_assert(offsetof(RingHeader, stop_code) == 640);
static_assert(offsetof(RingHeader, producer) == 768);
static_assert(offsetof(RingHeader, consumer) == 1024);
static_assert(sizeof(RingHeader) <= kHeaderBytes);
// Atomics in memory shared between processes must not hide a lock of one process.
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

constexpr uint64_t align_record(uint64_t bytes) { return (bytes + kRecordAlign - 1) & ~(kRecordAlign - 1); }
constexpr uint64_t record_bytes(uint64_t payload_bytes) { return sizeof(RecordHeader) + align_record(payload_bytes); }

}  // namespace staleflow

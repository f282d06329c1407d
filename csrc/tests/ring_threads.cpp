// Producer and consumer as two threads of one process, so that ThreadSanitizer sees both: payloads of all sizes are
// written and read without locks, and only the ring's own stores order them. Also the arena, the copy and the partition,
// for the address and undefined-behaviour sanitizers.
//
//   ring_threads [RECORDS]
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "arena.h"
#include "check.h"
#include "copy.h"
#include "partition.h"
#include "ring.h"

using namespace staleflow;

namespace {

constexpr int64_t kSecond = 1000000000;
constexpr uint64_t kCapacity = 1 << 16;

std::string unique(const char* what) { return std::string("staleflow-test-") + what + "-" + std::to_string(getpid()); }

uint64_t size_of_record(uint64_t number) { return (number * 2654435761u) % (kCapacity / 8 + 1); }

void fill(uint8_t* to, uint64_t bytes, uint64_t number) { std::memset(to, static_cast<int>(number & 0xFF), bytes); }

void require_filled(const RecordView& record) {
  CHECK(record.payload_bytes == size_of_record(record.sequence));
  for (uint64_t i = 0; i < record.payload_bytes; ++i) CHECK(record.payload[i] == (record.sequence & 0xFF));
}

void produce(Ring& ring, uint64_t records) {
  for (uint64_t number = 1; number <= records;) {
    const uint64_t bytes = size_of_record(number);
    uint8_t* to = ring.reserve(bytes, {7, 1, number, 2});
    if (!to) {
      CHECK(ring.wait_writable(bytes, 20 * kSecond));
      continue;
    }
    fill(to, bytes, number);
    if (number % 5 == 0) {  // given up, and tried again
      ring.abort();
      CHECK(to == ring.reserve(bytes, {7, 1, number, 2}));
      fill(to, bytes, number);
    }
    ring.commit();
    ++number;
  }
}

void consume(Ring& ring, uint64_t records) {
  uint64_t expected = 1;
  while (expected <= records) {
    CHECK(ring.wait(20 * kSecond));
    RecordView record;
    for (int held = 0; held < 3 && ring.next(&record); ++held) {
      CHECK(record.sequence == expected++);
      CHECK(record.meta.id0 == record.sequence && record.meta.kind == 7);
      require_filled(record);
    }
    ring.release(expected - 1);
  }
}

void test_two_threads(uint64_t records) {
  RingOptions options;
  auto producer = Ring::create(unique("threads"), kCapacity, options);
  auto consumer = Ring::attach(unique("threads"), options);
  producer->unlink();
  std::thread reader([&] { consume(*consumer, records); });
  produce(*producer, records);
  reader.join();
  CHECK(producer->used() == 0);
}

void test_one_waiter_of_several(uint64_t records) {
  constexpr int kRings = 4;
  RingOptions options;
  std::vector<std::shared_ptr<Ring>> writers, readers;
  std::vector<Ring*> waited;
  for (int i = 0; i < kRings; ++i) {
    const std::string name = unique("any") + std::to_string(i);
    writers.push_back(Ring::create(name, kCapacity, options));
    readers.push_back(Ring::attach(name, options));
    writers.back()->unlink();
    waited.push_back(readers.back().get());
  }
  std::vector<std::thread> threads;
  for (auto& writer : writers) threads.emplace_back([&writer, records] { produce(*writer, records); });
  for (uint64_t seen = 0; seen < kRings * records;) {
    std::vector<bool> ready = Ring::wait_any(waited, 20 * kSecond);
    for (int i = 0; i < kRings; ++i) {
      RecordView record;
      while (ready[static_cast<size_t>(i)] && waited[static_cast<size_t>(i)]->next(&record)) {
        require_filled(record);
        waited[static_cast<size_t>(i)]->release(record.sequence);
        ++seen;
      }
    }
  }
  for (auto& thread : threads) thread.join();
}

void test_stop_overtakes() {
  RingOptions options;
  auto host = Ring::create(unique("stop"), kCapacity, options);
  auto rank = Ring::attach(unique("stop"), options);
  host->unlink();
  host->claim(Role::producer);
  std::thread sleeper([&] {
    CHECK(!rank->wait(20 * kSecond));
    CHECK(rank->stop_code() == 3);
  });
  host->set_stop(3);
  sleeper.join();
}

void test_arena() {
  auto arena = Arena::create(unique("arena"), 1 << 18, 1, {});
  arena->segment()->unlink();
  std::mt19937_64 random(1);
  std::vector<std::pair<std::shared_ptr<Block>, int>> live;
  for (int step = 0; step < 20000; ++step) {
    const uint64_t bytes = 1 + random() % 4000;
    if (auto block = arena->allocate(bytes)) {
      std::memset(arena->data() + block->offset, step & 0xFF, bytes);
      live.push_back({block, step & 0xFF});
      continue;
    }
    std::swap(live[random() % live.size()], live.back());
    auto [block, value] = live.back();
    for (uint64_t i = 0; i < block->bytes; ++i) CHECK(arena->data()[block->offset + i] == value);
    arena->free(block);
    live.pop_back();
  }
  for (auto& [block, value] : live) arena->free(block);
  CHECK(arena->used() == 0 && arena->largest_hole() == arena->capacity());
}

// Large copies go by whole lines and past the caches; what lies before, between and behind must be right as well.
void test_copy() {
  std::vector<uint8_t> source(40000), target(source.size() + 200);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint8_t>(1 + i % 251);
  for (uint64_t bytes : {0, 1, 16383, 16384, 16385, 16447, 16448, 33333}) {
    for (uint64_t at : {0, 1, 15, 63, 64, 100}) {
      std::fill(target.begin(), target.end(), uint8_t{0});
      copy_past_caches(target.data() + at, source.data() + at % 7, bytes);
      for (uint64_t i = 0; i < target.size(); ++i)
        CHECK(target[i] == (i >= at && i < at + bytes ? source[i - at + at % 7] : 0));
    }
  }
}

void test_partition() {
  std::mt19937_64 random(2);
  for (int round = 0; round < 200; ++round) {
    const int32_t groups = 1 + static_cast<int32_t>(random() % 40);
    std::vector<int64_t> weights(random() % 500);
    for (int64_t& weight : weights) weight = 1 + static_cast<int64_t>(random() % 30000);
    for (int32_t group : karmarkar_karp(weights, groups)) CHECK(group >= 0 && group < groups);
    for (int32_t group : longest_first(weights, groups)) CHECK(group >= 0 && group < groups);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t records = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000;
  test_two_threads(records);
  test_one_waiter_of_several(records / 8);
  test_stop_overtakes();
  test_arena();
  test_copy();
  test_partition();
  std::printf("ring_threads: %llu records, all checks passed\n", static_cast<unsigned long long>(records));
}

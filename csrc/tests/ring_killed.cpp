// Kills one side of a ring with SIGKILL at every labelled point, at the n-th time it comes by, starts a successor, and
// requires that every record arrives in order with the right bytes: never half, never lost; after the death of a
// consumer possibly twice, with the same sequence.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

namespace kill_points {
const char* wanted = "";
int countdown = 0;
inline void pass(const char* name) {
  if (std::strcmp(name, wanted) == 0 && --countdown == 0) kill(getpid(), SIGKILL);
}
}  // namespace kill_points
#define STALEFLOW_KILL_POINT(name) kill_points::pass(#name)

#include "../ring/ring.cpp"

#include "check.h"

using namespace staleflow;

namespace {

constexpr uint64_t kRecords = 3000;
constexpr uint64_t kCapacity = 8192;
constexpr int64_t kSecond = 1000000000;

// Waits for a side that may have died meanwhile: its successor is on its way, however slow the machine.
template <class Wait>
bool patiently(Wait wait) {
  for (const int64_t until = monotonic_ns() + 60 * kSecond; monotonic_ns() < until; usleep(1000)) {
    try {
      if (wait()) return true;
    } catch (const RingClosed&) {
    }
  }
  return false;
}

uint64_t size_of_record(uint64_t sequence) { return (sequence * 977) % (kCapacity / 8); }

// Only the producer knows the sequence it is about to give; it is the same as the record's id0, checked by the reader.
void produce_from(Ring& ring, uint64_t first, bool batched) {
  for (uint64_t number = first; number <= kRecords;) {
    const uint64_t bytes = size_of_record(number);
    uint8_t* to = ring.reserve(bytes, {1, 0, number, 0});
    if (!to) {
      if (batched) ring.publish();
      CHECK(patiently([&] { return ring.wait_writable(bytes, kSecond); }));
      continue;
    }
    std::memset(to, static_cast<int>(number & 0xFF), bytes / 2);
    kill_points::pass("mid_payload");
    std::memset(to + bytes / 2, static_cast<int>(number & 0xFF), bytes - bytes / 2);
    if (batched) {
      ring.stage();
      if (number % 7 == 0) ring.publish();
    } else {
      ring.commit();
    }
    ++number;
  }
  ring.publish();
}

// Returns the last sequence seen. `released` stands in for what a consumer has made durable.
uint64_t consume_from(Ring& ring, uint64_t seen) {
  while (seen < kRecords) {
    CHECK(patiently([&] { return ring.wait(kSecond); }));
    RecordView record;
    CHECK(ring.next(&record));
    CHECK(record.sequence <= seen + 1 && record.sequence == record.meta.id0);
    CHECK(record.payload_bytes == size_of_record(record.sequence));
    for (uint64_t i = 0; i < record.payload_bytes; ++i) CHECK(record.payload[i] == (record.sequence & 0xFF));
    seen = record.sequence;
    kill_points::pass("after_read");
    ring.release(record.sequence);
    kill_points::pass("after_release");
  }
  return seen;
}

template <class Body>
pid_t spawn(const char* point, int nth, Body body) {
  std::fflush(nullptr);
  pid_t child = fork();
  if (child) return child;
  kill_points::wanted = point;
  kill_points::countdown = nth;
  body();
  _exit(0);
}

bool was_killed(pid_t child) {
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status) || (WIFEXITED(status) && WEXITSTATUS(status) == 0));
  return WIFSIGNALED(status);
}

std::string unique() {
  static int count = 0;
  return "staleflow-test-killed-" + std::to_string(getpid()) + "-" + std::to_string(count++);
}

// What a producer would ask its upstream: which record comes next. The ring knows it as the recovered sequence.
uint64_t published_records(Ring& ring) {
  uint8_t* to = nullptr;
  while (!(to = ring.reserve(0, {1, 0, 0, 0}))) CHECK(patiently([&] { return ring.wait_writable(0, kSecond); }));
  ring.abort();
  return ring.next_sequence() - 1;
}

void producer_dies_at(const char* point, int nth, bool batched) {
  RingOptions options;
  auto host = Ring::create(unique(), kCapacity, options);
  host->unlink();
  const int descriptor = host->segment()->descriptor();
  pid_t reader = spawn("", 0, [&] { consume_from(*Ring::attach(descriptor, options), 0); });
  auto life = [&] {
    auto ring = Ring::attach(descriptor, options);
    produce_from(*ring, published_records(*ring) + 1, batched);
  };
  CHECK(was_killed(spawn(point, nth, life)));
  CHECK(!was_killed(spawn("", 0, life)));
  CHECK(!was_killed(reader));
}

void consumer_dies_at(const char* point, int nth) {
  RingOptions options;
  auto host = Ring::create(unique(), kCapacity, options);
  host->unlink();
  const int descriptor = host->segment()->descriptor();
  pid_t writer = spawn("", 0, [&] { produce_from(*Ring::attach(descriptor, options), 1, false); });
  // The successor does not know what its predecessor saw: it takes what comes, which must join on without a gap.
  auto life = [&] {
    auto ring = Ring::attach(descriptor, options);
    RecordView first;
    CHECK(patiently([&] { return ring->wait(kSecond); }) && ring->next(&first));
    const uint64_t before = first.sequence - 1;
    ring->rewind();
    consume_from(*ring, before);
  };
  CHECK(was_killed(spawn(point, nth, life)));
  CHECK(!was_killed(spawn("", 0, life)));
  CHECK(!was_killed(writer));
}

}  // namespace

int main() {
  int rounds = 0;
  for (int nth : {1, 2, 57, 1000}) {
    for (const char* point : {"after_reserve", "mid_payload", "before_publish", "between_stores", "before_bell"}) {
      producer_dies_at(point, nth, false);
      if (nth < 300) producer_dies_at(point, nth, true);
      ++rounds;
    }
    for (const char* point : {"after_read", "before_release", "after_release"}) {
      consumer_dies_at(point, nth);
      ++rounds;
    }
  }
  std::printf("ring_killed: %d points and moments, every record arrived whole and in order\n", rounds);
}

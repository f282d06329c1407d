// Waiting for the other side of a ring, or of any of several: a short spin, then a futex, then a look whether it lives.
#include "ring.h"

#include <algorithm>
#include <deque>
#include <vector>

namespace staleflow {

bool Ring::needs_attention(Role own) { return stop_unseen() || why_closed(own).has_value(); }

namespace {

constexpr int64_t kLivenessNs = 100000000;  // a sleeper looks this often whether the other side still lives

// Marks its owner as about to sleep, for as long as it lives: a flag left behind costs the other side a system call.
class Asleep {
 public:
  explicit Asleep(Bell& bell) : bell_(bell), event(bell.event.load(std::memory_order_seq_cst)) {
    bell.waiting.store(1, std::memory_order_seq_cst);
  }
  ~Asleep() { bell_.waiting.store(0, std::memory_order_relaxed); }
  Asleep(const Asleep&) = delete;

 private:
  Bell& bell_;

 public:
  const uint32_t event;  // as it was before the flag was set
};

}  // namespace

// True when `ready`; false at the timeout or when a stop came; RingClosed when nothing can come any more.
template <class Ready>
bool Ring::wait_until(Bell& bell, Role own, int64_t timeout_ns, Ready ready) {
  claim(own);
  if (ready()) return true;
  const int64_t start = monotonic_ns();
  const int64_t until = start + timeout_ns;
  const int64_t spin_until = start + std::min<int64_t>(static_cast<int64_t>(spin_ns), timeout_ns);
  while (monotonic_ns() < spin_until) {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      cpu_relax();
    }
  }
  for (;;) {
    if (stop_unseen()) return false;
    if (auto reason = why_closed(own)) throw RingClosed(*reason);
    const int64_t left = until - monotonic_ns();
    if (left <= 0) return false;
    {
      Asleep asleep(bell);
      if (ready()) return true;
      if (!needs_attention(own)) futex_wait(bell.event, asleep.event, std::min(left, kLivenessNs));
    }
    if (ready()) return true;
    look_at_peer(own);
  }
}

bool Ring::wait(int64_t timeout_ns) {
  return wait_until(header_->consumer_bell, Role::consumer, timeout_ns, [this] { return has_data(); });
}

bool Ring::wait_writable(uint64_t payload_bytes, int64_t timeout_ns) {
  require_fits(payload_bytes);
  return wait_until(header_->producer_bell, Role::producer, timeout_ns, [&] { return has_room(payload_bytes); });
}

std::vector<bool> Ring::wait_any(const std::vector<Ring*>& rings, int64_t timeout_ns) {
  for (Ring* ring : rings) ring->claim(Role::consumer);
  std::vector<bool> found(rings.size());
  auto look = [&] {
    bool any = false;
    for (size_t i = 0; i < rings.size(); ++i) {
      found[i] = rings[i]->has_data() || rings[i]->needs_attention(Role::consumer);
      any = any || found[i];
    }
    return any;
  };
  const int64_t until = monotonic_ns() + timeout_ns;
  while (!look()) {
    const int64_t left = until - monotonic_ns();
    if (left <= 0) break;
    {
      std::deque<Asleep> asleep;
      std::vector<WaitWord> words;
      for (Ring* ring : rings) {
        Bell& bell = ring->header_->consumer_bell;
        asleep.emplace_back(bell);
        words.push_back({asleep.back().event, reinterpret_cast<uint64_t>(&bell.event), FUTEX_32, 0});
      }
      if (!look()) futex_wait_any(words, std::min(left, kLivenessNs));
    }
    if (look()) break;
    for (Ring* ring : rings) ring->look_at_peer(Role::consumer);
  }
  return found;
}

}  // namespace staleflow

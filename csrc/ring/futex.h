// Sleeping on a word in memory shared between processes: futexes without the PRIVATE flag.
// (std::atomic::wait uses private ones: it never wakes another process.)
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace staleflow {

constexpr long kFutexWaitvCall = 449;   // the same on every architecture; older libc headers lack its name
constexpr size_t kFutexWaitvMax = 128;  // FUTEX_WAITV_MAX

inline int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

inline timespec to_timespec(int64_t ns) { return {ns / 1000000000, ns % 1000000000}; }

inline void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void futex_wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

// Sleeps while the word is `expected`, at most `timeout_ns`; may return early, so callers look again.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, int64_t timeout_ns) {
  timespec timeout = to_timespec(timeout_ns);
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

struct WaitWord {
  uint64_t expected;
  uint64_t address;
  uint32_t flags;
  uint32_t reserved;
};

// Sleeps until any of the words changes. Kernels before 5.16 (and some sandboxes) lack the call: a short nap then,
// after which the caller looks again.
inline void futex_wait_any(std::vector<WaitWord>& words, int64_t timeout_ns) {
  static std::atomic<bool> has_call{true};
  if (has_call.load(std::memory_order_relaxed) && words.size() <= kFutexWaitvMax) {
    timespec until = to_timespec(monotonic_ns() + timeout_ns);
    long woken = syscall(kFutexWaitvCall, words.data(), words.size(), 0, &until, CLOCK_MONOTONIC);
    if (woken >= 0 || (errno != ENOSYS && errno != EPERM)) return;
    has_call.store(false, std::memory_order_relaxed);
  }
  constexpr int64_t kNapNs = 200000;
  timespec nap = to_timespec(timeout_ns < kNapNs ? timeout_ns : kNapNs);
  nanosleep(&nap, nullptr);
}

}  // namespace staleflow

// Copies into memory that another process or a device reads next.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace staleflow {

// Memory of which more than half the last-level cache is written in turn has left the cache before it is written again.
// An ordinary store would then read the line that it is about to overwrite, and throw out what the writer still needs.
inline bool outgrows_cache(uint64_t bytes) {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  static const long last_level = sysconf(_SC_LEVEL3_CACHE_SIZE);
#else
  static const long last_level = 0;
#endif
  constexpr uint64_t kUsual = 32 << 20;  // virtual machines may not say
  return bytes > (last_level > 0 ? static_cast<uint64_t>(last_level) : kUsual) / 2;
}

#if defined(__SSE2__)

constexpr uint64_t kStreamBytes = 16 << 10;  // below this the fence costs more than it brings
constexpr uint64_t kLineBytes = 64;

// Whole lines, past the caches.
inline void stream_lines(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes; at += kLineBytes) {
    for (uint64_t part = 0; part < kLineBytes; part += sizeof(__m128i)) {
      const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at + part));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + at + part), value);
    }
  }
  _mm_sfence();  // such stores are not ordered by a later release store: `tail` must not overtake them
}

inline void copy_past_caches(uint8_t* to, const void* source, uint64_t bytes) {
  const auto* from = static_cast<const uint8_t*>(source);
  if (bytes >= kStreamBytes) {
    const uint64_t head = -reinterpret_cast<uintptr_t>(to) % kLineBytes;
    const uint64_t lines = (bytes - head) / kLineBytes * kLineBytes;
    std::memcpy(to, from, head);
    stream_lines(to + head, from + head, lines);
    to += head + lines, from += head + lines, bytes -= head + lines;
  }
  if (bytes) std::memcpy(to, from, bytes);
}

#else

inline void copy_past_caches(uint8_t* to, const void* source, uint64_t bytes) {
  if (bytes) std::memcpy(to, source, bytes);
}

#endif

// `room`: the bytes of the ring or arena that `to` is part of.
inline void copy_for_others(uint8_t* to, const void* from, uint64_t bytes, uint64_t room) {
  if (outgrows_cache(room)) return copy_past_caches(to, from, bytes);
  if (bytes) std::memcpy(to, from, bytes);
}

}  // namespace staleflow

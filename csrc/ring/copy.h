// Copies into memory that another process or a device reads next.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace staleflow {

#if defined(__SSE2__)

// From here on, stores go past the caches: an ordinary store first reads the line that it is about to overwrite, and
// throws out of the writer's cache what the writer still needs.
constexpr uint64_t kStreamBytes = 16 << 10;
constexpr uint64_t kLineBytes = 64;

inline void stream_lines(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes; at += kLineBytes) {
    for (uint64_t part = 0; part < kLineBytes; part += sizeof(__m128i)) {
      const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at + part));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + at + part), value);
    }
  }
  _mm_sfence();  // such stores are not ordered by a later release store: `tail` must not overtake them
}

inline void copy_for_others(uint8_t* to, const void* source, uint64_t bytes) {
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

inline void copy_for_others(uint8_t* to, const void* source, uint64_t bytes) {
  if (bytes) std::memcpy(to, source, bytes);
}

#endif

}  // namespace staleflow

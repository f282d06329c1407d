// The checksum, for host and device: a sum (mod 2^64) over 8-byte words of a bijection that depends on the word's
// place, so it can be taken in any order and in parallel, and any change inside one word changes it.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define STALEFLOW_BOTH __host__ __device__
#else
#define STALEFLOW_BOTH
#endif

namespace staleflow {

STALEFLOW_BOTH inline uint64_t mix_word(uint64_t word, uint64_t place) {
  uint64_t hash = word + (place + 1) * 0x9E3779B97F4A7C15ull;
  hash = (hash ^ (hash >> 32)) * 0xD6E8FEB86659FD93ull;
  return hash ^ (hash >> 29);
}

// `words` is the sum over all words, the last one padded with zeros; the length tells such paddings apart.
STALEFLOW_BOTH inline int64_t finish_checksum(uint64_t words, uint64_t bytes) {
  return static_cast<int64_t>(mix_word(words, bytes));
}

}  // namespace staleflow

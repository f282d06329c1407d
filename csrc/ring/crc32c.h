// CRC-32C (Castagnoli) of the 40 checked bytes of a record header.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace staleflow {

constexpr size_t kCheckedBytes = 40;

namespace detail {

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82F63B78u : 0u);
    table[i] = crc;
  }
  return table;
}

inline uint32_t crc32c_table(const uint8_t* bytes) {
  static constexpr std::array<uint32_t, 256> kTable = make_crc_table();
  uint32_t crc = 0xFFFFFFFF;
  for (size_t i = 0; i < kCheckedBytes; ++i) crc = kTable[(crc ^ bytes[i]) & 0xFF] ^ (crc >> 8);
  return ~crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) inline uint32_t crc32c_hardware(const uint8_t* bytes) {
  uint64_t crc = 0xFFFFFFFF;
  for (size_t i = 0; i < kCheckedBytes; i += 8) {
    uint64_t word;
    std::memcpy(&word, bytes + i, 8);
    crc = __builtin_ia32_crc32di(crc, word);
  }
  return ~static_cast<uint32_t>(crc);
}
#endif

}  // namespace detail

inline uint32_t crc32c(const void* checked) {
  const auto* bytes = static_cast<const uint8_t*>(checked);
#if defined(__x86_64__)
  static const bool has_hardware = __builtin_cpu_supports("sse4.2");
  if (has_hardware) return detail::crc32c_hardware(bytes);
#endif
  return detail::crc32c_table(bytes);
}

}  // namespace staleflow

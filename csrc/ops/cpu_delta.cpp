#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "checks.h"

namespace staleflow {
namespace {

constexpr int64_t kStep = 16;          // values compared at a time
constexpr int64_t kTile = 2048;        // values whose changes are gathered on the stack
constexpr int64_t kGrain = 64 * kTile;  // values per parallel range

// Bit i is set when bits of value i differ: compared as integers, so that NaN payloads and -0 count.
inline uint32_t changed_mask(const uint16_t* fresh, const uint16_t* old) {
#if defined(__SSE2__)
  const auto* a = reinterpret_cast<const __m128i*>(fresh);
  const auto* b = reinterpret_cast<const __m128i*>(old);
  const __m128i low = _mm_cmpeq_epi16(_mm_loadu_si128(a), _mm_loadu_si128(b));
  const __m128i high = _mm_cmpeq_epi16(_mm_loadu_si128(a + 1), _mm_loadu_si128(b + 1));
  return 0xFFFFu & ~static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(low, high)));
#else
  uint32_t mask = 0;
  for (int i = 0; i < kStep; ++i) mask |= static_cast<uint32_t>(fresh[i] != old[i]) << i;
  return mask;
#endif
}

struct Changes {
  std::vector<int32_t> indices;
  std::vector<uint16_t> values;
};

// Changes within [begin, end), at most kTile long; returns how many.
int64_t scan_tile(const uint16_t* fresh, const uint16_t* old, int64_t begin, int64_t end, int32_t* indices,
                  uint16_t* values) {
  int64_t found = 0;
  int64_t at = begin;
  for (; at + kStep <= end; at += kStep) {
    for (uint32_t mask = changed_mask(fresh + at, old + at); mask; mask &= mask - 1) {
      const int64_t index = at + __builtin_ctz(mask);
      indices[found] = static_cast<int32_t>(index);
      values[found++] = fresh[index];
    }
  }
  for (; at < end; ++at) {
    if (fresh[at] == old[at]) continue;
    indices[found] = static_cast<int32_t>(at);
    values[found++] = fresh[at];
  }
  return found;
}

void scan_range(const uint16_t* fresh, const uint16_t* old, int64_t begin, int64_t end, Changes* out) {
  int32_t indices[kTile];
  uint16_t values[kTile];
  for (int64_t tile = begin; tile < end; tile += kTile) {
    const int64_t found = scan_tile(fresh, old, tile, std::min(tile + kTile, end), indices, values);
    out->indices.insert(out->indices.end(), indices, indices + found);
    out->values.insert(out->values.end(), values, values + found);
  }
}

template <class T>
void append(const std::vector<T>& from, T*& to) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size() * sizeof(T));
  to += from.size();
}

std::tuple<Tensor, Tensor> delta_encode_cpu(const Tensor& fresh, const Tensor& old) {
  check_delta_inputs(fresh, old);
  const int64_t count = fresh.numel();
  const auto* fresh_bits = static_cast<const uint16_t*>(fresh.data_ptr());
  const auto* old_bits = static_cast<const uint16_t*>(old.data_ptr());
  std::vector<Changes> ranges(static_cast<size_t>((count + kGrain - 1) / kGrain));
  torch::stable::parallel_for(0, static_cast<int64_t>(ranges.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t range = first; range < last; ++range)
      scan_range(fresh_bits, old_bits, range * kGrain, std::min((range + 1) * kGrain, count), &ranges[static_cast<size_t>(range)]);
  });
  size_t found = 0;
  for (const Changes& range : ranges) found += range.indices.size();
  Tensor indices = torch::stable::new_empty(fresh, {static_cast<int64_t>(found)}, ScalarType::Int);
  Tensor values = torch::stable::new_empty(fresh, {static_cast<int64_t>(found)});
  auto* index_out = static_cast<int32_t*>(indices.data_ptr());
  auto* value_out = static_cast<uint16_t*>(values.data_ptr());
  for (const Changes& range : ranges) {
    append(range.indices, index_out);
    append(range.values, value_out);
  }
  return {indices, values};
}

void delta_apply_cpu(Tensor target, const Tensor& indices, const Tensor& values) {
  check_apply_inputs(target, indices, values);
  const int64_t count = indices.numel();
  const auto size = static_cast<uint64_t>(target.numel());
  const auto* index = static_cast<const int32_t*>(indices.data_ptr());
  const auto* value = static_cast<const uint16_t*>(values.data_ptr());
  auto* bits = static_cast<uint16_t*>(target.data_ptr());
  for (int64_t i = 0; i < count; ++i)  // all before the first write: a bad delta changes nothing
    STD_TORCH_CHECK(static_cast<uint64_t>(index[i]) < size, "delta_apply: index ", index[i], " in a target of ", size, " values");
  for (int64_t i = 0; i < count; ++i) bits[index[i]] = value[i];
}

}  // namespace
}  // namespace staleflow

STABLE_TORCH_LIBRARY_IMPL(staleflow, CPU, m) {
  m.impl("delta_encode", TORCH_BOX(&staleflow::delta_encode_cpu));
  m.impl("delta_apply", TORCH_BOX(&staleflow::delta_apply_cpu));
}

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstring>

#include "checks.h"
#include "checksum.h"

namespace staleflow {
namespace {

constexpr int64_t kGrainWords = 1 << 15;

uint64_t sum_words(const uint8_t* bytes, int64_t begin, int64_t end) {
  uint64_t sum = 0;
  for (int64_t i = begin; i < end; ++i) {
    uint64_t word;
    std::memcpy(&word, bytes + 8 * i, 8);
    sum += mix_word(word, static_cast<uint64_t>(i));
  }
  return sum;
}

Tensor checksum_cpu(const Tensor& input) {
  check_flat(input, ScalarType::Byte, "checksum", "bytes");
  const int64_t bytes = input.numel();
  const int64_t words = bytes / 8;
  const auto* data = static_cast<const uint8_t*>(input.data_ptr());
  std::atomic<uint64_t> total{0};
  torch::stable::parallel_for(0, words, kGrainWords, [&](int64_t begin, int64_t end) {
    total.fetch_add(sum_words(data, begin, end), std::memory_order_relaxed);
  });
  uint64_t last = 0;
  if (bytes % 8) {
    std::memcpy(&last, data + 8 * words, static_cast<size_t>(bytes % 8));
    total += mix_word(last, static_cast<uint64_t>(words));
  }
  Tensor output = torch::stable::new_empty(input, {}, ScalarType::Long);
  *static_cast<int64_t*>(output.data_ptr()) = finish_checksum(total, static_cast<uint64_t>(bytes));
  return output;
}

}  // namespace
}  // namespace staleflow

STABLE_TORCH_LIBRARY_IMPL(staleflow, CPU, m) { m.impl("checksum", TORCH_BOX(&staleflow::checksum_cpu)); }

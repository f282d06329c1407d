#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "checksum.h"
#include "cuda_support.cuh"

namespace staleflow {
namespace {

constexpr unsigned kMaxBlocks = 4096;

__device__ uint64_t load_word(const uint8_t* data, int64_t word, int64_t bytes, bool aligned) {
  const int64_t begin = 8 * word;
  if (aligned && begin + 8 <= bytes) return *reinterpret_cast<const uint64_t*>(data + begin);
  uint64_t value = 0;
  for (int64_t i = 0; i < 8 && begin + i < bytes; ++i) value |= static_cast<uint64_t>(data[begin + i]) << (8 * i);
  return value;
}

__device__ unsigned long long sum_over_warp(unsigned long long value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(0xFFFFFFFFu, value, step);
  return value;
}

__global__ void sum_words_kernel(const uint8_t* data, int64_t bytes, bool aligned, unsigned long long* total) {
  const int64_t words = (bytes + 7) / 8;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  unsigned long long sum = 0;
  for (int64_t word = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; word < words; word += stride)
    sum += mix_word(load_word(data, word, bytes, aligned), static_cast<uint64_t>(word));
  sum = sum_over_warp(sum);
  if (threadIdx.x % 32 == 0) atomicAdd(total, sum);
}

__global__ void finish_kernel(unsigned long long* total, int64_t bytes) {
  *total = static_cast<unsigned long long>(finish_checksum(*total, static_cast<uint64_t>(bytes)));
}

Tensor checksum_cuda(const Tensor& input) {
  check_flat(input, ScalarType::Byte, "checksum", "bytes");
  torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  cudaStream_t stream = current_stream(input);
  const int64_t bytes = input.numel();
  Tensor output = torch::stable::new_zeros(input, {}, ScalarType::Long);
  auto* total = static_cast<unsigned long long*>(output.data_ptr());
  const auto* data = static_cast<const uint8_t*>(input.data_ptr());
  const bool aligned = reinterpret_cast<uintptr_t>(data) % 8 == 0;
  if (bytes) {
    const unsigned blocks = std::min(kMaxBlocks, blocks_for((bytes + 7) / 8, kThreads));
    sum_words_kernel<<<blocks, kThreads, 0, stream>>>(data, bytes, aligned, total);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  finish_kernel<<<1, 1, 0, stream>>>(total, bytes);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return output;
}

}  // namespace
}  // namespace staleflow

STABLE_TORCH_LIBRARY_IMPL(staleflow, CUDA, m) { m.impl("checksum", TORCH_BOX(&staleflow::checksum_cuda)); }

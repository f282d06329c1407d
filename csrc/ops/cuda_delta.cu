#include <torch/csrc/stable/library.h>

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <tuple>

#include "cuda_support.cuh"

namespace staleflow {
namespace {

constexpr int kPerThread = 16;
constexpr int64_t kPerBlock = int64_t{kThreads} * kPerThread;

__device__ bool can_load_wide(const uint16_t* fresh, const uint16_t* old) {
  return (reinterpret_cast<uintptr_t>(fresh) | reinterpret_cast<uintptr_t>(old)) % sizeof(uint4) == 0;
}

__device__ int count_in_words(uint4 a, uint4 b) {
  return __popc(__vsetne2(a.x, b.x)) + __popc(__vsetne2(a.y, b.y)) + __popc(__vsetne2(a.z, b.z)) +
         __popc(__vsetne2(a.w, b.w));
}

// How many of a thread's kPerThread neighbouring values differ.
__device__ int count_changes(const uint16_t* fresh, const uint16_t* old, int64_t begin, int64_t count) {
  int changes = 0;
  if (begin + kPerThread <= count && can_load_wide(fresh, old)) {
    const auto* a = reinterpret_cast<const uint4*>(fresh + begin);
    const auto* b = reinterpret_cast<const uint4*>(old + begin);
    return count_in_words(a[0], b[0]) + count_in_words(a[1], b[1]);
  }
  for (int64_t i = begin; i < min(begin + kPerThread, count); ++i) changes += fresh[i] != old[i];
  return changes;
}

__global__ void count_kernel(const uint16_t* fresh, const uint16_t* old, int64_t count, int64_t* per_block) {
  using Reduce = cub::BlockReduce<int, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  const int64_t begin = blockIdx.x * kPerBlock + int64_t{threadIdx.x} * kPerThread;
  const int changes = Reduce(storage).Sum(count_changes(fresh, old, begin, count));
  if (threadIdx.x == 0) per_block[blockIdx.x] = changes;
}

// One block turns counts into starts, in place; the total goes behind the last.
__global__ void scan_kernel(int64_t* counts, int64_t blocks) {
  using Scan = cub::BlockScan<int64_t, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  int64_t before = 0;
  for (int64_t base = 0; base < blocks; base += kThreads) {
    const int64_t at = base + threadIdx.x;
    int64_t value = at < blocks ? counts[at] : 0;
    int64_t sum;
    Scan(storage).ExclusiveSum(value, value, sum);
    if (at < blocks) counts[at] = before + value;
    before += sum;
    __syncthreads();
  }
  if (threadIdx.x == 0) counts[blocks] = before;
}

__global__ void write_kernel(const uint16_t* fresh, const uint16_t* old, int64_t count, const int64_t* starts,
                             int32_t* indices, uint16_t* values) {
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  const int64_t begin = blockIdx.x * kPerBlock + int64_t{threadIdx.x} * kPerThread;
  const int changes = count_changes(fresh, old, begin, count);
  int place;
  Scan(storage).ExclusiveSum(changes, place);
  if (changes == 0) return;
  int64_t at = starts[blockIdx.x] + place;
  for (int64_t i = begin; i < min(begin + kPerThread, count); ++i) {
    if (fresh[i] == old[i]) continue;
    indices[at] = static_cast<int32_t>(i);
    values[at++] = fresh[i];
  }
}

std::tuple<Tensor, Tensor> delta_encode_cuda(const Tensor& fresh, const Tensor& old) {
  check_delta_inputs(fresh, old);
  check_on_device_of(old, fresh, "delta_encode");
  torch::stable::accelerator::DeviceGuard guard(fresh.get_device_index());
  cudaStream_t stream = current_stream(fresh);
  const int64_t count = fresh.numel();
  const unsigned blocks = blocks_for(count, kPerBlock);
  const auto* fresh_bits = static_cast<const uint16_t*>(fresh.data_ptr());
  const auto* old_bits = static_cast<const uint16_t*>(old.data_ptr());
  Tensor starts = torch::stable::new_zeros(fresh, {int64_t{blocks} + 1}, ScalarType::Long);
  auto* start = static_cast<int64_t*>(starts.data_ptr());
  if (blocks) {
    count_kernel<<<blocks, kThreads, 0, stream>>>(fresh_bits, old_bits, count, start);
    scan_kernel<<<1, kThreads, 0, stream>>>(start, blocks);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  const int64_t found = read_back(start + blocks, stream);
  Tensor indices = torch::stable::new_empty(fresh, {found}, ScalarType::Int);
  Tensor values = torch::stable::new_empty(fresh, {found});
  if (found) {
    write_kernel<<<blocks, kThreads, 0, stream>>>(fresh_bits, old_bits, count, start,
                                                  static_cast<int32_t*>(indices.data_ptr()),
                                                  static_cast<uint16_t*>(values.data_ptr()));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return {indices, values};
}

__global__ void check_indices_kernel(const int32_t* indices, int64_t count, int64_t size, int* outside) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i < count && (indices[i] < 0 || indices[i] >= size)) atomicExch(outside, 1);
}

__global__ void apply_kernel(uint16_t* target, const int32_t* indices, const uint16_t* values, int64_t count) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i < count) target[indices[i]] = values[i];
}

void delta_apply_cuda(Tensor target, const Tensor& indices, const Tensor& values) {
  check_apply_inputs(target, indices, values);
  check_on_device_of(indices, target, "delta_apply");
  check_on_device_of(values, target, "delta_apply");
  const int64_t count = indices.numel();
  if (count == 0) return;
  torch::stable::accelerator::DeviceGuard guard(target.get_device_index());
  cudaStream_t stream = current_stream(target);
  const auto* index = static_cast<const int32_t*>(indices.data_ptr());
  Tensor outside = torch::stable::new_zeros(indices, {1}, ScalarType::Int);
  auto* flag = static_cast<int*>(outside.data_ptr());
  const unsigned blocks = blocks_for(count, kThreads);
  check_indices_kernel<<<blocks, kThreads, 0, stream>>>(index, count, target.numel(), flag);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  STD_TORCH_CHECK(read_back(flag, stream) == 0, "delta_apply: an index lies outside the target of ", target.numel(), " values");
  apply_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<uint16_t*>(target.data_ptr()), index,
                                                static_cast<const uint16_t*>(values.data_ptr()), count);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace staleflow

STABLE_TORCH_LIBRARY_IMPL(staleflow, CUDA, m) {
  m.impl("delta_encode", TORCH_BOX(&staleflow::delta_encode_cuda));
  m.impl("delta_apply", TORCH_BOX(&staleflow::delta_apply_cuda));
}

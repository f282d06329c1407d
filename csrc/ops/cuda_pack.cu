#include <torch/csrc/stable/library.h>

#include <limits>

#include "cuda_support.cuh"
#include "pack_outputs.h"
#include "trajectory_record.h"

namespace staleflow {
namespace {

// What the header pass tells the host: the first broken trajectory, or how many tokens there are.
struct Summary {
  int64_t tokens;
  int32_t broken;  // index, or -1
  RecordFault fault;
};

// One thread walks all headers: a batch has thousands of trajectories, not millions, and needs their running sum.
__global__ void summarize_kernel(const uint8_t* bytes, int64_t size, const int64_t* offsets, int64_t count, int32_t* ends,
                                 Summary* summary) {
  int64_t tokens = 0;
  *summary = {0, -1, RecordFault::none};
  ends[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    TrajectoryView view;
    const RecordFault fault = view_record(bytes, size, offsets[i], &view);
    if (fault != RecordFault::none) {
      *summary = {0, static_cast<int32_t>(i), fault};
      return;
    }
    tokens += view.total_tokens();
    ends[i + 1] = static_cast<int32_t>(tokens);
  }
  summary->tokens = tokens;
}

__device__ int32_t version_at(const TrajectoryView& view, int64_t place) {
  for (int64_t i = 0; i < view.n_segments; ++i) {
    if (place < view.segments[i].n_tokens) return static_cast<int32_t>(view.segments[i].version);
    place -= view.segments[i].n_tokens;
  }
  return kNoVersion;
}

// One block per trajectory.
__global__ void pack_kernel(const uint8_t* bytes, int64_t size, const int64_t* offsets, const float* advantages,
                            const int32_t* ends, PackPointers out) {
  TrajectoryView view;
  view_record(bytes, size, offsets[blockIdx.x], &view);
  const int64_t start = ends[blockIdx.x];
  for (int64_t i = threadIdx.x; i < view.total_tokens(); i += blockDim.x) {
    const int64_t place = i - view.prompt_tokens;
    const bool response = place >= 0;
    out.input_ids[start + i] = view.tokens[i];
    out.positions[start + i] = i;
    out.logprobs[start + i] = response ? view.logprobs[place] : 0.0f;
    out.versions[start + i] = response ? version_at(view, place) : kNoVersion;
    out.loss_mask[start + i] = response ? 1.0f : 0.0f;
    out.advantages[start + i] = response ? advantages[blockIdx.x] : 0.0f;
  }
}

Packed pack_cuda(const Tensor& bytes, const Tensor& offsets, const Tensor& advantages) {
  check_pack_inputs(bytes, offsets, advantages);
  check_on_device_of(offsets, bytes, "pack");
  check_on_device_of(advantages, bytes, "pack");
  torch::stable::accelerator::DeviceGuard guard(bytes.get_device_index());
  cudaStream_t stream = current_stream(bytes);
  const int64_t count = offsets.numel();
  const auto* data = static_cast<const uint8_t*>(bytes.data_ptr());
  const auto* at = static_cast<const int64_t*>(offsets.data_ptr());
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(data) % kRecordAlignment == 0, "pack: the buffer is not 8-byte aligned");
  Tensor cu_seqlens = torch::stable::new_empty(bytes, {count + 1}, ScalarType::Int);
  Tensor scratch = torch::stable::new_empty(bytes, {sizeof(Summary)}, ScalarType::Byte);
  auto* ends = static_cast<int32_t*>(cu_seqlens.data_ptr());
  auto* summary = static_cast<Summary*>(scratch.data_ptr());
  summarize_kernel<<<1, 1, 0, stream>>>(data, bytes.numel(), at, count, ends, summary);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  const Summary found = read_back(summary, stream);
  STD_TORCH_CHECK(found.broken < 0, "pack: trajectory ", found.broken, " ", describe(found.fault));
  STD_TORCH_CHECK(found.tokens <= std::numeric_limits<int32_t>::max(), "pack: more than 2^31 - 1 tokens in one batch");
  Packed packed = allocate_packed(bytes, cu_seqlens, found.tokens);
  if (count) {
    const auto* advantage = static_cast<const float*>(advantages.data_ptr());
    pack_kernel<<<static_cast<unsigned>(count), kThreads, 0, stream>>>(data, bytes.numel(), at, advantage, ends, pointers_of(packed));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return packed;
}

}  // namespace
}  // namespace staleflow

STABLE_TORCH_LIBRARY_IMPL(staleflow, CUDA, m) { m.impl("pack", TORCH_BOX(&staleflow::pack_cuda)); }

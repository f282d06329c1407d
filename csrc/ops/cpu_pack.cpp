#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "checks.h"
#include "pack_outputs.h"
#include "trajectory_record.h"

namespace staleflow {
namespace {

std::vector<TrajectoryView> view_all(const Tensor& bytes, const Tensor& offsets) {
  const auto* data = static_cast<const uint8_t*>(bytes.data_ptr());
  const auto* at = static_cast<const int64_t*>(offsets.data_ptr());
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(data) % kRecordAlignment == 0, "pack: the buffer is not 8-byte aligned");
  std::vector<TrajectoryView> views(static_cast<size_t>(offsets.numel()));
  for (size_t i = 0; i < views.size(); ++i) {
    const RecordFault fault = view_record(data, bytes.numel(), at[i], &views[i]);
    STD_TORCH_CHECK(fault == RecordFault::none, "pack: trajectory ", i, " at offset ", at[i], " ", describe(fault));
  }
  return views;
}

Tensor cumulative_lengths(const Tensor& like, const std::vector<TrajectoryView>& views) {
  Tensor output = torch::stable::new_empty(like, {static_cast<int64_t>(views.size()) + 1}, ScalarType::Int);
  auto* ends = static_cast<int32_t*>(output.data_ptr());
  int64_t total = 0;
  ends[0] = 0;
  for (size_t i = 0; i < views.size(); ++i) {
    total += views[i].total_tokens();
    STD_TORCH_CHECK(total <= std::numeric_limits<int32_t>::max(), "pack: more than 2^31 - 1 tokens in one batch");
    ends[i + 1] = static_cast<int32_t>(total);
  }
  return output;
}

void pack_prompt(const TrajectoryView& view, int64_t at, const PackPointers& out) {
  const int64_t count = view.prompt_tokens;
  std::fill_n(out.logprobs + at, count, 0.0f);
  std::fill_n(out.versions + at, count, kNoVersion);
  std::fill_n(out.loss_mask + at, count, 0.0f);
  std::fill_n(out.advantages + at, count, 0.0f);
}

void pack_response(const TrajectoryView& view, int64_t at, float advantage, const PackPointers& out) {
  const int64_t count = view.response_tokens;
  if (count) std::memcpy(out.logprobs + at, view.logprobs, static_cast<size_t>(count) * sizeof(float));
  std::fill_n(out.loss_mask + at, count, 1.0f);
  std::fill_n(out.advantages + at, count, advantage);
  int32_t* version = out.versions + at;
  for (int64_t i = 0; i < view.n_segments; ++i)
    version = std::fill_n(version, view.segments[i].n_tokens, static_cast<int32_t>(view.segments[i].version));
}

void pack_one(const TrajectoryView& view, int64_t at, float advantage, const PackPointers& out) {
  for (int64_t i = 0; i < view.total_tokens(); ++i) {
    out.input_ids[at + i] = view.tokens[i];
    out.positions[at + i] = i;
  }
  pack_prompt(view, at, out);
  pack_response(view, at + view.prompt_tokens, advantage, out);
}

Packed pack_cpu(const Tensor& bytes, const Tensor& offsets, const Tensor& advantages) {
  check_pack_inputs(bytes, offsets, advantages);
  const std::vector<TrajectoryView> views = view_all(bytes, offsets);
  const Tensor cu_seqlens = cumulative_lengths(bytes, views);
  const auto* starts = static_cast<const int32_t*>(cu_seqlens.data_ptr());
  const Packed packed = allocate_packed(bytes, cu_seqlens, starts[views.size()]);
  const PackPointers out = pointers_of(packed);
  const auto* advantage = static_cast<const float*>(advantages.data_ptr());
  torch::stable::parallel_for(0, static_cast<int64_t>(views.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) pack_one(views[static_cast<size_t>(i)], starts[i], advantage[i], out);
  });
  return packed;
}

}  // namespace
}  // namespace staleflow

STABLE_TORCH_LIBRARY_IMPL(staleflow, CPU, m) { m.impl("pack", TORCH_BOX(&staleflow::pack_cpu)); }

// What the CPU and CUDA ops ask of their arguments.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <limits>

namespace staleflow {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check_flat(const Tensor& tensor, ScalarType type, const char* op, const char* what) {
  STD_TORCH_CHECK(tensor.scalar_type() == type, op, ": ", what, " has another dtype than documented");
  STD_TORCH_CHECK(tensor.is_contiguous(), op, ": ", what, " is not contiguous");
}

inline void check_delta_inputs(const Tensor& fresh, const Tensor& old) {
  check_flat(fresh, ScalarType::BFloat16, "delta_encode", "new");
  check_flat(old, ScalarType::BFloat16, "delta_encode", "old");
  STD_TORCH_CHECK(fresh.numel() == old.numel(), "delta_encode: new has ", fresh.numel(), " values, old ", old.numel());
  STD_TORCH_CHECK(fresh.numel() <= std::numeric_limits<int32_t>::max(), "delta_encode: ", fresh.numel(),
                  " values, indices are int32: encode at most 2^31 - 1 at a time");
}

inline void check_apply_inputs(const Tensor& target, const Tensor& indices, const Tensor& values) {
  check_flat(target, ScalarType::BFloat16, "delta_apply", "target");
  check_flat(indices, ScalarType::Int, "delta_apply", "indices");
  check_flat(values, ScalarType::BFloat16, "delta_apply", "values");
  STD_TORCH_CHECK(indices.numel() == values.numel(), "delta_apply: ", indices.numel(), " indices, ", values.numel(),
                  " values");
}

inline void check_pack_inputs(const Tensor& bytes, const Tensor& offsets, const Tensor& advantages) {
  check_flat(bytes, ScalarType::Byte, "pack", "bytes");
  check_flat(offsets, ScalarType::Long, "pack", "offsets");
  check_flat(advantages, ScalarType::Float, "pack", "advantages");
  STD_TORCH_CHECK(offsets.numel() == advantages.numel(), "pack: ", offsets.numel(), " offsets, ", advantages.numel(),
                  " advantages");
}

}  // namespace staleflow

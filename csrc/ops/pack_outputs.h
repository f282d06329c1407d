// The seven tensors of a packed batch.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "checks.h"

namespace staleflow {

using Packed = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

constexpr int32_t kNoVersion = -1;  // prompt tokens: no policy made them

struct PackPointers {
  int64_t* input_ids;
  int64_t* positions;
  float* logprobs;
  int32_t* versions;
  float* loss_mask;
  float* advantages;
};

inline Packed allocate_packed(const Tensor& like, const Tensor& cu_seqlens, int64_t tokens) {
  auto make = [&](ScalarType type) { return torch::stable::new_empty(like, {tokens}, type); };
  return {make(ScalarType::Long),  make(ScalarType::Long), cu_seqlens, make(ScalarType::Float), make(ScalarType::Int),
          make(ScalarType::Float), make(ScalarType::Float)};
}

inline PackPointers pointers_of(const Packed& packed) {
  return {static_cast<int64_t*>(std::get<0>(packed).data_ptr()), static_cast<int64_t*>(std::get<1>(packed).data_ptr()),
          static_cast<float*>(std::get<3>(packed).data_ptr()),   static_cast<int32_t*>(std::get<4>(packed).data_ptr()),
          static_cast<float*>(std::get<5>(packed).data_ptr()),   static_cast<float*>(std::get<6>(packed).data_ptr())};
}

}  // namespace staleflow

// What the CUDA ops share: the current stream, small copies to the host, launch sizes.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include "checks.h"

namespace staleflow {

constexpr int kThreads = 256;

inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check_on_device_of(const Tensor& tensor, const Tensor& first, const char* op) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == first.get_device_index(), op,
                  ": all tensors must be on the same CUDA device");
}

// Waits for the stream.
template <class T>
T read_back(const T* device, cudaStream_t stream) {
  T host;
  STD_CUDA_CHECK(cudaMemcpyAsync(&host, device, sizeof(T), cudaMemcpyDeviceToHost, stream));
  STD_CUDA_CHECK(cudaStreamSynchronize(stream));
  return host;
}

inline unsigned blocks_for(int64_t items, int64_t per_block) { return static_cast<unsigned>((items + per_block - 1) / per_block); }

}  // namespace staleflow

// torch.ops.staleflow: schemas. What the ops mean is told in staleflow/trajectories/ops.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(staleflow, m) {
  m.def("delta_encode(Tensor new, Tensor old) -> (Tensor indices, Tensor values)");
  m.def("delta_apply(Tensor(a!) target, Tensor indices, Tensor values) -> ()");
  m.def("checksum(Tensor bytes) -> Tensor");
  m.def(
      "pack(Tensor bytes, Tensor offsets, Tensor advantages) -> (Tensor input_ids, Tensor positions, "
      "Tensor cu_seqlens, Tensor logprobs, Tensor versions, Tensor loss_mask, Tensor advantages_per_token)");
}

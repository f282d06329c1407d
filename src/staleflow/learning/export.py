"""From the sharded policy to a Hugging Face folder that transformers and vLLM load."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from staleflow.learning.model import PolicyModel


@torch.no_grad()
def full_state(policy: PolicyModel) -> dict[str, Tensor]:
    """A copy of every parameter, whole, float32 on the CPU, by transformers' names. A collective of all ranks."""
    return {name: _whole_copy(parameter) for name, parameter in policy.sharded_parameters()}


def _whole_copy(tensor: Tensor) -> Tensor:
    """With one rank `full_tensor()` is the live parameter itself: always copy."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    return whole.to("cpu", torch.float32, copy=True)


def export_model(
    policy: PolicyModel, tokenizer: PreTrainedTokenizerBase, out: Path, dtype: torch.dtype = torch.float32
) -> None:
    """Write model and tokenizer to `out`. A collective; the first rank writes.

    By transformers' own writer, so that names and layout (experts apart, tied weights once) are the published ones.
    """
    state = {name: tensor.to(dtype) for name, tensor in full_state(policy).items()}
    if dist.get_rank() == 0:
        policy.hf.config.dtype = dtype
        policy.hf.save_pretrained(out, state_dict=state)
        tokenizer.save_pretrained(out)

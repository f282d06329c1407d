"""Attention over packed sequences, plugged into transformers through its public attention interface.

`use(model, backend)` sets it; every forward then passes `cu_seq_lens_q`, `cu_seq_lens_k` and `max_length_q`. The
backends are the same function: causal attention inside each sequence, nothing across.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

# (query [T, H, D], key [T, Hkv, D], value [T, Hkv, D], cu_seqlens int32 [S+1], max_seqlen, scale) -> [T, H, D]
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]


def blocks(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    """Sequences of similar length side by side in one causal attention each; exact on every device.

    Rows behind a sequence's end need no mask: causal attention never looks there. Lengths are grouped by the next
    power of two, so less than half of a block is such rows.
    """
    out = torch.empty_like(q)
    lengths = cu_seqlens.diff()
    for rows, valid in _length_blocks(cu_seqlens[:-1].long(), lengths.long()):
        parts = (x[rows].transpose(1, 2) for x in (q, k, v))  # [S, H, L, D]
        y = scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=k.shape[1] != q.shape[1])
        out = out.index_put((rows[valid],), y.transpose(1, 2)[valid])
    return out


def _length_blocks(starts: Tensor, lengths: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Per group of similar lengths: token rows int64 [S, L] (clamped into the sequence) and which are valid [S, L]."""
    found = []
    classes = torch.ceil(torch.log2(lengths.clamp(min=1).double())).long()
    for c in classes.unique().tolist():
        chosen = classes == c
        length = lengths[chosen][:, None]
        offsets = torch.arange(int(length.max()), device=starts.device)[None]
        valid = offsets < length
        found.append((starts[chosen][:, None] + torch.minimum(offsets, length - 1).clamp(min=0), valid))
    return found


def flash_attn(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    """The flash-attn package's varlen kernel."""
    from flash_attn import flash_attn_varlen_func

    cu = cu_seqlens.int()
    return flash_attn_varlen_func(q, k, v, cu, cu, max_seqlen, max_seqlen, softmax_scale=scale, causal=True)


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    """torch's own varlen kernel (CUDA, bfloat16 or float16)."""
    from torch.nn.attention.varlen import varlen_attn

    cu = cu_seqlens.int()
    gqa = k.shape[1] != q.shape[1]
    return varlen_attn(q, k, v, cu, cu, max_seqlen, max_seqlen, scale=scale, window_size=(-1, 0), enable_gqa=gqa)


def flex(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    """Flex attention with a block mask of the sequences."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens = q.shape[0]
    sequence = torch.searchsorted(cu_seqlens[1:].long(), torch.arange(tokens, device=q.device), right=True)

    def same_sequence_causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (sequence[i] == sequence[j]) & (i >= j)

    mask = create_block_mask(same_sequence_causal, None, None, tokens, tokens, device=q.device)
    attend = torch.compile(flex_attention) if q.is_cuda else flex_attention
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=k.shape[1] != q.shape[1])[0].transpose(0, 1)


KERNELS: dict[str, Kernel] = {"blocks": blocks, "flash_attn": flash_attn, "torch_varlen": torch_varlen, "flex": flex}


def choose(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """What "auto" means here: the fastest kernel that this device, this dtype and these packages have."""
    if backend != "auto":
        return backend
    if device.type != "cuda":
        return "blocks"
    if dtype not in (torch.bfloat16, torch.float16):
        return "flex"
    if importlib.util.find_spec("flash_attn"):
        return "flash_attn"
    return "torch_varlen" if importlib.util.find_spec("torch.nn.attention.varlen") else "flex"


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    kernel: Kernel,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,  # transformers hands every attention function the whole set of options
) -> tuple[Tensor, None]:
    """The signature transformers calls: query [1, H, T, D] -> [1, T, H, D]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = kernel(q, k, v, cu_seq_lens_q, max_length_q, scaling or q.shape[-1] ** -0.5)
    return out[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """Sequence borders are in `cu_seq_lens_q`; transformers need not build a mask."""


def register() -> None:
    """Make the backends known to transformers as staleflow_NAME (idempotent)."""
    for name, kernel in KERNELS.items():
        AttentionInterface.register(f"staleflow_{name}", partial(_attend, kernel=kernel))
        AttentionMaskInterface.register(f"staleflow_{name}", _no_mask)

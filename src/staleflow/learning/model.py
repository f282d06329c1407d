"""The policy as the trainer sees it: packed tokens in, log-probabilities of the response tokens out, sharded by FSDP2.

The forward pass ends in log-probabilities and entropies, never in logits: those exist only for `logits_chunk_tokens`
rows at a time, and are computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from staleflow.learning import attention
from staleflow.learning.batch import PackedBatch
from staleflow.learning.settings import ModelSettings

_PREFIX = "hf."


@dataclass(frozen=True, eq=False)
class ResponseScores:
    """Of the n response tokens of a batch: `index` int64 [n] where they are; `logprobs`, `entropy` float32 [n]."""

    index: Tensor
    logprobs: Tensor
    entropy: Tensor


def _chunk_scores(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probability of the target, entropy), float32 [rows] each, of softmax(hidden @ weight.T / temperature)."""
    logits = torch.nn.functional.linear(hidden, weight).float() / temperature
    log_p = logits.log_softmax(-1)
    # sum, not a view of the one column: FSDP hooks its backward pass onto what a module returns
    return log_p.gather(-1, targets[:, None]).sum(-1), -(log_p.exp() * log_p).sum(-1)


def linear_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """`_chunk_scores` without [tokens, vocabulary] logits: by chunks, recomputed in the backward pass."""
    if len(hidden) <= chunk_tokens:
        return _chunk_scores(hidden, weight, targets, temperature)
    parts = [
        checkpoint(_chunk_scores, h, weight, t, temperature, use_reentrant=False)
        for h, t in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


class PolicyModel(nn.Module):
    """A Hugging Face causal LM behind `forward(batch) -> (log-probabilities, entropies)`."""

    def __init__(self, hf: PreTrainedModel, chunk_tokens: int, temperature: float) -> None:
        super().__init__()
        self.hf = hf
        self.chunk_tokens = chunk_tokens
        self.temperature = temperature

    def forward(self, input_ids: Tensor, positions: Tensor, cu_seqlens: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the tokens at `index` (int64 [n]), each predicted from the token before it."""
        longest = int(cu_seqlens.diff().max())
        hidden = self.hf.get_decoder()(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            cu_seq_lens_q=cu_seqlens,
            cu_seq_lens_k=cu_seqlens,
            max_length_q=longest,
            max_length_k=longest,
        ).last_hidden_state[0]
        return linear_scores(
            hidden[(index - 1).clamp(min=0)],
            self.hf.get_output_embeddings().weight,
            input_ids[index],
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
        )

    def score(self, batch: PackedBatch) -> ResponseScores:
        """Scores of the response tokens. With none, the first token stands in, so that every rank runs the model."""
        index = batch.loss_mask.nonzero()[:, 0]
        if not len(index):
            index = index.new_zeros(1)
        return ResponseScores(index, *self(batch.input_ids, batch.positions, batch.cu_seqlens, index))

    def sharded_parameters(self) -> Iterator[tuple[str, DTensor]]:
        """(name as transformers knows it, shard) in a fixed order, equal on all ranks; tied weights once."""
        for name, parameter in self.named_parameters():
            yield name.removeprefix(_PREFIX), parameter


def load_policy(
    settings: ModelSettings, mesh: DeviceMesh, *, temperature: float, trainable: bool = True, path: str | None = None
) -> PolicyModel:
    """Read the model on the mesh's first rank, shard it over the mesh, each rank holding its own rows only."""
    device = torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None)
    hf = _read(path or settings.path, settings, device, whole=mesh.get_rank() == int(mesh.mesh.flatten()[0]))
    if settings.activation_checkpointing:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    hf.train(trainable)
    hf.requires_grad_(trainable)
    policy = PolicyModel(hf, settings.logits_chunk_tokens, temperature)
    if settings.compile:
        for layer in _layers(hf):
            layer.compile(dynamic=True)  # no two micro-batches are of one length
    whole_state = policy.state_dict() if not _is_meta(policy) else {}
    whole_buffers = dict(policy.named_buffers())
    shard(policy, settings, mesh)
    if mesh.size() == 1:
        policy.to(device) if not settings.cpu_offload else None
    else:
        _distribute(policy, whole_state, whole_buffers, mesh, "cpu" if settings.cpu_offload else device)
    if settings.cpu_offload:
        _move_buffers(policy, device)
    return policy


def _move_buffers(policy: PolicyModel, device: torch.device) -> None:
    """FSDP brings offloaded parameters to the device for each use, but not buffers (rotary frequencies)."""
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _read(path: str, settings: ModelSettings, device: torch.device, *, whole: bool) -> PreTrainedModel:
    attention.register()
    backend = attention.choose(settings.attention, device, getattr(torch, settings.dtype))
    options = {"attn_implementation": f"staleflow_{backend}", "dtype": torch.float32}
    if whole:
        hf = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, **options)
    else:
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, local_files_only=True), **options)
    if getattr(hf.config, "final_logit_softcapping", None):
        raise ValueError(f"model.path = {path}: its logits are soft-capped, which the log-probabilities here leave out")
    return hf


def _is_meta(module: nn.Module) -> bool:
    return any(p.is_meta for p in module.parameters())


def _layers(hf: PreTrainedModel) -> nn.ModuleList:
    return hf.get_decoder().layers


def shard(policy: PolicyModel, settings: ModelSettings, mesh: DeviceMesh) -> None:
    """FSDP2 on every decoder layer and on the rest. Gradients are summed over ranks: the loss carries denominators."""
    half = settings.dtype == "bfloat16"
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32 if half else None
        ),
        "offload_policy": offload if settings.cpu_offload else OffloadPolicy(),
    }
    for layer in _layers(policy.hf):
        fully_shard(layer, **options)
    fully_shard(policy, **options)
    for module in policy.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no pre-multiplied sum


def _distribute(
    policy: PolicyModel,
    state: dict[str, Tensor],
    buffers: dict[str, Tensor],
    mesh: DeviceMesh,
    device: torch.device | str,
) -> None:
    """Send each rank its rows of what the first rank has read; buffers (not in the state) whole."""
    policy.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(policy, state, options=options)
    for name, buffer in policy.named_buffers():
        if name in buffers and not buffers[name].is_meta:
            buffer.copy_(buffers[name])
        dist.broadcast(buffer, group_src=0, group=mesh.get_group())

"""Memory that a run will need, from the model's shape alone. Pure, without torch: `staleflow plan` prints it.

Estimates: what the design allocates is counted exactly, activations by rule, allocator and library overhead not at all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 1 << 30
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ModelShape:
    """What a decoder's size follows from; `experts` 0 is a dense model, `tied`: output weights are the embeddings."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        mlp = 3 * self.hidden * self.intermediate * max(self.experts, 1) + self.experts * self.hidden
        return attention + mlp + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.embedding_parameters + self.hidden

    def kv_bytes_per_token(self, dtype: str = "bfloat16") -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * _BYTES[dtype]


# For models that are not on disk yet, by the name of their folder.
KNOWN_SHAPES = {
    "Qwen2.5-0.5B": ModelShape(24, 896, 4864, 14, 2, 64, 151936, tied=True),
    "Qwen2.5-1.5B": ModelShape(28, 1536, 8960, 12, 2, 128, 151936, tied=True),
    "Qwen2.5-Math-7B": ModelShape(28, 3584, 18944, 28, 4, 128, 152064),
    "Qwen2.5-14B": ModelShape(48, 5120, 13824, 40, 8, 128, 152064),
    "Qwen2.5-32B": ModelShape(64, 5120, 27648, 40, 8, 128, 152064),
    "Qwen3-30B-A3B": ModelShape(48, 2048, 768, 32, 4, 128, 151936, experts=128, experts_per_token=8),
}


def model_shape(path: Path | str) -> ModelShape | None:
    """From `config.json` in the model's folder, else by the folder's name, else None."""
    file = Path(path) / "config.json"
    if file.is_file():
        return _from_config(json.loads(file.read_text()))
    return KNOWN_SHAPES.get(Path(path).name)


def _from_config(config: dict[str, Any]) -> ModelShape:
    heads = config["num_attention_heads"]
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    return ModelShape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=(config.get("moe_intermediate_size") if experts else None) or config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", True)),
        experts=experts,
        experts_per_token=config.get("num_experts_per_tok") or 0,
    )


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on one trainer device; `offloaded_bytes` lie on its host instead (CPU offload)."""

    state_bytes: int
    snapshot_bytes: int
    gathered_bytes: int
    activation_bytes: int
    logits_bytes: int
    offloaded_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.state_bytes + self.snapshot_bytes + self.gathered_bytes + self.activation_bytes + self.logits_bytes


def trainer_memory(
    shape: ModelShape,
    *,
    ranks: int,
    microbatch_tokens: int,
    dtype: str = "bfloat16",
    wire_dtype: str = "bfloat16",
    activation_checkpointing: bool = False,
    cpu_offload: bool = False,
    logits_chunk_tokens: int = 4096,
    reference: bool = False,
) -> TrainerMemory:
    """Of one of `ranks` FSDP2 ranks.

    State: float32 master weights, two Adam moments, gradients (16 bytes a parameter), sharded. Snapshot: the shard as
    it is published. Gathered: embeddings with their gradient, and two layers (one computing, one prefetched). Logits:
    one chunk in float32, its softmax and its gradient.
    """
    size = _BYTES[dtype]
    state = shape.parameters * (16 + 4 * reference) // ranks
    gathered = (2 * size * shape.embedding_parameters) + 3 * size * shape.layer_parameters
    rows = min(logits_chunk_tokens, microbatch_tokens)
    return TrainerMemory(
        state_bytes=0 if cpu_offload else state,
        snapshot_bytes=shape.parameters * _BYTES[wire_dtype] // ranks,
        gathered_bytes=gathered,
        activation_bytes=_activations(shape, microbatch_tokens, size, activation_checkpointing),
        logits_bytes=3 * 4 * rows * shape.vocabulary,
        offloaded_bytes=state if cpu_offload else 0,
    )


def _activations(shape: ModelShape, tokens: int, size: int, checkpointing: bool) -> int:
    """Kept for the backward pass: inputs of norms, projections, attention, and of the MLP's three products."""
    width = shape.intermediate * max(shape.experts_per_token, 1)
    attention = shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    layer = tokens * size * (6 * shape.hidden + attention + 4 * width)
    if checkpointing:
        return tokens * size * shape.hidden * shape.layers + layer
    return layer * shape.layers


def rollout_weight_bytes(shape: ModelShape, *, tensor_parallel: int, dtype: str = "bfloat16") -> int:
    """Weights on one device of an instance."""
    return shape.parameters * _BYTES[dtype] // tensor_parallel


def store_bytes(shape: ModelShape, wire_dtype: str = "bfloat16") -> int:
    """The parameter store of a node: two versions."""
    return 2 * shape.parameters * _BYTES[wire_dtype]


def describe(config: Any) -> list[str]:
    """Lines for a plan, from a resolved config; says so when the model's shape is unknown."""
    shape = model_shape(config.model.path)
    if shape is None:
        return [f"unknown: {config.model.path} has no config.json and its name is not known"]
    m = config.model
    need = trainer_memory(
        shape,
        ranks=config.trainer.ranks,
        microbatch_tokens=config.trainer.microbatch_tokens,
        dtype=m.dtype,
        wire_dtype=config.parameters.wire_dtype,
        activation_checkpointing=m.activation_checkpointing,
        cpu_offload=m.cpu_offload,
        logits_chunk_tokens=m.logits_chunk_tokens,
        reference=config.algorithm.kl_coefficient > 0,
    )
    weights = rollout_weight_bytes(shape, tensor_parallel=config.rollout.tensor_parallel, dtype=m.dtype)
    per_token = shape.kv_bytes_per_token(m.dtype) / config.rollout.tensor_parallel
    return [
        f"model   {shape.parameters / 1e9:.2f} billion parameters",
        f"trainer device  {_gib(need.total_bytes)}: state {_gib(need.state_bytes)}, snapshot "
        f"{_gib(need.snapshot_bytes)}, gathered {_gib(need.gathered_bytes)}, activations "
        f"{_gib(need.activation_bytes)}, logits {_gib(need.logits_bytes)}"
        + (f"; on its host {_gib(need.offloaded_bytes)}" if need.offloaded_bytes else ""),
        f"rollout device  weights {_gib(weights)}, cache {per_token / 1024:.1f} KiB a token "
        f"({_gib(int(per_token * config.longest_tokens))} for the longest trajectory)",
        f"host    parameter store {_gib(store_bytes(shape, config.parameters.wire_dtype))} on nodes with rollout",
    ]


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"

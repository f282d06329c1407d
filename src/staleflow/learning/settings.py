"""What the learning room is told: plain frozen dataclasses, checked when made.

They need neither torch nor transformers, so that a plan or a config check can build them on a login node.
"""

from __future__ import annotations

from dataclasses import dataclass

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
LOSSES = ("ppo_clip", "dapo", "decoupled", "gspo", "cispo", "sft")
PROXIMAL = ("engine", "recompute", "interpolate")
CORRECTIONS = ("none", "truncate", "mask")
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
SCHEDULES = ("constant", "linear", "cosine")
ATTENTIONS = ("auto", "flash_attn", "torch_varlen", "flex", "blocks")
DTYPES = ("float32", "bfloat16")


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{key} = {value!r}: must be one of {', '.join(allowed)}")


def _at_least(key: str, value: float, least: float, *, strictly: bool = False) -> None:
    if value < least or (strictly and value == least):
        raise ValueError(f"{key} = {value}: must be {'>' if strictly else '>='} {least}")


@dataclass(frozen=True)
class ModelSettings:
    """The policy: a Hugging Face causal LM in a local folder.

    `dtype` is what is computed in: with "bfloat16" the sharded master weights and the gradient reductions stay float32.
    `attention` chooses the kernel for packed sequences: "auto" takes flash-attn, then torch's varlen attention, then
    flex attention on a GPU, and "blocks" (exact, any device) on the CPU. `logits_chunk_tokens` bounds the rows of
    logits that exist at once. `reference_path` is the model that the KL term compares with; None is `path` itself.
    """

    path: str
    dtype: str = "float32"
    attention: str = "auto"
    activation_checkpointing: bool = False
    compile: bool = False
    cpu_offload: bool = False
    logits_chunk_tokens: int = 4096
    reference_path: str | None = None

    def __post_init__(self) -> None:
        _one_of("model.dtype", self.dtype, DTYPES)
        _one_of("model.attention", self.attention, ATTENTIONS)
        _at_least("model.logits_chunk_tokens", self.logits_chunk_tokens, 1)


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW. `max_grad_norm` 0 switches clipping off; the schedule counts training steps."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    min_lr_fraction: float = 0.0

    def __post_init__(self) -> None:
        _at_least("optimizer.lr", self.lr, 0)
        _at_least("optimizer.max_grad_norm", self.max_grad_norm, 0)
        _at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        _one_of("optimizer.schedule", self.schedule, SCHEDULES)
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"optimizer.total_steps = {self.total_steps}: schedule {self.schedule!r} needs its length, "
                f"more than warmup_steps = {self.warmup_steps}"
            )


@dataclass(frozen=True)
class AlgorithmSettings:
    """How trajectories become a gradient.

    Three policies are kept apart: the *behaviour* policy (the engine's log-probabilities, each token at the version
    that sampled it), the *proximal* policy (what the ratio is clipped around) and the policy being trained.
    `proximal` "engine" clips around the behaviour policy itself (vanilla PPO); "recompute" takes the trainer's own
    log-probabilities before this step's first update; "interpolate" approximates them from the age of a token.
    With "recompute" the clip bounds what the later updates of a step do, relative to its first: with
    `updates_per_step` 1 every ratio is 1, and nothing is ever clipped.

    With a proximal policy of its own, each token is weighted by proximal / behaviour. Where the token's version is
    the trainer's, that ratio is nothing but the numerical gap of engine and trainer: `engine_correction` and
    `engine_cap` rule there. Where the token is older it is mostly policy age: `age_correction` and `age_cap` rule.
    "truncate" caps a weight, "mask" drops a token whose weight is outside [1/cap, cap], "none" leaves the weight at 1.

    `aggregation`: "token_mean" (DAPO), "sequence_mean" (GRPO, GSPO), "constant" (Dr. GRPO: sequences x
    `constant_tokens`); all denominators are counted over the global batch.
    """

    advantage: str = "grpo"
    loss: str = "ppo_clip"
    aggregation: str = "token_mean"
    constant_tokens: int = 0
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    proximal: str = "engine"
    engine_correction: str = "none"
    engine_cap: float = 2.0
    age_correction: str = "none"
    age_cap: float = 5.0
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    updates_per_step: int = 1
    overlong_buffer_tokens: int = 0
    overlong_penalty: float = 1.0

    def __post_init__(self) -> None:
        _one_of("algorithm.advantage", self.advantage, ADVANTAGES)
        _one_of("algorithm.loss", self.loss, LOSSES)
        _one_of("algorithm.aggregation", self.aggregation, AGGREGATIONS)
        _one_of("algorithm.proximal", self.proximal, PROXIMAL)
        _one_of("algorithm.engine_correction", self.engine_correction, CORRECTIONS)
        _one_of("algorithm.age_correction", self.age_correction, CORRECTIONS)
        _at_least("algorithm.temperature", self.temperature, 0, strictly=True)
        _at_least("algorithm.clip_low", self.clip_low, 0)
        _at_least("algorithm.clip_high", self.clip_high, 0)
        _at_least("algorithm.engine_cap", self.engine_cap, 1)
        _at_least("algorithm.age_cap", self.age_cap, 1)
        _at_least("algorithm.kl_coefficient", self.kl_coefficient, 0)
        _at_least("algorithm.updates_per_step", self.updates_per_step, 1)
        if self.dual_clip and self.dual_clip <= 1:
            raise ValueError(f"algorithm.dual_clip = {self.dual_clip}: must be > 1, or 0 for off")
        if self.aggregation == "constant" and self.constant_tokens < 1:
            raise ValueError("algorithm.constant_tokens = 0: aggregation 'constant' divides by it; set the token limit")
        if self.loss == "decoupled" and self.proximal == "engine":
            raise ValueError("algorithm.proximal = 'engine': loss 'decoupled' needs 'recompute' or 'interpolate'")

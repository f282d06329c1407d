"""Losses of the policy: pure functions on the response tokens of a micro-batch, [n] each.

A per-token loss times its aggregation weight, summed, is this micro-batch's exact share of the loss over the global
batch: denominators are in the weights, so that micro-batches and ranks add up, and nothing is a mean of means.
All ratios are formed from log-probabilities at the sampling temperature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from staleflow.learning.batch import BatchTotals
from staleflow.learning.settings import AlgorithmSettings

_LOG_RATIO_LIMIT = 20.0  # exp of more overflows float32 before any clip can act


@dataclass(frozen=True, eq=False)
class LossInputs:
    """Response tokens only. `logprobs` and `entropy` carry the gradient, all else is data; float32 [n].

    `sequence` int64 [n] in 0..`sequences`-1; `age` int32 [n] = step - version of the token; `weights` from
    `aggregation_weights`, 0 on a token that stands in where there is none; `reference` None when there is no KL term.
    """

    logprobs: Tensor
    entropy: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    age: Tensor
    sequence: Tensor
    sequences: int
    reference: Tensor | None = None


@dataclass(frozen=True, eq=False)
class LossOutput:
    """`loss_sum`: scalar to be differentiated; `sums`: detached sums over tokens, to be divided by the token total."""

    loss_sum: Tensor
    sums: dict[str, Tensor]


def aggregation_weights(
    lengths: Tensor, sequence: Tensor, totals: BatchTotals, mode: str, constant_tokens: int = 0
) -> Tensor:
    """Weight of each token, float32 [n], denominators included; `lengths` float32 [S] trained tokens a sequence.

    token_mean: 1/tokens. sequence_mean: 1/(sequences * own length). constant: 1/(sequences * constant_tokens).
    An entirely masked global batch (totals 0) gives weights that sum to nothing, not a division by zero.
    """
    if mode == "token_mean":
        return torch.full_like(sequence, 1.0 / max(totals.tokens, 1), dtype=torch.float32)
    if mode == "sequence_mean":
        return 1.0 / (max(totals.sequences, 1) * lengths.clamp(min=1)[sequence])
    if mode == "constant":
        return torch.full_like(sequence, 1.0 / (max(totals.sequences, 1) * constant_tokens), dtype=torch.float32)
    raise ValueError(f"aggregation {mode!r}: must be token_mean, sequence_mean or constant")


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """new - old, held within what float32 can exponentiate."""
    return (new - old).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)


def ppo_clip(
    logprobs: Tensor, proximal: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1-low, 1+high) A) per token, and where the clip took the gradient away (bool).

    PPO eq. 7; DAPO's clip-higher is clip_high > clip_low. `dual_clip` c > 1 bounds the loss of bad actions whose
    ratio exploded: for A < 0 the objective is at least c A.
    """
    ratio = log_ratio(logprobs, proximal).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    clipped = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    if dual_clip:
        bounded = (advantages < 0) & (ratio > dual_clip)
        objective = torch.where(bounded, dual_clip * advantages, objective)
        clipped = clipped | bounded
    return -objective, clipped


def gspo(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    sequences: int,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """PPO's clip on the sequence's ratio s = exp(mean over its tokens of log r), in its per-token form (GSPO-token).

    Every token carries sg[s] * pi / sg[pi], so that with aggregation "sequence_mean" value and gradient are those of
    the sequence objective min(s A, clip(s) A).
    """
    log_ratios = log_ratio(logprobs.detach(), proximal)
    counts = torch.zeros(sequences, device=logprobs.device).index_add(0, sequence, torch.ones_like(log_ratios))
    mean = torch.zeros(sequences, device=logprobs.device).index_add(0, sequence, log_ratios) / counts.clamp(min=1)
    per_token = logprobs + (mean[sequence] - logprobs.detach())
    return ppo_clip(per_token, torch.zeros_like(per_token), advantages, clip_low, clip_high)


def cispo(
    logprobs: Tensor, proximal: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-sg[clip(r, 1-low, 1+high)] A log pi: the importance weight is clipped, no token loses its gradient.

    MiniMax-M1, eq. 4-5. `clip_low` >= 1 means no lower clip, as published.
    """
    ratio = log_ratio(logprobs, proximal).exp().detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs, weight != ratio


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = reference - logprobs: unbiased for KL(policy || reference), never negative."""
    d = log_ratio(reference, logprobs)
    return d.exp() - d - 1


def interpolated_proximal(logprobs: Tensor, behaviour: Tensor, age: Tensor) -> Tensor:
    """The proximal policy without a forward pass: behaviour/age + policy*(1 - 1/age) in log space; age 0: the policy.

    The older a token, the nearer to the present policy it is clipped (A-3PO).
    """
    share = torch.where(age > 0, 1.0 / age.clamp(min=1), 0.0)
    return share * behaviour + (1 - share) * logprobs.detach()


def correction_weights(proximal: Tensor, behaviour: Tensor, mode: str, cap: float) -> Tensor:
    """proximal / behaviour as a weight without gradient: 1 ("none"), min(w, cap) ("truncate"), 0 outside ("mask")."""
    if mode == "none":
        return torch.ones_like(behaviour)
    weight = log_ratio(proximal, behaviour).exp().detach()
    if mode == "truncate":
        return weight.clamp(max=cap)
    return torch.where((weight <= cap) & (weight >= 1 / cap), weight, 0.0)


def importance_weights(inputs: LossInputs, settings: AlgorithmSettings) -> Tensor:
    """Weight per token: the engine's numerical gap where age is 0, policy age elsewhere, each under its own rule."""
    gap = correction_weights(inputs.proximal, inputs.behaviour, settings.engine_correction, settings.engine_cap)
    age = correction_weights(inputs.proximal, inputs.behaviour, settings.age_correction, settings.age_cap)
    return torch.where(inputs.age <= 0, gap, age)


def objective(inputs: LossInputs, settings: AlgorithmSettings) -> tuple[Tensor, Tensor]:
    """Loss per token (before importance weights) and where it was clipped, by the loss's name."""
    i, s = inputs, settings
    if s.loss == "sft":
        return -i.logprobs, torch.zeros_like(i.logprobs, dtype=torch.bool)
    if s.loss == "gspo":
        return gspo(i.logprobs, i.proximal, i.advantages, i.sequence, i.sequences, s.clip_low, s.clip_high)
    if s.loss == "cispo":
        return cispo(i.logprobs, i.proximal, i.advantages, s.clip_low, s.clip_high)
    return ppo_clip(i.logprobs, i.proximal, i.advantages, s.clip_low, s.clip_high, s.dual_clip)


def policy_loss(inputs: LossInputs, settings: AlgorithmSettings) -> LossOutput:
    """This micro-batch's share of the loss, and the sums behind its statistics."""
    per_token, clipped = objective(inputs, settings)
    weights = importance_weights(inputs, settings) if settings.loss != "sft" else torch.ones_like(per_token)
    per_token = per_token * weights
    counted = (inputs.weights > 0).float()
    sums = {
        "clip_fraction": (clipped * counted).sum(),
        "importance_weight": (weights * counted).sum(),
        "entropy": (inputs.entropy.detach() * counted).sum(),
        "approx_kl": (k3(inputs.behaviour, inputs.logprobs.detach()) * counted).sum(),
        "logprob": (inputs.logprobs.detach() * counted).sum(),
    }
    if settings.entropy_coefficient:
        per_token = per_token - settings.entropy_coefficient * inputs.entropy
    if inputs.reference is not None:
        kl = k3(inputs.logprobs, inputs.reference)
        sums["reference_kl"] = (kl.detach() * counted).sum()
        per_token = per_token + settings.kl_coefficient * kl
    return LossOutput((per_token * inputs.weights).sum(), sums)

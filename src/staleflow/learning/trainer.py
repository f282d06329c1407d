"""The policy trainer: micro-batches in, one version later out.

Collectives (all on the default group of the trainer role or on `mesh`, from the calling thread only): FSDP2's own in
each forward and backward pass, one gradient norm per update, one reduction of the statistics per step. Every rank must
therefore bring the same number of micro-batches to a step; an empty one (`pack([], [])`) is a legal filler.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from staleflow.learning import optimizer as adamw
from staleflow.learning.batch import BatchTotals, PackedBatch, response_lengths, totals_of
from staleflow.learning.losses import LossInputs, aggregation_weights, interpolated_proximal, policy_loss
from staleflow.learning.model import PolicyModel, ResponseScores, load_policy
from staleflow.learning.settings import AlgorithmSettings, ModelSettings, OptimizerSettings
from staleflow.learning.statistics import StepStatistics


@dataclass(frozen=True, eq=False)
class _Update:
    """One optimizer update: its micro-batches with the proximal log-probabilities [T] if they had to be stored."""

    batches: Iterable[tuple[PackedBatch, Tensor | None]]
    totals: BatchTotals


class PolicyTrainer:
    """A Hugging Face causal LM, AdamW and an algorithm on the ranks of `mesh` (None: all of the default group).

    The default process group must exist, also for one rank. `seed` feeds dropout, if the model has any, together with
    step and rank, so that a resumed run needs no generator state.
    """

    def __init__(
        self,
        model: ModelSettings,
        optimizer: OptimizerSettings,
        algorithm: AlgorithmSettings,
        *,
        device: torch.device | str,
        seed: int,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.mesh = mesh or init_device_mesh(self.device.type, (dist.get_world_size(),))
        self.algorithm = algorithm
        self._optimizer_settings = optimizer
        self._seed = seed
        self.model = load_policy(model, self.mesh, temperature=algorithm.temperature)
        self._reference = self._load_reference(model) if algorithm.kl_coefficient else None
        self.optimizer = adamw.build(self.model, optimizer)

    def _load_reference(self, model: ModelSettings) -> PolicyModel:
        path = model.reference_path or model.path
        return load_policy(model, self.mesh, temperature=self.algorithm.temperature, trainable=False, path=path)

    def train_step(
        self, step: int, micro_batches: Iterable[PackedBatch], totals: BatchTotals | None = None
    ) -> dict[str, float]:
        """Train on the global batch of step `step`, of which this rank brings `micro_batches`; version step -> step+1.

        `totals` counts the global batch; None counts here (one small collective, and the micro-batches are held).
        With one update a step, micro-batches are consumed one by one and may be views into a ring; with several they
        are copied. Returns the metrics, equal on every rank.
        """
        torch.manual_seed(hash((self._seed, step, self.mesh.get_rank())) & 0xFFFF_FFFF)
        lr = adamw.learning_rate(step, self._optimizer_settings)
        adamw.set_learning_rate(self.optimizer, lr)
        statistics, norms = StepStatistics(self.device), []
        for number, update in enumerate(self._updates(micro_batches, totals)):
            for batch, proximal in update.batches:
                self._accumulate(step, batch, proximal, update.totals, statistics, before_update=number == 0)
            norms.append(self._apply())
        metrics = statistics.reduce(self.mesh.get_group())
        return metrics | {"grad_norm": max(norms), "lr": lr, "updates": float(len(norms))}

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch) -> Tensor:
        """float32 [T]: the policy's log-probability of each response token at the sampling temperature, 0 elsewhere."""
        return self._scattered(batch, self.model)

    def sharded_parameters(self) -> Iterator[tuple[str, DTensor]]:
        """(name, this rank's shard) in an order equal on all ranks; names as transformers' modules have them."""
        return self.model.sharded_parameters()

    def state_dict(self) -> dict[str, Any]:
        """For `torch.distributed.checkpoint`: sharded tensors, so that another number of ranks can read it.

        They are the live ones: copy them before the next step, as an asynchronous save does.
        """
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])

    def _updates(self, micro_batches: Iterable[PackedBatch], totals: BatchTotals | None) -> Iterator[_Update]:
        """The step's micro-batches, cut into `updates_per_step` consecutive parts."""
        count = self.algorithm.updates_per_step
        if count == 1 and totals is not None:
            yield _Update(((batch, None) for batch in micro_batches), totals)
            return
        held = [batch.clone() for batch in micro_batches]
        self._require_equal_counts(len(held), at_least=count)
        bounds = [len(held) * i // count for i in range(count + 1)]
        parts = [held[a:b] for a, b in itertools.pairwise(bounds)]
        proximal = [self._stored_proximal(part) if i else [None] * len(part) for i, part in enumerate(parts)]
        for part, stored in zip(parts, proximal, strict=True):
            yield _Update(zip(part, stored, strict=True), self._global_totals(part))

    def _require_equal_counts(self, mine: int, *, at_least: int) -> None:
        extremes = torch.tensor([mine, -mine], device=self.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.mesh.get_group())
        most, least = int(extremes[0]), -int(extremes[1])
        if least != most or least < at_least:
            raise ValueError(
                f"ranks bring {least} to {most} micro-batches: each must bring the same number, at least "
                f"algorithm.updates_per_step = {at_least}"
            )

    def _global_totals(self, batches: Sequence[PackedBatch]) -> BatchTotals:
        mine = totals_of(batches)
        counts = torch.tensor([mine.tokens, mine.sequences], device=self.device)
        dist.all_reduce(counts, group=self.mesh.get_group())
        return BatchTotals(*counts.tolist())

    def _stored_proximal(self, batches: Sequence[PackedBatch]) -> list[Tensor | None]:
        """What later updates of a step clip around must be computed before its first one."""
        if self.algorithm.proximal != "recompute":
            return [None] * len(batches)
        return [self.logprobs(batch.to(self.device)) for batch in batches]

    def _accumulate(
        self,
        step: int,
        batch: PackedBatch,
        proximal: Tensor | None,
        totals: BatchTotals,
        statistics: StepStatistics,
        *,
        before_update: bool,
    ) -> None:
        """Forward and backward of one micro-batch; gradients add up until the update."""
        batch = batch.to(self.device)
        scores = self.model.score(batch)
        inputs = self._loss_inputs(step, batch, scores, proximal, totals)
        output = policy_loss(inputs, self.algorithm)
        output.loss_sum.backward()
        statistics.add("loss", output.loss_sum)
        for name, value in output.sums.items():
            statistics.add(name, value)
        statistics.add_tokens(inputs, before_update=before_update)

    def _loss_inputs(
        self, step: int, batch: PackedBatch, scores: ResponseScores, proximal: Tensor | None, totals: BatchTotals
    ) -> LossInputs:
        index, logprobs = scores.index, scores.logprobs
        sequence = batch.sequence_ids()[index]
        age = (step - batch.versions[index]).abs()  # after a resume a token may come from a newer version that was lost
        weights = aggregation_weights(
            response_lengths(batch), sequence, totals, self.algorithm.aggregation, self.algorithm.constant_tokens
        )
        behaviour = batch.logprobs[index]
        return LossInputs(
            logprobs=logprobs,
            entropy=scores.entropy,
            proximal=self._proximal(logprobs, behaviour, age) if proximal is None else proximal[index],
            behaviour=behaviour,
            advantages=batch.advantages[index],
            weights=weights * batch.loss_mask[index],
            age=age,
            sequence=sequence,
            sequences=batch.sequences,
            reference=self._reference_logprobs(batch, index),
        )

    def _proximal(self, logprobs: Tensor, behaviour: Tensor, age: Tensor) -> Tensor:
        """Before a step's first update the policy *is* what "recompute" would compute."""
        if self.algorithm.proximal == "engine":
            return behaviour
        if self.algorithm.proximal == "interpolate":
            return interpolated_proximal(logprobs, behaviour, age)
        return logprobs.detach()

    @torch.no_grad()
    def _reference_logprobs(self, batch: PackedBatch, index: Tensor) -> Tensor | None:
        return None if self._reference is None else self._scattered(batch, self._reference)[index]

    def _scattered(self, batch: PackedBatch, model: PolicyModel) -> Tensor:
        batch = batch.to(self.device)
        scores = model.score(batch)
        model.reshard()  # no backward pass follows, for which FSDP would keep the root's weights gathered
        out = torch.zeros(batch.tokens, device=self.device)
        return out.index_copy(0, scores.index, scores.logprobs) * batch.loss_mask

    def _apply(self) -> float:
        """One optimizer update; returns the gradient norm before clipping."""
        norm = adamw.clip_gradients(self.model.parameters(), self._optimizer_settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

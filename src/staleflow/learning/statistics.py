"""What a training step reports: sums over tokens, combined over micro-batches and ranks once at the end of a step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from staleflow.learning.losses import LossInputs

_SAMPLE = 4096  # log-ratios kept per rank for the quantiles
_QUANTILES = (0.01, 0.5, 0.99)


class StepStatistics:
    """Collects one step on this rank; `reduce` is a collective and gives the same numbers on every rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._max_age = torch.zeros((), device=device)
        self._log_ratios: list[Tensor] = []

    def add(self, name: str, value: Tensor | float) -> None:
        value = torch.as_tensor(value, dtype=torch.float32, device=self._device).detach()
        self._sums[name] = self._sums.get(name, torch.zeros((), device=self._device)) + value

    def add_tokens(self, inputs: LossInputs, *, before_update: bool) -> None:
        """Policy age and engine-trainer gap apart: the gap is looked at only where engine and trainer had one version.

        After a step's first update no token is of the trainer's version any more.
        """
        counted = inputs.weights > 0
        log_ratio, age = (inputs.logprobs.detach() - inputs.behaviour)[counted], inputs.age[counted]
        fresh = (age <= 0) & before_update
        self.add("tokens", counted.sum())
        self.add("age", age.sum())
        self.add("fresh_tokens", fresh.sum())
        self.add("fresh_gap", log_ratio[fresh].abs().sum())
        self.add("aged_difference", log_ratio[~fresh].abs().sum())
        self._max_age = torch.cat([age.float(), self._max_age[None]]).max()
        self._log_ratios.append(log_ratio)

    def reduce(self, group: dist.ProcessGroup) -> dict[str, float]:
        """The step's metrics: means over the trained tokens of all ranks."""
        names = sorted(self._sums)
        packed = torch.stack([self._sums[n].double() for n in names])
        dist.all_reduce(packed, group=group)
        dist.all_reduce(self._max_age, dist.ReduceOp.MAX, group=group)
        sums = dict(zip(names, packed.tolist(), strict=True))
        return _means(sums) | {"age_max": self._max_age.item()} | self._ratio_quantiles(group)

    def _ratio_quantiles(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Of policy / behaviour, from an even sample of the tokens."""
        mine = torch.cat(self._log_ratios) if self._log_ratios else torch.zeros(0, device=self._device)
        sample = torch.full((_SAMPLE,), torch.nan, device=self._device)
        kept = mine[:: max(1, -(-len(mine) // _SAMPLE))]
        sample[: len(kept)] = kept
        every = sample.new_empty(_SAMPLE * group.size())
        dist.all_gather_into_tensor(every, sample, group=group)
        at = torch.tensor(_QUANTILES, device=self._device)
        values = torch.nanquantile(every, at).nan_to_num(0.0).exp().tolist()
        return {f"ratio_p{int(q * 100):02d}": v for q, v in zip(_QUANTILES, values, strict=True)}


def _means(sums: dict[str, float]) -> dict[str, float]:
    """`loss` carries its denominators already; the gap means are over their own tokens; all else over all tokens."""
    tokens, fresh = sums.pop("tokens", 0.0), sums.pop("fresh_tokens", 0.0)
    metrics = {"loss": sums.pop("loss", 0.0), "tokens": tokens, "fresh_tokens": fresh}
    metrics["engine_gap"] = sums.pop("fresh_gap", 0.0) / max(fresh, 1)
    metrics["aged_difference"] = sums.pop("aged_difference", 0.0) / max(tokens - fresh, 1)
    metrics["age_mean"] = sums.pop("age", 0.0) / max(tokens, 1)
    return metrics | {name: value / max(tokens, 1) for name, value in sums.items()}

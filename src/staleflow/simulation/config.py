"""A study in one TOML file: fleet, costs, workload, bound, and the variants to compare. Every key is checked."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from staleflow.coordination.cost_model import CostModel, load_cost_model
from staleflow.coordination.settings import CoordinationSettings

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0.0)]


class StudyError(ValueError):
    """The study cannot be run; the message is one line per fault."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Fleet(Section):
    """The rollout instances. `cost_model` is relative to the study's own folder."""

    instances: Positive
    cost_model: Path
    max_running: Positive = 1024
    kv_capacity_tokens: Positive = 1 << 40
    prefill: bool = True  # False: prompts and resumed contexts cost nothing (as in the published simulator)


class Costs(Section):
    """What takes time beside decoding."""

    command_s: Seconds = 0.0  # coordinator -> instance, and back
    pull_s: Seconds = 0.0
    push_s: Seconds = 0.0
    reward_s: Seconds = 0.0
    train_s: Seconds = 0.0
    train_s_per_token: Seconds | Literal["balanced"] = 0.0  # balanced: as long as the rollout at the fluid rate


class Workload(Section):
    """Response lengths in tokens.

    lognormal: exp(N(mu, sigma)), `correlation` of the logarithms inside a group; pareto: minimum * Pareto(alpha);
    bimodal: lognormal, of which a share is `factor` times longer; trace: a JSONL file or a finished run's folder.
    """

    kind: Literal["lognormal", "pareto", "bimodal", "trace"] = "lognormal"
    mu: float = 8.1
    sigma: Annotated[float, Field(ge=0.0)] = 0.95
    correlation: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    minimum: Positive = 1
    alpha: Annotated[float, Field(gt=0.0)] = 1.5
    share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    factor: Annotated[float, Field(gt=0.0)] = 6.0
    trace: Path | None = None
    clip: Positive = 20_000
    prompt_tokens: Positive = 512


class Staleness(Section):
    batch_groups: Positive
    group_size: Positive = 1
    eta: tuple[Annotated[int, Field(ge=0)], ...] = (1, 2, 3)
    spare_groups: Annotated[int, Field(ge=0)] = 0
    spare_members: Annotated[int, Field(ge=0)] = 0


class Run(Section):
    """Virtual time: `steps` training steps, of which the first `warmup` are not measured."""

    steps: Positive = 20
    warmup: Annotated[int, Field(ge=0)] = 4
    seeds: Positive = 5
    cycle_s: Annotated[float, Field(gt=0.0)] = 0.05
    snapshot_s: Annotated[float, Field(gt=0.0)] = 1.0


class Variant(Section):
    """One line of the comparison: a policy, or an ablation of one. `settings` are CoordinationSettings by name."""

    name: str
    policy: str = "staleflow"
    eta: tuple[int, ...] | None = None  # None: the study's
    settings: dict[str, float | int | bool | str] = {}
    spare_groups: Annotated[int, Field(ge=0)] = 0
    spare_members: Annotated[int, Field(ge=0)] = 0


class Study(Section):
    name: str
    description: str = ""
    fleet: Fleet
    costs: Costs = Costs()
    workload: Workload = Workload()
    staleness: Staleness
    run: Run = Run()
    coordination: dict[str, float | int | bool | str] = {}
    variants: tuple[Variant, ...] = ()

    @model_validator(mode="after")
    def _warm(self) -> Study:
        """At the start eta + 1 batches begin at once, at one version; steps 0 .. eta + 1 still feel it."""
        most = max((*self.staleness.eta, *(eta for v in self.variants for eta in v.eta or ())))
        if self.run.warmup < most + 2:
            raise ValueError(f"run.warmup = {self.run.warmup}: with eta = {most} at least {most + 2} steps are needed")
        return self

    def settings(self, variant: Variant) -> CoordinationSettings:
        """The variant's settings over the study's over the defaults."""
        merged: dict[str, Any] = {**self.coordination, **variant.settings, "policy": variant.policy}
        known = CoordinationSettings.__dataclass_fields__
        for key in merged:
            if key not in known:
                raise StudyError(
                    f"{self.name}: variant {variant.name!r}: unknown setting {key!r}; known: {', '.join(known)}"
                )
        return CoordinationSettings(**merged)


def studies_in(folder: Path) -> list[Path]:
    """The simulator's studies of a folder, the yardstick first; other studies there describe no fleet."""
    found = [path for path in sorted(folder.glob("*.toml")) if "fleet" in tomllib.loads(path.read_text())]
    return sorted(found, key=lambda path: path.stem != "yardstick")


def load_study(path: Path | str) -> tuple[Study, CostModel]:
    """Read a study and its cost model. Raises StudyError."""
    path = Path(path)
    try:
        study = Study.model_validate(tomllib.loads(path.read_text()))
        cost = load_cost_model(path.parent / study.fleet.cost_model)
    except FileNotFoundError as error:
        raise StudyError(f"{error.filename}: no such file; give a study, e.g. configs/studies/yardstick.toml") from None
    except ValidationError as error:
        faults = [f"{path}: {'.'.join(map(str, f['loc']))} = {f['input']!r}: {f['msg']}" for f in error.errors()]
        raise StudyError("\n".join(faults)) from None
    except ValueError as error:
        raise StudyError(f"{path}: {error}") from None
    return study, cost

"""What people and tools see of a run: a line a step, the live view, the summary. Decides nothing."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staleflow.config import Config
from staleflow.coordination.coordinator import Coordinator
from staleflow.observe.live import InstanceState, LiveState, View
from staleflow.observe.metrics import MetricsWriter, write_summary
from staleflow.observe.spans import Spans
from staleflow.roles.accounts import Accounts
from staleflow.roles.batching import StepPlan
from staleflow.roles.evaluations import Round
from staleflow.roles.messages import StepDone

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Started:
    ages: dict[int, int]
    reward: float
    time_s: float
    prompts: list[int]


class Observer:
    """`accounts` and `core` are read, never changed."""

    def __init__(self, config: Config, view: View, metrics: MetricsWriter, spans: Spans | None = None) -> None:
        self._c, self._view, self._metrics, self._spans = config, view, metrics, spans or Spans(None)
        self._accounts: Accounts
        self._core: Coordinator
        self._started: _Started | None = None
        self._last_done_s = 0.0
        self._publish_overlap: float | None = None
        self._loss: float | None = None
        self._steps_done = 0
        self.accuracies: list[dict[str, float]] = []

    def watch(self, accounts: Accounts, core: Coordinator) -> None:
        self._accounts, self._core = accounts, core
        self._steps_done = core.version

    def note(self, text: str) -> None:
        """For people: on the view, and in rank 0's log."""
        log.info("%s", text)
        self._view.note(text)

    def step_started(self, ages: Counter[int], reward: float, now_s: float, prompts: list[int]) -> None:
        """`prompts`: indices in the data of what the step trains on."""
        self._started = _Started(dict(sorted(ages.items())), reward, now_s, prompts)
        mean = sum(age * count for age, count in ages.items()) / max(1, sum(ages.values()))
        self._spans.counter("staleness", mean=mean, most=max(ages, default=0))

    def step_done(self, plan: StepPlan, metrics: dict[str, float], slowest: StepDone, now_s: float) -> None:
        started = self._started
        assert started is not None
        a = self._accounts
        since_s = now_s - (self._last_done_s or a.began_s)
        self._last_done_s = now_s
        self._publish_overlap = slowest.publish_overlap
        self._steps_done, self._loss = plan.step + 1, metrics.get("loss")
        values: dict[str, Any] = {
            "reward": started.reward,
            "staleness": started.ages,
            "trained_tokens": plan.response_tokens,
            "trajectories": len(plan.tids),
            "prompts": started.prompts,
            "step_s": since_s,
            "train_s": slowest.busy_s,
            "publish_wait_s": slowest.snapshot_wait_s,
            "publish_s": a.publish_s[-1] if a.publish_s else None,
            "publish_overlap": slowest.publish_overlap,
            "pull_s": a.pull_s[-1] if a.pull_s else None,
            "versions": {s.instance: s.version for s in sorted(a.engines.values(), key=lambda s: s.instance)},
            "trainer_idle_fraction": a.trainer_idle_fraction(now_s),
            "rollout_busy_fraction": a.rollout_busy_fraction(now_s),
            "generated_tokens": a.generated_tokens,
            "discarded_tokens": dict(a.discarded),
            "logprob_gap": a.gaps[-1] if a.gaps else None,
            "train": metrics,
            "protocol": self._core.counters(),
        }
        self._metrics.write(plan.step, values)
        self.refresh(now_s, "")

    def evaluated(self, of: Round, result: dict[str, float]) -> None:
        self.accuracies.append(result)
        self.note(
            f"evaluation at version {of.version}: {result['mean']:.3f} ± {result['stderr']:.3f} "
            f"on {int(result['prompts'])} prompts"
        )

    def refresh(self, now_s: float, waiting_for: str) -> None:
        """Give the view the present state; cheap enough for every cycle."""
        a = self._accounts
        instances = tuple(
            InstanceState(s.instance, s.version, s.running, s.waiting, s.kv_tokens / max(1, s.kv_capacity_tokens))
            for s in sorted(a.engines.values(), key=lambda s: s.instance)
        )
        self._view.update(
            LiveState(
                run=self._c.run.name,
                step=self._steps_done,
                steps=self._c.run.steps,
                elapsed_s=now_s - a.began_s if a.began_s else 0.0,
                reward=a.rewards[self._steps_done - 1] if 0 < self._steps_done <= len(a.rewards) else None,
                loss=self._loss,
                accuracy=self.accuracies[-1]["mean"] if self.accuracies else None,
                tokens_per_s=a.tokens_per_s(now_s),
                trainer_idle=a.trainer_idle_fraction(now_s) if a.began_s else None,
                staleness=dict(a.ages),
                instances=instances,
                waiting_for=waiting_for,
            )
        )

    def finish(self, status: str, reason: str, exit_code: int) -> Path:
        """Write summary.json, close the view, print where things are."""
        self._metrics.close()
        summary = self.summary(status, reason) | {"exit_code": exit_code}
        path = write_summary(self._c.run_dir, summary)
        self._view.close()
        for line in closing_lines(summary, self._c.run_dir):
            self.note(line)
        return path

    def summary(self, status: str, reason: str) -> dict[str, Any]:
        a, now_s = self._accounts, time.monotonic()
        first, last = a.reward_ends()
        view = self._core.view()
        # A short run's last evaluation may end before its first: instances answer at their own pace.
        by_version = sorted(self.accuracies, key=lambda result: result["version"])
        evaluated = {
            "accuracy_before": by_version[0]["mean"] if by_version and not by_version[0]["version"] else None,
            "accuracy_after": by_version[-1]["mean"] if len(by_version) > 1 else None,
            "evaluations": self.accuracies,
        }
        s = self._c.staleness
        return {
            "status": status,
            "reason": reason,
            "policy": self._c.coordination.policy,
            "eta": s.eta,
            "steps": self._steps_done,
            "batch_groups": s.batch_groups,
            "group_size": s.group_size,
            "max_staleness": max(a.ages, default=0),
            "staleness_histogram": dict(sorted(a.ages.items())),
            "trained_trajectories": a.trained_trajectories,
            "trained_tokens": a.trained_tokens,
            "generated_tokens": a.generated_tokens,
            "discarded_tokens": dict(a.discarded),
            "wall_s": a.wall_s(now_s) if a.began_s else 0.0,
            "trainer_idle_fraction": a.trainer_idle_fraction(now_s) if a.began_s else 1.0,
            "rollout_busy_fraction": a.rollout_busy_fraction(now_s) if a.began_s else 0.0,
            "publish_s": _mean(a.publish_s),
            "publish_overlap": self._publish_overlap,
            "publish_wait_s": a.publish_wait_s,
            "pull_s": _mean(a.pull_s),
            "pulls": len(a.pull_s),
            "interrupts": a.interrupted + view.interrupts,
            "migrations": view.migrations,
            "reward_first": first,
            "reward_last": last,
            "logprob_gap": _mean(a.gaps),
            "protocol": self._core.counters(),
            "segments_max": a.segments_max,
            **(evaluated if self._c.evaluation else {}),
        }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def closing_lines(summary: dict[str, Any], run_dir: Path) -> list[str]:
    """The short account at the end of a run."""
    histogram = "  ".join(f"{age}: {count}" for age, count in summary["staleness_histogram"].items()) or "-"
    tokens_per_s = summary["trained_tokens"] / summary["wall_s"] if summary["wall_s"] else 0.0
    lines = [
        "",
        f"{summary['status']}: {summary['reason']}",
        f"  steps      {summary['steps']} in {summary['wall_s']:.0f} s, {tokens_per_s:.0f} trained tokens/s, "
        f"trainer idle {summary['trainer_idle_fraction']:.0%}, rollout busy {summary['rollout_busy_fraction']:.0%}",
        f"  staleness  at most {summary['max_staleness']} of eta = {summary['eta']}; trajectories by age  {histogram}",
    ]
    if summary["reward_first"] is not None:
        lines.append(f"  reward     {summary['reward_first']:.3f} -> {summary['reward_last']:.3f}")
    if summary.get("accuracy_before") is not None and summary.get("accuracy_after") is not None:
        lines.append(f"  held out   {summary['accuracy_before']:.3f} -> {summary['accuracy_after']:.3f}")
    wasted = sum(summary["discarded_tokens"].values())
    lines.append(f"  discarded  {wasted} of {summary['generated_tokens']} generated tokens")
    lines.append(f"  files      {run_dir}/  (summary.json, metrics.jsonl, tb/, attempt_N/*.log)")
    return lines

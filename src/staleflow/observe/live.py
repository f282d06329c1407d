"""Watching a run: on a terminal a live view, elsewhere one plain line a step. Fed with `LiveState` by rank 0."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

_REFRESH_S = 0.25
_BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class InstanceState:
    """One rollout instance: `kv_use` is the used fraction of its KV cache, 0 to 1. `version` -1: none loaded yet."""

    instance: int
    version: int
    running: int
    waiting: int
    kv_use: float


@dataclass(frozen=True)
class LiveState:
    """The run at one moment. `step` counts finished steps; `staleness` is {age in versions: trajectories trained}.

    `tokens_per_s` counts generated tokens of all instances. `waiting_for` says in words what the trainer waits for, ""
    when it is at work. What is not known yet is None.
    """

    run: str
    step: int
    steps: int
    elapsed_s: float
    reward: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    tokens_per_s: float | None = None
    trainer_idle: float | None = None
    staleness: Mapping[int, int] = field(default_factory=dict)
    instances: tuple[InstanceState, ...] = ()
    waiting_for: str = ""


class View(Protocol):
    """`update` as often as there is something new (cheap); `note` for a sentence that stays; `close` at the end."""

    def update(self, state: LiveState) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


def open_view(mode: str = "auto", out: TextIO | None = None) -> View:
    """The view for `mode`: "auto" (live where `out` is a terminal), "always", "never". Imports rich only for it."""
    out = out or sys.stdout
    if mode not in ("auto", "always", "never"):
        raise ValueError(f"observe.live: {mode!r}; one of auto, always, never")
    if mode == "always" or (mode == "auto" and out.isatty()):
        return TerminalView(out)
    return PlainView(out)


class PlainView:
    """One line for each finished step."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._step = 0

    def update(self, state: LiveState) -> None:
        if state.step > self._step:
            self._step = state.step
            self.note(step_line(state))

    def note(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def close(self) -> None:
        self._out.flush()


def step_line(state: LiveState) -> str:
    """`step 12/200  reward 0.41  loss 0.003  310 tok/s  age 0:12 1:52  versions 12 11  idle 21 %  34 s`"""
    parts = [f"step {state.step}/{state.steps}"]
    parts += [f"{name} {_short(value)}" for name, value in _numbers(state)]
    if state.staleness:
        parts.append("age " + " ".join(f"{age}:{count}" for age, count in sorted(state.staleness.items())))
    if state.instances:
        parts.append("versions " + " ".join(str(one.version) for one in state.instances))
    if state.trainer_idle is not None:
        parts.append(f"idle {state.trainer_idle:.0%}")
    if state.waiting_for:
        parts.append(f"waits for {state.waiting_for}")
    return "  ".join([*parts, _clock(state.elapsed_s)])


def _numbers(state: LiveState) -> list[tuple[str, float]]:
    named = {
        "reward": state.reward, "loss": state.loss, "accuracy": state.accuracy, "tokens/s": state.tokens_per_s,
    }  # fmt: skip
    return [(name, value) for name, value in named.items() if value is not None]


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class TerminalView:
    """A table that is redrawn in place, at most four times a second."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=out)
        # The rank's log owns stdout and stderr; rich must not put itself in between.
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()
        self._drawn_s = 0.0
        self._step = -1
        self._last: LiveState | None = None
        self._rewards: list[float] = []

    def update(self, state: LiveState) -> None:
        self._last = state
        if state.step > self._step and state.reward is not None:
            self._rewards = [*self._rewards, state.reward][-60:]
        now_s = time.monotonic()
        if state.step > self._step or now_s - self._drawn_s >= _REFRESH_S:
            self._step, self._drawn_s = state.step, now_s
            self._draw(state)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last state on the screen; may be called twice."""
        if self._last is not None:
            self._draw(self._last)
        self._live.stop()

    def _draw(self, state: LiveState) -> None:
        self._live.update(_panel(state, self._rewards), refresh=True)


def _panel(state: LiveState, rewards: list[float]) -> Any:
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    facts = "   ".join(f"{name} {_short(value)}" for name, value in _numbers(state))
    idle = "" if state.trainer_idle is None else f"   idle {state.trainer_idle:.0%}"
    trainer = f"waits for {state.waiting_for}" if state.waiting_for else "at work"
    lines = [
        Text(f"step {state.step} of {state.steps}   {_clock(state.elapsed_s)}"),
        Text(progress_bar(state.step, state.steps)),
        Text(facts),
        Text(f"reward    {sparkline(rewards)}"),
        Text(f"staleness {histogram_line(state.staleness)}"),
        Text(f"trainer   {trainer}{idle}", style="yellow" if state.waiting_for else "green"),
        _instances(state.instances),
    ]
    return Panel(Group(*lines), title=Text(f"staleflow  {state.run}"), title_align="left")


def _instances(instances: tuple[InstanceState, ...]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("instance", "version", "running", "waiting", "KV use"):
        table.add_column(column, justify="right")
    for one in instances:
        version = "-" if one.version < 0 else str(one.version)
        table.add_row(str(one.instance), version, str(one.running), str(one.waiting), f"{one.kv_use:.0%}")
    return table


def progress_bar(done: int, total: int, width: int = 60) -> str:
    filled = width * done // max(total, 1)
    return "━" * filled + "─" * (width - filled)


def sparkline(values: list[float]) -> str:
    """The course of some numbers as a line of blocks, from the smallest to the largest of them."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[1 + round((value - low) / span * 7)] for value in values)


def histogram_line(counts: Mapping[int, int]) -> str:
    """`0 ███ 61%  1 ██ 39%`: a bar and a share for each age."""
    total = sum(counts.values())
    if not total:
        return ""
    return "  ".join(f"{age} {'█' * round(12 * n / total)} {n / total:.0%}" for age, n in sorted(counts.items()))

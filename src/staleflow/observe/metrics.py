"""What a run leaves for people and tools: metrics.jsonl (a line a step), TensorBoard, summary.json."""

from __future__ import annotations

import json
import math
import numbers
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

# design.md, "contracts that tools rely on". The accuracies exist only where an evaluation is configured.
SUMMARY_KEYS = frozenset({
    "status", "policy", "eta", "steps", "batch_groups", "group_size", "max_staleness", "staleness_histogram",
    "trained_trajectories", "trained_tokens", "generated_tokens", "discarded_tokens", "wall_s",
    "trainer_idle_fraction", "rollout_busy_fraction", "publish_s", "pull_s", "interrupts", "migrations",
    "reward_first", "reward_last", "logprob_gap", "protocol", "segments_max",
})  # fmt: skip
STATUSES = ("completed", "stopped", "failed")


class MetricsWriter:
    """Writes the metrics of one run; made once, on rank 0.

    `from_step` is the first step that this attempt will write. Steps from there on that an earlier attempt has written
    were undone with its weights: they move to `metrics.undone.jsonl`, so that each step of metrics.jsonl is unique.
    """

    def __init__(self, run_dir: Path, *, tensorboard: bool = True, from_step: int = 0) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        _drop_undone(path, from_step)
        self._lines: TextIO = path.open("a", encoding="utf-8")
        self._board = _Board(run_dir / "tb", from_step) if tensorboard else None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One line: {"step": step, …}. Values are numbers, strings, None, or nested mappings and lists of them.

        A number that is not finite becomes null and its key is listed under "non_finite": JSON has no NaN, and a loss
        that broke must not vanish.
        """
        broken: list[str] = []
        line = {"step": step, **_plain(values, broken)}
        if broken:
            line["non_finite"] = broken
        self._lines.write(json.dumps(line, allow_nan=False) + "\n")
        self._lines.flush()
        if self._board is not None:
            self._board.write(step, values)

    def close(self) -> None:
        """Make what was written durable; may be called twice."""
        if self._lines.closed:
            return
        self._lines.flush()
        os.fsync(self._lines.fileno())
        self._lines.close()
        if self._board is not None:
            self._board.close()


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Write summary.json at once or not at all. Raises ValueError when a promised key is missing or impossible."""
    missing = sorted(SUMMARY_KEYS - summary.keys())
    if missing:
        raise ValueError(f"summary.json: missing {', '.join(missing)}")
    if summary["status"] not in STATUSES:
        raise ValueError(f"summary.json: status {summary['status']!r}; one of {', '.join(STATUSES)}")
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "summary.json"
    replace_text(path, json.dumps(_plain(summary, []), indent=2, allow_nan=False) + "\n")
    return path


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All whole lines of metrics.jsonl, in order; a line torn by a kill is left out."""
    path = run_dir / "metrics.jsonl"
    return (
        [line for line in map(_parsed, path.read_text(encoding="utf-8").splitlines()) if line] if path.exists() else []
    )


def replace_text(path: Path, text: str) -> None:
    """Replace the file atomically: a reader, or a kill, finds the old text or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    beside.replace(path)


def _drop_undone(path: Path, from_step: int) -> None:
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    lines = [(line, _parsed(line)) for line in text.splitlines()]
    kept = [line for line, parsed in lines if parsed and parsed["step"] < from_step]
    if len(kept) == len(lines) and text.endswith("\n"):
        return
    undone = [line for line, parsed in lines if parsed and parsed["step"] >= from_step]
    with path.with_name("metrics.undone.jsonl").open("a", encoding="utf-8") as out:
        out.writelines(line + "\n" for line in undone)
    replace_text(path, "".join(line + "\n" for line in kept))


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        parsed = json.loads(line)
    except json.JSONDecodeError:
        return None  # the kill came in the middle of this line
    return parsed if isinstance(parsed, dict) and "step" in parsed else None


def _plain(value: Any, broken: list[str], name: str = "") -> Any:
    """Turn numpy scalars, tuples and int keys into what JSON has."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, broken, f"{name}.{key}" if name else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, broken, name) for item in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)  # also numpy's and torch's scalars; anything else raises here, with its type
    if math.isfinite(number):
        return number
    broken.append(name)
    return None


class _Board:
    """TensorBoard event files, written with the package tensorboard alone (its torch face would import torch)."""

    def __init__(self, folder: Path, from_step: int) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ValueError(
                "observe.tensorboard = true needs tensorboard: pip install 'staleflow[train]', or set it to false"
            ) from error
        self._event, self._summary = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(folder))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(event_pb2.Event(step=from_step, session_log=start))  # hides what was undone

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        scalars = [self._summary.Summary.Value(tag=tag, simple_value=number) for tag, number in _scalars(values)]
        event = self._event.Event(step=step, wall_time=time.time(), summary=self._summary.Summary(value=scalars))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _scalars(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += _scalars(value, f"{prefix}{key}/")
        elif isinstance(value, numbers.Real) or hasattr(value, "item"):
            found.append((f"{prefix}{key}", float(value)))
    return found

"""Profilers for a few steps of a few ranks (`[profile]`): Nsight Systems, and torch's own.

A trainer counts its steps, a rollout rank the versions that it works with: both name the same time. Recording begins
when the first step of the window begins and ends when one after its last does, or with the rank.

nsys   `launch/nsys.sh` starts the rank under `nsys profile --capture-range=cudaProfilerApi`; here the capture is
       switched on and off. A rank without CUDA has nothing to capture.
torch  a Chrome trace per rank, `trace/torch_rank_R.ROLE.json`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from staleflow.config import Profile, Window

log = logging.getLogger(__name__)


class Capture(Protocol):
    def start(self) -> None: ...
    def stop(self) -> None: ...


class NsysCapture:
    """Switches the capture of the profiler around this process."""

    def start(self) -> None:
        import torch

        torch.cuda.profiler.start()

    def stop(self) -> None:
        import torch

        torch.cuda.synchronize()  # what was launched in the window belongs to it
        torch.cuda.profiler.stop()


class TorchCapture:
    """torch.profiler: operators on the CPU and, where there is a GPU, its kernels."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._profile: Any = None

    def start(self) -> None:
        import torch

        wanted = torch.profiler.ProfilerActivity
        activities = [wanted.CPU, *([wanted.CUDA] if torch.cuda.is_available() else [])]
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def stop(self) -> None:
        self._profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._profile.export_chrome_trace(str(self._path))
        log.info("profile of this rank: %s", self._path)


class Profiling:
    """The windows of one rank. `step` costs a comparison outside of them."""

    def __init__(self, windows: Sequence[tuple[Window, Capture]]) -> None:
        self._waiting = list(windows)
        self._running: list[tuple[Window, Capture]] = []

    def step(self, number: int) -> None:
        """`number` is about to begin."""
        for pair in [p for p in self._running if number > p[0].steps[1]]:
            self._running.remove(pair)
            pair[1].stop()
        for pair in [p for p in self._waiting if number >= p[0].steps[0]]:
            self._waiting.remove(pair)
            if number <= pair[0].steps[1]:
                self._running.append(pair)
                pair[1].start()

    def close(self) -> None:
        """The rank ends: what still runs is stopped and written."""
        while self._running:
            self._running.pop()[1].stop()


def open_profiling(profile: Profile, rank: int, role: str, trace_dir: Path) -> Profiling:
    """What `[profile]` asks of this rank."""
    windows: list[tuple[Window, Capture]] = []
    if profile.nsys is not None and profile.nsys.wants(rank):
        windows += _nsys(profile.nsys)
    if profile.torch is not None and profile.torch.wants(rank):
        windows.append((profile.torch, TorchCapture(trace_dir / f"torch_rank_{rank}.{role}.json")))
    return Profiling(windows)


def _nsys(window: Window) -> list[tuple[Window, Capture]]:
    import torch

    if torch.cuda.is_available():
        return [(window, NsysCapture())]
    log.warning("profile.nsys: this rank has no CUDA device, so nothing is captured")
    return []

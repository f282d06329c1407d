"""A deterministic engine without a model, for tests of everything else.

The tokens of a trajectory depend on the weights that are loaded, on its seed and on the position, the length of the
response on the seed alone (long-tailed), so that a run with it can be compared bit by bit.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from staleflow.engines.base import Delta, Load, Request
from staleflow.trajectories.schema import Finish

FIRST_TOKEN = 3  # below: padding, EOS, BOS
EOS = 1
_MIX = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def mix(*values: int) -> int:
    """A 64-bit hash of integers (splitmix64 finaliser, chained)."""
    state = 0
    for value in values:
        state = (state + _MIX + (value & _WORD)) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state


class ScriptedEngine:
    """See `engines.base.Engine`. `step_s` is slept in each step that has work."""

    def __init__(self, *, vocabulary: int, max_running: int, step_s: float, mean_tokens: float = 12.0) -> None:
        self._vocabulary, self._max_running, self._step_s = vocabulary, max_running, step_s
        self._mean_tokens = mean_tokens
        self._weights = 0
        self._running: dict[int, tuple[Request, int, int]] = {}  # tid -> (request, tokens when it was added, and since)

    def add(self, request: Request) -> None:
        self._running[request.tid] = (request, len(request.tokens), 0)  # its owner's buffer grows with what we yield

    def step(self) -> list[Delta]:
        if self._running:
            time.sleep(self._step_s)
        return [self._advance(tid) for tid in list(self._running)[: self._max_running]]

    def _advance(self, tid: int) -> Delta:
        request, before, done = self._running[tid]
        position = before + done
        word = mix(self._weights, request.seed or 0, position)
        ends = self._ends_at(request.seed or tid, position)
        token = EOS if ends else FIRST_TOKEN + word % (self._vocabulary - FIRST_TOKEN)
        finish = Finish.STOP if ends else Finish.LENGTH if done + 1 >= request.max_new else Finish.PARTIAL
        if finish is Finish.PARTIAL:
            self._running[tid] = (request, before, done + 1)
        else:
            del self._running[tid]
        return Delta(tid, [token], [-math.log(self._vocabulary)], finish)

    def _ends_at(self, seed: int, position: int) -> bool:
        """A hazard per position that depends on seed and position only: lengths survive interruption."""
        hazard = (0.3 + 1.7 * (mix(seed) % 1000) / 1000) / self._mean_tokens
        return (mix(seed, position, 7) >> 11) / (1 << 53) < hazard

    def abort(self, tids: Iterable[int]) -> None:
        for tid in tids:
            self._running.pop(tid, None)

    def busy(self) -> bool:
        return bool(self._running)

    def load(self) -> Load:
        held = len(self._running)
        kv = sum(before + done for _, before, done in self._running.values())
        return Load(min(held, self._max_running), max(0, held - self._max_running), kv, 1 << 20)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        import torch

        checksum = 0
        for name, tensor in weights:
            array = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            checksum = zlib.crc32(array, zlib.crc32(name.encode(), checksum))
        self._weights = checksum

    def reset_prefix_cache(self) -> bool:
        return not self._running

    def score(self, tokens: Sequence[int]) -> list[float]:
        return [float(v) for v in np.full(len(tokens) - 1, -math.log(self._vocabulary))]

    def close(self) -> None:
        self._running.clear()

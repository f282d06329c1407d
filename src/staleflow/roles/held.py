"""A trajectory while an instance generates it: grows by what each step yields, becomes a record when it leaves."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from staleflow.engines.base import Delta, Request
from staleflow.trajectories.schema import Finish, Trajectory


@dataclass
class Held:
    """`tokens` is prompt + response, `segments` [[version, n_tokens], …]; `v_traj` is the first segment's version."""

    tid: int
    group_id: int
    member: int
    prompt_tokens: int
    seed: int
    tokens: array[int]
    logprobs: array[float]
    segments: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, t: Trajectory) -> Held:
        tokens, logprobs = array("i"), array("f")
        tokens.frombytes(np.ascontiguousarray(t.tokens, "<i4").tobytes())
        logprobs.frombytes(np.ascontiguousarray(t.logprobs, "<f4").tobytes())
        segments = [[version, n] for version, n in t.segments]
        return cls(t.tid, t.group_id, t.member, t.prompt_tokens, t.seed, tokens, logprobs, segments)

    @property
    def response_tokens(self) -> int:
        return len(self.logprobs)

    def extend(self, delta: Delta, version: int) -> None:
        """Take what a step of the engine at `version` yielded."""
        self.tokens.extend(delta.tokens)
        self.logprobs.extend(delta.logprobs)
        if self.segments and self.segments[-1][0] == version:
            self.segments[-1][1] += len(delta.tokens)
        elif len(delta.tokens):
            self.segments.append([version, len(delta.tokens)])

    def request(self, max_tokens: int, temperature: float, seed: int | None) -> Request:
        """Go on from here; `max_tokens` is the limit of the whole response."""
        return Request(self.tid, self.tokens, max_tokens - self.response_tokens, temperature, seed)

    def record(self, finish: Finish) -> Trajectory:
        return Trajectory(
            group_id=self.group_id,
            member=self.member,
            v_traj=self.segments[0][0] if self.segments else 0,
            prompt_tokens=self.prompt_tokens,
            tokens=np.frombuffer(self.tokens, np.int32),
            logprobs=np.frombuffer(self.logprobs, np.float32),
            segments=tuple((version, n) for version, n in self.segments),
            finish=finish,
            seed=self.seed,
        )

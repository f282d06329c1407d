"""When held-out prompts are generated, and what becomes of the answers: rank 0's part of evaluation.

A round is due before the first step, every `evaluation.every_steps` versions, and at the end; training goes on beside
it. Without an `[evaluation]` section nothing is ever due.
"""

from __future__ import annotations

from typing import Any

from staleflow.config import Config
from staleflow.coordination.coordinator import Coordinator
from staleflow.roles.checkpointing import Checkpointing
from staleflow.roles.evaluations import Evaluations
from staleflow.roles.payloads import Payloads
from staleflow.trajectories.schema import group_and_member


class Evaluating:
    """`observer` shows a round that is through, `checkpointing` keeps the best version."""

    def __init__(
        self,
        config: Config,
        rounds: Evaluations | None,
        core: Coordinator,
        payloads: Payloads,
        checkpointing: Checkpointing,
        observer: Any,
        start_version: int,
    ) -> None:
        self._settings, self._last_step = config.evaluation, config.run.steps
        self._rounds, self._core, self._payloads = rounds, core, payloads
        self._checkpointing, self._observer, self._start_version = checkpointing, observer, start_version
        self._ending = False

    @property
    def at_the_end(self) -> bool:
        """The last round has begun: nothing else is left to wait for."""
        return self._ending

    def at_start(self) -> None:
        """Before the first step; later only where the attempt before this one was lost in the middle of the round."""
        done = any(one["version"] == self._start_version for one in self._observer.accuracies)
        if not done:
            self.at_version(self._start_version)

    def at_version(self, version: int) -> None:
        """Begin a round where one is due. The one at the end is `through`'s."""
        if self._settings is None or version >= self._last_step:
            return
        every = self._settings.every_steps
        if version == 0 or (every > 0 and version % every == 0):
            self._begin(version)

    def through(self, version: int) -> bool:
        """After the last step: begin the last round; whether all rounds are answered."""
        if self._rounds is None:
            return True
        if not self._ending:
            self._ending = True
            self._begin(version)
        return not self._rounds.busy

    def generated(self, tid: int, versions: list[int]) -> None:
        if self._rounds is not None:
            self._rounds.generated(tid, versions)

    def answered(self, tid: int, reward: float | None) -> None:
        """None: it could not be scored."""
        assert self._rounds is not None
        done = self._rounds.scored(tid, reward)
        if done is None:
            return
        result = done.result(self._rounds.samples)
        self._observer.evaluated(done, result)
        if result["prompts"]:
            self._checkpointing.evaluated(done.version, result["mean"])

    def waits_for(self, group_id: int) -> bool:
        return self._rounds is not None and self._rounds.waits_for(group_id)

    def _begin(self, version: int) -> None:
        assert self._rounds is not None
        _, work = self._rounds.start(version)
        for tid, prompt in work:
            self._payloads.prompt_of[group_and_member(tid)[0]] = prompt
        self._core.evaluate([tid for tid, _ in work], [len(p.token_ids) for _, p in work], version)

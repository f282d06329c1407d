"""A host's shard of the trajectory server: payloads by trajectory id, metadata of prompts by group."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from staleflow.trajectories.arena import Arena, Block
from staleflow.trajectories.schema import group_and_member


class ArenaFull(RuntimeError):
    """The arena has no room for a trajectory that the protocol admitted."""


@dataclass(frozen=True)
class PromptEntry:
    """What starts and scores the members of a group. `tokens` int32 bytes, `index` the prompt's place in the data."""

    tokens: bytes
    text: str
    reference: dict[str, Any]
    index: int = 0


class TrajectoryServer:
    """Owns every payload of its node between an instance and the trainer, or another instance."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._blocks: dict[int, Block] = {}
        self._prompts: dict[int, PromptEntry] = {}
        self._members: defaultdict[int, set[int]] = defaultdict(set)

    def add_prompt(self, group_id: int, entry: PromptEntry) -> None:
        self._prompts[group_id] = entry

    def prompt(self, tid: int) -> PromptEntry:
        return self._prompts[group_and_member(tid)[0]]

    def knows(self, tid: int) -> bool:
        """Whether the group of this trajectory has not been given up or trained on."""
        return group_and_member(tid)[0] in self._prompts

    def prompt_index(self, tid: int) -> int:
        return self.prompt(tid).index

    def put(self, tid: int, record: Any) -> None:
        """Copy a record in (one copy). A newer state of the same trajectory replaces the older one."""
        self._drop_block(tid)
        block = self._arena.take(record)
        if block is None:
            raise ArenaFull(
                f"the arena has no room for trajectory {tid} ({len(record)} bytes; {self._arena.used} of "
                f"{self._arena.capacity} bytes in use): lower staleness.eta or rollout.max_tokens"
            )
        self._blocks[tid] = block
        self._members[group_and_member(tid)[0]].add(tid)

    def get(self, tid: int) -> memoryview | None:
        """The record of a trajectory as a view into the arena, or None when none is held here."""
        block = self._blocks.get(tid)
        return None if block is None else self._arena.view(block)

    def forget(self, tid: int) -> None:
        """The payload is not needed any more. Unknown ids are ignored."""
        group_id = group_and_member(tid)[0]
        self._drop_block(tid)
        self._members[group_id].discard(tid)
        if not self._members[group_id]:
            del self._members[group_id]

    def forget_prompt(self, group_id: int) -> None:
        """The group is over."""
        self._prompts.pop(group_id, None)

    def _drop_block(self, tid: int) -> None:
        if (block := self._blocks.pop(tid, None)) is not None:
            self._arena.free(block)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def tids(self) -> tuple[int, ...]:
        return tuple(self._blocks)

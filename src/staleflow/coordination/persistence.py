"""A group's metadata as plain values and back: what a checkpoint keeps of the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from staleflow.coordination.board import Phase, Work
from staleflow.coordination.desk import Desk, Group


def dump_group(g: Group) -> dict[str, Any]:
    """JSON-able; a trajectory is [tid, tokens, V_traj, floor, generated]."""
    return {
        "id": g.group_id,
        "prompt_tokens": g.prompt_tokens,
        "max_new_tokens": g.max_new_tokens,
        "expected_tokens": g.expected_tokens,
        "size": g.size,
        "placed": g.placed,
        "complete": g.complete,
        "rewards": list(g.rewards.items()),
        "works": [[w.tid, w.tokens, w.version, w.floor, w.phase is Phase.GENERATED] for w in g.works.values()],
    }


def load_group(desk: Desk, saved: Mapping[str, Any], size: int) -> None:
    """Put a dumped group on the desk; what was being generated waits. A complete group keeps its own size."""
    group = Group(
        saved["id"],
        saved["prompt_tokens"],
        saved["max_new_tokens"],
        saved["expected_tokens"],
        saved["size"] if saved["complete"] else size,
        saved["placed"],
        rewards=dict(saved["rewards"]),
        complete=saved["complete"],
    )
    desk.groups[group.group_id] = group
    if group.placed < group.size:
        desk.offers.append(group)
    for tid, tokens, version, floor, generated in saved["works"]:
        work = Work(tid, group.prompt_tokens, tokens, version, floor)
        group.works[tid] = desk.board.works[tid] = work
        if generated:
            work.phase = Phase.GENERATED
        else:
            desk.unfinished += 1
            desk.board.enqueue(work)

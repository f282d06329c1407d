"""Two accounts of the same trajectories, compared every cycle: the protocol's, and the trajectory server's.

The trajectory server's account is made without asking the protocol, in two parts:

    register  rank 0: what the commands have begun, what the steps took, what was freed
    shards    hosts: what each has told, and how many records it has handed to its trainers, by its own count

The register must agree after every cycle. A shard's `Account` comes through the same ordered stream as what it counts,
so that whatever it counts has been taken when it is; steps that were sent and that it does not count yet are under way,
and are counted apart. So messages in flight never look like a mismatch, and a mismatch never looks like one of them.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from staleflow.coordination.coordinator import Coordinator
from staleflow.coordination.types import Command, Released, Route, is_evaluation
from staleflow.protocol.audit import audit
from staleflow.protocol.errors import ProtocolError
from staleflow.roles import messages as m

MISMATCH_FILE = "accounts_mismatch.json"
_TOLD = {m.Finished: "finished", m.Rewarded: "rewarded", m.RewardFailed: "failed"}


class ShardAccount:
    """A host's own count. Everything that it tells the coordinator passes through `emit`."""

    def __init__(self, node: int, emit: Callable[[m.ToCoordinator], None]) -> None:
        self._node, self._emit = node, emit
        self._told: Counter[str] = Counter()
        self._last: m.Account | None = None

    def emit(self, message: m.ToCoordinator) -> None:
        if (name := _TOLD.get(type(message))) is not None:
            self._told[name] += 1
        self._emit(message)

    def tell(self, steps: int, trained: int) -> None:
        """Once a turn: the account as it is now, if it has changed. `trained`: records handed over in `steps` steps."""
        told = self._told
        account = m.Account(self._node, told["finished"], told["rewarded"], told["failed"], steps, trained)
        if account != self._last:
            self._last = account
            self._emit(account)


@dataclass
class _Shard:
    """What rank 0 has taken from a host, and sent to it. `under_way`: records of each step it has not counted yet."""

    told: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    trained: int = 0
    under_way: deque[int] = field(default_factory=deque)

    def catch_up(self, steps: int) -> None:
        while self.under_way and self.steps < steps:
            self.steps += 1
            self.trained += self.under_way.popleft()

    def dump(self) -> dict[str, Any]:
        return {"told": self.told, "steps": self.steps, "trained": self.trained, "under_way": list(self.under_way)}


class Audit:
    """Rank 0's side. Each check returns why the run has to stop, or None; both accounts are then in `run_dir`."""

    def __init__(self, core: Coordinator, run_dir: Path) -> None:
        self._core, self._run_dir = core, run_dir
        counted = core.counters()["trajectories"]
        self._reserved, self._consumed = counted["reserved"], counted["consumed"]
        self._released = Counter(counted["released"])
        self._outstanding: set[int] = set()
        self._shards: dict[int, _Shard] = {}

    # ---- what happened -----------------------------------------------------------------------------------------------

    def restored(self, tids: Iterable[int]) -> None:
        """After a resume: what was outstanding when the run was left."""
        self._outstanding.update(tids)

    def commanded(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Route):
                for tid in command.tids:
                    if not is_evaluation(tid) and tid not in self._outstanding:
                        self._outstanding.add(tid)
                        self._reserved += 1

    def released(self, items: Sequence[Released]) -> None:
        for item in items:  # one that finished on its way out comes a second time, with its last tokens
            if item.tid in self._outstanding:
                self._outstanding.discard(item.tid)
                self._released[item.reason] += 1

    def sent_step(self, tids_by_node: dict[int, list[int]]) -> None:
        """A train step has been sent: these records are to be handed over, by the node of their trainer."""
        for node, tids in tids_by_node.items():
            self._consumed += len(tids)
            self._outstanding.difference_update(tids)
            self._shard(node).under_way.append(len(tids))

    def told(self, node: int, message: m.ToCoordinator) -> None:
        if (name := _TOLD.get(type(message))) is not None:
            self._shard(node).told[name] += 1

    def _shard(self, node: int) -> _Shard:
        return self._shards.setdefault(node, _Shard())

    # ---- checks ------------------------------------------------------------------------------------------------------

    def after_cycle(self) -> str | None:
        """Protocol against register. Nothing may have happened since the cycle that has not been told here."""
        try:
            audit(self._core.counters(), {"trajectories": self._register()})
        except ProtocolError as error:
            return self._mismatch(str(error).splitlines()[0])
        return None

    def account(self, account: m.Account) -> str | None:
        """A host's shard against what was taken from it and sent to it."""
        shard = self._shard(account.node)
        shard.catch_up(account.steps)
        ours = m.Account(
            account.node, shard.told["finished"], shard.told["rewarded"], shard.told["failed"], shard.steps,
            shard.trained,
        )  # fmt: skip
        if ours == account:
            return None
        return self._mismatch(f"the trajectory server on node {account.node} counts {account}, the coordinator {ours}")

    def _register(self) -> dict[str, Any]:
        return {
            "reserved": self._reserved,
            "outstanding": len(self._outstanding),
            "consumed": self._consumed,
            "released": self._released,
        }

    def _mismatch(self, why: str) -> str:
        path = self._run_dir / MISMATCH_FILE
        dump = {
            "why": why,
            "protocol": {"counters": self._core.counters(), "state": self._core.dump_ledger()},
            "trajectory_server": {
                "trajectories": self._register(),
                "outstanding": sorted(self._outstanding),
                "shards": {node: shard.dump() for node, shard in self._shards.items()},
            },
        }
        path.write_text(json.dumps(dump, indent=1, sort_keys=True) + "\n")
        return f"{why}; both accounts are in {path}"

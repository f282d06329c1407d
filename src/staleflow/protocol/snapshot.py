"""dump(), load() and check(): the protocol's state as plain values, back again, and recounted from its groups.

Format 1: `{"format", the six settings, "version", "used": [[first, last], ...], "groups": [[id, [[member, V_traj,
finished], ...]], ...] in order of reservation, "finished": [id, ...] in order of training, "counters": {...}}`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

from staleflow.protocol.errors import ProtocolError
from staleflow.protocol.group import Group
from staleflow.protocol.intervals import IdIntervals
from staleflow.protocol.usual import NO_GROUP

if TYPE_CHECKING:
    from staleflow.protocol.core import StalenessProtocol

FORMAT = 1
SETTINGS = ("batch_groups", "group_size", "eta", "spare_groups", "spare_members")
P = TypeVar("P", bound="StalenessProtocol")


def dump(protocol: StalenessProtocol) -> dict[str, Any]:
    """See StalenessProtocol.dump."""
    return {
        "format": FORMAT,
        **{name: getattr(protocol, name) for name in SETTINGS},
        "version": protocol.version,
        "used": protocol._used_ids().dump(),
        "groups": [[i, _dump_members(protocol, i)] for i in protocol.outstanding()],
        "finished": [group_id for ids in protocol._finished for group_id in ids],
        "counters": _plain(protocol.counters()),
    }


def _dump_members(protocol: StalenessProtocol, group_id: int) -> list[list[int]]:
    return [[member, version, int(done)] for member, (version, done) in protocol.members(group_id).items()]


def _plain(counters: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Counters as built-in values, reasons sorted, so that equal states have equal texts."""
    return {unit: {**counts, "released": dict(sorted(counts["released"].items()))} for unit, counts in counters.items()}


def load(cls: type[P], state: dict[str, Any]) -> P:
    """See StalenessProtocol.load."""
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise ProtocolError(f"a protocol state of format {FORMAT} is needed, got {found!r}; it was written elsewhere")
    try:
        protocol = cls(**{name: state[name] for name in SETTINGS}, start_version=state["version"])
        _load_counters(protocol, state["counters"])
        _load_groups(protocol, state)
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise ProtocolError(f"the protocol state is damaged: {error!r}") from error
    check(protocol)
    return protocol


def _load_groups(protocol: StalenessProtocol, state: dict[str, Any]) -> None:
    protocol._used = IdIntervals.load(state["used"])
    for group_id, members in state["groups"]:
        group = _load_group(protocol, members)
        if protocol.holds(group_id) or not 0 <= protocol._class_of(group) <= protocol.eta:
            raise ValueError(f"group {group_id} occurs twice or is outside the staleness window")
        protocol._adopt(group_id, group)
        protocol._shift_slack(protocol._class_of(group), protocol.eta + 1, -1)
    for group_id in state["finished"]:
        protocol._finished[protocol.version_of(group_id) + protocol.eta - protocol.version].ids.append(group_id)
        protocol._finished_count += 1


def _load_group(protocol: StalenessProtocol, members: list[list[int]]) -> Group:
    group = Group((0, 0), members[0][1], 0, protocol.group_size)
    for member, version, _ in members:
        group.add(member, protocol._bits[member], version)
    group.running ^= sum(protocol._bits[member] for member, _, finished in members if finished)
    group.missing = protocol.group_size - sum(bool(finished) for _, _, finished in members)
    if protocol.spare_members and not group.missing:
        group.keep_done()
    return group


def _load_counters(protocol: StalenessProtocol, counters: dict[str, dict[str, Any]]) -> None:
    groups, trajectories = counters["groups"], counters["trajectories"]
    protocol._reserved_groups = groups["reserved"]
    protocol._consumed_groups = groups["consumed"]
    protocol._released_groups = Counter(groups["released"])
    protocol._reserved_trajectories = trajectories["reserved"]
    protocol._consumed_trajectories = trajectories["consumed"]
    protocol._released_trajectories = Counter(trajectories["released"])


def check(protocol: StalenessProtocol) -> None:
    """See StalenessProtocol.check."""
    groups = {i: group for i in protocol.outstanding() if (group := protocol._find(i))}
    _check_usual(protocol)
    _check_groups(protocol, groups)
    _check_classes(protocol, groups)
    _check_conservation(protocol, groups)


def _check_usual(protocol: StalenessProtocol) -> None:
    usual = protocol._usual
    sizes = {usual.end - usual.base, len(usual.versions), len(usual.reserved), len(usual.running)}
    _expect(len(sizes) == 1, "exactly once", "the lists of usual groups have different lengths")
    unseen = [usual.base + i for i, run in enumerate(usual.running) if run and usual.versions[i] is NO_GROUP]
    _expect(not unseen, "exactly once", f"groups run that are not outstanding: {unseen}")
    twice = [i for i, _, _ in usual.rows() if i in protocol._groups]
    _expect(not twice, "exactly once", f"groups are filed twice: {twice}")


def _check_groups(protocol: StalenessProtocol, groups: dict[int, Group]) -> None:
    used = protocol._used_ids()
    for group_id, group in groups.items():
        where = f"group {group_id} at version {protocol.version}"
        _expect(group_id in used, "exactly once", f"{where} is outstanding but its id is not marked as used")
        _expect(group.reserved > 0, "conservation", f"{where} has no member")
        _expect(group.running & ~group.reserved == 0, "conservation", f"{where} has running members without a place")
        _expect(group.reserved < 1 << len(protocol._bits), "conservation", f"{where} has more members than allowed")
        left = protocol.group_size - (group.reserved ^ group.running).bit_count()
        _expect(group.missing == left >= 0, "conservation", f"{where} misses {left} members, not {group.missing}")
        versions = [v for v, done in protocol.members(group_id).values() if done or group.missing]
        _expect(group.version == min(versions), "monotony", f"{where} is not as old as its oldest member")
        _expect(0 <= protocol._class_of(group) <= protocol.eta, "bound", f"{where} has version {group.version}")


def _check_classes(protocol: StalenessProtocol, groups: dict[int, Group]) -> None:
    places = protocol.batch_groups + protocol.spare_groups
    listed = [i for ids in protocol._finished for i in ids]
    complete = {i for i, group in groups.items() if not group.missing}
    _expect(len(listed) == len(complete) == protocol._finished_count, "exactly once", "finished groups are miscounted")
    _expect(set(listed) == complete, "exactly once", "the list of finished groups is not that of complete groups")
    for place, ids in enumerate(protocol._finished):
        right = all(protocol._class_of(groups[i]) == place for i in ids)
        _expect(right, "bound", f"a finished group is filed under the wrong deadline {protocol.version + place}")
    due = Counter(protocol._class_of(group) for group in groups.values())
    outstanding = 0
    for place in range(protocol.eta + 1):
        outstanding += due[place]
        room = places * (place + 1) - outstanding
        what = f"{outstanding} groups are due by step {protocol.version + place}"
        _expect(room >= 0, "feasibility", f"{what}, which has {places * (place + 1)} places until then")
        _expect(room == protocol._slack[place], "feasibility", f"{what}, but the slack says {protocol._slack[place]}")


def _check_conservation(protocol: StalenessProtocol, groups: dict[int, Group]) -> None:
    trajectories = sum(group.reserved.bit_count() for group in groups.values())
    counted = protocol.counters()
    _expect(len(groups) == counted["groups"]["outstanding"], "conservation", f"{len(groups)} groups run: {counted}")
    _expect(trajectories == counted["trajectories"]["outstanding"], "conservation", f"{trajectories} run: {counted}")
    for unit, count in counted.items():
        ended = count["consumed"] + sum(count["released"].values())
        _expect(count["reserved"] == count["outstanding"] + ended, "conservation", f"{unit} do not add up: {count}")
    _expect(
        protocol._used_ids().count() == protocol._reserved_groups, "exactly once", f"ids used and reserved: {counted}"
    )


def _expect(holds: bool, invariant: str, what: str) -> None:
    if not holds:
        raise ProtocolError(f"invariant broken, {invariant}: {what}")

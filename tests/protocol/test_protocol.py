"""The protocol by example: what each call promises, in small cases that can be followed by hand."""

import json
import subprocess
import sys

import pytest

from staleflow.protocol import NotReady, ProtocolError, StalenessProtocol, audit


def finish(protocol: StalenessProtocol, *group_ids: int) -> None:
    for group_id in group_ids:
        for member in protocol.members(group_id):
            protocol.occupy(group_id, member)


def filled(protocol: StalenessProtocol, versions: list[int]) -> StalenessProtocol:
    """Reserve one whole group per version, ids from 0."""
    for group_id, version in enumerate(versions):
        for member in range(protocol.group_size):
            assert protocol.reserve(group_id, member, version)
    return protocol


def test_eta_zero_is_synchronous() -> None:
    protocol = filled(StalenessProtocol(2, 1, 0), [0, 0])
    assert not protocol.reserve(2, 0, 0), "one batch, and no more before it is trained"
    finish(protocol, 0)
    assert not protocol.ready() and protocol.waiting_for() == [1]
    finish(protocol, 1)
    assert protocol.consume() == [0, 1]
    assert not protocol.can_reserve(0) and protocol.can_reserve(1)


def test_a_version_has_room_for_eta_plus_one_batches() -> None:
    protocol = StalenessProtocol(3, 1, 2)
    admitted = sum(protocol.reserve(group_id, 0, 0) for group_id in range(100))
    assert admitted == 9


def test_the_trainer_waits_for_exactly_the_groups_that_are_due() -> None:
    protocol = filled(StalenessProtocol(2, 1, 1, start_version=1), [0, 0, 1, 1])
    finish(protocol, 2, 3)
    assert protocol.buffers() == [(1, 2, 0, 0, "STUCK"), (2, 0, 2, 0, "READY")]
    assert protocol.waiting_for() == [0, 1], "two are finished, but those two may be trained later, and these may not"
    with pytest.raises(NotReady, match="waits for 2 unfinished: 0, 1"):
        protocol.consume()
    finish(protocol, 1, 0)
    assert protocol.consume() == [1, 0], "ties go to the earliest finished"
    assert protocol.consume() == [2, 3]


def test_any_finished_group_will_do_when_nothing_is_due() -> None:
    protocol = filled(StalenessProtocol(2, 1, 1), [0, 0, 0])
    assert protocol.waiting_for() == [0, 1, 2]
    finish(protocol, 2, 1)
    assert protocol.consume() == [2, 1], "a straggler is overtaken, not dropped"
    assert protocol.version_of(0) == 0
    assert protocol.buffers()[0] == (1, 1, 0, 1, "STUCK"), "now it is due"


def test_a_ready_step_stays_ready() -> None:
    protocol = filled(StalenessProtocol(1, 1, 1, start_version=1), [1])
    finish(protocol, 0)
    assert protocol.ready()
    assert not protocol.reserve(1, 0, 0), "it would be due now and take the place of the finished one"
    assert protocol.reserve(1, 0, 1)


def test_an_older_member_lowers_its_group_if_the_deadline_can_be_met() -> None:
    protocol = StalenessProtocol(1, 2, 1, start_version=1)
    assert protocol.reserve(0, 0, 1) and protocol.reserve(1, 0, 1)
    assert protocol.reserve(0, 1, 0) and protocol.version_of(0) == 0
    before = protocol.dump()
    assert not protocol.can_reserve(0, group_id=1)
    assert not protocol.reserve(1, 1, 0), "step 1 has one place, and group 0 needs it"
    assert protocol.dump() == before
    protocol.release(0, "aborted", member=1)
    assert protocol.version_of(0) == 1 and protocol.reserve(1, 1, 0), "releasing the old member moved its group back"


def test_a_released_member_may_begin_again_and_counts_anew() -> None:
    protocol = filled(StalenessProtocol(1, 2, 1), [0])
    protocol.release(0, "failed", member=1)
    assert protocol.reserve(0, 1, 0)
    assert protocol.counters()["trajectories"]["reserved"] == 3
    protocol.release(0, "failed", member=0)
    protocol.release(0, "failed", member=1)
    assert not protocol.holds(0), "releasing the last member releases the group"
    assert protocol.counters()["groups"] == {"reserved": 1, "outstanding": 0, "consumed": 0, "released": {"failed": 1}}
    with pytest.raises(ProtocolError, match="used before"):
        protocol.reserve(0, 0, 0)


def test_reserving_again_is_idempotent_and_keeps_the_version() -> None:
    protocol = filled(StalenessProtocol(1, 1, 2), [0, 0])
    finish(protocol, 0)
    protocol.consume()
    before = protocol.dump()
    assert protocol.reserve(1, 0, 1), "a resumed trajectory is routed to a newer instance"
    assert protocol.dump() == before and protocol.version_of(1, 0) == 0


def test_the_first_finished_members_make_the_group() -> None:
    protocol = StalenessProtocol(1, 2, 2, spare_members=1, start_version=2)
    for member, version in enumerate((0, 2, 1)):
        assert protocol.reserve(7, member, version)
    assert protocol.version_of(7) == 0
    assert not protocol.occupy(7, 1)
    assert protocol.occupy(7, 2)
    assert protocol.version_of(7) == 1, "only those that are kept count"
    assert protocol.occupy(7, 0) is False
    assert protocol.counters()["trajectories"]["released"] == {"redundant": 1}
    assert protocol.consume() == [7]
    protocol.check()


def test_a_spare_member_that_still_runs_at_consume_is_released() -> None:
    protocol = StalenessProtocol(1, 1, 1, spare_members=2)
    for member in range(3):
        protocol.reserve(0, member, 0)
    assert protocol.occupy(0, 1)
    assert not protocol.reserve(0, 0, 0) or protocol.holds(0, 0)
    protocol.release(0, "redundant", member=2)
    with pytest.raises(ProtocolError, match="release the whole group"):
        protocol.release(0, "redundant", member=1)
    assert protocol.consume() == [0]
    assert protocol.dropped == [(0, 0, "redundant")]
    assert protocol.counters()["trajectories"]["released"] == {"redundant": 2}
    assert protocol.occupy(0, 0) is False, "it finished while its abort was on the way"


def test_surplus_groups_are_dropped_only_as_far_as_needed_unfinished_first_newest_first() -> None:
    protocol = filled(StalenessProtocol(1, 1, 1, spare_groups=1), [0, 0, 0, 0])
    assert not protocol.can_reserve(0), "two places in each of two steps"
    finish(protocol, 1, 2)
    assert protocol.consume() == [1]
    assert protocol.dropped == [(3, 0, "surplus")], "three are left for two places"
    assert sorted(protocol.outstanding()) == [0, 2]
    finish(protocol, 0)
    assert protocol.consume() == [2]
    assert protocol.dropped == [(0, 0, "surplus")], "it was due, finished or not"


def test_a_filtered_group_reopens_admission() -> None:
    protocol = filled(StalenessProtocol(1, 2, 0), [0])
    protocol.occupy(0, 0)
    protocol.release(0, "filtered")
    assert protocol.counters()["trajectories"]["released"] == {"filtered": 2}
    assert protocol.reserve(1, 0, 0)


def test_the_readme_of_states() -> None:
    protocol = StalenessProtocol(2, 1, 1)
    assert protocol.buffers() == [(0, 0, 0, 2, "PENDING"), (1, 0, 0, 2, "PENDING")]
    filled(protocol, [0, 0, 0])
    assert protocol.buffers() == [(0, 2, 0, 0, "STUCK"), (1, 1, 0, 1, "PENDING")]
    finish(protocol, 1, 2)
    assert protocol.buffers() == [(0, 0, 2, 0, "READY"), (1, 1, 0, 1, "PENDING")]


@pytest.mark.parametrize(
    "settings",
    [
        {"eta": -1},
        {"batch_groups": 0},
        {"group_size": 0},
        {"spare_groups": -1},
        {"spare_members": -2},
        {"start_version": -1},
        {"eta": 1.0},
        {"group_size": 70_000},
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ProtocolError, match=str(next(iter(settings.values())))):
        StalenessProtocol(**{"batch_groups": 1, "group_size": 1, "eta": 0, **settings})


def test_ids_of_a_long_run_stay_small_in_the_dump() -> None:
    protocol = StalenessProtocol(4, 1, 1)
    for step in range(2_000):
        for group_id in range(4 * step, 4 * step + 4):
            assert protocol.reserve(group_id, 0, protocol.version)
            protocol.occupy(group_id, 0)
        protocol.consume()
    assert protocol.dump()["used"] == [[0, 7_999]]
    assert len(json.dumps(protocol.dump())) < 500


@pytest.mark.parametrize("damage", ["format", "groups", "finished", "used", "counters", "version", "conservation"])
def test_a_damaged_state_is_not_loaded(damage: str) -> None:
    protocol = filled(StalenessProtocol(2, 2, 1), [0, 0, 0])
    finish(protocol, 1)
    state = protocol.dump()
    if damage == "format":
        state["format"] = 99
    elif damage == "groups":
        state["groups"].pop()
    elif damage == "finished":
        state["finished"] = [0]
    elif damage == "used":
        state["used"] = [[0, 1]]
    elif damage == "conservation":
        state["counters"]["trajectories"]["reserved"] += 1
    else:
        del state[damage]
    with pytest.raises(ProtocolError):
        StalenessProtocol.load(state)


def test_check_names_the_broken_invariant() -> None:
    protocol = filled(StalenessProtocol(1, 1, 1), [0])
    protocol._slack[0] -= 1
    with pytest.raises(ProtocolError, match="feasibility"):
        protocol.check()


def test_the_audit_accepts_equal_accounts_and_shows_both_when_they_differ() -> None:
    protocol = filled(StalenessProtocol(1, 2, 1), [0, 0])
    protocol.release(1, "failed")
    counters = protocol.counters()
    server = json.loads(json.dumps(counters))
    server["trajectories"]["released"]["stale"] = 0
    audit(counters, server)
    audit(counters, {"trajectories": server["trajectories"]})
    server["trajectories"]["outstanding"] = 1
    with pytest.raises(ProtocolError, match=r"trajectories.outstanding is 2 and 1") as caught:
        audit(counters, server)
    assert "protocol: {" in str(caught.value) and "trajectory server: {" in str(caught.value)
    server["trajectories"]["released"]["lost"] = 3
    with pytest.raises(ProtocolError, match=r"released.lost is 0 and 3"):
        audit(counters, server)
    with pytest.raises(ProtocolError, match="no 'trajectories'"):
        audit(counters, {})


def test_the_protocol_needs_neither_torch_nor_anything_else_that_is_heavy() -> None:
    code = "import sys, staleflow.protocol; print(sorted({'torch', 'numpy', 'zmq', 'vllm'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "ids", [[5, 3, 900, 4, -7, 10**15, 901, 6], list(range(40, 0, -3)), [2**40 * i for i in range(9)]]
)
def test_ids_may_come_in_any_order(ids: list[int]) -> None:
    protocol = StalenessProtocol(len(ids), 2, 0)
    for group_id in ids:
        assert protocol.reserve(group_id, 0, 0)
    for group_id in ids:
        assert protocol.reserve(group_id, 1, 0)
        protocol.check()
    finish(protocol, *reversed(ids))
    assert protocol.consume() == ids[::-1]
    for group_id in ids:
        with pytest.raises(ProtocolError, match="used before"):
            protocol.reserve(group_id, 0, 1)

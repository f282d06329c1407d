"""Usual groups in lists, others as objects: where a group is changes no answer, and memory follows the outstanding."""

import random

import pytest

from staleflow.protocol import ProtocolError, StalenessProtocol
from staleflow.protocol.finished import FinishedGroups


def places(protocol: StalenessProtocol) -> int:
    return len(protocol._usual.versions)


@pytest.mark.parametrize("stride", [1, 2, 3, 1_000])
def test_lists_stay_within_a_few_times_what_is_outstanding(stride: int) -> None:
    protocol = StalenessProtocol(8, 2, 3)
    group_id = 0
    for _ in range(2_000):
        for member in (0, 1):
            assert protocol.reserve(group_id, member, 0)
        if group_id >= 20 * stride:
            protocol.release(group_id - 20 * stride, "filtered")
        assert places(protocol) <= 4 * 32 + 64
        group_id += stride
    protocol.check()
    assert protocol.outstanding() == [group_id - back * stride for back in range(20, 0, -1)]


def test_every_id_order_answers_alike() -> None:
    """The same life under rising ids, falling ones, and ones all over the place."""
    lives = []
    for ids in (range(40), range(40, 0, -1), range(-7_000, 7_000, 350), random.Random(0).sample(range(2**60), 40)):
        protocol = StalenessProtocol(4, 2, 2)
        names = {group_id: name for name, group_id in enumerate(ids)}
        trained = []
        waiting = list(ids)
        while waiting or protocol.outstanding():
            while waiting and protocol.reserve(waiting[0], 0, protocol.version):
                assert protocol.reserve(waiting.pop(0), 1, protocol.version)
            protocol.check()
            for group_id in protocol.outstanding()[::-1]:
                for member, (_, done) in protocol.members(group_id).items():
                    if not done and not protocol.ready():
                        protocol.occupy(group_id, member)
            trained.append([names[group_id] for group_id in protocol.consume()])
        lives.append(trained)
    assert all(life == lives[0] for life in lives)


def test_the_first_and_the_last_id_there_are() -> None:
    protocol = StalenessProtocol(2, 1, 0)
    for group_id in (2**63 - 2, 2**63 - 1):
        assert protocol.reserve(group_id, 0, 0) and protocol.occupy(group_id, 0)
    with pytest.raises(ProtocolError, match="64-bit"):
        protocol.reserve(2**63, 0, 0)
    assert protocol.consume() == [2**63 - 2, 2**63 - 1]
    assert protocol.reserve(1 - 2**63, 0, 1) and protocol.outstanding() == [1 - 2**63]


@pytest.mark.parametrize("bad", [1.0, None, "1", 2**70, -(2**70)])
def test_what_is_no_id_is_refused_even_where_it_would_be_the_next(bad: object) -> None:
    protocol = StalenessProtocol(4, 1, 1)
    protocol.reserve(0, 0, 0)
    before = protocol.dump()
    for misuse in (lambda: protocol.reserve(bad, 0, 0), lambda: protocol.occupy(bad, 0)):  # type: ignore[arg-type]
        with pytest.raises(ProtocolError):
            misuse()
    assert protocol.dump() == before


def test_a_trained_group_is_unknown() -> None:
    protocol = StalenessProtocol(1, 1, 1)
    protocol.reserve(0, 0, 0)
    protocol.reserve(1, 0, 0)
    protocol.occupy(1, 0)
    assert protocol.consume() == [1]
    for misuse in (
        lambda: protocol.occupy(1, 0),
        lambda: protocol.release(1, "failed"),
        lambda: protocol.version_of(1),
    ):
        with pytest.raises(ProtocolError):
            misuse()
    assert not protocol.holds(1) and protocol.members(1) == {}


def test_finished_groups_that_were_released_are_not_taken() -> None:
    rng = random.Random(3)
    finished, model = FinishedGroups(), []
    for group_id in range(3_000):
        finished.ids.append(group_id)
        model.append(group_id)
        if rng.random() < 0.4:
            gone = model.pop(rng.randrange(len(model)))
            finished.remove(gone)
        if rng.random() < 0.02:
            count = rng.randrange(40)
            assert finished.take(count) == model[:count]
            del model[:count]
        assert len(finished) == len(model)
        assert len(finished.ids) <= 2 * len(model) + 1
    assert list(finished) == model

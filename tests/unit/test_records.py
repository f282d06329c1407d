"""Trajectory records and micro-batches: golden bytes, round trips, broken input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.engines.base import Delta
from staleflow.roles.held import Held
from staleflow.trajectories import microbatch
from staleflow.trajectories.schema import Finish, Trajectory, decode, encode, group_and_member, trajectory_id

ONE = Trajectory(
    group_id=7, member=2, v_traj=3, prompt_tokens=2, tokens=np.array([5, 6, 7], np.int32),
    logprobs=np.array([-0.5], np.float32), segments=((3, 1),), finish=Finish.STOP, reward=1.0, seed=9,
)  # fmt: skip
GOLDEN = (
    "53465431 02000000 01000000 01000000 0700000000000000 02000000 03000000 01000000 0000803f 00000000 00000000"
    "0900000000000000 0000000000000000 05000000 06000000 07000000 000000bf 03000000 01000000"
).replace(" ", "")


def test_golden_bytes() -> None:
    assert bytes(encode(ONE)).hex() == GOLDEN


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    prompt = draw(st.integers(0, 20))
    lengths = draw(st.lists(st.integers(1, 9), max_size=4))
    first = draw(st.integers(0, 100))
    response = sum(lengths)
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=prompt + response, max_size=prompt + response))
    logprobs = draw(st.lists(st.floats(-50, 0, width=32), min_size=response, max_size=response))
    return Trajectory(
        draw(st.integers(0, 2**45)), draw(st.integers(0, 2**16 - 1)), first, prompt, np.array(tokens, np.int32),
        np.array(logprobs, np.float32), tuple((first + i, n) for i, n in enumerate(lengths)),
        draw(st.sampled_from(Finish)), draw(st.floats(-2, 2, width=32)), draw(st.integers(0, 2**62)),
    )  # fmt: skip


def same(a: Trajectory, b: Trajectory) -> bool:
    return bytes(encode(a)) == bytes(encode(b)) and a.segments == b.segments and a.finish is b.finish


@given(trajectories())
def test_round_trip(t: Trajectory) -> None:
    assert same(decode(encode(t)), t)
    assert group_and_member(trajectory_id(t.group_id, t.member)) == (t.group_id, t.member)


@given(trajectories(), st.data())
def test_a_torn_record_is_an_error(t: Trajectory, data: st.DataObject) -> None:
    whole = bytes(encode(t))
    with pytest.raises(ValueError, match="trajectory record"):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(st.lists(trajectories(), max_size=6))
def test_micro_batch_holds_records_where_it_says(several: list[Trajectory]) -> None:
    records = [bytes(encode(t)) for t in several]
    payload = bytearray(microbatch.encoded_bytes([len(r) for r in records]))
    microbatch.encode_into(payload, records, [float(i) for i in range(len(records))])
    data, offsets, advantages = microbatch.decode(payload)
    assert advantages.tolist() == [float(i) for i in range(len(records))]
    assert all(offset % 8 == 0 for offset in offsets)
    for t, offset in zip(several, offsets, strict=True):
        assert same(decode(data[offset:]), t)


def test_held_grows_by_versions() -> None:
    held = Held.of(Trajectory(7, 2, 0, 2, np.array([5, 6], np.int32), np.zeros(0, np.float32), ()))
    held.extend(Delta(held.tid, [8, 9], [-0.1, -0.2], Finish.PARTIAL), 4)
    held.extend(Delta(held.tid, [10], [-0.3], Finish.PARTIAL), 4)
    held.extend(Delta(held.tid, [], [], Finish.PARTIAL), 5)
    held.extend(Delta(held.tid, [11], [-0.4], Finish.STOP), 6)
    record = held.record(Finish.STOP)
    assert record.segments == ((4, 3), (6, 1)) and record.v_traj == 4
    assert record.tokens.tolist() == [5, 6, 8, 9, 10, 11] and record.response_tokens == 4
    assert same(Held.of(decode(encode(record))).record(Finish.STOP), record)
    assert held.request(96, 1.0, None).max_new == 92

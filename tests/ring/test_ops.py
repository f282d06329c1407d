"""The tensor ops against plain torch, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from staleflow.trajectories import ops  # noqa: E402
from staleflow.trajectories.arena import Arena  # noqa: E402
from staleflow.trajectories.pack import pack, pack_records, unpack  # noqa: E402
from staleflow.trajectories.packed import PackedBatch  # noqa: E402
from staleflow.trajectories.ring import Ring  # noqa: E402
from staleflow.trajectories.schema import Trajectory, encode  # noqa: E402

RNG = np.random.default_rng(4)


def trajectory(prompt: int, segments: list[tuple[int, int]]) -> Trajectory:
    """Random tokens; segments are (version, n_tokens)."""
    response = sum(n for _, n in segments)
    return Trajectory(
        group_id=1,
        member=0,
        v_traj=segments[0][0] if segments else 0,
        prompt_tokens=prompt,
        tokens=RNG.integers(0, 150_000, prompt + response, dtype=np.int32),
        logprobs=RNG.standard_normal(response).astype(np.float32),
        segments=tuple(segments),
    )


def laid_out(trajectories: list[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
    """Records in one buffer with gaps between them, not in order, as rings and arenas have them."""
    offsets, at = [0] * len(trajectories), 64
    for index in reversed(range(len(trajectories))):
        offsets[index] = at
        at += -(-trajectories[index].nbytes // 64) * 64 + 64
    buffer = np.zeros(at, np.uint8)
    for offset, one in zip(offsets, trajectories, strict=True):
        encode(one, buffer[offset : offset + one.nbytes])
    return torch.from_numpy(buffer), torch.tensor(offsets, dtype=torch.int64)


def reference(trajectories: list[Trajectory], advantages: list[float]) -> PackedBatch:
    """Slow and obvious."""

    def per_token(of_prompt: float, of_response: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        parts = [
            part
            for one, response in zip(trajectories, of_response, strict=True)
            for part in (torch.full((one.prompt_tokens,), of_prompt, dtype=dtype), response.to(dtype))
        ]
        return torch.cat([torch.empty(0, dtype=dtype), *parts])

    lengths = [len(one.tokens) for one in trajectories]
    tokens = [torch.from_numpy(one.tokens).long() for one in trajectories]
    versions = [torch.tensor([v for v, n in one.segments for _ in range(n)]) for one in trajectories]
    return PackedBatch(
        input_ids=torch.cat([torch.empty(0, dtype=torch.long), *tokens]),
        positions=torch.cat([torch.empty(0, dtype=torch.long), *map(torch.arange, lengths)]),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        logprobs=per_token(0, [torch.from_numpy(one.logprobs) for one in trajectories], torch.float32),
        versions=per_token(-1, versions, torch.int32),
        loss_mask=per_token(0, [torch.ones(one.response_tokens) for one in trajectories], torch.float32),
        advantages=per_token(
            0,
            [torch.full((one.response_tokens,), a) for one, a in zip(trajectories, advantages, strict=True)],
            torch.float32,
        ),
    )


def assert_same(got: PackedBatch, expected: PackedBatch) -> None:
    for name, a, b in zip(PackedBatch._fields, got, expected, strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


BATCHES = {
    "no trajectory": [],
    "one token": [trajectory(1, [])],
    "a prompt and one token": [trajectory(1, [(0, 1)])],
    "no prompt": [trajectory(0, [(3, 5)])],
    "an empty one between others": [trajectory(2, [(1, 3)]), trajectory(0, []), trajectory(4, [(2, 1)])],
    "many segments": [trajectory(7, [(v, v % 5) for v in range(40)])],
    "an uneven batch": [trajectory(int(p), [(1, int(n)), (2, int(n) // 3)]) for p, n in RNG.integers(0, 300, (50, 2))],
}


@pytest.mark.parametrize("name", BATCHES)
def test_pack_against_the_reference(name: str) -> None:
    trajectories = BATCHES[name]
    advantages = [float(a) for a in RNG.standard_normal(len(trajectories)).astype(np.float32)]
    got = pack(*laid_out(trajectories), torch.tensor(advantages, dtype=torch.float32))
    assert_same(got, reference(trajectories, advantages))


def test_pack_of_a_million_tokens() -> None:
    trajectories = [trajectory(512, [(1, 1_500_000 // 64), (2, 3)]) for _ in range(64)]
    advantages = [float(i) for i in range(64)]
    got = pack(*laid_out(trajectories), torch.tensor(advantages))
    assert len(got.input_ids) > 1_000_000
    assert_same(got, reference(trajectories, advantages))


def test_pack_straight_from_a_ring_and_from_an_arena(make_ring, arena: Arena) -> None:
    trajectories = [trajectory(5, [(1, 20)]), trajectory(6, [(1, 7), (2, 30)])]
    expected = reference(trajectories, [1.0, -1.0])
    ring: Ring = make_ring()
    for one in trajectories:
        ring.push(1, encode(one))
    records = ring.peek(2)
    assert_same(pack_records(ring.data, [record.offset for record in records], [1.0, -1.0]), expected)
    blocks = [arena.take(record) for record in records]
    ring.release(records[-1].sequence)
    assert_same(pack_records(arena.data, [block.offset for block in blocks if block], [1.0, -1.0]), expected)


def test_unpack_gives_the_trajectories_back() -> None:
    trajectories = BATCHES["an uneven batch"]
    advantages = [float(i) for i in range(len(trajectories))]
    apart = unpack(pack(*laid_out(trajectories), torch.tensor(advantages)))
    assert len(apart) == len(trajectories)
    for one, original, advantage in zip(apart, trajectories, advantages, strict=True):
        assert_same(one, reference([original], [advantage]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b, o: (b, o + 4), "trajectory 0 at offset 68 does not begin at a multiple of 8"),
        (lambda b, o: (b, o - 64), "trajectory 0 at offset 0 does not begin with the magic"),
        (lambda b, o: (b, o + 1_000_000), "begins outside"),
        (lambda b, o: (b, o - 640), "begins outside"),
        (lambda b, o: (b[: 64 + 80], o), "longer than the buffer"),
        (lambda b, o: (b.float(), o), "bytes has another dtype"),
        (lambda b, o: (b, o.int()), "offsets has another dtype"),
        (lambda b, o: (b[::2], o), "bytes is not contiguous"),
        (lambda b, o: (b, torch.cat([o, o])), "2 offsets, 1 advantages"),
    ],
)
def test_broken_records_are_errors(change, message: str) -> None:
    buffer, offsets = change(*laid_out([trajectory(3, [(1, 4)])]))
    with pytest.raises(RuntimeError, match=message):
        pack(buffer, offsets, torch.zeros(1))


@pytest.mark.parametrize(("offset", "value"), [(4, 0xFFFFFFFF), (8, 0xFFFFFFFF), (12, 0xFFFFFFFF), (8, 3), (12, 0)])
def test_headers_that_lie_are_errors(offset: int, value: int) -> None:
    """Counts of prompt, response and segments that reach beyond the buffer or do not fit together."""
    buffer, offsets = laid_out([trajectory(3, [(1, 4)])])
    buffer[64 + offset : 68 + offset] = torch.frombuffer(bytearray(value.to_bytes(4, "little")), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"longer than the buffer|do not add up"):
        pack(buffer, offsets, torch.zeros(1))


# Deltas


def changed_pair(n: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(new, old) of any bit patterns at all, of which this share differs."""
    old = torch.randint(-(2**15), 2**15, (n,), dtype=torch.int16)
    flips = torch.randint(1, 2**15, (n,), dtype=torch.int16) * (torch.rand(n) < share)
    return (old ^ flips).view(torch.bfloat16), old.view(torch.bfloat16)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 2047, 2049, 300_001])
def test_a_delta_is_exact_to_the_bit(n: int, share: float) -> None:
    new, old = changed_pair(n, share)
    indices, values = ops.delta_encode(new, old)
    expected = (new.view(torch.int16) != old.view(torch.int16)).nonzero().flatten()
    assert indices.dtype == torch.int32
    assert torch.equal(indices.long(), expected)
    assert torch.equal(values.view(torch.int16), new.view(torch.int16)[expected])
    target = old.clone()
    ops.delta_apply(target, indices, values)
    assert torch.equal(target.view(torch.int16), new.view(torch.int16))


def test_nan_payloads_and_signed_zeros_are_changes() -> None:
    bits = [0x7FC0, 0x7FC1, 0xFFC0, 0x0000, 0x8000, 0x7FC0, 0x0000]
    other = [0x7FC1, 0x7FC1, 0x7FC0, 0x8000, 0x8000, 0x7FC0, 0x0000]
    new, old = (torch.tensor(np.array(b, np.uint16).view(np.int16)).view(torch.bfloat16) for b in (bits, other))
    assert ops.delta_encode(new, old)[0].tolist() == [0, 2, 3]


def test_shapes_do_not_matter_and_views_work() -> None:
    new, old = changed_pair(6 * 35, 0.2)
    flat = ops.delta_encode(new, old)
    shaped = ops.delta_encode(new.view(6, 35), old.view(6, 35))
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(flat, shaped, strict=True))
    odd = ops.delta_encode(new[3:], old[3:])[0]  # 2-byte alignment only
    assert torch.equal(odd, flat[0][flat[0] >= 3] - 3)


@pytest.mark.parametrize("index", [-1, 4, 2**31 - 1])
def test_a_wild_index_changes_nothing(index: int) -> None:
    target = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=f"index {index} in a target of 4 values"):
        ops.delta_apply(target, torch.tensor([0, index], dtype=torch.int32), torch.ones(2, dtype=torch.bfloat16))
    assert not target.any()


def test_delta_misuse() -> None:
    new, old = changed_pair(8, 0.5)
    with pytest.raises(RuntimeError, match="old has another dtype"):
        ops.delta_encode(new, old.float())
    with pytest.raises(RuntimeError, match="new has 8 values, old 7"):
        ops.delta_encode(new, old[:7])
    with pytest.raises(RuntimeError, match="new is not contiguous"):
        ops.delta_encode(new[::2], old[::2])
    with pytest.raises(RuntimeError, match="1 indices, 2 values"):
        ops.delta_apply(new, torch.zeros(1, dtype=torch.int32), old[:2])


# Checksums


def checksum_reference(data: bytes) -> int:
    mask = 2**64 - 1

    def mix(word: int, place: int) -> int:
        h = (word + (place + 1) * 0x9E3779B97F4A7C15) & mask
        h = ((h ^ h >> 32) * 0xD6E8FEB86659FD93) & mask
        return h ^ h >> 29

    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    total = mix(sum(mix(word, place) for place, word in enumerate(words)) & mask, len(data))
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1000, 300_003])
def test_checksum_against_the_reference(n: int) -> None:
    data = RNG.integers(0, 256, n, dtype=np.uint8)
    assert ops.checksum(torch.from_numpy(data)) == checksum_reference(data.tobytes())


def test_checksum_sees_what_sums_do_not() -> None:
    data = torch.arange(64, dtype=torch.uint8)
    seen = {ops.checksum(data)}
    for place in range(64):
        changed = data.clone()
        changed[place] ^= 1
        seen.add(ops.checksum(changed))
    swapped = torch.cat([data[8:16], data[:8], data[16:]])
    seen |= {ops.checksum(swapped), ops.checksum(data[:63]), ops.checksum(torch.cat([data, data.new_zeros(1)]))}
    assert len(seen) == 68


def test_checksum_of_any_dtype_is_that_of_its_bytes() -> None:
    values = torch.randn(33, dtype=torch.bfloat16)
    assert ops.checksum(values) == ops.checksum(values.view(torch.uint8))


# What torch asks of a custom op

# Numbers only: opcheck compares by value, and a NaN equals nothing. NaN payloads have tests of their own, by bits.
OLD = torch.arange(100).to(torch.bfloat16)
NEW = torch.where(torch.arange(100) % 3 == 0, OLD + 1, OLD)
INDICES, VALUES = ops.delta_encode(NEW, OLD)
SAMPLES = {
    "delta_encode": (NEW, OLD),
    "delta_apply": (OLD.clone(), INDICES, VALUES),
    "checksum": (torch.arange(100, dtype=torch.uint8),),
    "pack": (*laid_out([trajectory(3, [(1, 4)]), trajectory(1, [(2, 2)])]), torch.ones(2)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.staleflow, name).default, SAMPLES[name])

"""The CUDA ops give what the CPU ops give, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from staleflow.trajectories import ops  # noqa: E402
from staleflow.trajectories.pack import pack  # noqa: E402
from staleflow.trajectories.schema import Trajectory, encode  # noqa: E402


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
    a, b = (x.view(bits.get(x.dtype, x.dtype)).cpu() for x in (a, b))
    return torch.equal(a, b)


def versions(count: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    old = torch.randint(-(2**15), 2**15, (count,), dtype=torch.int16)
    flips = torch.randint(1, 2**15, (count,), dtype=torch.int16) * (torch.rand(count) < share)
    return (old ^ flips).view(torch.bfloat16), old.view(torch.bfloat16)


@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("count", [0, 1, 15, 4095, 4096, 4097, 1_000_003])
def test_delta(count: int, share: float) -> None:
    new, old = versions(count, share)
    indices, values = ops.delta_encode(new.cuda(), old.cuda())
    assert all(same(a, b) for a, b in zip((indices, values), ops.delta_encode(new, old), strict=True))
    target = old.cuda()
    ops.delta_apply(target, indices, values)
    assert same(target, new)


def test_delta_of_a_view_that_is_only_2_byte_aligned() -> None:
    new, old = (x.cuda()[3:] for x in versions(10_000, 0.1))
    assert all(
        same(a, b) for a, b in zip(ops.delta_encode(new, old), ops.delta_encode(new.cpu(), old.cpu()), strict=True)
    )


def test_large_delta() -> None:
    new, old = versions(200_000_000, 0.01)
    indices, values = ops.delta_encode(new.cuda(), old.cuda())
    assert same(values, new[indices.long().cpu()])


def test_a_wild_index_changes_nothing() -> None:
    target = torch.zeros(4, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(RuntimeError, match="an index lies outside the target of 4 values"):
        ops.delta_apply(
            target, torch.tensor([0, 4], dtype=torch.int32).cuda(), torch.ones(2, dtype=torch.bfloat16).cuda()
        )
    assert not target.any()


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1_000_003])
def test_checksum(count: int) -> None:
    data = torch.randint(0, 256, (count,), dtype=torch.uint8)
    assert ops.checksum(data.cuda()) == ops.checksum(data)
    if count > 3:
        assert ops.checksum(data.cuda()[3:]) == ops.checksum(data[3:])


def batch(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(count)
    parts, offsets, at = [], [], 0
    for _ in range(count):
        prompt, first, second = (int(n) for n in rng.integers(0, 500, 3))
        tokens = rng.integers(0, 150_000, prompt + first + second, dtype=np.int32)
        logprobs = rng.standard_normal(first + second).astype(np.float32)
        raw = bytes(encode(Trajectory(0, 0, 1, prompt, tokens, logprobs, ((1, first), (2, second)))))
        parts.append(raw + bytes(-len(raw) % 64))
        offsets.append(at)
        at += len(parts[-1])
    data = torch.frombuffer(bytearray(b"".join(parts) or b"\0"), dtype=torch.uint8)
    return (
        data,
        torch.tensor(offsets, dtype=torch.int64),
        torch.from_numpy(rng.standard_normal(count).astype(np.float32)),
    )


@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_pack(count: int) -> None:
    arguments = batch(count)
    on_device = pack(*(argument.cuda() for argument in arguments))
    assert all(same(a, b) for a, b in zip(on_device, pack(*arguments), strict=True))


def test_a_broken_record_is_named() -> None:
    data, offsets, advantages = batch(3)
    offsets[1] += 8
    with pytest.raises(RuntimeError, match="trajectory 1 does not begin with the magic"):
        pack(data.cuda(), offsets.cuda(), advantages.cuda())


def test_opcheck() -> None:
    new, old = (x.cuda() for x in versions(1000, 0.2))
    torch.library.opcheck(torch.ops.staleflow.delta_encode.default, (new, old))
    torch.library.opcheck(torch.ops.staleflow.checksum.default, (new.view(torch.uint8),))
    torch.library.opcheck(torch.ops.staleflow.pack.default, tuple(x.cuda() for x in batch(4)))

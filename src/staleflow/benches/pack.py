"""`staleflow bench pack`: records to one packed batch, against the same in plain torch and against memory bandwidth.

The batch: long-tailed trajectories as reasoning models make them, three version segments each, lying apart as in an
arena. `limit` is what copying as many bytes as packing reads and writes would allow.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

REPEATS = 7
TRAJECTORIES = 512
PROMPT_TOKENS = 300
BYTES_READ_PER_TOKEN = 8  # token id and log-probability
BYTES_WRITTEN_PER_TOKEN = 32


def run(args: list[str]) -> dict[str, Any]:
    """`--quick` packs an eighth of the trajectories."""
    import numpy as np
    import torch

    from staleflow.trajectories.pack import pack

    trajectories = _trajectories(TRAJECTORIES // (8 if "--quick" in args else 1))
    buffer, offsets = _lay_out(trajectories)
    advantages = torch.from_numpy(np.linspace(-1, 1, len(trajectories), dtype=np.float32))
    tokens = sum(len(one.tokens) for one in trajectories)
    packed = pack(buffer, offsets, advantages)
    plain = _pack_in_torch(buffer, offsets, advantages)
    assert all(torch.equal(a, b) for a, b in zip(packed, plain, strict=True)), "the two do not compute the same"
    moved = tokens * (BYTES_READ_PER_TOKEN + BYTES_WRITTEN_PER_TOKEN)
    return {
        "bench": "pack",
        "unit": "tokens/s",
        "ours": tokens / best_s(lambda: pack(buffer, offsets, advantages)),
        "limit": tokens / (moved / memcpy_bytes_per_s()),
        "peers": {"torch": tokens / best_s(lambda: _pack_in_torch(buffer, offsets, advantages))},
        "tokens": tokens,
        "trajectories": len(trajectories),
        "threads": torch.get_num_threads(),
        "load_1m": os.getloadavg()[0],
    }


def memcpy_bytes_per_s(nbytes: int = 256 << 20) -> float:
    """Bytes read and written per second by torch's copy, with as many threads as the ops have."""
    import torch

    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    return 2 * nbytes / best_s(lambda: target.copy_(source))


def best_s(call: Callable[[], Any]) -> float:
    """The best of several: what other programs take away is not ours."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _trajectories(count: int) -> list[Any]:
    import numpy as np

    from staleflow.trajectories.schema import Trajectory

    rng = np.random.default_rng(0)
    made = []
    for length in np.clip(rng.lognormal(7.5, 1.0, count), 10, 20_000).astype(int):
        tokens = rng.integers(0, 150_000, PROMPT_TOKENS + length, dtype=np.int32)
        logprobs = rng.standard_normal(length, dtype=np.float32)
        parts = [length // 3, length // 3, length - 2 * (length // 3)]
        segments = tuple((version, int(n)) for version, n in enumerate(parts))
        made.append(Trajectory(0, 0, 0, PROMPT_TOKENS, tokens, logprobs, segments))
    return made


def _lay_out(trajectories: list[Any]) -> tuple[Any, Any]:
    import numpy as np
    import torch

    from staleflow.trajectories.schema import encode

    offsets = np.cumsum([0] + [-(-one.nbytes // 64) * 64 for one in trajectories])
    buffer = np.zeros(offsets[-1], np.uint8)
    for offset, one in zip(offsets, trajectories, strict=False):
        encode(one, buffer[offset : offset + one.nbytes])
    return torch.from_numpy(buffer), torch.from_numpy(offsets[:-1].copy())


def _pack_in_torch(buffer: Any, offsets: Any, advantages: Any) -> tuple[Any, ...]:
    """What one writes without the op: slices, concatenation, repeat_interleave."""
    import torch

    ids, logprobs, lengths, runs, run_values = [], [], [], [], []
    for offset in offsets.tolist():
        head = buffer[offset : offset + 64].view(torch.int32)
        prompt, response, n_segments = head[1:4].tolist()
        body = buffer[offset + 64 : offset + 64 + 4 * (prompt + 2 * response) + 8 * n_segments].view(torch.int32)
        ids.append(body[: prompt + response])
        logprobs += [torch.zeros(prompt), body[prompt + response : prompt + 2 * response].view(torch.float32)]
        segments = body[prompt + 2 * response :].view(-1, 2)
        runs += [torch.tensor([prompt]), segments[:, 1].long()]
        run_values += [torch.tensor([-1], dtype=torch.int32), segments[:, 0]]
        lengths.append(prompt + response)
    sizes = torch.tensor(lengths)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
    total = int(cu_seqlens[-1])
    versions = torch.repeat_interleave(torch.cat(run_values), torch.cat(runs))
    mask = (versions >= 0).float()
    positions = torch.arange(total) - torch.repeat_interleave(cu_seqlens[:-1], sizes)
    spread = torch.repeat_interleave(advantages, sizes) * mask
    return torch.cat(ids).long(), positions, cu_seqlens.int(), torch.cat(logprobs), versions, mask, spread

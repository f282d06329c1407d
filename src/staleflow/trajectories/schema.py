"""The trajectory record: how one sampled response lies in a ring, in the arena and in the spool.

Little-endian, starts 8-byte aligned. `csrc` reads the same layout (`pack`), golden bytes are in the tests.

    0   u32  magic "SFT1"            32  u32  finish (Finish)
    4   u32  prompt_tokens           36  f32  reward
    8   u32  response_tokens         40  f32  advantage
    12  u32  n_segments              44  u32  reserved
    16  i64  group_id                48  i64  seed
    24  u32  member                  56  u64  reserved
    28  u32  v_traj
    64  i32 tokens[prompt + response], f32 logprobs[response], u32 segments[n_segments][2] = (version, n_tokens)

`logprobs[i]` belongs to `tokens[prompt_tokens + i]`: the engine's log-probability of that token under the full
distribution at the sampling temperature, given everything before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from staleflow.trajectories.sizes import HEADER_BYTES, record_bytes

MAGIC = 0x31544653  # b"SFT1" read as a little-endian u32
MEMBER_BITS = 16  # a trajectory id is group_id << MEMBER_BITS | member

_HEADER = np.dtype(
    {
        "names": [
            "magic", "prompt_tokens", "response_tokens", "n_segments", "group_id", "member", "v_traj", "finish",
            "reward", "advantage", "seed",
        ],
        "formats": ["<u4", "<u4", "<u4", "<u4", "<i8", "<u4", "<u4", "<u4", "<f4", "<f4", "<i8"],
        "offsets": [0, 4, 8, 12, 16, 24, 28, 32, 36, 40, 48],
        "itemsize": HEADER_BYTES,
    }
)  # fmt: skip

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class Finish(IntEnum):
    """Why generation ended (or did not)."""

    PARTIAL = 0
    STOP = 1  # EOS or a stop string: the response is complete
    LENGTH = 2  # the token limit: truncated
    ABORTED = 3
    FAILED = 4


def trajectory_id(group_id: int, member: int) -> int:
    """The id of a trajectory: unique in the run, computable by everyone."""
    return group_id << MEMBER_BITS | member


def group_and_member(tid: int) -> tuple[int, int]:
    """Inverse of `trajectory_id`."""
    return tid >> MEMBER_BITS, tid & ((1 << MEMBER_BITS) - 1)


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One response to one prompt, finished or partial.

    `tokens` int32 (prompt + response), `logprobs` float32 (response), `segments` ((version, n_tokens), …) oldest first;
    the segment lengths add up to the response length.
    """

    group_id: int
    member: int
    v_traj: int
    prompt_tokens: int
    tokens: Int32Array
    logprobs: Float32Array
    segments: tuple[tuple[int, int], ...]
    finish: Finish = Finish.PARTIAL
    reward: float = 0.0
    seed: int = 0

    @property
    def tid(self) -> int:
        return trajectory_id(self.group_id, self.member)

    @property
    def response_tokens(self) -> int:
        return len(self.logprobs)

    @property
    def response(self) -> Int32Array:
        return self.tokens[self.prompt_tokens :]

    @property
    def nbytes(self) -> int:
        return record_bytes(self.prompt_tokens, self.response_tokens, len(self.segments))

    def rewarded(self, reward: float) -> Trajectory:
        return replace(self, reward=reward)


def encode(trajectory: Trajectory, out: Any = None) -> Any:
    """Write the record into `out` (a writable buffer of at least `nbytes`), or into a new bytearray; returns it."""
    t = trajectory
    out = bytearray(t.nbytes) if out is None else out
    header = np.zeros((), _HEADER)
    header["magic"], header["prompt_tokens"], header["response_tokens"] = MAGIC, t.prompt_tokens, t.response_tokens
    header["n_segments"], header["group_id"], header["member"] = len(t.segments), t.group_id, t.member
    header["v_traj"], header["finish"], header["reward"], header["seed"] = t.v_traj, t.finish, t.reward, t.seed
    view = np.frombuffer(out, np.uint8)
    view[:HEADER_BYTES] = np.frombuffer(header.tobytes(), np.uint8)
    at = HEADER_BYTES
    for part in (t.tokens, t.logprobs, np.asarray(t.segments, "<u4").reshape(-1, 2)):
        raw = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        view[at : at + raw.size] = raw
        at += raw.size
    return out


def decode(buffer: Any, *, copy: bool = True) -> Trajectory:
    """Read a record. With `copy=False` the arrays are views, valid only as long as `buffer` is.

    Raises ValueError when the buffer does not hold a whole record.
    """
    view = np.frombuffer(buffer, np.uint8)
    if view.size < HEADER_BYTES:
        raise ValueError(f"trajectory record: {view.size} bytes, shorter than its header of {HEADER_BYTES}")
    h = view[:HEADER_BYTES].view(_HEADER)[0]
    if int(h["magic"]) != MAGIC:
        raise ValueError(f"trajectory record: magic {int(h['magic']):#x}, not {MAGIC:#x}")
    prompt, response, segments = int(h["prompt_tokens"]), int(h["response_tokens"]), int(h["n_segments"])
    size = record_bytes(prompt, response, segments)
    if view.size < size:
        raise ValueError(f"trajectory record: {view.size} bytes, its header says {size}")
    at_logprobs = HEADER_BYTES + 4 * (prompt + response)
    at_segments = at_logprobs + 4 * response
    tokens = view[HEADER_BYTES:at_logprobs].view("<i4")
    logprobs = view[at_logprobs:at_segments].view("<f4")
    pairs = view[at_segments:size].view("<u4").reshape(-1, 2)
    return Trajectory(
        group_id=int(h["group_id"]),
        member=int(h["member"]),
        v_traj=int(h["v_traj"]),
        prompt_tokens=prompt,
        tokens=tokens.copy() if copy else tokens,
        logprobs=logprobs.copy() if copy else logprobs,
        segments=tuple((int(v), int(n)) for v, n in pairs),
        finish=Finish(int(h["finish"])),
        reward=float(h["reward"]),
        seed=int(h["seed"]),
    )

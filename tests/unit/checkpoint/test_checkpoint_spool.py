"""The spool: what was written is read again, what a crash tore is not, and a segment lives as long as it is needed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.trajectories import spool
from staleflow.trajectories.spool import (
    FrameKind,
    SegmentName,
    SegmentWriter,
    decode_reward,
    encode_frame,
    encode_reward,
    read_payload,
    read_segment,
    segments_in,
)


def write(path: Path, payloads: list[bytes]) -> list[bytes]:
    frames = [encode_frame(FrameKind.FINISHED, i << 16, i, payload) for i, payload in enumerate(payloads)]
    path.write_bytes(b"".join(frames))
    return frames


@given(st.lists(st.binary(max_size=200), max_size=6), st.floats(allow_nan=False))
def test_frames_come_back(tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes], reward: float) -> None:
    path = tmp_path_factory.mktemp("spool") / "one"
    write(path, payloads)
    with path.open("ab") as file:
        file.write(encode_reward(7, 3, reward))
    frames = list(read_segment(path))
    assert [frame.payload for frame in frames[:-1]] == payloads
    assert [(frame.tid, frame.prompt) for frame in frames[:-1]] == [(i << 16, i) for i in range(len(payloads))]
    assert decode_reward(frames[-1]) == reward
    for frame in frames:
        assert read_payload(path, frame.offset, len(frame.payload)) == frame.payload


def test_a_tail_torn_anywhere_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "one"
    frames = write(path, [b"first" * 5, b"second" * 7])
    whole = path.read_bytes()
    for length in range(len(frames[0]), len(whole)):
        path.write_bytes(whole[:length])
        assert [frame.payload for frame in read_segment(path)] == [b"first" * 5]
        path.write_bytes(whole[:length] + bytes(len(whole) - length))  # allocated, but never written
        assert [frame.payload for frame in read_segment(path)][:1] == [b"first" * 5]


def test_damage_ends_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "one"
    first, _, _ = write(path, [b"aaaa", b"bbbb", b"cccc"])
    data = bytearray(path.read_bytes())
    data[2 * len(first) - 1] ^= 1  # the last byte of the second payload
    path.write_bytes(data)
    assert [frame.payload for frame in read_segment(path)] == [b"aaaa"]


def test_a_write_that_the_disk_refused_leaves_no_torn_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SegmentWriter(tmp_path, attempt=0, node=0)
    writer.write([encode_frame(FrameKind.FINISHED, 1, 1, b"before")], {0})
    true_write = os.write

    def full(file: int, data: memoryview) -> int:
        true_write(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spool.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        writer.write([encode_frame(FrameKind.FINISHED, 2, 2, b"refused")], {0})
    monkeypatch.setattr(spool.os, "write", true_write)
    writer.write([encode_frame(FrameKind.FINISHED, 2, 2, b"after")], {0})
    writer.close_segment()
    (path,) = segments_in(tmp_path).values()
    assert [frame.payload for frame in read_segment(path)] == [b"before", b"after"]


def test_segments_live_as_long_as_one_of_their_groups(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, attempt=3, node=1, first=1)
    writer.write([encode_frame(FrameKind.FINISHED, 1 << 16, 1, b"x")], {1})
    writer.close_segment()
    writer.write([encode_frame(FrameKind.FINISHED, 2 << 16, 2, b"y")], {2})
    writer.close_segment()
    first, second = segments_in(tmp_path)
    assert (first, second) == (SegmentName(3, 1, 1), SegmentName(3, 1, 2))
    assert [path.name for path in writer.needed()] == [str(first), str(second)]
    writer.forget({1, 99})
    assert [path.name for path in writer.needed()] == [str(second)]
    writer.remove(writer.unneeded())
    assert list(segments_in(tmp_path)) == [second]


def test_an_attempt_never_writes_into_a_file_that_is_there(tmp_path: Path) -> None:
    for _ in range(2):
        writer = SegmentWriter(tmp_path, attempt=0, node=0)
        try:
            writer.write([b""], {0})
        except FileExistsError:
            return
        writer.close_segment()
    raise AssertionError("the second writer took over the first one's file")


def test_other_files_in_the_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "notes.spool").touch()
    with pytest.raises(ValueError, match=r"notes\.spool.*remove it"):
        segments_in(tmp_path)

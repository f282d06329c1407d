"""What a version consists of: names, shapes, and where each tensor lies in the image of a version."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

ITEM_BYTES = {"bfloat16": 2, "float32": 4}
ALIGNMENT_BYTES = 64  # a cache line, and a multiple of every item and of the checksum's words


@dataclass(frozen=True)
class Entry:
    """One tensor: contiguous, row-major, at `offset_bytes` of the image."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset_bytes: int

    @property
    def rows(self) -> int:
        """Length of dimension 0, along which trainers shard; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Manifest:
    """The layout of every version of one model: same names, shapes and offsets in each.

    Names as in the checkpoint, but experts stacked.
    """

    entries: tuple[Entry, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one image, alignment included."""
        return aligned(max((entry.offset_bytes + entry.nbytes for entry in self.entries), default=0))

    @cached_property
    def digest(self) -> str:
        """32 hex characters; equal exactly when names, shapes, dtypes and offsets are."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]

    @cached_property
    def by_name(self) -> dict[str, int]:
        """Name -> index in `entries`."""
        return {entry.name: index for index, entry in enumerate(self.entries)}

    def to_json(self) -> str:
        return json.dumps([[e.name, list(e.shape), e.dtype, e.offset_bytes] for e in self.entries])

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        return cls(tuple(Entry(name, tuple(shape), dtype, offset) for name, shape, dtype, offset in json.loads(text)))

    @classmethod
    def from_shapes(cls, shapes: Iterable[tuple[str, Sequence[int]]], dtype: str) -> Manifest:
        """Lay out tensors in the given order. Raises ValueError on a repeated name or a dtype that is not carried."""
        if dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {dtype!r} cannot be published: use one of {', '.join(ITEM_BYTES)}")
        entries: list[Entry] = []
        offset = 0
        for name, shape in shapes:
            entry = Entry(name, tuple(int(n) for n in shape), dtype, offset)
            entries.append(entry)
            offset = aligned(offset + entry.nbytes)
        manifest = cls(tuple(entries))
        if len(manifest.by_name) != len(entries):
            repeated = sorted({e.name for e in entries if [x.name for x in entries].count(e.name) > 1})
            raise ValueError(f"parameter names repeat: {', '.join(repeated)}; give tied weights once")
        return manifest

    @classmethod
    def from_model_dir(cls, path: str | Path, dtype: str) -> Manifest:
        """Read names and shapes from the safetensors headers of a Hugging Face model folder; no tensor is loaded.

        `dtype` is what travels and is stored, whatever the files hold. Experts are stacked, as trainers hold them and
        engines load them too (`stacked`). Raises FileNotFoundError without such files.
        """
        files = sorted(Path(path).glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{path} holds no *.safetensors file: save the model with save_pretrained first")
        shapes = [item for file in files for item in _safetensors_shapes(file)]
        return cls.from_shapes(stacked(shapes), dtype)


_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(gate|up|down)_proj\.weight")


def stacked(shapes: Iterable[tuple[str, Sequence[int]]]) -> list[tuple[str, Sequence[int]]]:
    """Names and shapes with the experts of a layer in two tensors, as transformers' modules have them.

    Checkpoint files name each expert's matrices, `….experts.7.gate_proj.weight` [I, H]; a trainer holds
    `….experts.gate_up_proj` [E, 2I, H] and `….experts.down_proj` [E, H, I], sharded along the experts.
    """
    found: list[tuple[str, Sequence[int]]] = []
    stacks: dict[str, list[int]] = {}
    for name, shape in shapes:
        match = _EXPERT.fullmatch(name)
        if match is None:
            found.append((name, shape))
        elif match[2] != "up":  # it comes with its gate
            name = f"{match[1]}.{'gate_up' if match[2] == 'gate' else 'down'}_proj"
            if name not in stacks:
                stacks[name] = [0, shape[0] * (2 if match[2] == "gate" else 1), *shape[1:]]
                found.append((name, stacks[name]))
            stacks[name][0] += 1
    return found


def _safetensors_shapes(file: Path) -> Iterator[tuple[str, Sequence[int]]]:
    """(name, shape) of each tensor in the order of the data (format: u64 header length, JSON header, data)."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    for name, item in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"]):
        yield name, item["shape"]


def aligned(n: int) -> int:
    """`n` rounded up to where a tensor may begin."""
    return -(-n // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

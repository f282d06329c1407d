"""The parameter store of a node: two versions of the model in shared memory, one writer, many readers (paper §4).

Layout, little-endian:

         0  owner's mark (`shared`)                             64  u32 ABI, u32 length of the manifest's JSON
       128  u8 mapped[128]: reader i has attached              256  32 bytes: digest of the manifest, ASCII
    512, 640  slot header: u64 sequence, i64 version, u64 checksum, i64 writes
      4096  the manifest's JSON, then, each on a 2 MiB boundary, the image of slot 0 and of slot 1

A slot's sequence is odd while it is written and even when it is complete (a sequence lock). The writer takes the slot
that does not hold the newest version and waits for nobody. A reader notes the sequence, uses the image, and calls
`valid()` after its last copy: if the sequence has moved, what it copied may be torn, and it starts again. A writer
that fails or dies leaves the sequence odd: that version is never seen, and the other slot still serves.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from staleflow.parameters import shared
from staleflow.parameters.checksum import word_sum
from staleflow.parameters.manifest import Entry, Manifest

if TYPE_CHECKING:
    import torch

ABI = 1
SLOTS = 2
NO_VERSION = -1
MAX_READERS = 128
PIN_CHUNK_BYTES = 64 << 30  # registering 512 GiB at once fails on some drivers

_HEAD = struct.Struct("<II")
_HEAD_AT, _MAPPED_AT, _DIGEST_AT, _SLOTS_AT, _MANIFEST_AT = 64, 128, 256, 512, 4096
_SLOT_HEADER_BYTES = 128
_PAGE_BYTES = 2 << 20
_SEQUENCE, _VERSION, _CHECKSUM, _WRITES = range(4)

Bytes = npt.NDArray[np.uint8]
log = logging.getLogger(__name__)


class StoreError(RuntimeError):
    """The store cannot serve what was asked for."""


class NodeStore:
    """One per node. `create` by the host (the only writer), `attach` by the rollout ranks."""

    def __init__(self, name: str, fd: int, manifest: Manifest, *, writer: bool) -> None:
        self.name = name
        self.manifest = manifest
        self.writer = writer
        self._fd = fd
        # Readers map the images read-only: a stray write there must not reach the other instances.
        self._memory = np.frombuffer(shared.map_all(fd, writable=writer), np.uint8)
        self._barrier = threading.Lock()
        self._pinned: list[int] = []
        first = _images_at(manifest)
        self._images = [self._memory[at : at + manifest.nbytes] for at in (first, first + _stride(manifest))]
        self._views: dict[int, list[tuple[str, torch.Tensor]]] = {}  # of the slots, made at the first use

    @classmethod
    def create(cls, name: str, manifest: Manifest) -> NodeStore:
        """Allocate both slots (all memory at once). Errors as in `shared.create`."""
        text = manifest.to_json().encode()
        fd = shared.create(name, _images_at(manifest) + SLOTS * _stride(manifest))
        os.pwrite(fd, _HEAD.pack(ABI, len(text)), _HEAD_AT)
        os.pwrite(fd, manifest.digest.encode(), _DIGEST_AT)
        os.pwrite(fd, text, _MANIFEST_AT)
        store = cls(name, fd, manifest, writer=True)
        store.forget(0)
        return store

    @classmethod
    def attach(cls, name: str, reader: int | None = None) -> NodeStore:
        """Map an existing store read-only. `reader` (0..127) is marked for `all_mapped`.

        `name` may also be a path: `path` of the owner, after it has unlinked the name. Raises FileNotFoundError, or
        StoreError when the segment was written by another ABI.
        """
        fd = shared.attach(name)
        abi, length = _HEAD.unpack(os.pread(fd, _HEAD.size, _HEAD_AT))
        if abi != ABI:
            os.close(fd)
            raise StoreError(f"parameter store {name} has ABI {abi}, this program {ABI}: use one version on all ranks")
        manifest = Manifest.from_json(os.pread(fd, length, _MANIFEST_AT).decode())
        store = cls(name, fd, manifest, writer=False)
        if os.pread(fd, 32, _DIGEST_AT).decode() != manifest.digest:
            raise StoreError(f"parameter store {name}: the manifest is damaged")
        if reader is not None:
            os.pwrite(fd, b"\x01", _MAPPED_AT + reader)
        return store

    @property
    def path(self) -> str:
        """A path by which processes of the same user can attach even after `unlink`, while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def all_mapped(self, readers: int) -> bool:
        """Whether readers 0..readers-1 have attached: then `unlink`, so that no kill can leave a file."""
        return bool(self._memory[_MAPPED_AT : _MAPPED_AT + readers].all())

    def unlink(self) -> None:
        """Remove the name; everybody who has mapped the store keeps it. Idempotent."""
        shared.unlink(self.name)

    def close(self) -> None:
        """Let go of the mapping (once no view of it is left) and, by the owner, remove the name."""
        if self.writer:
            self.unlink()
        self._unpin()
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._views.clear()
        self._images, self._memory = [], np.empty(0, np.uint8)

    # -- writing --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self, version: int) -> Iterator[Slot]:
        """Fill the older slot; on exit `version` becomes visible, unless the block raised: then never.

        What was newest stays readable all the time. Raises StoreError when `version` is not newer than all it holds
        (after a return to an older checkpoint call `forget` first).
        """
        if not self.writer:
            raise StoreError("only the process that created the store writes to it")
        newest = self.newest()
        if newest is not None and version <= newest:
            raise StoreError(f"version {version} is not newer than version {newest} in the store")
        index = self._older()
        header = self._header(index)
        slot = Slot(self, index, held=self._held(index))
        header[_VERSION] = NO_VERSION
        header[_SEQUENCE] += 1 if header[_SEQUENCE] % 2 == 0 else 2
        self._fence()
        yield slot
        self._fence()
        header[_VERSION], header[_CHECKSUM] = version, np.uint64(slot.checksum).view(np.int64)
        header[_WRITES] += 1
        self._fence()
        header[_SEQUENCE] += 1

    def forget(self, from_version: int) -> None:
        """Drop every version >= `from_version`: a trainer that went back to a checkpoint makes them anew."""
        for index in range(SLOTS):
            header = self._header(index)
            if header[_VERSION] >= from_version or header[_WRITES] == 0:
                header[_SEQUENCE] += 1 if header[_SEQUENCE] % 2 == 0 else 0
                self._fence()
                header[_VERSION] = NO_VERSION

    # -- reading --------------------------------------------------------------------------------------------------

    def newest(self) -> int | None:
        """The newest complete version, or None."""
        held = [version for version in (self._held(index) for index in range(SLOTS)) if version is not None]
        return max(held, default=None)

    def read(self, version_min: int = 0, *, exactly: int | None = None) -> Reading:
        """Begin to read the newest version (or `exactly` that one), at least `version_min`.

        Raises StoreError when the store does not hold it. Cheap: nothing is copied; check `valid()` afterwards.
        """
        for index in range(SLOTS):
            sequence = self._sequence(index)
            version = self._held(index)
            wanted = self.newest() if exactly is None else exactly
            if version is not None and version == wanted and version >= version_min:
                return Reading(self, index, sequence, version)
        wanted_text = f"version >= {version_min}" if exactly is None else f"version {exactly}"
        raise StoreError(f"the parameter store holds no {wanted_text}; its newest is {self.newest()}")

    def register_cuda(self) -> bool:
        """Pin the images for this process, so that copies to the device run at full speed. False without CUDA.

        Every return code is checked; a refusal is logged once and the memory stays pageable (slower, still right).
        """
        import torch

        if not torch.cuda.is_available() or self._pinned:
            return bool(self._pinned)
        for image in self._images:
            for at in range(0, image.nbytes, PIN_CHUNK_BYTES):
                chunk = image[at : at + PIN_CHUNK_BYTES]
                flags = 0 if self.writer else 8  # cudaHostRegisterReadOnly: the mapping is
                code = torch.cuda.cudart().cudaHostRegister(chunk.ctypes.data, chunk.nbytes, flags)
                if int(code) != 0:
                    log.warning(
                        "cudaHostRegister of %d MiB failed (%s): Pulls use pageable memory", chunk.nbytes >> 20, code
                    )
                    self._unpin()
                    return False
                self._pinned.append(chunk.ctypes.data)
        return True

    def _unpin(self) -> None:
        if self._pinned:
            import torch

            for address in self._pinned:
                torch.cuda.cudart().cudaHostUnregister(address)
            self._pinned = []

    # -- headers --------------------------------------------------------------------------------------------------

    def _tensors(self, index: int) -> list[tuple[str, torch.Tensor]]:
        """(name, view) of all tensors of a slot. Kept: making them anew costs a Pull of many small tensors time."""
        if index not in self._views:
            image = as_tensor(self._images[index])
            self._views[index] = [(entry.name, image_part(image, entry)) for entry in self.manifest.entries]
        return self._views[index]

    def _header(self, index: int) -> npt.NDArray[np.int64]:
        at = _SLOTS_AT + index * _SLOT_HEADER_BYTES
        return self._memory[at : at + 32].view(np.int64)

    def _sequence(self, index: int) -> int:
        sequence = int(self._header(index)[_SEQUENCE])
        self._fence()
        return sequence

    def _held(self, index: int) -> int | None:
        """The version in a slot, None while it is being written (or was left unfinished)."""
        header = self._header(index)
        before = self._sequence(index)
        version = int(header[_VERSION])
        self._fence()
        stable = before % 2 == 0 and int(header[_SEQUENCE]) == before
        return version if stable and version != NO_VERSION else None

    def _older(self) -> int:
        versions = [self._held(index) for index in range(SLOTS)]
        return versions.index(None) if None in versions else int(np.argmin([v for v in versions if v is not None]))

    def _fence(self) -> None:
        """Order memory accesses before it against those after it.

        x86 keeps the order of stores and of loads by itself; elsewhere the release of one lock followed by the
        acquisition of another does (release-then-acquire is ordered on ARMv8 and POWER).
        """
        for _ in range(2):
            self._barrier.acquire()
            self._barrier.release()


class Slot:
    """The slot that is being written. `checksum` (the sum of the landed pieces, `checksum.word_sum`) goes with it."""

    def __init__(self, store: NodeStore, index: int, held: int | None) -> None:
        self.held = held  # the version whose bytes are still in it: two pushes ago, or None when not trustworthy
        self.checksum = 0
        self._image = store._images[index]
        self._other = store._images[1 - index]
        self._other_version = store._held(1 - index)

    def view(self, offset_bytes: int, nbytes: int) -> Bytes:
        """Writable bytes of the image, in place."""
        return self._image[offset_bytes : offset_bytes + nbytes]

    def base(self, offset_bytes: int, nbytes: int) -> Bytes:
        """The same range in the other slot (the version before)."""
        return self._other[offset_bytes : offset_bytes + nbytes]

    @property
    def base_version(self) -> int | None:
        return self._other_version


@dataclass(frozen=True)
class Reading:
    """One version while it is read. Everything in it is a view of the store: valid only if `valid()` says so after."""

    store: NodeStore
    index: int
    sequence: int
    version: int

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def valid(self) -> bool:
        """Whether the slot was left alone since `read`. Call it after the last copy has completed (device too)."""
        self.store._fence()
        return int(self.store._header(self.index)[_SEQUENCE]) == self.sequence

    def image(self) -> Bytes:
        """All bytes of the version (read-only, uint8)."""
        return self.store._images[self.index]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, CPU tensor) in the order of the manifest, each a view of the slot: copy it, never write to it."""
        yield from self.store._tensors(self.index)

    def checksum_ok(self) -> bool:
        """Sum the image again and compare (one pass over memory): for tests, probes and suspicion."""
        stored = int(self.store._header(self.index)[_CHECKSUM].view(np.uint64))
        return word_sum(self.image()) == stored


def as_tensor(data: Bytes) -> torch.Tensor:
    """View bytes, of read-only memory too, as a uint8 tensor."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(data)


def image_part(image: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The tensor of `entry` in an image (uint8 tensor), as a view."""
    import torch

    flat = image[entry.offset_bytes : entry.offset_bytes + entry.nbytes]
    return flat.view(getattr(torch, entry.dtype)).view(entry.shape)


def _images_at(manifest: Manifest) -> int:
    return _paged(_MANIFEST_AT + len(manifest.to_json().encode()))


def _stride(manifest: Manifest) -> int:
    return _paged(manifest.nbytes)


def _paged(n: int) -> int:
    return -(-n // _PAGE_BYTES) * _PAGE_BYTES

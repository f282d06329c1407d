"""The trainer rank's own shard in the dtype that travels, apart from the weights that the optimizer changes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from staleflow.parameters.layout import Piece, Rows, Shard, shard_of
from staleflow.parameters.manifest import Manifest

Bytes = npt.NDArray[np.uint8]
COPY_LIMIT_S = 600.0


def own_rows(index: int, tensor: torch.Tensor, trainer: int) -> Rows:
    """The rows of entry `index` that this trainer rank publishes: its shard; of what is replicated, rank 0 all.

    Raises ValueError for a tensor that is sharded along another dimension than 0, or over two dimensions of a mesh.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not isinstance(tensor, DTensor):
        return Rows(index, 0, rows if trainer == 0 else 0)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    sharded = {dim: p.dim for dim, p in enumerate(tensor.placements) if isinstance(p, ShardPlacement)}
    if len(sharded) > 1 or any(dim != 0 for dim in sharded.values()) or coordinate is None:
        raise ValueError(f"placements {tensor.placements} cannot be published: shard along dimension 0 (fully_shard)")
    if any(coordinate[dim] != 0 for dim in range(mesh.ndim) if dim not in sharded):
        return Rows(index, 0, 0)  # another replica publishes it
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    return Rows(index, offset[0] if offset else 0, shape[0] if shape else 1)


class Staging:
    """Buffer of one shard. `begin` and `snapshot` (main thread) fill it, in the order of the image.

    `read` and `tensors` (publisher's thread) wait for what has not been filled yet: a push follows close behind the
    snapshot.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.Tensor]], manifest: Manifest, trainer: int) -> None:
        tensors = dict(parameters)
        _require_names(manifest, tensors)
        rows = [own_rows(index, tensors[entry.name], trainer) for index, entry in enumerate(manifest.entries)]
        for entry in manifest.entries:
            if tuple(tensors[entry.name].shape) != entry.shape:
                raise ValueError(
                    f"{entry.name} has shape {tuple(tensors[entry.name].shape)}, the manifest {entry.shape}"
                )
        self.shard: Shard = shard_of(manifest, rows)
        self.device = _local(next(iter(tensors.values()))).device
        self.data = torch.zeros(self.shard.nbytes, dtype=torch.uint8, device=self.device)
        # The publisher's own, so that what it copies and sends does not queue behind the training step.
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._pairs = [
            (tensors[manifest.entries[part.entry].name], self._part(manifest, part, offset), offset)
            for part, offset in zip(self.shard.rows, self.shard.staging_offsets, strict=True)
        ]
        self._done: torch.cuda.Event | None = None
        self._moved = threading.Condition()
        self._filled = 0  # bytes from the begin that hold the version; under `_moved`, like the next two
        self._awaited = 0  # bytes that `read` waits for
        self._failed = False

    def tensors(self, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, the rows staged here), in host memory. Errors as in `read`."""
        self._await(self.shard.nbytes)
        for part, offset in zip(self.shard.rows, self.shard.staging_offsets, strict=True):
            yield manifest.entries[part.entry].name, self._part(manifest, part, offset).cpu()

    def _part(self, manifest: Manifest, part: Rows, offset: int) -> torch.Tensor:
        entry = manifest.entries[part.entry]
        flat = self.data[offset : offset + part.count * entry.row_bytes].view(getattr(torch, entry.dtype))
        return flat.view(part.count, *entry.shape[1:]) if entry.shape else flat.view(())

    def begin(self) -> None:
        """Another version is about to be snapshot: whoever reads waits for it from now on."""
        with self._moved:
            self._filled, self._failed = 0, False

    @torch.no_grad()
    def snapshot(self) -> None:
        """Copy (and round) the rows this rank publishes. No collective; on the device's current stream."""
        try:
            for tensor, part, offset in self._pairs:
                self._advance(offset)
                part.copy_(_local(tensor))
            if self.device.type == "cuda":
                self._done = torch.cuda.Event()
                self._done.record()
        except BaseException:
            with self._moved:
                self._failed = True
                self._moved.notify_all()
            raise
        self._advance(self.shard.nbytes, complete=True)

    def _advance(self, filled: int, *, complete: bool = False) -> None:
        """All before `filled` is in the buffer. On a GPU only the whole counts: its copies have only been queued."""
        if self.device.type == "cuda" and not complete:
            return
        with self._moved:
            self._filled = filled
            if filled >= self._awaited:
                self._moved.notify_all()

    @property
    def complete(self) -> bool:
        """Whether all of the version has been snapshot (on a GPU: its copies have been queued)."""
        return self._filled >= self.shard.nbytes

    def _await(self, filled: int) -> None:
        with self._moved:
            self._awaited = filled
            done = self._moved.wait_for(lambda: self._filled >= filled or self._failed, COPY_LIMIT_S)
            if self._failed:
                raise RuntimeError("the snapshot failed half-way")
            if not done:
                raise TimeoutError(f"this rank's main thread has not copied its shard within {COPY_LIMIT_S:.0f} s")
        if self._done is not None:
            self._done.synchronize()

    def read(self, piece: Piece) -> Bytes:
        """The bytes of a piece in host memory: on the CPU a view, from a GPU a copy through pinned memory.

        Waits until they have been snapshot; RuntimeError when that failed, TimeoutError when it takes too long.
        """
        data = self.part(piece)
        if self.stream is None:
            return data.numpy()
        host = torch.empty(piece.nbytes, dtype=torch.uint8, pin_memory=True)  # cached by torch: two or three in use
        with on_stream(self.stream):
            host.copy_(data, non_blocking=True)
        self.stream.synchronize()
        return host.numpy()

    def part(self, piece: Piece) -> torch.Tensor:
        """The bytes of a piece where they are staged. Waits, and errors, as in `read`."""
        self._await(piece.staging_bytes + piece.nbytes)
        return self.data[piece.staging_bytes : piece.staging_bytes + piece.nbytes]


def on_stream(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """For work of a thread on the device: on `stream`, or (None) on the current one."""
    return torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _require_names(manifest: Manifest, tensors: dict[str, torch.Tensor]) -> None:
    missing = [entry.name for entry in manifest.entries if entry.name not in tensors]
    extra = [name for name in tensors if name not in manifest.by_name]
    if missing or extra:
        raise ValueError(
            f"the trainer's parameters are not those of the manifest (missing {missing[:5]}, unknown {extra[:5]}): "
            "use the checkpoint's names, and give tied weights once"
        )

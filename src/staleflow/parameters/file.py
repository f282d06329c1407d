"""Transport `file`: each trainer rank writes its rows as safetensors into a directory. Slow and obvious.

    DIRECTORY/version_000012/rows_1_of_2.safetensors     tensor name -> rows; metadata: name -> first row

A version exists when all its files do; each appears by a rename, so that none is seen half written. The last two
versions are kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from staleflow.parameters.layout import Rows
from staleflow.parameters.manifest import Manifest
from staleflow.parameters.staging import Staging
from staleflow.parameters.store import StoreError
from staleflow.parameters.transports import Sent

KEPT = 2
WATCH_S = 0.01  # how often a watcher looks
_NAME = re.compile(r"rows_\d+_of_(\d+)\.safetensors")


class File:
    """The trainer rank's end (`transports.Transport`): number `trainer` of `trainers`."""

    def __init__(self, directory: str | Path, manifest: Manifest, trainer: int, trainers: int) -> None:
        self.directory, self.manifest = Path(directory), manifest
        self.trainer, self.name = trainer, f"rows_{trainer}_of_{trainers}.safetensors"
        self._staging: Staging | None = None

    def open(self, rows: tuple[Rows, ...], staging: Staging) -> None:
        self._staging = staging
        self.directory.mkdir(parents=True, exist_ok=True)

    def push(self, version: int, *, fresh: bool) -> Sent:
        assert self._staging is not None, "open() comes first"
        begin = time.monotonic()
        if fresh:
            self._withdraw(version)
        folder = self.directory / f"version_{version:06d}"
        folder.mkdir(exist_ok=True)
        rows = {self.manifest.entries[part.entry].name: part.first for part in self._staging.shard.rows}
        unfinished = folder / f"{self.name}.{os.getpid()}"
        save_file(dict(self._staging.tensors(self.manifest)), unfinished, {"rows": json.dumps(rows)})
        unfinished.rename(folder / self.name)
        self._prune()
        nbytes = self._staging.shard.nbytes
        return Sent(version, time.monotonic() - begin, nbytes, nbytes)

    def stop(self) -> None: ...

    def break_off(self) -> None: ...

    def close(self) -> None: ...

    def _withdraw(self, from_version: int) -> None:
        """Remove this rank's rows of versions that earlier trainers made beyond the checkpoint."""
        for version in _folders(self.directory):
            if version >= from_version:
                (self.directory / f"version_{version:06d}" / self.name).unlink(missing_ok=True)

    def _prune(self) -> None:
        for version in _folders(self.directory)[:-KEPT]:
            folder = self.directory / f"version_{version:06d}"
            (folder / self.name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty: another rank's rows are still in it
                folder.rmdir()


class FileSource:
    """The rollout rank's end: a source for `pull.Puller`."""

    def __init__(self, directory: str | Path, manifest: Manifest) -> None:
        self.directory, self.manifest = Path(directory), manifest

    def newest(self) -> int | None:
        """The newest version of which all rows are there, or None."""
        complete = (version for version in reversed(_folders(self.directory)) if self._files(version))
        return next(complete, None)

    def read(self, version_min: int = 0, *, exactly: int | None = None) -> FileReading:
        """The newest version, or `exactly` that one. StoreError when it is not there (any more)."""
        version = self.newest() if exactly is None else exactly
        files = self._files(version) if version is not None else []
        if version is None or version < version_min or not files:
            raise StoreError(f"{self.directory} holds no version {version_min if exactly is None else exactly}")
        return FileReading(self.manifest, version, files)

    def _files(self, version: int) -> list[Path]:
        """All files of a complete version, else nothing."""
        folder = self.directory / f"version_{version:06d}"
        matches = [match for path in sorted(folder.glob("rows_*")) if (match := _NAME.fullmatch(path.name))]
        complete = bool(matches) and len(matches) == int(matches[0][1])
        return [folder / match.string for match in matches] if complete else []


class FileReading:
    """One version in files."""

    def __init__(self, manifest: Manifest, version: int, files: list[Path]) -> None:
        self.manifest, self.version, self._files = manifest, version, files
        self._whole = False

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, CPU tensor), in the order of the manifest."""
        with contextlib.ExitStack() as stack:
            try:
                files = [stack.enter_context(safe_open(path, "pt")) for path in self._files]
            except FileNotFoundError:
                return  # pruned meanwhile: not valid
            firsts = [json.loads(file.metadata()["rows"]) for file in files]
            for entry in self.manifest.entries:
                holders = [(rows[entry.name], k) for k, rows in enumerate(firsts) if entry.name in rows]
                tensors = [files[k].get_tensor(entry.name) for _, k in sorted(holders)]
                yield entry.name, tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        self._whole = True

    def valid(self) -> bool:
        """Whether all of it was read: files are never changed, only removed."""
        return self._whole


class FileWatch:
    """Tells when a version is complete: (own thread) waits for files, and for nobody.

    `on_stored(version, seconds)` is called from the thread; seconds since the version's folder was first seen.
    """

    def __init__(
        self,
        source: FileSource,
        on_stored: Callable[[int, float], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._source, self._on_stored, self._on_error = source, on_stored, on_error
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="versions", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._watch()
        except OSError as error:
            self._on_error(error)

    def _watch(self) -> None:
        told: int | None = None
        seen_s: dict[int, float] = {}
        while not self._stopping.wait(WATCH_S):
            now_s = time.monotonic()
            seen_s = {version: seen_s.get(version, now_s) for version in _folders(self._source.directory)}
            newest = self._source.newest()
            if newest is not None and newest != told:
                self._on_stored(newest, time.monotonic() - seen_s.get(newest, now_s))
                told = newest


def _folders(directory: Path) -> list[int]:
    """Versions with a folder, ascending."""
    return sorted(int(path.name.removeprefix("version_")) for path in directory.glob("version_*"))

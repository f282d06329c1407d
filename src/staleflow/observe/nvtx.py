"""NVTX ranges for Nsight Systems: what a rank's loop does, named by the same verbs as the spans.

A profiler announces itself by NVTX_INJECTION64_PATH (nsys sets it). Without one nothing is imported and `open_ranges`
gives an object whose methods do nothing. Ranges are in the domain "staleflow"; the payload is the parameter version.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any

DOMAIN = "staleflow"
INJECTION = "NVTX_INJECTION64_PATH"


class Silent:
    """No profiler: as little as a method call."""

    on = False

    def push(self, name: str, version: int = 0) -> None:
        """Open a range on this thread; the payload is the version of the parameters it works with."""

    def pop(self) -> None:
        """Close the innermost open range of this thread."""

    def range(self, name: str, version: int = 0) -> Silent:
        """The same as a `with` block."""
        return self

    def start(self, name: str, version: int = 0) -> Any:
        """Begin a range that need not nest; the answer goes to `end`."""

    def end(self, handle: Any) -> None:
        """End a range that `start` began."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class Ranges(Silent):
    """A profiler listens."""

    on = True

    def __init__(self) -> None:
        try:
            import nvtx
        except ImportError as error:
            raise ImportError(f"{INJECTION} asks for NVTX ranges: pip install 'staleflow[nvtx]' ({error})") from error
        self._domain = nvtx.get_domain(DOMAIN)
        self._events: dict[str, Any] = {}

    def push(self, name: str, version: int = 0) -> None:
        self._domain.push_range(self._event(name, version))

    def pop(self) -> None:
        self._domain.pop_range()

    def range(self, name: str, version: int = 0) -> Silent:
        return _Block(self, name, version)

    def start(self, name: str, version: int = 0) -> Any:
        return self._domain.start_range(self._event(name, version))

    def end(self, handle: Any) -> None:
        self._domain.end_range(handle)

    def _event(self, name: str, version: int) -> Any:
        event = self._events.get(name)
        if event is None:
            event = self._events[name] = self._domain.get_event_attributes(message=name)
        event.payload = version
        return event


class _Block(Silent):
    def __init__(self, ranges: Ranges, name: str, version: int) -> None:
        self._ranges, self._name, self._version = ranges, name, version

    def __enter__(self) -> None:
        self._ranges.push(self._name, self._version)

    def __exit__(self, *_: object) -> None:
        self._ranges.pop()


def open_ranges(environ: Mapping[str, str] = os.environ) -> Silent:
    """Ranges for the profiler that started this process, or an object that does nothing."""
    return Ranges() if environ.get(INJECTION) else Silent()

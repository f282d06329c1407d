"""Shared memory, seen by tests that may run side by side."""

from __future__ import annotations

import time
from collections.abc import Callable


def lasting(names: Callable[[], set[str]], patience_s: float) -> set[str]:
    """Those of `names()` that stay: what another test's job has just made goes by itself, what is left does not."""
    deadline_s = time.monotonic() + patience_s
    while (found := names()) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return found

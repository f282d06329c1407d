"""Which tests share a process when they run side by side: `make test`, or pytest -n N --dist loadscope."""

from __future__ import annotations

from typing import Any

import pytest

SLOWEST_FIRST = ("cluster", "vllm", "job", "fault", "dist")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that nobody waits for it at the end."""
    items.sort(key=lambda item: _turn(item.nodeid.split("/")[1]))


def _turn(folder: str) -> int:
    return SLOWEST_FIRST.index(folder) if folder in SLOWEST_FIRST else len(SLOWEST_FIRST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests stay together, because they share fixtures, and all of the cluster's, because there is one."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/cluster" if nodeid.startswith("tests/cluster/") else nodeid.split("::", 1)[0]

    return ByFile(config, log)

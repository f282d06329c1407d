"""Which tests share a process when they run side by side (`make test`, pytest -n N --dist loadgroup)."""

import pytest

SLOWEST_FIRST = ("cluster", "vllm", "job", "fault", "dist")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests stay together, because they share fixtures, and all of the cluster's, because there is one."""
    for item in items:
        folder, *rest = item.nodeid.removeprefix("tests/").split("::")[0].split("/")
        item.add_marker(pytest.mark.xdist_group(folder if folder == "cluster" else "/".join([folder, *rest])))
    items.sort(key=lambda item: _turn(item.nodeid.split("/")[1]))


def _turn(folder: str) -> int:
    return SLOWEST_FIRST.index(folder) if folder in SLOWEST_FIRST else len(SLOWEST_FIRST)

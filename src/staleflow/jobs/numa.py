"""Where the memory of a device's rings belongs: on the NUMA node next to the device."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from staleflow.jobs.checks import numa_node

UNBOUND = -1


def nodes_of_devices(
    count: int,
    environ: Mapping[str, str] = os.environ,
    sysfs: Path = Path("/sys/bus/pci/devices"),
    status: Path = Path("/proc/self/status"),
) -> list[int]:
    """The NUMA node of each of the plan's `count` devices; -1 where none is known or its memory is not ours to use."""
    listed = [entry.strip() for entry in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    names = listed or [str(device) for device in range(count)]
    if len(names) < count:  # each task is shown its own device only: the host cannot tell which is whose
        return [UNBOUND] * count
    buses, allowed = _bus_ids(), _memory_allowed(status)
    found = [numa_node(bus, sysfs) if (bus := _bus_of(name, buses)) else "?" for name in names[:count]]
    return [int(node) if node.isdigit() and int(node) in allowed else UNBOUND for node in found]


def _bus_ids() -> list[Sequence[str]]:
    """(index, UUID, PCI bus id) of every device; empty without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True)
    rows = [[part.strip() for part in line.split(",")] for line in answer.stdout.splitlines()]
    return [row for row in rows if len(row) == 3] if answer.returncode == 0 else []


def _bus_of(name: str, buses: Sequence[Sequence[str]]) -> str | None:
    """CUDA_VISIBLE_DEVICES names devices by index or by the beginning of their UUID."""
    for index, uuid, bus in buses:
        if name == index or (not name.isdigit() and uuid.startswith(name)):
            return bus
    return None


def _memory_allowed(status: Path) -> set[int]:
    """The nodes that this process's cpuset lets it take memory from."""
    for line in status.read_text().splitlines():
        if line.startswith("Mems_allowed_list:"):
            spans = [part.split("-") for part in line.split(":")[1].strip().split(",")]
            return {node for span in spans for node in range(int(span[0]), int(span[-1]) + 1)}
    return set()

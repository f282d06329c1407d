"""From the plan's device (its place on its node) to the index that CUDA knows it by in this process."""

from __future__ import annotations

from collections.abc import Mapping

from staleflow.jobs.env import LaunchError


def cuda_index(device: int, devices_on_node: int, environ: Mapping[str, str]) -> int:
    """The CUDA index of the plan's `device`, where the node has `devices_on_node` device ranks.

    CUDA numbers what CUDA_VISIBLE_DEVICES lists from 0, whatever the entries are: numbers with gaps, UUIDs, MIG slices.
    A launcher that shows each task its own device only (`srun --gpus-per-task=1`) makes that one device 0.

    Raises:
        LaunchError: the list is empty, or shorter than the node's device ranks.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return device
    visible = [entry for entry in listed.split(",") if entry.strip() and entry.strip() != "-1"]
    if len(visible) == 1 and devices_on_node > 1:
        return 0
    if device >= len(visible):
        raise LaunchError(
            "CUDA_VISIBLE_DEVICES",
            listed or "(empty)",
            f"lists {len(visible)} devices for {devices_on_node} device ranks on this node",
            f"ask for {devices_on_node} (--gpus-per-node={devices_on_node}), or `unset CUDA_VISIBLE_DEVICES`",
        )
    return device

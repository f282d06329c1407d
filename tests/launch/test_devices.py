import os

import pytest

from staleflow.jobs.devices import cuda_index
from staleflow.jobs.env import LaunchError
from staleflow.jobs.numa import UNBOUND, nodes_of_devices


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2]),
        ("0,1,2", [0, 1, 2]),
        ("1,4,7", [0, 1, 2]),
        ("GPU-8f3a,GPU-11d0,GPU-77aa", [0, 1, 2]),
        ("MIG-1,MIG-2,MIG-3", [0, 1, 2]),
        ("5", [0, 0, 0]),  # --gpus-per-task=1
        ("GPU-8f3a", [0, 0, 0]),
    ],
)
def test_the_plans_devices_under_what_launchers_show(visible, expected):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [cuda_index(device, 3, environ) for device in range(3)] == expected


@pytest.mark.parametrize("visible", ["0,1", "", "-1"])
def test_too_few_devices_are_refused(visible):
    with pytest.raises(LaunchError, match="--gpus-per-node=3"):
        cuda_index(2, 3, {"CUDA_VISIBLE_DEVICES": visible})


@pytest.mark.parametrize(
    ("visible", "allowed", "expected"),
    [
        (None, "0-1", [0, 0, 1]),
        ("3,2,0", "0-1", [1, 1, 0]),
        ("GPU-dd,GPU-aa,GPU-cc", "0,1", [1, 0, 1]),
        ("0,2,3", "1", [UNBOUND, 1, 1]),  # the cpuset has no memory of node 0
        ("2", "0-1", [UNBOUND] * 3),  # each task sees its own device: the host cannot tell
        ("MIG-1,MIG-2,MIG-3", "0-1", [UNBOUND] * 3),
    ],
)
def test_the_numa_nodes_of_the_plans_devices(tmp_path, monkeypatch, visible, allowed, expected):
    names = ("aa", "bb", "cc", "dd")
    lines = "\n".join(f"{i}, GPU-{name}11, 00000000:{i}A:00.0" for i, name in enumerate(names))
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\ncat <<END\n{lines}\nEND\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for i in range(4):
        (tmp_path / f"0000:{i}a:00.0").mkdir()
        (tmp_path / f"0000:{i}a:00.0" / "numa_node").write_text(f"{i // 2}\n")
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\nMems_allowed_list:\t{allowed}\n")
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert nodes_of_devices(3, environ, tmp_path, status) == expected


def test_without_a_driver_nothing_is_bound(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert nodes_of_devices(2, {}) == [UNBOUND] * 2

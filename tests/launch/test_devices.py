import pytest

from staleflow.jobs.devices import cuda_index
from staleflow.jobs.env import LaunchError


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

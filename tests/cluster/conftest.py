"""A virtual cluster of two nodes under real Slurm daemons, for all tests of this folder. Needs root and Slurm."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.small import CONFIG

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # mpirun lies beside the interpreter
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(900))  # six ranks that start on two busy cores take minutes


def why_impossible() -> str | None:
    """What this machine lacks for a virtual cluster, or None."""
    if os.geteuid() != 0:
        return "a virtual cluster needs root"
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    if missing := [tool for tool in ("slurmctld", "slurmd", "munged", "ip") if shutil.which(tool, path=path) is None]:
        return f"{', '.join(missing)} not installed: make cluster-deps installs them"
    command = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "mount", "-t", "tmpfs", "x", "/mnt"]
    tried = subprocess.run(command, capture_output=True, text=True)
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


class Cluster:
    """The command `vcluster`, and what the tests need around it."""

    def __init__(self, state: Path, epilog: Path):
        self.environment = os.environ | {"VCLUSTER_STATE": str(state), "VCLUSTER_CONF": str(epilog)}

    def __call__(self, *arguments: str, check: bool = True, timeout: float = 120, **environment: str) -> str:
        """Run `vcluster ARGUMENTS` and return its standard output."""
        result = subprocess.run(
            [HERE / "vcluster", *arguments],
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and result.returncode:
            pytest.fail(f"vcluster {' '.join(arguments)}: rc {result.returncode}\n{result.stdout}\n{result.stderr}")
        return result.stdout

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows about a job, as `scontrol show job` prints it."""
        text = self("scontrol", "show", "job", "-o", number)
        return dict(pair.split("=", 1) for pair in text.split() if "=" in pair)

    def nodes_up(self) -> list[str]:
        return self("sinfo", "-h", "-N", "-t", "idle,alloc,mix", "-o", "%N").split()

    def wait(self, number: str, limit_s: float = 300) -> dict[str, str]:
        """Wait until a job has ended for good; the limit is there to find hangs, whatever else the machine does."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            job = self.job(number)
            if job["JobState"] in ENDED:
                return job
            time.sleep(0.3)
        pytest.fail(f"job {number} is still {job['JobState']} after {limit_s:.0f} s")


@pytest.fixture(scope="session")
def cluster():
    if (why := why_impossible()) is not None:
        pytest.skip(why)
    # A short path of its own: unix sockets lie below it.
    with tempfile.TemporaryDirectory(prefix="vc") as folder:
        conf = Path(folder) / "conf"
        conf.write_text(f"Epilog={HERE / 'epilog.sh'}\n")
        cluster = Cluster(Path(folder) / "state", conf)
        cluster("up", "2")
        try:
            yield cluster
        finally:
            cluster("down")


@pytest.fixture(autouse=True)
def healthy(cluster):
    """Each test begins with both nodes up and idle, and with nothing of an earlier job on them."""
    cluster("up", "2")
    end_s = time.monotonic() + 60
    while cluster("squeue", "-h").strip() and time.monotonic() < end_s:
        time.sleep(0.3)
    yield
    for number in cluster("squeue", "-h", "-o", "%A").split():
        cluster("scancel", number)


@pytest.fixture
def submit(cluster, tmp_path):
    """submit(script, *flags): `staleflow submit` of a probe job on ctl; returns (job number, run directory)."""
    (tmp_path / "job.toml").write_text(CONFIG)
    run_dir = tmp_path / "runs" / "two-nodes"

    def call(script: dict, *flags: str) -> tuple[str, Path]:
        run_dir.mkdir(parents=True)
        (run_dir / "script.json").write_text(json.dumps(script))
        answer = cluster(
            *("run", "ctl", "env", "-C", str(tmp_path), sys.executable, "-m", "staleflow", "submit", "job.toml"),
            *("--nodes", "2", "--gpus-per-node", "0", "--time", "30", "--site", str(HERE / "site.env")),
            *("--python", str(HERE / "probe"), *flags),
            PROBE_PYTHON=sys.executable,
            PYTHONPATH=str(ROOT / "src"),
            PATH=PATH,
        )
        return answer.split()[3], run_dir

    return call


def log_of(run_dir: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(run_dir.glob("slurm-*.log")))

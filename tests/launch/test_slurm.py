"""What `staleflow submit` writes: golden scripts, refusals, and every shell script under shellcheck."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from staleflow.jobs.slurm import LAUNCH, JobScript, main, render_sbatch

SHELLCHECK = Path(sys.executable).with_name("shellcheck")
GOLDEN = Path(__file__).parent / "golden"
JOB = JobScript(
    name="demo",
    launcher="srun",
    nodes=2,
    ranks_per_node=9,
    run_dir=Path("/data/me/runs/demo"),
    work_dir=Path("/data/me"),
    launch_dir=LAUNCH,
    site=LAUNCH / "sites" / "infiniband.env",
    python="/data/me/venv/bin/python",
    time="04:00:00",
    partition="gpu",
    gpus_per_node=8,
    options=("--account=rl",),
)
VARIANTS = {
    "srun": JOB,
    "torchrun": JobScript(**{**JOB.__dict__, "launcher": "torchrun"}),
    "mpirun": JobScript(**{**JOB.__dict__, "launcher": "mpirun"}),
    "srun_survive_shared_cpu": JobScript(
        **{**JOB.__dict__, "survive_rollout": True, "exclusive": False, "gpus_per_node": 0, "time": None, "options": ()}
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_scripts_are_as_reviewed(name):
    """To accept a change: STALEFLOW_UPDATE_GOLDEN=1 pytest tests/launch/test_slurm.py, then read the diff."""
    text = render_sbatch(VARIANTS[name]).replace(str(LAUNCH), "/opt/staleflow/launch")
    golden = GOLDEN / f"{name}.sbatch"
    if os.environ.get("STALEFLOW_UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()
    assert "@@" not in text


def test_paths_with_blanks_are_quoted(tmp_path):
    script = tmp_path / "job.sbatch"
    script.write_text(render_sbatch(JobScript(**{**JOB.__dict__, "run_dir": Path("/data/my runs/$HOME")})))
    shown = subprocess.run(["bash", "-c", f"source <(grep ^run_dir= {script}); echo $run_dir"], capture_output=True)
    assert shown.stdout.decode().strip() == "/data/my runs/$HOME"


def shell_files():
    return sorted(path for pattern in ("*.sh", "*/*.sh", "*/*.env") for path in LAUNCH.glob(pattern))


def test_shellcheck_is_content_with_scripts_and_rendered_jobs(tmp_path):
    rendered = []
    for name, job in VARIANTS.items():
        rendered.append(tmp_path / f"{name}.sbatch")
        rendered[-1].write_text(render_sbatch(job))
    assert len(shell_files()) >= 8
    result = subprocess.run(
        [SHELLCHECK, "--external-sources", "--source-path", str(LAUNCH.parent), *shell_files(), *rendered],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout


def test_dry_run_prints_the_script_and_writes_nothing(config_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([str(config_file), "--nodes", "2", "--dry-run", "--time", "10", "--gpus-per-node", "0"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=two-nodes\n")
    assert "#SBATCH --ntasks-per-node=3\n" in text
    assert "--gpus-per-node" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]


def test_submit_hands_script_and_resolved_config_to_sbatch(config_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text('#!/bin/sh\necho "Submitted batch job 7"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    assert main([str(config_file), "staleness.eta=1", "--nodes", "1"]) == 0
    assert "Submitted batch job 7" in capsys.readouterr().out
    folder = tmp_path / "runs" / "two-nodes" / "submit"
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml", "job.sbatch", "plan.json"]
    assert tomllib.loads((folder / "config.toml").read_text())["staleness"]["eta"] == 1
    assert "#SBATCH --gpus-per-node=4\n" in (folder / "job.sbatch").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "3"], ["--nodes 3", "4 device ranks", "1, 2, 4"]),
        (["rollout.instances=1", "rollout.tensor_parallel=3", "--nodes", "2"], ["tensor_parallel = 3"]),
        (["--nodes", "2", "--site", "moon"], ["--site moon", "infiniband"]),
        (["rollout.instnces=1", "--nodes", "2"], ["instnces", "did you mean"]),
        (
            ["fault.survive_rollout=true", "checkpoint.every_steps=5", "--nodes", "2", "--launcher", "torchrun"],
            ["fault.survive_rollout", "--launcher srun"],
        ),
        (["fault.survive_rollout=true", "--nodes", "2"], ["checkpoint.every_steps > 0"]),
        (["--nodes", "2", "--launch-dir", "/nowhere", "--site", "job.toml"], ["--launch-dir"]),
    ],
)
def test_what_cannot_run_is_refused_with_the_remedy(config_file, arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([str(config_file), *arguments]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


def test_a_login_node_without_slurm_is_told_so(config_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([str(config_file), "--nodes", "1"]) == 2
    assert "--dry-run" in capsys.readouterr().err

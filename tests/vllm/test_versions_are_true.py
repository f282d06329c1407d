"""A real job on real vLLM: every token carries the version that made it, and no stale cache was used.

The trainer keeps the weights of every version, the host every trajectory that was trained on. Each segment is scored
again by transformers with the weights of its version, and must agree with the engine's log-probabilities.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from staleflow.trajectories.schema import Trajectory, decode
from tests.job.harness import TORCHRUN, Job, Task, finished
from tests.moe import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.dist, pytest.mark.slow]
AGREEMENT = 1e-3  # float32 on both sides


@pytest.fixture(scope="module", params=["dense", "experts"])
def model_task(request: pytest.FixtureRequest, task: Task, tmp_path_factory: pytest.TempPathFactory) -> Task:
    """The demo's task, with its model or with a mixture of experts that has the same tokenizer."""
    if request.param == "dense":
        return task
    root = tmp_path_factory.mktemp("experts")
    shutil.copytree(task.root, root, dirs_exist_ok=True)
    make_model(str(root / "model"))
    return Task(root)


@pytest.fixture(scope="module")
def job(model_task: Task, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Five steps at eta = 2 on two engines that always have work and take every version as soon as it is there."""
    return finished(
        model_task,
        tmp_path_factory.mktemp("run"),
        launcher=TORCHRUN,
        rollout__engine="vllm",
        run__steps=5,
        staleness__batch_groups=8,
        staleness__group_size=8,
        rollout__max_running=8,
        coordination__synchronization="greedy",
        reward__kind="python",
        reward__options={"function": "tests.vllm.even:reward"},
        observe__audit_weights=True,
    )


def trajectories(job: Job) -> Iterator[Trajectory]:
    data = (job.run_dir / "audit.trajectories").read_bytes()
    while data:
        trajectory = decode(data)
        data = data[trajectory.nbytes :]
        yield trajectory


def test_partial_rollout_really_happened(job: Job) -> None:
    summary = job.summary
    assert summary["status"] == "completed" and summary["steps"] == 5
    assert summary["segments_max"] >= 2, "no trajectory went on under a newer version"
    assert len(summary["staleness_histogram"]) >= 2
    assert summary["max_staleness"] <= 2
    assert summary["logprob_gap"] is not None and summary["logprob_gap"] < AGREEMENT


def test_every_segment_agrees_with_its_version(job: Job, model_task: Task) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_task.root / "model", dtype=torch.float32).eval()
    sampled = sorted(trajectories(job), key=lambda t: -len(t.segments))[:48]
    assert any(len(t.segments) > 1 for t in sampled)
    versions = {version for t in sampled for version, _ in t.segments}
    assert len(versions) >= 3
    worst = wrong_version = 0.0
    for version in sorted(versions):
        model.load_state_dict(load_file(job.run_dir / "audit" / f"v{version}.safetensors"), strict=False)
        for t in sampled:
            scores = scored(model, t)
            at = 0
            for segment_version, n in t.segments:
                gap = float((scores[at : at + n] - torch.tensor(t.logprobs[at : at + n])).abs().max())
                if segment_version == version:
                    worst = max(worst, gap)
                elif abs(segment_version - version) == 1:
                    wrong_version = max(wrong_version, gap)
                at += n
    assert worst < AGREEMENT
    assert wrong_version > 10 * AGREEMENT, "versions are too alike for this test to tell them apart"


def scored(model: object, t: Trajectory) -> object:
    """Log-probabilities of the response tokens, float32 [n]."""
    import torch

    with torch.no_grad():
        tokens = torch.tensor(t.tokens, dtype=torch.int64)
        logits = model(tokens[None]).logits[0, t.prompt_tokens - 1 : -1]  # type: ignore[operator]  # any HF model
        return logits.log_softmax(-1).gather(-1, tokens[t.prompt_tokens :, None])[:, 0]

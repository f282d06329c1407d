"""A whole job on real vLLM that is stopped in the middle, and goes on from its checkpoint.

Its model has tied embeddings, whose output side the engine on the CPU holds a second time.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from staleflow.checkpoint import layout
from tests.job.harness import Task, start

pytestmark = [pytest.mark.vllm, pytest.mark.dist, pytest.mark.slow]
STEPS = 5


def tied(model: Path, out: Path) -> Path:
    """The model with its embeddings for output weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(model, tie_word_embeddings=True).save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)
    return out


@pytest.mark.timeout(600)
def test_stopped_in_the_middle_it_goes_on_where_it_was(task: Task, tmp_path: Path) -> None:
    changes = {
        "model__path": str(tied(task.root / "model", tmp_path / "tied")),
        "optimizer__lr": 1e-3,
        "rollout__engine": "vllm",
        "rollout__max_running": 4,  # so that much is outstanding whenever the signal comes
        "run__steps": STEPS,
        "staleness__eta": 2,
        "reward__kind": "python",
        "reward__options": {"function": "tests.vllm.even:reward"},
        "checkpoint__resume": "auto",
    }
    job = start(task, tmp_path, **changes)
    job.until_step(1)
    job.signal(signal.SIGUSR1)
    assert job.wait(60) == 85, job.output
    stopped_at = job.summary["steps"]
    place = layout.latest(job.run_dir)
    assert place is not None and layout.version_of(place) == stopped_at < STEPS
    before = job.metrics()[-1]["protocol"]["groups"]

    again = start(task, tmp_path, **changes)
    assert again.wait(240) == 0, again.output
    summary = again.summary
    assert summary["status"] == "completed" and summary["max_staleness"] <= 2
    assert summary["logprob_gap"] < 1e-4, "the engines compute with other weights than the trainer"
    lines = again.metrics()
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert sorted(prompt for line in lines for prompt in line["prompts"]) == list(range(4 * STEPS))
    assert any(line["train"]["grad_norm"] > 0 for line in lines[stopped_at:])
    groups = summary["protocol"]["groups"]
    assert groups["consumed"] == 4 * STEPS >= before["consumed"] and groups["outstanding"] == 0

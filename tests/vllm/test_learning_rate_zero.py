"""What the demo gains comes from learning: the same run with learning rate 0 gains nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from staleflow.learning import sft
from tests.job.harness import TORCHRUN, Task, finished

pytestmark = [pytest.mark.vllm, pytest.mark.dist, pytest.mark.slow]


def test_no_gain_without_learning(task: Task, tmp_path: Path) -> None:
    warm = tmp_path / "warm"
    files = [str(task.root / name) for name in ("model", "demonstrations.jsonl", "valid.jsonl")]
    sft.main([*files, str(warm), "--eval-every", "300"])
    changes = {
        "model__path": str(warm),
        "rollout__engine": "vllm",
        "optimizer__lr": 0.0,
        "evaluation__max_prompts": 128,
    }
    summary = finished(task, tmp_path, launcher=TORCHRUN, run__steps=4, **changes).summary
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    assert before > 0.1, "the warm start left nothing to compare"
    assert abs(after - before) < 0.03  # greedy decoding of equal weights; batches may round differently

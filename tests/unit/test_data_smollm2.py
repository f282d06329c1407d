"""The real model's task: held-out sums, the same ones every time, and a clear word where the model is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from staleflow.config import load
from staleflow.data import smollm2


def problems(path: Path) -> list[tuple[str, str]]:
    return [(row["prompt"], row["answer"]) for row in map(json.loads, path.read_text().splitlines())]


def test_held_out_sums_are_not_trained_on(tmp_path: Path) -> None:
    smollm2.write_data(tmp_path, 0)
    train, test = problems(tmp_path / "train.jsonl"), problems(tmp_path / "test.jsonl")
    assert len(test) == smollm2.HELD_OUT and not set(test) & set(train)
    assert len({*train, *test}) == len(smollm2.FIRST) * len(smollm2.SECOND)
    for prompt, answer in test:
        a, b = prompt.removeprefix("What is ").removesuffix("?").split(" + ")
        assert int(a) + int(b) == int(answer)
    again = tmp_path / "again"
    again.mkdir()
    smollm2.write_data(again, 0)
    assert (again / "train.jsonl").read_bytes() == (tmp_path / "train.jsonl").read_bytes()


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

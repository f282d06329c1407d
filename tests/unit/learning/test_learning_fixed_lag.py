"""The fixed-lag comparison: the ages it promises, log-probabilities that are the policy's, the same data for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from staleflow.config import load
from staleflow.data import addition
from staleflow.learning.fixed_lag import run

DECOUPLED = ("algorithm.loss=decoupled", "algorithm.proximal=recompute", "algorithm.updates_per_step=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("addition")
    addition.write_data(out, 0, train=16, demonstrations=1, held_out=4)
    addition.write_model(out, 0)
    return out


def lines(folder: Path, lag: int, *overrides: str) -> list[dict[str, Any]]:
    config = load(
        "configs/demo.toml",
        [
            f"model.path={folder}",
            f'data.train=[{{ path = "{folder / "train.jsonl"}" }}]',
            f'evaluation.data=[{{ path = "{folder / "test.jsonl"}" }}]',
            "run.steps=4",
            "staleness.batch_groups=2",
            "staleness.group_size=4",
            "rollout.max_tokens=8",
            "rollout.max_model_len=64",
            *overrides,
        ],
    )
    return list(run(config, lag, every=3))


def test_every_step_trains_on_the_policy_of_so_many_versions_ago(folder: Path) -> None:
    found = lines(folder, 2)
    assert [line["age_mean"] for line in found] == [0, 1, 2, 2]
    assert found[0]["fresh_tokens"] == found[0]["tokens"] > 0
    assert found[0]["engine_gap"] < 1e-5, "what was sampled from is what is differentiated"
    assert ["held_out" in line for line in found] == [False, False, True, True]


def test_losses_see_the_same_responses_until_their_policies_differ(folder: Path) -> None:
    vanilla, decoupled = lines(folder, 2), lines(folder, 2, *DECOUPLED)
    assert [line["tokens"] for line in vanilla[:3]] == [line["tokens"] for line in decoupled[:3]]
    assert [line["updates"] for line in decoupled] == [2] * 4

"""What a user writes is checked: every error names key, value and remedy, one line each."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from staleflow import config
from staleflow.config import ConfigError
from staleflow.jobs import preflight

MINIMAL = """
[run]
name = "test"
steps = 3
[model]
path = "models/none"
[data]
train = [{ path = "data/none.jsonl" }]
max_prompt_tokens = 32
[staleness]
eta = 1
batch_groups = 4
group_size = 2
[rollout]
instances = 2
max_tokens = 96
max_model_len = 128
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(MINIMAL)
    return file


def test_minimal_config_and_overrides(path: Path) -> None:
    loaded = config.load(path, ["staleness.eta=3", "optimizer.lr=1e-5", "coordination.policy=sync"])
    assert (loaded.staleness.eta, loaded.optimizer.lr, loaded.coordination.policy) == (3, 1e-5, "sync")


def test_resolved_config_reads_back_equal(path: Path) -> None:
    loaded = config.load(path)
    assert config.parse(tomllib.loads(config.dumps(loaded))) == loaded


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("staleness.etta=1", ["staleness.etta = 1", "did you mean 'eta'"]),
        ("optimizer.learning_rate=1", ["optimizer.learning_rate = 1", "unknown key", "lr"]),
        ("coordination.polcy='x'", ["coordination.polcy", "did you mean 'policy'"]),
        ("staleness.eta=-1", ["staleness.eta = -1", "greater than or equal to 0"]),
        ("staleness.group_size=1", ["staleness.group_size = 1", "at least 2"]),
        ("rollout.max_tokens=97", ["rollout.max_tokens = 97", "rollout.max_model_len = 128"]),
        ("trainer.microbatch_tokens=10", ["trainer.microbatch_tokens = 10", "raise it"]),
        ("trainer.ranks=9", ["staleness.batch_groups = 4", "trainer.ranks = 9"]),
        ("optimizer.lr=-1.0", ["optimizer.lr = -1.0", ">= 0"]),
        ("algorithm.loss=ppo", ["algorithm.loss = 'ppo'", "ppo_clip"]),
        ("algorithm.temperature=0.5", ["algorithm.temperature = 0.5", "rollout.temperature"]),
        ("run.name=a/b", ["run.name = 'a/b'"]),
        ("run.steps=many", ["run.steps = 'many'", "integer"]),
        ("reward.kind=guess", ["'guess'", "exact_match"]),
        ("staleness=1", ["section.key=value"]),
        ("nonsense", ["section.key=value"]),
    ],
)
def test_mistakes_are_named(path: Path, override: str, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(path, [override])
    for part in expected:
        assert part in str(caught.value)


def test_several_mistakes_at_once(path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(path, ["staleness.eta=-1", "rollout.instances=0"])
    assert len(str(caught.value).splitlines()) == 2


def test_missing_file_and_broken_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        config.load(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        config.load(broken)


def test_missing_model_and_data_are_found_before_the_start(path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        preflight.check(config.load(path))
    assert "model.path = 'models/none'" in str(caught.value) and "data.train = 'data/none.jsonl'" in str(caught.value)


def test_context_of_the_model_is_a_limit(path: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 100}')
    (model / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"rollout.max_model_len = 128: the model's context is 100"):
        preflight.check(config.load(path, [f"model.path={model}"]))


def test_cli_refuses_with_code_2_and_one_line(path: Path) -> None:
    command = [sys.executable, "-m", "staleflow", "run", str(path), "staleness.eta=-1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and "staleness.eta = -1" in result.stderr


def test_every_shipped_config_is_sound() -> None:
    shipped = sorted(Path("configs").glob("*.toml"))
    assert shipped
    for file in shipped:
        loaded: Any = config.load(file)
        assert loaded.run.name

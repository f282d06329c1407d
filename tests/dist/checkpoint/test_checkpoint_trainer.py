"""Weights and optimizer: written beside training as they were, read by other numbers of ranks, exported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from staleflow.checkpoint import export, layout
from staleflow.config import load

pytestmark = pytest.mark.dist
WORLD = Path(__file__).with_name("checkpoint_world.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 whose output layer is its embedding."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    sizes = {"vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    out = tmp_path_factory.mktemp("tied")
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=True)).save_pretrained(out)
    return out


def world(size: int, folder: Path, deed: str, model: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORLD), str(rank), str(size), str(folder), deed, str(model)],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(size)
    ]
    for rank in ranks:
        output, _ = rank.communicate(timeout=200)
        assert rank.returncode == 0, output


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    world(2, folder, "save", model)
    return folder


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_ranks_reads_what_two_wrote(saved: Path, model: Path, size: int) -> None:
    """Training went on while it was written: what is read is the state at the call."""
    world(size, saved, "load", model)
    before, after = load_file(saved / "save.safetensors"), load_file(saved / f"loaded-{size}.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_before_the_first_step_the_optimizer_stays_fresh(model: Path, tmp_path: Path) -> None:
    world(1, tmp_path, "early", model)


def test_what_cannot_be_written_is_told_on_every_rank(model: Path, tmp_path: Path) -> None:
    world(2, tmp_path, "full", model)


def test_exported_model_is_what_was_trained(saved: Path, model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run_dir = tmp_path / "run"
    (run_dir).mkdir()
    config = Path("configs/demo.toml").read_text().replace('path = "models/addition/warm"', f'path = "{model}"')
    (run_dir / "config.toml").write_text(config)
    shutil.copytree(saved / "trainer", layout.begin(run_dir, 2) / layout.TRAINER)
    place = layout.finish(layout.checkpoints_dir(run_dir) / "writing-000002", 2, {"version": 2})
    assert export.export(load(run_dir / "config.toml"), place, tmp_path / "out") == "float32"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    trained = load_file(saved / "save.safetensors")
    parameters = dict(exported.named_parameters())
    assert parameters.keys() == trained.keys()
    assert all(torch.equal(parameters[name], trained[name]) for name in trained)
    assert exported.lm_head.weight.data_ptr() == exported.model.embed_tokens.weight.data_ptr()


def test_export_refuses_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main([str(tmp_path), str(tmp_path / "out")]) == 2
    assert "no run directory" in capsys.readouterr().err
    (tmp_path / "config.toml").write_text(Path("configs/demo.toml").read_text())
    assert export.main([str(tmp_path), str(tmp_path / "out"), "--step", "7"]) == 2
    assert "no checkpoint of step 7; there are: none" in capsys.readouterr().err

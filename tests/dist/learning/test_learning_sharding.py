"""The number of trainer ranks changes nothing: one, two and four ranks (Gloo) take the same steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.dist, pytest.mark.slow]
WORKER = Path(__file__).with_name("shard_worker.py")
CASES = (
    "dense", "several_updates", "recomputed_activations", "offloaded", "chunked_logits", "bfloat16", "experts", "tied",
    "resumed",
)  # fmt: skip


def make_models(root: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    common = {
        "vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "initializer_range": 0.1,
    }  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(intermediate_size=48, tie_word_embeddings=False, **common)).save_pretrained(
        root / "dense"
    )
    Qwen2ForCausalLM(Qwen2Config(intermediate_size=48, tie_word_embeddings=True, **common)).save_pretrained(
        root / "tied"
    )
    experts = Qwen3MoeConfig(
        intermediate_size=48, moe_intermediate_size=16, num_experts=6, num_experts_per_tok=2, head_dim=8,
        tie_word_embeddings=False, **common,
    )  # fmt: skip
    Qwen3MoeForCausalLM(experts).save_pretrained(root / "experts")


def run_ranks(world: int, root: Path) -> dict:
    out = root / f"out{world}.pt"
    arguments = [str(world), str(root / f"store{world}"), str(root), str(out), str(root / "checkpoint")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, str(WORKER), str(rank), *arguments], env=environment) for rank in range(world)
    ]
    try:
        codes = [rank.wait(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * world
    return torch.load(out)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of each world size; two ranks first, since the others resume from what they saved."""
    root = tmp_path_factory.mktemp("sharding")
    make_models(root)
    return {world: run_ranks(world, root) for world in (2, 1, 4)}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.timeout(600)
def test_ranks_take_the_same_steps_as_one(outcomes, case, world):
    one, many = outcomes[1][case], outcomes[world][case]
    rough = case == "bfloat16"  # every rank count rounds its own partial sums
    for alone, together in zip(one["metrics"], many["metrics"], strict=True):
        assert together == pytest.approx(alone, rel=5e-2 if rough else 1e-3, abs=2e-2 if rough else 2e-5)
    for name, weight in one["state"].items():
        # Adam divides by the gradient's size: where that is all but zero, its sign is rounding noise
        far = (many["state"][name] - weight).abs() > (2e-2 if rough else 1e-3)
        assert far.float().mean() < 0.01, name


@pytest.mark.timeout(600)
def test_the_settings_that_only_save_memory_change_nothing(outcomes):
    plain = outcomes[1]["chunked_logits"]
    for case in ("recomputed_activations", "offloaded"):
        for name, weight in outcomes[1][case]["state"].items():
            torch.testing.assert_close(plain["state"][name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.timeout(600)
def test_weights_did_change(outcomes):
    for case in CASES:
        assert all(m["grad_norm"] > 0 for m in outcomes[1][case]["metrics"])
    assert outcomes[1]["several_updates"]["metrics"][0]["updates"] == 2

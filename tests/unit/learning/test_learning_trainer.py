"""The trainer as a user sees it: what it learns, what it reports, what it refuses, what it writes."""

import copy
import math

import numpy as np
import pytest
import torch
from test_learning_packed import TEMPERATURE, plain, reference_logprobs, trainer_for
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from staleflow.learning.batch import BatchTotals, pack, totals_of
from staleflow.learning.export import export_model, full_state
from staleflow.learning.model import PolicyModel
from staleflow.learning.optimizer import learning_rate
from staleflow.learning.settings import AlgorithmSettings, ModelSettings, OptimizerSettings
from staleflow.learning.trainer import PolicyTrainer

ADVANTAGES = [1.0, -0.5, 0.25, 2.0, -1.0]


def step(trainer, trajectories, number=4, advantages=ADVANTAGES):
    batch = pack(trajectories, advantages)
    return trainer.train_step(number, [batch], totals_of([batch]))


def test_learning_rate_zero_leaves_every_bit(tiny_model, trajectories):
    trainer = trainer_for(tiny_model, lr=0.0)
    before = full_state(trainer.model)
    metrics = step(trainer, trajectories)
    assert metrics["grad_norm"] > 0
    after = full_state(trainer.model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_step_makes_good_actions_likelier_and_bad_ones_less(tiny_model, trajectories):
    trainer = trainer_for(tiny_model, lr=1e-3, proximal="recompute")
    batch = pack(trajectories, ADVANTAGES)
    before = trainer.logprobs(batch)
    step(trainer, trajectories)
    change = (trainer.logprobs(batch) - before) * batch.advantages
    assert change.sum() > 0


def test_a_loaded_state_scores_and_goes_on_like_the_one_saved(tiny_model, trajectories):
    """Also right after scoring, which must not leave outdated copies behind."""
    saved, loaded = trainer_for(tiny_model, lr=1e-2), trainer_for(tiny_model, lr=1e-2)
    batch = pack(trajectories, ADVANTAGES)
    step(saved, trajectories)
    loaded.logprobs(batch)
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))  # which holds live tensors
    assert torch.equal(loaded.logprobs(batch), saved.logprobs(batch))
    assert step(loaded, trajectories, 5) == step(saved, trajectories, 5)
    assert torch.equal(loaded.logprobs(batch), saved.logprobs(batch))


def test_age_and_engine_gap_are_reported_apart(tiny_model, trajectories):
    """Tokens of version 4 are fresh in step 4; those of version 3 are one old."""
    trainer = trainer_for(tiny_model, lr=0.0)
    batch = pack(trajectories, ADVANTAGES)
    metrics = step(trainer, trajectories)
    fresh, old = batch.versions == 4, batch.versions == 3
    difference = (trainer.logprobs(batch) - batch.logprobs).abs()
    assert metrics["fresh_tokens"] == int(fresh.sum())
    assert metrics["engine_gap"] == pytest.approx(difference[fresh].mean().item(), rel=1e-4)
    assert metrics["aged_difference"] == pytest.approx(difference[old].mean().item(), rel=1e-4)
    assert metrics["age_mean"] == pytest.approx(int(old.sum()) / metrics["tokens"])
    assert metrics["age_max"] == 1


def test_offloaded_it_computes_the_same(tiny_model, trajectories):
    """On the CPU there is nowhere to go, but the path through FSDP's offload policy is the one that a GPU takes."""
    offloaded = PolicyTrainer(
        ModelSettings(tiny_model, cpu_offload=True),
        OptimizerSettings(lr=1e-2),
        AlgorithmSettings(temperature=TEMPERATURE),
        device="cpu",
        seed=0,
    )
    plain_one = trainer_for(tiny_model, lr=1e-2, clip=1.0)
    for number in (4, 5):
        assert step(offloaded, trajectories, number) == step(plain_one, trajectories, number)


def test_entropy_and_ratio_quantiles(tiny_model, trajectories):
    trainer = trainer_for(tiny_model, lr=0.0)
    batch = pack(trajectories, ADVANTAGES)
    metrics = step(trainer, trajectories)
    with torch.no_grad():
        entropies = []
        for t in trajectories:
            logits = plain(tiny_model)(torch.from_numpy(t.tokens).long()[None]).logits[0] / TEMPERATURE
            p = logits[t.prompt_tokens - 1 : -1].softmax(-1)
            entropies.append(-(p * p.log()).sum(-1))
    assert metrics["entropy"] == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-4)
    ratios = (trainer.logprobs(batch) - batch.logprobs)[batch.loss_mask > 0].exp()
    assert metrics["ratio_p50"] == pytest.approx(ratios.median().item(), rel=0.3)
    assert metrics["ratio_p01"] <= metrics["ratio_p50"] <= metrics["ratio_p99"]


def test_an_entirely_masked_step_changes_nothing_and_reports_numbers(tiny_model):
    trainer = trainer_for(tiny_model, lr=1e-2)
    before = full_state(trainer.model)
    metrics = trainer.train_step(0, [pack([], [])], BatchTotals(0, 0))
    assert all(math.isfinite(v) for v in metrics.values())
    after = full_state(trainer.model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_several_updates_clip_around_the_policy_before_the_first(tiny_model, trajectories):
    """With lr 0 the ratio to the recomputed policy stays 1 in every update, whatever the engine said."""
    trainer = trainer_for(tiny_model, lr=0.0, proximal="recompute", updates_per_step=2, loss="decoupled")
    parts = [pack(trajectories[:2], ADVANTAGES[:2]), pack(trajectories[2:], ADVANTAGES[2:])]
    metrics = trainer.train_step(4, parts, totals_of(parts))
    assert metrics["updates"] == 2
    assert metrics["clip_fraction"] == 0


def test_the_recomputed_policy_clips_nothing_in_the_first_update_and_something_in_the_next(tiny_model, trajectories):
    """One update a step is what vanilla would do with its clip taken away: no bound but the learning rate."""
    uncapped = {"engine_correction": "truncate", "engine_cap": 1e9, "age_correction": "truncate", "age_cap": 1e9}
    decoupled = {"loss": "decoupled", "proximal": "recompute", **uncapped}
    one = trainer_for(tiny_model, **decoupled)
    assert step(one, trajectories)["clip_fraction"] == 0
    open_vanilla = trainer_for(tiny_model, clip_low=1.0, clip_high=1e9)
    step(open_vanilla, trajectories)
    for mine, theirs in zip(one.optimizer.state.values(), open_vanilla.optimizer.state.values(), strict=True):
        torch.testing.assert_close(mine["exp_avg"].full_tensor(), theirs["exp_avg"].full_tensor(), rtol=1e-4, atol=1e-7)
    two = trainer_for(tiny_model, lr=1e-2, updates_per_step=2, **decoupled)
    parts = [pack(trajectories[:3], ADVANTAGES[:3]), pack(trajectories[3:], ADVANTAGES[3:])]
    assert two.train_step(4, parts, totals_of(parts))["clip_fraction"] > 0


def test_too_few_micro_batches_for_the_updates_are_refused(tiny_model, trajectories):
    trainer = trainer_for(tiny_model, updates_per_step=3)
    with pytest.raises(ValueError, match=r"at least algorithm\.updates_per_step = 3"):
        trainer.train_step(0, [pack(trajectories, ADVANTAGES)], BatchTotals(1, 1))


def test_reference_kl_starts_at_zero_and_grows(tiny_model, trajectories):
    trainer = trainer_for(tiny_model, lr=1e-2, kl_coefficient=0.1)
    assert step(trainer, trajectories)["reference_kl"] == pytest.approx(0, abs=1e-6)
    assert step(trainer, trajectories, 5)["reference_kl"] > 1e-4


def test_gradients_are_clipped_to_the_norm(tiny_model, trajectories):
    """Adam forgets the scale of a gradient, not of one among others: the first step tells by its momentum."""
    free, clipped = trainer_for(tiny_model, clip=0.0), trainer_for(tiny_model, clip=0.01)
    norm = step(free, trajectories)["grad_norm"]
    assert step(clipped, trajectories)["grad_norm"] == pytest.approx(norm, rel=1e-5)

    def momentum(trainer):
        return sum(s["exp_avg"].full_tensor().square().sum() for s in trainer.optimizer.state.values()).sqrt().item()

    assert momentum(clipped) == pytest.approx(momentum(free) * 0.01 / norm, rel=1e-3)


@pytest.mark.parametrize(
    ("schedule", "step_number", "expected"),
    [
        ("constant", 0, 0.25),
        ("constant", 3, 1.0),
        ("constant", 1000, 1.0),
        ("linear", 9, 0.55),  # half way from 4 to 14, down to a tenth
        ("linear", 40, 0.1),
        ("cosine", 9, 0.55),
        ("cosine", 14, 0.1),
    ],
)
def test_learning_rate_schedule(schedule, step_number, expected):
    settings = OptimizerSettings(lr=1.0, schedule=schedule, warmup_steps=4, total_steps=14, min_lr_fraction=0.1)
    assert learning_rate(step_number, settings) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AlgorithmSettings(loss="pop"), "algorithm.loss = 'pop': must be one of"),
        (lambda: AlgorithmSettings(loss="decoupled"), "needs 'recompute' or 'interpolate'"),
        (lambda: AlgorithmSettings(aggregation="constant"), "algorithm.constant_tokens = 0"),
        (lambda: AlgorithmSettings(dual_clip=0.5), "must be > 1, or 0 for off"),
        (lambda: AlgorithmSettings(temperature=0.0), "algorithm.temperature = 0.0: must be > 0"),
        (lambda: OptimizerSettings(schedule="linear"), "optimizer.total_steps = 0"),
        (lambda: ModelSettings("x", dtype="float16"), "model.dtype = 'float16'"),
    ],
)
def test_settings_that_cannot_work_name_key_value_and_remedy(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer, models

    vocabulary = {str(i): i for i in range(37)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="0")))


def test_the_exported_folder_is_the_policy(tiny_model, trajectories, tokenizer, tmp_path):
    trainer = trainer_for(tiny_model, lr=1e-2)
    step(trainer, trajectories)
    export_model(trainer.model, tokenizer, tmp_path)
    with torch.no_grad():
        expected = torch.cat([reference_logprobs(plain(str(tmp_path)), t) for t in trajectories])
    batch = pack(trajectories, ADVANTAGES)
    torch.testing.assert_close(trainer.logprobs(batch)[batch.loss_mask > 0], expected, rtol=1e-4, atol=1e-4)


def test_experts_are_exported_under_their_published_names(tmp_path, tokenizer):
    from safetensors.torch import load_file

    config = Qwen3MoeConfig(
        vocab_size=37, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=3, num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    export_model(PolicyModel(model, 8, 1.0), tokenizer, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    experts = model.model.layers[0].mlp.experts
    stem = "model.layers.0.mlp.experts.2"
    assert torch.equal(written[f"{stem}.gate_proj.weight"], experts.gate_up_proj[2, :8])
    assert torch.equal(written[f"{stem}.up_proj.weight"], experts.gate_up_proj[2, 8:])
    assert torch.equal(written[f"{stem}.down_proj.weight"], experts.down_proj[2])
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(
        np.array_equal(p.detach(), q.detach()) for p, q in zip(again.parameters(), model.parameters(), strict=True)
    )

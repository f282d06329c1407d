"""Packing changes nothing: the same log-probabilities and gradients as transformers, one sequence at a time."""

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from staleflow.learning import attention
from staleflow.learning.batch import NO_VERSION, BatchTotals, pack, totals_of
from staleflow.learning.export import full_state
from staleflow.learning.model import linear_scores, load_policy
from staleflow.learning.settings import AlgorithmSettings, ModelSettings, OptimizerSettings
from staleflow.learning.trainer import PolicyTrainer

TEMPERATURE = 0.7


def trainer_for(path, *, temperature=TEMPERATURE, lr=1e-3, clip=0.0, compile=False, **algorithm):
    return PolicyTrainer(
        ModelSettings(path, compile=compile),
        OptimizerSettings(lr=lr, max_grad_norm=clip),
        AlgorithmSettings(temperature=temperature, **algorithm),
        device="cpu",
        seed=0,
    )


def reference_logprobs(model, trajectory, temperature=TEMPERATURE):
    """Of the response, by plain transformers."""
    tokens = torch.from_numpy(trajectory.tokens).long()
    logits = model(tokens[None]).logits[0, :-1].float() / temperature
    every = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    return every[trajectory.prompt_tokens - 1 :]


def plain(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def test_pack_puts_everything_at_its_token(trajectories):
    batch = pack(trajectories[:2], [0.5, -1.0])
    assert batch.cu_seqlens.tolist() == [0, 8, 10]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    assert batch.loss_mask.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 0, 1]
    assert batch.versions.tolist() == [NO_VERSION] * 3 + [3, 3, 4, 4, 4] + [NO_VERSION, 4]
    assert batch.advantages.tolist() == [0, 0, 0, 0.5, 0.5, 0.5, 0.5, 0.5, 0, -1]
    np.testing.assert_array_equal(batch.logprobs[3:8], trajectories[0].logprobs)
    assert batch.sequence_ids().tolist() == [0] * 8 + [1] * 2
    assert totals_of([batch]) == BatchTotals(tokens=6, sequences=2)


def test_pack_wants_one_advantage_each(trajectories):
    with pytest.raises(ValueError, match="1 advantages for 2 trajectories"):
        pack(trajectories[:2], [1.0])


def test_packed_logprobs_equal_those_of_each_sequence_alone(tiny_model, trajectories):
    got = trainer_for(tiny_model).logprobs(batch := pack(trajectories, [0.0] * 5))
    with torch.no_grad():
        expected = torch.cat([reference_logprobs(plain(tiny_model), t) for t in trajectories])
    torch.testing.assert_close(got[batch.loss_mask > 0], expected, rtol=1e-5, atol=1e-5)
    assert (got[batch.loss_mask == 0] == 0).all()


def test_packed_gradients_equal_those_of_each_sequence_alone(tiny_model, trajectories):
    trainer = trainer_for(tiny_model, loss="sft")
    batch = pack(trajectories, [1.0] * 5)
    scores = trainer.model.score(batch)
    (-scores.logprobs.sum()).backward()
    model = plain(tiny_model)
    (-sum(reference_logprobs(model, t).sum() for t in trajectories)).backward()
    expected = dict(model.named_parameters())
    for name, parameter in trainer.sharded_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name].grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", ["blocks", "flex"])
def test_attention_backends_agree_with_a_plain_mask(kernel):
    torch.manual_seed(0)
    q, k, v = torch.randn(21, 4, 16), torch.randn(21, 2, 16), torch.randn(21, 2, 16)
    cu = torch.tensor([0, 1, 8, 16, 21], dtype=torch.int32)
    sequence = torch.repeat_interleave(torch.arange(4), cu.diff().long())
    allowed = (sequence[:, None] == sequence[None]) & torch.ones(21, 21).tril().bool()
    kk, vv = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("ihd,jhd->hij", q, kk) * 0.25
    expected = torch.einsum("hij,jhd->ihd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), vv)
    torch.testing.assert_close(attention.KERNELS[kernel](q, k, v, cu, 8, 0.25), expected, rtol=1e-5, atol=1e-5)


def test_chunked_scores_equal_whole_ones_with_gradients():
    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    targets = torch.randint(20, (10,))

    def outcome(chunk_tokens):
        logprobs, entropy = linear_scores(hidden, weight, targets, temperature=0.5, chunk_tokens=chunk_tokens)
        loss = (logprobs * torch.arange(10)).sum() + entropy.sum()
        return logprobs, entropy, *torch.autograd.grad(loss, (hidden, weight))

    for whole, chunked in zip(outcome(100), outcome(3), strict=True):
        torch.testing.assert_close(whole, chunked)
    p = (hidden @ weight.T / 0.5).softmax(-1)
    torch.testing.assert_close(outcome(100)[1], -(p * p.log()).sum(-1))


def test_micro_batches_add_up_to_the_whole_batch(tiny_model, trajectories):
    """Clipping, sequence means, ages: splitting the batch, with an empty filler, changes neither loss nor weights."""
    advantages = [1.0, -0.5, 0.25, 2.0, -1.0]
    options = {"aggregation": "sequence_mean", "entropy_coefficient": 0.01}
    whole, split = trainer_for(tiny_model, **options), trainer_for(tiny_model, **options)
    batch = pack(trajectories, advantages)
    parts = [pack(trajectories[:2], advantages[:2]), pack([], []), pack(trajectories[2:], advantages[2:])]
    first = whole.train_step(5, [batch], totals_of([batch]))
    second = split.train_step(5, parts, totals_of(parts))
    assert first == pytest.approx(second, rel=1e-4, abs=1e-6)
    for (name, a), (_, b) in zip(full_state(whole.model).items(), full_state(split.model).items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


def test_mesh_is_the_default_group_unless_given(tiny_model):
    policy = load_policy(ModelSettings(tiny_model), init_device_mesh("cpu", (1,)), temperature=1.0)
    assert {name for name, _ in policy.sharded_parameters()} == {n for n, _ in plain(tiny_model).named_parameters()}


@pytest.mark.slow
def test_compiled_layers_learn_alike(tiny_model, trajectories):
    """model.compile: the same steps and the same weights after them, with batches of two sizes."""
    eager, compiled = trainer_for(tiny_model), trainer_for(tiny_model, compile=True)
    for chosen in (trajectories, trajectories[1:]):
        batch = pack(chosen, [1.0] * len(chosen))
        expected = eager.train_step(4, [batch], totals_of([batch]))
        assert compiled.train_step(4, [batch], totals_of([batch])) == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert sum(m._compiled_call_impl is not None for m in compiled.model.modules()) == 2
    for (name, a), (_, b) in zip(full_state(eager.model).items(), full_state(compiled.model).items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)

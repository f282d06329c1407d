"""Losses and their gradients against numbers worked by hand."""

import math

import pytest
import torch

from staleflow.learning import losses
from staleflow.learning.batch import BatchTotals
from staleflow.learning.losses import LossInputs, policy_loss
from staleflow.learning.settings import AlgorithmSettings


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def gradient(loss: torch.Tensor, logprobs: torch.Tensor) -> list[float]:
    (g,) = torch.autograd.grad(loss.sum(), logprobs)
    return g.tolist()


def approx(*values: float):
    return pytest.approx(list(values), rel=1e-5, abs=1e-7)


def inputs(logprobs, behaviour, advantages, *, proximal=None, age=None, weights=None, reference=None, sequence=None):
    n = len(logprobs)
    return LossInputs(
        logprobs=logprobs,
        entropy=torch.full((n,), 0.5),
        proximal=behaviour if proximal is None else proximal,
        behaviour=behaviour,
        advantages=advantages,
        weights=torch.full((n,), 1.0 / n) if weights is None else weights,
        age=torch.zeros(n, dtype=torch.int32) if age is None else torch.tensor(age),
        sequence=torch.zeros(n, dtype=torch.int64) if sequence is None else torch.tensor(sequence),
        sequences=1 if sequence is None else max(sequence) + 1,
        reference=reference,
    )


def test_ppo_clips_only_where_it_would_go_further():
    # ratios 1.5, 0.5, 1.5, 0.5 with advantages +1, +1, -1, -1 and a clip of 0.2
    new = logs(0.6, 0.2, 0.6, 0.2).requires_grad_()
    loss, clipped = losses.ppo_clip(new, logs(0.4, 0.4, 0.4, 0.4), torch.tensor([1.0, 1.0, -1.0, -1.0]), 0.2, 0.2)
    assert loss.tolist() == approx(-1.2, -0.5, 1.5, 0.8)
    assert clipped.tolist() == [True, False, False, True]
    assert gradient(loss, new) == approx(0, -0.5, 1.5, 0)  # d(-r A)/d log p = -r A, nothing where clipped


def test_clip_higher_leaves_more_room_upwards():
    loss, clipped = losses.ppo_clip(logs(0.5, 0.6), logs(0.4, 0.4), torch.ones(2), 0.2, 0.28)
    assert loss.tolist() == approx(-1.25, -1.28)
    assert clipped.tolist() == [False, True]


def test_dual_clip_bounds_a_bad_action_whose_ratio_exploded():
    new = logs(0.8).requires_grad_()
    loss, clipped = losses.ppo_clip(new, logs(0.1), torch.tensor([-1.0]), 0.2, 0.2, dual_clip=3.0)
    assert loss.tolist() == approx(3.0)
    assert clipped.tolist() == [True]
    assert gradient(loss, new) == [0.0]


def test_gspo_uses_the_geometric_mean_of_the_ratios():
    # sequence 0: ratios 2 and 1/2 -> s = 1; sequence 1: ratios 1.2 and 1.2 -> s = 1.2, clipped at 1.1 for A = +1
    new = logs(0.8, 0.2, 0.48, 0.48).requires_grad_()
    old = logs(0.4, 0.4, 0.4, 0.4)
    loss, clipped = losses.gspo(new, old, torch.ones(4), torch.tensor([0, 0, 1, 1]), 2, 0.1, 0.1)
    assert loss.tolist() == approx(-1, -1, -1.1, -1.1)
    assert clipped.tolist() == [False, False, True, True]
    # mean over the sequence's two tokens gives the objective's gradient -s A / |y| per token
    assert gradient(loss / 2, new) == approx(-0.5, -0.5, 0, 0)


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    new = logs(0.8, 0.1).requires_grad_()  # ratios 2 and 0.25
    loss, clipped = losses.cispo(new, logs(0.4, 0.4), torch.tensor([1.0, -1.0]), clip_low=1.0, clip_high=0.5)
    assert loss.tolist() == approx(-1.5 * math.log(0.8), 0.25 * math.log(0.1))
    assert gradient(loss, new) == approx(-1.5, 0.25)
    assert clipped.tolist() == [True, False]


def test_k3_is_the_kl_in_expectation_and_zero_at_equality():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    assert (p * losses.k3(p.log(), q.log())).sum().item() == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-5)
    assert losses.k3(p.log(), p.log()).tolist() == approx(0, 0, 0)
    # d = log(q/p) = log 2: 2 - log 2 - 1
    assert losses.k3(logs(0.2), logs(0.4)).item() == pytest.approx(1 - math.log(2))


def test_interpolated_proximal_leans_to_the_policy_with_age():
    new, old = logs(0.8, 0.8, 0.8), logs(0.2, 0.2, 0.2)
    got = losses.interpolated_proximal(new, old, torch.tensor([0, 1, 2])).exp().tolist()
    assert got == approx(0.8, 0.2, 0.4)  # the policy, the behaviour, their geometric mean


@pytest.mark.parametrize(("mode", "expected"), [("none", [1, 1, 1]), ("truncate", [0.25, 2, 2]), ("mask", [0, 0, 2])])
def test_correction_weights(mode, expected):
    got = losses.correction_weights(logs(0.1, 0.8, 0.8), logs(0.4, 0.2, 0.4), mode, 2.0)
    assert got.tolist() == approx(*expected)


def test_engine_gap_and_policy_age_are_corrected_by_their_own_rules():
    settings = AlgorithmSettings(
        loss="decoupled", proximal="recompute", engine_correction="truncate", engine_cap=1.5, age_correction="mask",
        age_cap=2.0,
    )  # fmt: skip
    now = logs(0.8, 0.8, 0.6)
    i = inputs(now, logs(0.4, 0.2, 0.4), torch.ones(3), proximal=now, age=[0, 2, 1])
    assert losses.importance_weights(i, settings).tolist() == approx(1.5, 0.0, 1.5)


def test_decoupled_is_ppo_around_the_proximal_policy_weighted_by_proximal_over_behaviour():
    settings = AlgorithmSettings(loss="decoupled", proximal="recompute", age_correction="truncate", age_cap=10.0)
    new = logs(0.6).requires_grad_()
    i = inputs(new, logs(0.2), torch.ones(1), proximal=logs(0.5), age=[1])
    out = policy_loss(i, settings)
    # ratio 0.6/0.5 = 1.2 (on the edge of the clip), weight 0.5/0.2 = 2.5
    assert out.loss_sum.item() == pytest.approx(-1.2 * 2.5, rel=1e-5)
    assert out.sums["importance_weight"].item() == pytest.approx(2.5)


def test_supervised_loss_is_the_mean_negative_log_probability():
    out = policy_loss(inputs(logs(0.5, 0.25), torch.zeros(2), torch.ones(2)), AlgorithmSettings(loss="sft"))
    assert out.loss_sum.item() == pytest.approx(1.5 * math.log(2))


def test_kl_and_entropy_enter_by_their_coefficients():
    settings = AlgorithmSettings(kl_coefficient=0.1, entropy_coefficient=0.01)
    i = inputs(logs(0.2), logs(0.2), torch.zeros(1), reference=logs(0.4))
    assert policy_loss(i, settings).loss_sum.item() == pytest.approx(0.1 * (1 - math.log(2)) - 0.01 * 0.5)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token_mean", [1 / 8, 1 / 8, 1 / 8]), ("sequence_mean", [1 / 8, 1 / 8, 1 / 4]), ("constant", [1 / 40] * 3)],
)
def test_aggregation_weights_count_over_the_global_batch(mode, expected):
    """Two sequences of 2 and 1 tokens here; 4 sequences and 8 tokens on all ranks."""
    got = losses.aggregation_weights(
        torch.tensor([2.0, 1.0]), torch.tensor([0, 0, 1]), BatchTotals(8, 4), mode, constant_tokens=10
    )
    assert got.tolist() == approx(*expected)


def test_an_entirely_masked_batch_is_zero_not_nan():
    weights = losses.aggregation_weights(
        torch.zeros(1), torch.zeros(1, dtype=torch.int64), BatchTotals(0, 0), "token_mean"
    )
    new = logs(0.3).requires_grad_()
    out = policy_loss(inputs(new, logs(0.3), torch.ones(1), weights=weights * 0), AlgorithmSettings())
    assert out.loss_sum.item() == 0.0
    assert gradient(out.loss_sum, new) == [0.0]
    assert all(v.item() == 0.0 for v in out.sums.values())


def test_a_ratio_beyond_float32_does_not_poison_the_loss():
    new = torch.tensor([-0.1]).requires_grad_()
    loss, _ = losses.ppo_clip(new, torch.tensor([-200.0]), torch.tensor([1.0]), 0.2, 0.2)
    assert loss.tolist() == approx(-1.2)
    assert gradient(loss, new) == [0.0]

"""Advantages against numbers worked by hand."""

import numpy as np
import pytest

from staleflow.learning.advantages import (
    ADVANTAGES,
    dr_grpo,
    grpo,
    overlong_penalties,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)

REWARDS = [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]]


def test_grpo_divides_by_the_standard_deviation_of_the_group():
    # mean 1/2; sample variance (4 * 1/4) / 3 = 1/3
    expected = 0.5 * np.sqrt(3.0)
    np.testing.assert_allclose(grpo(REWARDS), [[expected, -expected, -expected, expected], [0, 0, 0, 0]], rtol=1e-6)


def test_dr_grpo_only_centres():
    np.testing.assert_allclose(dr_grpo([[1, 0, 0, 0]]), [[0.75, -0.25, -0.25, -0.25]])


def test_rloo_leaves_its_own_reward_out():
    # for the first: others' mean 0 -> 1; for the rest: others' mean 1/3 -> -1/3
    np.testing.assert_allclose(rloo([[1, 0, 0, 0]]), [[1, -1 / 3, -1 / 3, -1 / 3]], rtol=1e-6)


def test_reinforce_pp_has_one_baseline_for_the_batch():
    # rewards 3,1,1,1,0,0,0,2: mean 1, squared deviations 4+0+0+0+1+1+1+1 = 8, sample variance 8/7
    got = reinforce_pp([[3, 1, 1, 1], [0, 0, 0, 2]])
    scale = np.sqrt(7 / 8)
    np.testing.assert_allclose(got, np.array([[2, 0, 0, 0], [-1, -1, -1, 1]]) * scale, rtol=1e-6)


def test_reinforce_pp_baseline_centres_on_the_group_then_scales_by_the_batch():
    # centred: 1,-1 | 3,-3 ; mean 0, sample variance (1+1+9+9)/3 = 20/3
    got = reinforce_pp_baseline([[2, 0], [6, 0]])
    np.testing.assert_allclose(got, np.array([[1, -1], [3, -3]]) / np.sqrt(20 / 3), rtol=1e-6)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_equal_rewards_teach_nothing(name):
    """Also where the mean is not exactly representable: rounding must not be blown up into a signal."""
    assert np.abs(ADVANTAGES[name]([[0.1] * 7, [0.1] * 7])).max() < 1e-6


@pytest.mark.parametrize("rewards", [[[1.0]], [1.0, 0.0]])
def test_a_group_needs_two_members(rewards):
    with pytest.raises(ValueError, match="members >= 2"):
        grpo(rewards)


def test_overlong_penalty_grows_linearly_inside_the_buffer():
    got = overlong_penalties([60, 80, 90, 100, 120], max_tokens=100, buffer_tokens=20, penalty=1.0)
    np.testing.assert_allclose(got, [0, 0, -0.5, -1, -1])
    with pytest.raises(ValueError, match="buffer_tokens = 0"):
        overlong_penalties([1], max_tokens=10, buffer_tokens=0)

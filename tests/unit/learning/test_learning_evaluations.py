"""Evaluation: what is made of the answers, and which checkpoint it names the best."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from staleflow.data.prompts import Prompt
from staleflow.roles.evaluations import Evaluations, pass_at
from staleflow.trajectories.schema import group_and_member


def evaluations(prompts: int, samples: int) -> Evaluations:
    token = np.zeros(1, np.int32)
    return Evaluations([Prompt(i, "", token, {}, 0) for i in range(prompts)], samples)


def answered(room: Evaluations, version: int, rewards: list[list[float | None]]) -> dict[str, float]:
    """A whole round: rewards[prompt][member]; answered last first, as instances may."""
    _, work = room.start(version)
    first = group_and_member(work[0][0])[0]
    for tid, _ in reversed(work):
        group_id, member = group_and_member(tid)
        room.generated(tid, [version + member % 2])
        done = room.scored(tid, rewards[group_id - first][member])
    assert done is not None and not room.busy
    return done.result(room.samples)


def test_mean_pass_and_noise_by_hand():
    result = answered(evaluations(2, 4), 3, [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    assert result["mean"] == pytest.approx((0.25 + 1) / 2)
    assert result["stderr"] == pytest.approx(0.375)  # of 0.25 and 1.0: sqrt(0.28125 / 2)
    assert result["pass@1"] == pytest.approx(0.625)
    assert result["pass@2"] == pytest.approx((0.5 + 1) / 2)  # a pair holds the one of four in 3 of 6 cases
    assert result["pass@4"] == 1.0
    assert [result[f"sample_{i}"] for i in range(4)] == [1.0, 0.5, 0.5, 0.5]
    assert (result["version"], result["newest_version"], result["prompts"]) == (3, 4, 2)


@pytest.mark.parametrize(("n", "solved"), [(5, 0), (5, 1), (5, 3), (6, 5), (4, 4)])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_solution(n, solved):
    for k in range(1, n + 1):
        subsets = list(combinations(range(n), k))
        assert pass_at(k, n, solved) == pytest.approx(sum(min(s) < solved for s in subsets) / len(subsets))


def test_an_answer_that_could_not_be_scored_is_no_zero():
    result = answered(evaluations(2, 2), 0, [[1.0, None], [None, None]])
    assert (result["mean"], result["prompts"], result["failed"]) == (1.0, 1, 3)
    assert result["pass@1"] == 1.0 and result["pass@2"] == 0.0  # nobody was asked twice
    nothing = answered(evaluations(1, 1), 0, [[None]])
    assert (nothing["mean"], nothing["prompts"]) == (0.0, 0)


def test_a_late_answer_counts_for_its_own_round():
    room = evaluations(1, 1)
    _, [(old, _)] = room.start(2)
    _, [(new, _)] = room.start(4)
    assert room.scored(new, 1.0).version == 4
    assert room.scored(old, 0.0).version == 2
    assert room.scored(old, 1.0) is None, "a second answer"

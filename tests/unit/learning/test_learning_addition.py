"""The demo's task: its problems, its careless teacher, its files; and a warm start in miniature."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.data import addition

problems = st.tuples(st.sampled_from(addition.NUMBERS), st.sampled_from(addition.ADDENDS))


@settings(deadline=None)
@given(problems)
def test_a_careful_teacher_is_always_right(problem):
    response = addition.demonstrate(problem, random.Random(0), forget=0.0)
    assert addition.exact_match(response, addition.answer(problem)) == 1.0
    assert len(response) + 1 <= addition.MAX_RESPONSE_TOKENS
    assert len(addition.prompt(problem)) == addition.MAX_PROMPT_TOKENS


@settings(deadline=None)
@given(problems)
def test_a_teacher_who_forgets_is_wrong_exactly_where_a_carry_is_due(problem):
    response = addition.demonstrate(problem, random.Random(0), forget=1.0)
    assert addition.exact_match(response, addition.answer(problem)) == (not addition.needs_carry(problem))


@pytest.mark.parametrize(
    ("response", "reward"),
    [("478+1=479", 1.0), ("479", 1.0), ("0479", 0.0), ("479+0=", 0.0), ("", 0.0), ("480=479", 1.0)],
)
def test_only_the_result_counts(response, reward):
    assert addition.exact_match(response, "479") == reward


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_are_disjoint_and_the_same_for_the_same_seed(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        addition.write_data(tmp_path / name, 7, train=500, demonstrations=500, held_out=200)
    files = ("test", "valid", "train", "demonstrations")
    assert all((tmp_path / f"a/{f}.jsonl").read_bytes() == (tmp_path / f"b/{f}.jsonl").read_bytes() for f in files)
    prompts = {f: {r["prompt"] for r in rows(tmp_path / f"a/{f}.jsonl")} for f in files}
    assert len(prompts["test"]) == len(prompts["valid"]) == 200
    held_out = prompts["test"] | prompts["valid"]
    assert len(held_out) == 400
    assert not held_out & (prompts["train"] | prompts["demonstrations"])


def test_response_lengths_have_a_long_tail():
    rng = random.Random(0)
    lengths = sorted(len(addition.demonstrate(addition.draw_problem(rng), rng)) + 1 for _ in range(2000))
    assert lengths[-1] >= 8 * lengths[0]
    assert lengths[1000] < sum(lengths) / 2000 < lengths[-1] / 2


def test_warm_start_learns_and_refuses_to_end_outside_its_band(tmp_path):
    """A few steps: the loss falls; an accuracy that was asked for and not reached is an error, not a silent start."""
    from staleflow.learning.sft import SftSettings, read_jsonl, warm_start

    addition.write_data(tmp_path, 0, train=1, demonstrations=64, held_out=8)
    addition.write_model(tmp_path / "model", 0)
    shown, valid = read_jsonl(tmp_path / "demonstrations.jsonl"), read_jsonl(tmp_path / "valid.jsonl")
    start = (str(tmp_path / "model"), shown, valid, addition.exact_match, tmp_path / "warm")
    quick = {"steps": 12, "eval_every": 12, "warmup_steps": 2, "max_tokens": 8}
    result = warm_start(*start, SftSettings(**quick), report=lambda _: None)
    assert result.steps == 12
    assert result.loss < 3.0  # from log 64 = 4.16
    assert (tmp_path / "warm" / "tokenizer.json").exists()
    with pytest.raises(ValueError, match=r"outside 0\.9 to 1\.0: change --steps"):
        warm_start(*start, SftSettings(min_accuracy=0.9, **quick), report=lambda _: None)

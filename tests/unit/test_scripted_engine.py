"""The scripted engine is only worth something when it is deterministic in weights, seed and position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from staleflow.engines.base import Request
from staleflow.engines.scripted import EOS, ScriptedEngine
from staleflow.trajectories.schema import Finish


def engine(weights: float = 1.0) -> ScriptedEngine:
    torch: Any = pytest.importorskip("torch")
    made = ScriptedEngine(vocabulary=64, max_running=8, step_s=0.0)
    made.load_weights([("w", torch.full((4,), weights))])
    return made


def generate(made: ScriptedEngine, seed: int, tokens: list[int], limit: int = 400) -> tuple[list[int], Finish]:
    made.add(Request(1, tokens, limit, 1.0, seed))
    out: list[int] = []
    while made.busy():
        (delta,) = made.step()
        out += delta.tokens
    return out, delta.finish


def test_same_weights_and_seed_give_the_same_tokens() -> None:
    assert generate(engine(), 5, [4, 4]) == generate(engine(), 5, [4, 4])


def test_other_weights_or_seed_give_others() -> None:
    base, finish = generate(engine(), 5, [4, 4])
    assert finish is Finish.STOP and base[-1] == EOS
    assert generate(engine(2.0), 5, [4, 4])[0] != base and len(generate(engine(2.0), 5, [4, 4])[0]) == len(base)
    assert generate(engine(), 6, [4, 4])[0] != base


def test_interrupted_and_continued_is_the_same_response() -> None:
    whole, _ = generate(engine(), 11, [4, 4])
    made = engine()
    made.add(Request(1, [4, 4], 400, 1.0, 11))
    begun = [token for _ in range(min(3, len(whole) - 1)) for token in made.step()[0].tokens]
    made.abort([1])
    rest, _ = generate(made, 11, [4, 4, *begun], 400 - len(begun))
    assert begun + rest == whole


def test_a_buffer_that_grows_while_it_is_generated_changes_nothing() -> None:
    """As a rollout rank does it: the request's tokens are the buffer that what comes is appended to."""
    whole, _ = generate(engine(), 11, [4, 4])
    made, buffer = engine(), [4, 4]
    made.add(Request(1, buffer, 400, 1.0, 11))
    while made.busy():
        buffer += made.step()[0].tokens
    assert buffer[2:] == whole


def test_limit_and_lengths_are_long_tailed() -> None:
    assert generate(engine(), 5, [4, 4], 1)[1] in (Finish.LENGTH, Finish.STOP)
    lengths = np.array([len(generate(engine(), seed, [4, 4])[0]) for seed in range(200)])
    assert lengths.max() >= 4 * np.median(lengths)

"""The kinds of reward: each is a function (options) -> scorer, and a scorer is (RewardSample) -> float.

| kind | reference | options |
|---|---|---|
| `exact_match` | `answer` | `extract` (`extract.py`), `pattern` (a regex: last match, group 1 if any), `ignore_case` |
| `math` | `answer` (LaTeX or plain) | `boxed_only` |
| `python` | anything | `function = "module:name"`, `kwargs`; called as `name(sample, **kwargs)` |
| `reasoning_gym` | `index`, `answer` | `task`, `seed`, `size`, `config`, `extract` |
| `code` | `tests` | see `code.py` |

`exact_match` gives 0 to a truncated response: an answer that was cut may only look right. The others judge the text.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

from staleflow.rewards.extract import extractor
from staleflow.rewards.spec import RewardError, RewardSample, RewardTerm

Scorer = Callable[[RewardSample], float]


def make_scorer(terms: tuple[RewardTerm, ...]) -> Callable[[RewardSample], tuple[float, ...]]:
    """A function that gives the (unweighted) rewards of `terms` for a sample. Raises ValueError on bad options."""
    scorers = [_MAKERS[term.kind](dict(term.options)) for term in terms]

    def score(sample: RewardSample) -> tuple[float, ...]:
        return tuple(_finite(scorer(sample), term.kind) for scorer, term in zip(scorers, terms, strict=True))

    return score


def is_trusted(term: RewardTerm) -> bool:
    """Whether the term is a cheap, total function of ours, which needs no process of its own.

    A regular expression from a config does not count: Python's matcher can take exponential time and cannot be stopped.
    """
    return term.kind == "exact_match" and "pattern" not in term.options


def weighted(terms: tuple[RewardTerm, ...], parts: tuple[float, ...]) -> float:
    return sum(term.weight * part for term, part in zip(terms, parts, strict=True))


def _finite(value: Any, kind: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise RewardError(f"reward {kind}: returned {value!r}, not a number") from None
    if not math.isfinite(number):
        raise RewardError(f"reward {kind}: returned {number}")
    return number


def no_more(options: dict[str, Any], kind: str) -> None:
    if options:
        raise ValueError(f"reward.options: {sorted(options)[0]!r} is unknown for kind {kind!r}")


def answer_of(sample: RewardSample) -> str:
    if "answer" not in sample.reference:
        raise RewardError("the reference has no 'answer'; set data.answer_field")
    return str(sample.reference["answer"])


def _exact_match(options: dict[str, Any]) -> Scorer:
    extract = extractor(options.pop("extract", "whole"), options.pop("pattern", None))
    fold = str.casefold if options.pop("ignore_case", False) else str
    no_more(options, "exact_match")

    def score(sample: RewardSample) -> float:
        if sample.truncated:
            return 0.0
        found = extract(sample.response)
        return float(found is not None and fold(found.strip()) == fold(answer_of(sample).strip()))

    return score


def _math(options: dict[str, Any]) -> Scorer:
    from staleflow.rewards.math import make

    return make(options)


def _python(options: dict[str, Any]) -> Scorer:
    target, kwargs = options.pop("function", None), options.pop("kwargs", {})
    no_more(options, "python")
    module, _, name = str(target).partition(":")
    if not target or not name:
        raise ValueError(f"reward.options.function: {target!r}; write it as 'module:function'")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"reward.options.function: {target!r} cannot be loaded ({error})") from error
    return lambda sample: function(sample, **kwargs)


def _reasoning_gym(options: dict[str, Any]) -> Scorer:
    from staleflow.rewards.reasoning import make

    return make(options)


def _code(options: dict[str, Any]) -> Scorer:
    from staleflow.rewards.code import make

    return make(options)


_MAKERS: dict[str, Callable[[dict[str, Any]], Scorer]] = {
    "exact_match": _exact_match,
    "math": _math,
    "python": _python,
    "reasoning_gym": _reasoning_gym,
    "code": _code,
}

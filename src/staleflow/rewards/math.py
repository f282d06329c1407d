"""Mathematical equality through math-verify: `1/2`, `0.5` and `\\frac{1}{2}` are the same answer.

So is `52 + 34` for 86: where the problem itself is such an expression, a response that repeats it is scored 1. Use
another kind there.

math-verify's own time limits use `signal.alarm`; they are switched off, because the pool's limit is the harder one.
"""

from __future__ import annotations

from typing import Any

from staleflow.rewards.kinds import Scorer, answer_of, no_more
from staleflow.rewards.spec import RewardError, RewardSample


def make(options: dict[str, Any]) -> Scorer:
    """Options: `boxed_only` (default False): only an answer inside \\boxed counts.

    Raises ValueError when math-verify is not installed.
    """
    boxed_only = bool(options.pop("boxed_only", False))
    no_more(options, "math")
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise ValueError("reward.kind 'math' needs math-verify: pip install 'staleflow[rewards]'") from error
    _quiet()
    boxed = LatexExtractionConfig(boxed_match_priority=0)
    wanted = [boxed] if boxed_only else [boxed, ExprExtractionConfig()]

    def score(sample: RewardSample) -> float:
        answer = answer_of(sample)
        gold = parse(f"\\boxed{{{answer}}}", parsing_timeout=None) or parse(answer, parsing_timeout=None)
        if not gold:
            raise RewardError(f"the reference answer {answer!r} is nothing that math-verify can read")
        if boxed_only and "\\boxed" not in sample.response:
            return 0.0
        found = parse(sample.response, wanted, parsing_timeout=None)
        return float(verify(gold, found, timeout_seconds=None, raise_on_error=True))

    return score


def _quiet() -> None:
    """math-verify warns on every unlimited call; the limit is the pool's."""
    import logging

    logging.getLogger("math_verify").setLevel(logging.ERROR)

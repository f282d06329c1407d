"""Code execution: the last fenced block of a response, run against tests in a limited process (`sandbox.py`).

`reference["tests"]` is a list (or the JSON text of one) of `{"input": …, "output": …}` for a program that reads its
input, or of texts with assertions that are executed after the solution. A solution that fails, hangs or takes too much
memory is scored: that is its fault. Only what goes wrong outside it is a failure of the reward.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from typing import Any

from staleflow.rewards.kinds import Scorer, no_more
from staleflow.rewards.sandbox import Limits, run_python
from staleflow.rewards.spec import CODE_TOTAL_S, RewardError, RewardSample

_BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)

_ASSERTIONS = """
import os, sys
scope = {{"__name__": "__main__"}}
exec(compile({solution!r}, "solution.py", "exec"), scope)
exec(compile({test!r}, "test.py", "exec"), scope)
sys.stdout.flush()
os.write(1, {token!r})
"""


def make(options: dict[str, Any]) -> Scorer:
    """Options: `partial` (share of passed tests; default False: all or nothing), `test_s` (4), `total_s` (8),
    `memory_bytes` (512 MiB), `output_bytes` (1 MiB), `isolate` ("auto": where the kernel allows; "must").
    """
    partial, total_s = bool(options.pop("partial", False)), float(options.pop("total_s", CODE_TOTAL_S))
    limits = Limits(
        wall_s=float(options.pop("test_s", 4.0)),
        memory_bytes=int(options.pop("memory_bytes", 512 << 20)),
        output_bytes=int(options.pop("output_bytes", 1 << 20)),
        isolate=str(options.pop("isolate", "auto")),
    )
    no_more(options, "code")

    def score(sample: RewardSample) -> float:
        tests = _tests(sample.reference.get("tests"))
        solution = last_block(sample.response)
        if solution is None:
            return 0.0
        passed, end_s = 0, time.monotonic() + total_s
        for test in tests:
            left_s = end_s - time.monotonic()
            ok = left_s > 0 and _passes(solution, test, limits.within(left_s))
            passed += ok
            if not ok and not partial:
                return 0.0
        return passed / len(tests)

    return score


def last_block(text: str) -> str | None:
    """The last complete fenced block."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


def _tests(tests: Any) -> list[Any]:
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except json.JSONDecodeError as error:
            raise RewardError(f"reference tests are not JSON ({error})") from error
    if not isinstance(tests, list) or not tests:
        raise RewardError("the reference has no 'tests'; add it to data.reference_fields")
    return tests


def _passes(solution: str, test: Any, limits: Limits) -> bool:
    if isinstance(test, str):
        # Only a solution that came through all assertions gets to print the token; leaving early does not help.
        token = secrets.token_hex(16).encode()
        outcome = run_python(_ASSERTIONS.format(solution=solution, test=test, token=token), "", limits)
        return outcome.ok and outcome.output.endswith(token)
    try:
        given, wanted = str(test["input"]), str(test["output"])
    except (KeyError, TypeError):
        raise RewardError(f"test {test!r}: neither a text nor an object with input and output") from None
    outcome = run_python(solution, given, limits)
    return outcome.ok and _lines(outcome.output.decode(errors="replace")) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]

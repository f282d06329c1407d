"""What each kind of reward accepts, rejects, and refuses to judge."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil
import pytest

from staleflow.rewards.extract import extractor
from staleflow.rewards.kinds import make_scorer
from staleflow.rewards.spec import RewardError, RewardSample, RewardSpec, RewardTerm


def score(
    kind: str, response: str, *, options: dict | None = None, truncated: bool = False, **reference: object
) -> float:
    (value,) = make_scorer((RewardTerm(kind, 1.0, options or {}),))(RewardSample("p", response, truncated, reference))
    return value


@pytest.mark.parametrize(
    ("how", "text", "found"),
    [
        ("whole", " 7 ", " 7 "),
        ("last_line", "so\n\nit is 7\n\n", "it is 7"),
        ("last_line", "", None),
        ("boxed", r"\boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1", None),
        ("boxed", "none", None),
        ("tag", "<answer>1</answer><answer> 2 </answer>", " 2 "),
        ("tag", "2</answer>", None),
        ("tag", "<answer>2", None),
        ("after:####", "work\n#### 3\n#### 4\nmore", " 4"),
        ("after:####", "4", None),
    ],
)
def test_named_ways_to_find_the_answer(how: str, text: str, found: str | None) -> None:
    assert extractor(how)(text) == found


def test_a_pattern_gives_its_last_match() -> None:
    assert extractor(pattern=r"= (\d+)")("1+1= 2 = 3") == "3"
    assert extractor(pattern=r"\d+")("12 and 34") == "34"
    assert extractor(pattern=r"\d+")("none") is None


def test_exact_match_ignores_surrounding_blanks_and_on_demand_case() -> None:
    assert score("exact_match", " Paris\n", answer="Paris") == 1.0
    assert score("exact_match", "paris", answer="Paris") == 0.0
    assert score("exact_match", "paris", answer="Paris", options={"ignore_case": True}) == 1.0
    assert score("exact_match", "12", answer=12) == 1.0


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (r"so it is $\boxed{\frac{1}{2}}$", "1/2", 1.0),
        (r"$\boxed{0.5}$", r"\frac{1}{2}", 1.0),
        ("The answer is 12", "12", 1.0),
        (r"$x = 3$", "3", 1.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{13}", "12", 0.0),
        ("no idea", "12", 0.0),
    ],
)
def test_math_compares_values(response: str, answer: str, right: float) -> None:
    pytest.importorskip("math_verify")
    assert score("math", response, answer=answer) == right


def test_math_wants_a_box_on_demand_and_an_answer_it_can_read() -> None:
    pytest.importorskip("math_verify")
    assert score("math", "The answer is 12", answer="12", options={"boxed_only": True}) == 0.0
    assert score("math", r"\boxed{12}", answer="12", options={"boxed_only": True}) == 1.0
    with pytest.raises(RewardError, match="reference answer"):
        score("math", "12", answer="")


def test_reasoning_gym_judges_by_the_task_made_again(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    from staleflow.data.reasoning import write_task

    assert write_task(tmp_path / "t.jsonl", "basic_arithmetic", seed=3, size=4) == 4
    row = json.loads((tmp_path / "t.jsonl").read_text().splitlines()[2])
    reference = {"answer": row["answer"], "index": row["index"]}
    options = {"task": "basic_arithmetic", "seed": 3, "size": 4}
    assert score("reasoning_gym", f"<answer>{row['answer']}</answer>", options=options, **reference) == 1.0
    assert score("reasoning_gym", "<answer>9999</answer>", options=options, **reference) < 0.5
    assert score("reasoning_gym", row["answer"], options=options, **reference) == 0.0
    with pytest.raises(RewardError, match="another answer"):
        score("reasoning_gym", "x", options=options, **{**reference, "answer": "?"})
    with pytest.raises(RewardError, match="index 7"):
        score("reasoning_gym", "x", options=options, **{**reference, "index": 7})
    with pytest.raises(ValueError, match="no_such_task"):
        score("reasoning_gym", "x", options={"task": "no_such_task"}, **reference)


def code(body: str, *tests: object, **options: object) -> float:
    return score("code", f"Here:\n```python\n{body}\n```\n", options={"test_s": 1.0, **options}, tests=list(tests))


ECHO = {"input": "3\n4\n", "output": "7\n"}


def test_code_is_judged_by_what_it_prints() -> None:
    assert code("print(int(input()) + int(input()))", ECHO) == 1.0
    assert code("print(8)", ECHO) == 0.0
    assert code("print(7); raise SystemExit(1)", ECHO) == 0.0
    assert score("code", "print(7)", tests=[ECHO]) == 0.0, "there is no block"
    assert code("print(7)", ECHO, {"input": "", "output": "8"}, partial=True) == 0.5
    assert code("print(7)", ECHO, {"input": "", "output": "8"}) == 0.0


def test_code_is_judged_by_assertions() -> None:
    solution = "def add(a, b):\n    return a + b\nprint('noise')"
    assert code(solution, "assert add(1, 2) == 3", "assert add(0, 0) == 0") == 1.0
    assert code(solution, "assert add(1, 2) == 4") == 0.0
    assert code("import sys; sys.exit(0)", "assert False") == 0.0, "to leave early is not to pass"


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "x = bytearray(2 << 30); print(7)",
        "while True: print('x' * 1000)",
        "import os, time\nif os.fork(): time.sleep(60)\nprint(7)",
        "import os, time\nos.setsid()\nos.fork()\ntime.sleep(60)",
    ],
)
def test_code_that_misbehaves_scores_nothing_and_leaves_nothing(body: str) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    assert code(body, ECHO, test_s=0.7) == 0.0
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


def test_what_the_program_left_running_does_not_outlive_it(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    body = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(1)
    open({str(mark)!r}, "w")
else:
    print(7)
"""
    assert code(body, ECHO) == 1.0
    time.sleep(1.3)
    assert not mark.exists()


def test_code_sees_no_network_and_no_secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    assert code("import os; print('A_SECRET' in os.environ)", {"input": "", "output": "False"}) == 1.0
    if _namespaces_work():
        assert code(OFFLINE, {"input": "", "output": "101"}, isolate="must") == 1.0, "101: network is unreachable"


OFFLINE = """
import socket
try:
    socket.create_connection(("127.0.0.1", 1), 1)
except OSError as error:
    print(error.errno)
"""


def _namespaces_work() -> bool:
    try:
        return code("print(1)", {"input": "", "output": "1"}, isolate="must") == 1.0
    except RuntimeError:
        return False


def test_broken_tests_are_a_failure_of_the_reward() -> None:
    with pytest.raises(RewardError, match="tests"):
        score("code", "```\nx\n```")
    with pytest.raises(RewardError, match="not JSON"):
        score("code", "```\nx\n```", tests="[")
    with pytest.raises(RewardError, match="neither"):
        code("x", {"in": 1})


def test_the_pool_must_be_more_patient_than_the_code_it_runs() -> None:
    with pytest.raises(ValueError, match=r"must exceed total_s = 8\.0"):
        RewardSpec("code", timeout_s=5.0)
    RewardSpec("code", {"total_s": 3.0}, timeout_s=5.0)

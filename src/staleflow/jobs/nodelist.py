"""Slurm's compact notations, read without Slurm: node lists and counts per node."""

from __future__ import annotations

import re

REMEDY = "start the ranks directly with srun, and let no wrapper change its variables"


class LaunchError(ValueError):
    """The launcher's environment cannot be right. One line: key, value, what is wrong, and the remedy."""

    def __init__(self, key: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(f"{key}={value}: {problem}; {remedy}")
        self.key, self.value, self.problem, self.remedy = key, value, problem, remedy


def expand_node_list(text: str) -> list[str]:
    """Slurm's compact host list as names, in order: `node[01-03,7],login` -> node01 node02 node03 node7 login."""
    return [name for part in _split_outside_brackets(text) for name in _expand_part(part)]


def expand_counts(text: str) -> list[int]:
    """Slurm's compact counts: `2(x3),1` -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise LaunchError("SLURM_STEP_TASKS_PER_NODE", text, f"cannot read {part!r}", REMEDY)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split_outside_brackets(text: str) -> list[str]:
    if text.count("[") != text.count("]"):
        raise LaunchError("SLURM_JOB_NODELIST", text, "has an unclosed bracket", REMEDY)
    return [part for part in re.split(r",(?![^\[]*\])", text) if part]


def _expand_part(part: str) -> list[str]:
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if match is None:
        return [part]
    prefix, ranges, rest = match.groups()
    return [f"{prefix}{number}{tail}" for number in _expand_ranges(ranges, part) for tail in _expand_part(rest)]


def _expand_ranges(ranges: str, part: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None:
            raise LaunchError("SLURM_JOB_NODELIST", part, f"cannot read the range {item!r}", REMEDY)
        first, last = match[1], match[2] or match[1]
        numbers += [f"{i:0{len(first)}d}" for i in range(int(first), int(last) + 1)]
    return numbers

"""reasoning-gym: its own scorer judges the answer, on the task made again from (task, seed, size, config, index).

The data set holds question, answer and index only; the metadata that some scorers need does not survive JSON.
`data.reasoning.write_task` writes such a data set.
"""

from __future__ import annotations

from typing import Any

from staleflow.rewards.extract import extractor
from staleflow.rewards.kinds import Scorer, answer_of, no_more
from staleflow.rewards.spec import RewardError, RewardSample


def make(options: dict[str, Any]) -> Scorer:
    """Options: `task`, `seed`, `size`, `config` (a table of the task's own settings), `extract` (default "tag").

    Raises ValueError when the package is missing or does not know the task.
    """
    extract = extractor(options.pop("extract", "tag"))
    tasks = open_task(
        options.pop("task", ""), options.pop("seed", 0), options.pop("size", 500), options.pop("config", {})
    )
    no_more(options, "reasoning_gym")

    def score(sample: RewardSample) -> float:
        entry = _entry(tasks, sample)
        found = extract(sample.response)
        return 0.0 if found is None else float(tasks.score_answer(found.strip(), entry))

    return score


def open_task(task: str, seed: int, size: int, config: dict[str, Any]) -> Any:
    """The procedural data set. Raises ValueError on an unknown task or setting."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError("reasoning_gym needs the package: pip install 'staleflow[rewards]'") from error
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reward.options: reasoning_gym task {task!r}: {error}") from error


def _entry(tasks: Any, sample: RewardSample) -> dict[str, Any]:
    index = sample.reference.get("index")
    if not isinstance(index, int) or not 0 <= index < tasks.size:
        raise RewardError(f"reference index {index!r}: not in the task of size {tasks.size}; add 'index' to the fields")
    entry: dict[str, Any] = tasks[index]
    if str(entry["answer"]) != answer_of(sample):
        raise RewardError(f"task {index} has another answer here: seed, config or version of reasoning-gym differ")
    return entry

"""A data set of a reasoning-gym task as JSONL: prompt, answer, and the index from which its reward finds it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from staleflow.rewards.reasoning import open_task

HINT = "Write your final answer between <answer> and </answer>."


def write_task(
    path: Path, task: str, *, seed: int, size: int, config: dict[str, Any] | None = None, hint: str = HINT
) -> int:
    """Write rows {"prompt", "answer", "index"}; returns their number. Tasks without a text answer are left out.

    Use `data.reference_fields = ["index"]` and the same task, seed, size and config in `reward.options`.
    """
    tasks = open_task(task, seed, size, config or {})
    rows = [{"prompt": f"{entry['question']}\n{hint}".strip(), "answer": entry["answer"], "index": index}
            for index, entry in enumerate(tasks) if entry["answer"] is not None]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return len(rows)

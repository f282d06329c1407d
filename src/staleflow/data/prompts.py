"""The stream of prompts: deterministic, restartable, read by the coordinator.

Prompt `i` is a pure function of the files, the settings and `i`, so the state of the stream is a position and the set
of prompts that are settled. After a resume the prompts that were issued, are not settled and are not held by anybody
come first, so that none is lost and none is used twice.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from staleflow.data.order import Order
from staleflow.data.table import Table, read_table
from staleflow.protocol.intervals import IdIntervals


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any: ...


@dataclass(frozen=True)
class Dataset:
    """A data set on disk. An epoch holds `round(weight * rows)` of its prompts: 1.0 is every row once."""

    path: Path
    weight: float = 1.0


@dataclass(frozen=True)
class DataSettings:
    """Where prompts come from and how they become tokens.

    `prompt_field` is a text or a list of chat messages, `answer_field` anything ("" for none); `a.b` goes into nested
    objects. `reference_fields` are further fields that rewards need. `epochs=None` starts again as often as asked.
    """

    datasets: tuple[Dataset, ...]
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    reference_fields: tuple[str, ...] = ()
    chat_template: bool = False
    system_prompt: str | None = None
    max_prompt_tokens: int = 1024
    epochs: int | None = None
    shuffle: bool = True
    seed: int = 0
    deduplicate: bool = False

    def __post_init__(self) -> None:
        if not self.datasets:
            raise ValueError("data.train: no data set given")
        if self.max_prompt_tokens < 1:
            raise ValueError(f"data.max_prompt_tokens: {self.max_prompt_tokens}; at least 1 is needed")
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"data.epochs: {self.epochs}; at least 1, or leave it out to go on for ever")
        if self.system_prompt is not None and not self.chat_template:
            raise ValueError("data.system_prompt needs data.chat_template = true")


@dataclass(frozen=True, eq=False)
class Prompt:
    """`index` counts from 0 over the whole run and is never reused, `token_ids` int32, `reference` for the reward."""

    index: int
    text: str
    token_ids: npt.NDArray[np.int32]
    reference: dict[str, Any]
    epoch: int


class PromptSource:
    """An iterator of `Prompt`. It ends after `settings.epochs`, or never.

    `settle(index)` says that a prompt was trained on or given up for good. With `settle_on_issue` the stream does that
    itself, and is an ordinary stateful iterable (evaluation, torchdata's StatefulDataLoader).
    Raises ValueError when a file cannot be read, a row lacks a field, or no prompt is left.
    """

    def __init__(self, settings: DataSettings, tokenizer: Tokenizer, *, settle_on_issue: bool = False) -> None:
        self.settings = settings
        self.settle_on_issue = settle_on_issue
        self._table: Table = read_table(settings, tokenizer)
        weights = [dataset.weight for dataset in settings.datasets]
        self._order = Order(self._table.sizes, weights, settings.seed, settings.shuffle)
        self._next = 0
        self._again: deque[int] = deque()
        self._settled = IdIntervals()

    @property
    def prompts_per_epoch(self) -> int:
        return self._order.per_epoch

    @property
    def left_out(self) -> dict[str, int]:
        """Rows that are no prompts, by reason: `too_long`, `empty`, `duplicate`."""
        return dict(self._table.left_out)

    def left_out_in_words(self) -> str | None:
        """`7 rows left out: 5 too long, 2 empty`, or None when every row is a prompt."""
        counts = {reason: n for reason, n in self.left_out.items() if n}
        if not counts:
            return None
        parts = ", ".join(f"{n} {reason.replace('_', ' ')}" for reason, n in counts.items())
        return f"{sum(counts.values())} rows left out: {parts}"

    @property
    def total(self) -> int | None:
        """Prompts of the whole stream, or None when it is endless."""
        return None if self.settings.epochs is None else self.settings.epochs * self.prompts_per_epoch

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        if self._again:
            return self.prompt(self._again.popleft())
        if self.total is not None and self._next >= self.total:
            raise StopIteration
        index, self._next = self._next, self._next + 1
        if self.settle_on_issue:
            self._settled.add(index)
        return self.prompt(index)

    def prompt(self, index: int) -> Prompt:
        """Prompt `index`, whether it was issued or not. Raises IndexError beyond the end."""
        if index < 0 or (self.total is not None and index >= self.total):
            raise IndexError(f"prompt {index}: the stream has {self.total}")
        row = self._order.row(index)
        text, ids, reference = self._table.row(row)
        return Prompt(index, text, ids, reference, index // self.prompts_per_epoch)

    def settle(self, index: int) -> None:
        """Prompt `index` is done with: it is never issued again."""
        if index >= self._next:
            raise ValueError(f"prompt {index} was never issued (next is {self._next})")
        self._settled.add(index)

    def give_back(self, index: int) -> None:
        """Issue prompt `index` once more, before new ones (its trajectories were lost)."""
        if index >= self._next or index in self._settled:
            raise ValueError(f"prompt {index} is not out (next is {self._next})")
        self._again.append(index)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; a few numbers, whatever the length of the run."""
        return {"fingerprint": self._fingerprint(), "next": self._next, "settled": self._settled.dump()}

    def load_state_dict(self, state: dict[str, Any], held: Collection[int] = ()) -> None:
        """Go on from `state`. `held` are prompts whose trajectories survive elsewhere; other unsettled ones come again.

        Raises ValueError when the data or the settings that order them have changed.
        """
        if state["fingerprint"] != self._fingerprint():
            raise ValueError(
                "data: the files, weights, seed, shuffle or templates are not those of the checkpoint, so its position "
                "means nothing here; restore them, or start a new run from the exported model"
            )
        self._next = int(state["next"])
        self._settled = IdIntervals.load(state["settled"])
        held = frozenset(held)
        self._again = deque(index for index in unsettled(self._settled, self._next) if index not in held)

    def _fingerprint(self) -> str:
        order = self._order
        words = f"{self._table.digest} {order.sizes} {order.quotas} {order.seed} {order.shuffle}"
        return hashlib.blake2b(words.encode(), digest_size=12).hexdigest()


def unsettled(settled: IdIntervals, below: int) -> Iterator[int]:
    """The indices in [0, below) that are not in `settled`, rising."""
    at = 0
    for first, last in settled.dump():
        yield from range(at, min(first, below))
        at = last + 1
    yield from range(at, below)

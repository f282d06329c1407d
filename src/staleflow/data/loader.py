"""A prompt stream as torchdata's StatefulDataLoader, for code that is written against it. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from staleflow.data.prompts import Prompt, PromptSource


class _Stream(IterableDataset):  # type: ignore[type-arg]  # torch's own generics are optional
    """torch takes for a stream only what has its base class."""

    def __init__(self, source: PromptSource) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._source)

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state)


def stateful_loader(source: PromptSource, batch: int, collate: Callable[[list[Prompt]], Any] = list) -> Any:
    """A loader of `batch` prompts at a time whose `state_dict` holds the position of `source`.

    `source` must have been made with `settle_on_issue=True`: a loader cannot know what becomes of its prompts.
    """
    if not source.settle_on_issue:
        raise ValueError("stateful_loader needs PromptSource(..., settle_on_issue=True)")
    return StatefulDataLoader(_Stream(source), batch_size=batch, collate_fn=collate)

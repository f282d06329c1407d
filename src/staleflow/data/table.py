"""All prompts of a run, tokenized once at the start, so that bad rows are found before anything expensive begins."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from staleflow.data.rows import Row, field_of, read_rows

if TYPE_CHECKING:
    from staleflow.data.prompts import Dataset, DataSettings

_BATCH_ROWS = 1024


@dataclass
class Table:
    """Rows of all data sets end to end: token ids in one flat int32 array, so that millions of prompts fit."""

    sizes: list[int] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=lambda: {"too_long": 0, "empty": 0, "duplicate": 0})
    digest: str = ""
    texts: list[str] = field(default_factory=list)
    references: list[dict[str, Any]] = field(default_factory=list)
    ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    ends: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))

    def row(self, row: int) -> tuple[str, npt.NDArray[np.int32], dict[str, Any]]:
        return self.texts[row], self.ids[self.ends[row] : self.ends[row + 1]], self.references[row]


def read_table(settings: DataSettings, tokenizer: Any) -> Table:
    """Read, render, tokenize and filter. Raises ValueError on a row without its fields, or when nothing is left."""
    table, hasher, pieces = Table(), hashlib.blake2b(digest_size=16), []
    seen: set[bytes] = set()
    for dataset in settings.datasets:
        before = len(table.texts)
        rendered = _rendered(settings, dataset, tokenizer, table, seen)
        while batch := list(islice(rendered, _BATCH_ROWS)):
            encoded = tokenizer([text for text, _ in batch], add_special_tokens=not settings.chat_template)
            for (text, reference), ids in zip(batch, encoded["input_ids"], strict=True):
                if len(ids) > settings.max_prompt_tokens or not ids:
                    table.left_out["too_long" if ids else "empty"] += 1
                    continue
                piece = np.asarray(ids, np.int32)
                table.texts.append(text)
                table.references.append(reference)
                pieces.append(piece)
                hasher.update(piece.tobytes() + repr(reference.get("answer")).encode() + b"\0")
        table.sizes.append(len(table.texts) - before)
    if not table.texts:
        raise ValueError(f"data: no prompt is left; left out: {table.left_out}; see data.max_prompt_tokens")
    table.ids = np.concatenate(pieces)
    table.ids.flags.writeable = False  # prompts are views of it
    table.ends = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
    table.digest = hasher.hexdigest()
    return table


def _rendered(
    settings: DataSettings, dataset: Dataset, tokenizer: Any, table: Table, seen: set[bytes]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, row in read_rows(dataset.path):
        prompt = field_of(row, settings.prompt_field, where)
        reference = _reference(settings, row, where)
        text = _text(settings, tokenizer, prompt, where)
        if not text.strip():
            table.left_out["empty"] += 1
            continue
        if settings.deduplicate:
            key = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if key in seen:
                table.left_out["duplicate"] += 1
                continue
            seen.add(key)
        yield text, reference


def _reference(settings: DataSettings, row: Row, where: str) -> dict[str, Any]:
    reference = {name: field_of(row, name, where) for name in settings.reference_fields}
    if settings.answer_field:
        reference["answer"] = field_of(row, settings.answer_field, where)
    return reference


def _text(settings: DataSettings, tokenizer: Any, prompt: Any, where: str) -> str:
    """The text whose tokens the engine gets. A blank prompt gives "" even under a template that adds words."""
    if isinstance(prompt, str) and (not settings.chat_template or not prompt.strip()):
        return prompt
    if not settings.chat_template:
        raise ValueError(
            f"{where}: {settings.prompt_field} is a {type(prompt).__name__}; set data.chat_template = true"
        )
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if settings.system_prompt is not None:
        messages = [{"role": "system", "content": settings.system_prompt}, *messages]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is a program of the model's authors and may raise anything
        raise ValueError(f"{where}: the chat template failed ({type(error).__name__}: {error})") from error

"""Rows of a data set on disk: JSONL without further packages, Parquet and Hugging Face folders through `datasets`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield (where, row) in file order; `where` names the row in messages. Raises ValueError on what cannot be read."""
    if not path.exists():
        raise ValueError(f"data: {path}: no such file or folder")
    if path.suffix in (".jsonl", ".json", ".ndjson") and path.is_file():
        return _read_jsonl(path)
    if path.is_dir() or path.suffix == ".parquet":
        return _read_with_datasets(path)
    raise ValueError(f"data: {path}: not a .jsonl or .parquet file, nor a folder written by datasets.save_to_disk")


def field_of(row: Row, name: str, where: str) -> Any:
    """A field of the row; `a.b` goes into nested objects. Raises ValueError naming the fields that are there."""
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            known = ", ".join(sorted(value)) if isinstance(value, dict) else f"a {type(value).__name__}"
            raise ValueError(f"{where}: no field {name!r} (there: {known}); set data.prompt_field / data.answer_field")
        value = value[part]
    return value


def _read_jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not a JSON object ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where}: a {type(row).__name__}, not a JSON object; write one object per line")
            yield where, row


def _read_with_datasets(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"data: {path}: needs the package datasets: pip install 'staleflow[data]'") from error
    for number, row in enumerate(_open(datasets, path)):
        yield f"{path}[{number}]", row


def _open(datasets: Any, path: Path) -> Any:
    if path.is_file():
        return datasets.Dataset.from_parquet(str(path), cache_dir=None, keep_in_memory=True)
    files = sorted(str(file) for file in path.rglob("*.parquet"))
    if files:
        return datasets.Dataset.from_parquet(files, keep_in_memory=True)
    try:
        found = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        raise ValueError(f"data: {path}: holds neither Parquet files nor a saved data set") from error
    if isinstance(found, datasets.DatasetDict):
        raise ValueError(f"data: {path}: holds the splits {', '.join(found)}; give the folder of one of them")
    return found

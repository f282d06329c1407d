"""What can be refused before any rank loads a model: files, context length, shared memory. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from staleflow.config import Config, ConfigError, Source


def check(config: Config) -> None:
    """Raises ConfigError with one line per fault: key, value, remedy."""
    faults = [*_model_faults(config), *_data_faults(config)]
    if faults:
        raise ConfigError("\n".join(faults))


def _model_faults(config: Config) -> Iterator[str]:
    path = Path(config.model.path)
    if not path.is_dir():
        yield f"model.path = {str(path)!r}: no such directory; download the model first (the demo's: make demo-model)"
        return
    for needed, what in (("config.json", "its config.json"), ("*.safetensors", "a *.safetensors file")):
        if not any(path.glob(needed)):
            yield f"model.path = {str(path)!r}: the directory lacks {what}; save the model with save_pretrained"
            return
    context = model_facts(path).get("max_position_embeddings")
    if context is not None and config.rollout.max_model_len > context:
        yield (
            f"rollout.max_model_len = {config.rollout.max_model_len}: the model's context is {context} "
            f"(max_position_embeddings); lower it"
        )


def model_facts(path: Path) -> dict[str, Any]:
    """The model's config.json; the text part of a multimodal one."""
    facts: dict[str, Any] = json.loads((path / "config.json").read_text())
    return facts | facts.get("text_config", {})


def _data_faults(config: Config) -> Iterator[str]:
    yield from _missing("data.train", config.data.train)
    if config.evaluation is not None:
        yield from _missing("evaluation.data", config.evaluation.data)


def _missing(key: str, sources: tuple[Source, ...]) -> Iterator[str]:
    for source in sources:
        if not source.path.exists():
            yield f"{key} = {str(source.path)!r}: no such file; give a JSONL or Parquet file or a data set folder"

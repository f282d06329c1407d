"""The tokenizer of a model folder, without torch where that can be had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# These classes say of themselves that tokenizer.json is the whole truth, so no model-specific class is needed.
_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")


def load_tokenizer(path: Path | str) -> Any:
    """A transformers tokenizer. Raises ValueError when the folder has none.

    AutoTokenizer brings torch into the process (seconds, and hundreds of megabytes); it is used only where the model
    asks for a class of its own, so that engine and data always agree about the tokens.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"model.path: {folder}: no such folder; give a folder in Hugging Face format")
    if _is_plain(folder):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path: {folder}: its tokenizer cannot be loaded ({error})") from error


def _is_plain(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    if not (folder / "tokenizer.json").is_file() or not config.is_file():
        return False
    return json.loads(config.read_text(encoding="utf-8")).get("tokenizer_class") in _PLAIN

"""The tokenizer of a model folder, and prompts made with a real one."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from staleflow.data.prompts import Dataset, DataSettings, PromptSource
from staleflow.data.tokenizer import load_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a model has it: a tokenizer of one token per character, with a chat template."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    characters = ["<pad>", "<eos>", *(chr(c) for c in range(32, 127))]
    words = tokenizers.models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("model")
    fast.save_pretrained(folder)
    return folder


def test_prompts_through_a_chat_template_decode_to_their_text(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "2+2?", "answer": "4"}) + "\n")
    tokenizer = load_tokenizer(model)
    prompt = next(PromptSource(DataSettings((Dataset(path),), chat_template=True), tokenizer))
    assert prompt.text == "<user>2+2?<a>"
    assert tokenizer.decode(prompt.token_ids.tolist()) == prompt.text


def test_a_plain_tokenizer_does_not_bring_torch(model: Path) -> None:
    program = f"""
        import sys
        from staleflow.data.tokenizer import load_tokenizer
        assert load_tokenizer({str(model)!r})(["1"], add_special_tokens=True)["input_ids"] == [[19]]
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_a_folder_that_is_missing_or_holds_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: no such folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"model.path: .*cannot be loaded"):
        load_tokenizer(tmp_path)

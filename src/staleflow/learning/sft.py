"""Supervised warm start with the policy trainer (loss "sft"), watched on held-out problems.

    python -m staleflow.learning.sft MODEL_DIR DEMONSTRATIONS VALID OUT_DIR [--steps N] [--lr X] …

Trains for `steps` steps and then requires a held-out accuracy in `min_accuracy`..`max_accuracy`: a warm start for
reinforcement learning is to leave something to learn, and something to learn from. The accuracy is that of greedy
decoding against the exact answer. One process, on the CPU or one GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from staleflow.learning.batch import PackedBatch, pack, totals_of
from staleflow.learning.export import export_model, full_state
from staleflow.learning.settings import AlgorithmSettings, ModelSettings, OptimizerSettings
from staleflow.learning.trainer import PolicyTrainer
from staleflow.trajectories.schema import Finish, Trajectory

Match = Callable[[str, str], float]  # (response, answer) -> reward


@dataclass(frozen=True)
class SftSettings:
    """`batch_sequences` demonstrations a step; an evaluation every `eval_every` steps and at the end."""

    steps: int = 300
    batch_sequences: int = 16
    lr: float = 3e-3
    warmup_steps: int = 20
    eval_every: int = 80
    min_accuracy: float = 0.0
    max_accuracy: float = 1.0
    max_tokens: int = 64
    seed: int = 0
    dtype: str = "float32"


@dataclass(frozen=True)
class SftResult:
    steps: int
    loss: float
    accuracy: float
    wall_s: float


def read_jsonl(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return [json.loads(line) for line in file]


def demonstration(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str) -> Trajectory:
    """A demonstration as a trajectory of version 0: prompt, then response and EOS to be learned."""
    before = tokenizer.encode(prompt, add_special_tokens=False)
    after = [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]
    return Trajectory(
        group_id=0,
        member=0,
        v_traj=0,
        prompt_tokens=len(before),
        tokens=np.array(before + after, np.int32),
        logprobs=np.zeros(len(after), np.float32),
        segments=((0, len(after)),),
        finish=Finish.STOP,
    )


def batches(demonstrations: Sequence[Trajectory], settings: SftSettings) -> Iterator[PackedBatch]:
    """Shuffled passes over the demonstrations, without end."""
    rng = random.Random(settings.seed)
    queue: list[Trajectory] = []
    while True:
        if len(queue) < settings.batch_sequences:
            queue = rng.sample(list(demonstrations), len(demonstrations)) + queue
        chosen, queue = queue[-settings.batch_sequences :], queue[: -settings.batch_sequences]
        yield pack(chosen, [1.0] * len(chosen))


@torch.no_grad()
def greedy_responses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], max_tokens: int
) -> list[str]:
    """The most probable response to each prompt, without EOS; batched with a key-value cache."""
    inputs = tokenizer(
        list(prompts), return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
    ).to(model.device)
    out = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


class HeldOut:
    """Greedy accuracy on problems that are not trained on, with a plain copy of the policy."""

    def __init__(self, model_path: str, problems: Sequence[dict[str, str]], match: Match, max_tokens: int) -> None:
        self._copy = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, local_files_only=True).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        self._problems, self._match, self._max_tokens = problems, match, max_tokens

    def accuracy(self, weights: dict[str, Tensor]) -> float:
        self._copy.load_state_dict(weights, strict=False)  # tied weights are in there once
        prompts = [p["prompt"] for p in self._problems]
        responses = greedy_responses(self._copy, self._tokenizer, prompts, self._max_tokens)
        return float(np.mean([self._match(r, p["answer"]) for r, p in zip(responses, self._problems, strict=True)]))


def warm_start(
    model_path: str,
    demonstrations: Sequence[dict[str, str]],
    problems: Sequence[dict[str, str]],
    match: Match,
    out: Path,
    settings: SftSettings,
    *,
    report: Callable[[str], Any] = print,
) -> SftResult:
    """Train, evaluate, and write the model to `out` in Hugging Face format. Needs a default process group."""
    started = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    trainer = PolicyTrainer(
        ModelSettings(model_path, dtype=settings.dtype),
        OptimizerSettings(
            lr=settings.lr, warmup_steps=settings.warmup_steps, schedule="cosine", total_steps=settings.steps
        ),
        AlgorithmSettings(loss="sft"),
        device="cuda" if torch.cuda.is_available() else "cpu",
        seed=settings.seed,
    )
    held_out = HeldOut(model_path, problems, match, settings.max_tokens)
    shown = [demonstration(tokenizer, d["prompt"], d["response"]) for d in demonstrations]
    accuracy, step, metrics = 0.0, 0, {"loss": float("nan")}
    for step, batch in zip(range(1, settings.steps + 1), batches(shown, settings), strict=False):
        metrics = trainer.train_step(step - 1, [batch], totals_of([batch]))
        if step % settings.eval_every == 0 or step == settings.steps:
            accuracy = held_out.accuracy(full_state(trainer.model))
            report(
                f"warm start step {step}/{settings.steps}: loss {metrics['loss']:.4f}, held-out accuracy {accuracy:.3f}"
            )
    if not settings.min_accuracy <= accuracy <= settings.max_accuracy:
        raise ValueError(
            f"warm start ended at held-out accuracy {accuracy:.3f}, outside {settings.min_accuracy} to "
            f"{settings.max_accuracy}: change --steps (now {settings.steps}) or the demonstrations"
        )
    export_model(trainer.model, tokenizer, out)
    return SftResult(step, metrics["loss"], accuracy, time.monotonic() - started)


def load_match(name: str) -> Match:
    """`module:function` -> the function (response, answer) -> reward."""
    import importlib

    module, _, function = name.partition(":")
    if not function:
        raise ValueError(f"--match {name!r}: must be MODULE:FUNCTION")
    return getattr(importlib.import_module(module), function)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m staleflow.learning.sft", description="Supervised warm start.")
    for name in ("model", "demonstrations", "valid", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--match", default="staleflow.data.addition:exact_match")
    for name, default in vars(SftSettings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = vars(parser.parse_args(arguments))
    paths = [options.pop(name) for name in ("model", "demonstrations", "valid", "out")]
    match = load_match(options.pop("match"))
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, shown, valid, out = paths
        result = warm_start(str(model), read_jsonl(shown), read_jsonl(valid), match, out, SftSettings(**options))
    finally:
        dist.destroy_process_group()
    print(
        f"warm start: {result.steps} steps in {result.wall_s:.1f} s, loss {result.loss:.4f}, "
        f"held-out accuracy {result.accuracy:.3f} -> {out}"
    )


if __name__ == "__main__":
    main()

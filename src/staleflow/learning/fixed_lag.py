"""Which loss survives old data? Every step trains on what the policy of `lag` versions ago has sampled.

    python -m staleflow.learning.fixed_lag configs/demo.toml [--lag N] [--every N] [a.b=c …]

In a job, ages depend on how fast its parts happen to be; here all are `lag` (in the first steps the step's number), in
one process and without an engine. Two runs that differ in the loss alone see the same prompts and, for the first
`lag` + 1 steps, the same responses. Prints a line a step, a JSON object each; every `every` steps with the held-out
accuracy. Takes what it needs from a config of a whole run; the reward is that of the demo's task.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from staleflow.config import Config, load
from staleflow.data.addition import exact_match
from staleflow.learning.advantages import ADVANTAGES
from staleflow.learning.batch import pack, totals_of
from staleflow.learning.export import full_state
from staleflow.learning.sft import HeldOut, read_jsonl
from staleflow.learning.trainer import PolicyTrainer
from staleflow.trajectories.packed import PackedBatch
from staleflow.trajectories.partition import balance
from staleflow.trajectories.schema import Finish, Trajectory

Weights = dict[str, Tensor]
SHOWN = (
    "clip_fraction", "importance_weight", "entropy", "logprob", "approx_kl", "age_mean", "ratio_p01", "ratio_p99",
    "grad_norm",
)  # fmt: skip


class Sampler:
    """Responses by plain transformers, with their log-probabilities under the full distribution at `temperature`."""

    def __init__(self, path: str, max_tokens: int, temperature: float) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self._max_tokens, self._temperature = max_tokens, temperature

    @torch.no_grad()
    def sample(self, weights: Weights, prompts: Sequence[str], version: int, seed: int) -> list[Trajectory]:
        """One response a prompt."""
        torch.manual_seed(seed)
        self._model.load_state_dict(weights, strict=False)  # tied weights are in there once
        inputs = self._tokenizer(
            list(prompts), return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        )
        out = self._model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=self._max_tokens,
            do_sample=True,
            temperature=self._temperature,
            top_k=0,
            top_p=1.0,
            pad_token_id=self._tokenizer.pad_token_id,
            output_logits=True,
            return_dict_in_generate=True,
        )
        responses = out.sequences[:, inputs["input_ids"].shape[1] :]
        logits = torch.stack(out.logits, 1) / self._temperature
        scores = logits.log_softmax(-1).gather(-1, responses[..., None])[..., 0]
        lengths = inputs["attention_mask"].sum(1).tolist()
        rows = zip(inputs["input_ids"], lengths, responses, scores, strict=True)
        return [self._trajectory(prompt[-n:], response, s, version) for prompt, n, response, s in rows]

    def _trajectory(self, prompt: Tensor, response: Tensor, logprobs: Tensor, version: int) -> Trajectory:
        ends = (response == self._tokenizer.eos_token_id).nonzero()
        length = int(ends[0]) + 1 if len(ends) else len(response)
        return Trajectory(
            group_id=0,
            member=0,
            v_traj=version,
            prompt_tokens=len(prompt),
            tokens=torch.cat([prompt, response[:length]]).numpy().astype(np.int32),
            logprobs=logprobs[:length].numpy().copy(),
            segments=((version, length),),
            finish=Finish.STOP if len(ends) else Finish.LENGTH,
        )

    def reward(self, trajectory: Trajectory, answer: str) -> float:
        text = self._tokenizer.decode(trajectory.response, skip_special_tokens=True)
        return exact_match(str(text), answer) if trajectory.finish == Finish.STOP else 0.0


class Problems:
    """Shuffled training problems, the same for the same seed; a step's are those of its number."""

    def __init__(self, config: Config) -> None:
        self._rows = read_jsonl(Path(config.data.train[0].path))
        self._order = np.random.default_rng(config.run.seed).permutation(len(self._rows))
        self._groups, self._members = config.staleness.batch_groups, config.staleness.group_size

    def of(self, step: int) -> list[dict[str, str]]:
        """One entry a trajectory, group by group."""
        at = np.arange(step * self._groups, (step + 1) * self._groups) % len(self._order)
        return [self._rows[i] for i in self._order[at] for _ in range(self._members)]


def micro_batches(config: Config, sampled: Sequence[Trajectory], rewards: npt.ArrayLike) -> list[PackedBatch]:
    """As a trainer of one rank gets them."""
    table = np.reshape(rewards, (-1, config.staleness.group_size))
    advantages = ADVANTAGES[config.algorithm.advantage](table).reshape(-1)
    lengths = [len(t.tokens) for t in sampled]
    updates = config.algorithm.updates_per_step
    cut = balance(lengths, 1, config.trainer.microbatch_tokens, min_count=updates).microbatches[0]
    return [pack([sampled[i] for i in part], advantages[part].tolist()) for part in cut]


def run(config: Config, lag: int, every: int) -> Iterator[dict[str, Any]]:
    """`run.steps` steps; of each the reward of what it trained on, the trainer's metrics, maybe `held_out`, its greedy
    accuracy after the step. Needs a default process group.
    """
    seed, rollout = config.run.seed, config.rollout
    algorithm = replace(config.algorithm, temperature=rollout.temperature)
    trainer = PolicyTrainer(config.model, config.optimizer, algorithm, device="cpu", seed=seed)
    sampler, problems = Sampler(config.model.path, rollout.max_tokens, rollout.temperature), Problems(config)
    if config.evaluation is None:
        raise ValueError("evaluation.data: names the problems that are held out; set it")
    test = read_jsonl(Path(config.evaluation.data[0].path))[: config.evaluation.max_prompts]
    held_out = HeldOut(config.model.path, test, exact_match, rollout.max_tokens)
    versions = {0: full_state(trainer.model)}
    for step in range(config.run.steps):
        version, rows = max(0, step - lag), problems.of(step)
        sampled = sampler.sample(
            versions[version], [r["prompt"] for r in rows], version, hash((seed, step)) & 0xFFFF_FFFF
        )
        rewards = [sampler.reward(t, r["answer"]) for t, r in zip(sampled, rows, strict=True)]
        batches = micro_batches(config, sampled, rewards)
        metrics = trainer.train_step(step, batches, totals_of(batches))
        versions[step + 1] = full_state(trainer.model)
        versions.pop(step - lag, None)
        line = {"step": step, "reward": float(np.mean(rewards))} | metrics
        if (step + 1) % every == 0 or step + 1 == config.run.steps:
            line["held_out"] = held_out.accuracy(versions[step + 1])
        yield line


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m staleflow.learning.fixed_lag", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--lag", type=int, default=8)
    parser.add_argument("--every", type=int, default=5)
    options = parser.parse_intermixed_args(arguments)
    config = load(options.config, options.overrides)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for line in run(config, options.lag, options.every):
            kept = {name: line[name] for name in ("step", "reward", "held_out", *SHOWN) if name in line}
            print(json.dumps({k: float(f"{v:.4g}") for k, v in kept.items()}), flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

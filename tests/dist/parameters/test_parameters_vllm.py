"""Real engines pull under load: two FSDP2 trainer ranks, one node, an instance with tp 2 and one with tp 1.

Each segment of each trajectory, scored again by Hugging Face with the weights of the segment's version, must agree:
the version is labelled truly, all of it arrived, and no cache block of an older one was used.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parameters_engines import enter_role, start_engine
from parameters_world import Context, World

from staleflow.parameters.manifest import Manifest
from staleflow.parameters.publish import Publisher
from staleflow.parameters.pull import Puller
from staleflow.parameters.relay import Relay
from staleflow.parameters.store import NodeStore

pytestmark = [pytest.mark.vllm, pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(600)]
pytest.importorskip("vllm")

LAST_VERSION = 3
GAP = 1e-3  # float32
PROMPT_TOKENS = 150  # longer than a cache block: a stale block would show
HOST, TRAINERS, INSTANCES = 0, [1, 2], ([3, 4], [5])


def test_segments_agree_with_the_trainer_after_every_pull(tmp_path: Path) -> None:
    make_model(tmp_path)
    options = {"model": str(tmp_path)}
    ranks = [
        partial(host, **options),
        *(partial(trainer, **options) for _ in TRAINERS),
        *(partial(rollout, instance=index, **options) for index, ranks in enumerate(INSTANCES) for _ in ranks),
    ]
    with World(ranks) as world:
        told = world.finish(580)
    often, rarely = told[3][0], told[5][0]
    assert often["versions"] == list(range(LAST_VERSION + 1))
    assert len(rarely["versions"]) < len(often["versions"])  # each at its own time
    for found in (often, rarely):
        print(f"versions {found['versions']}: worst gap {found['gap']:.1e}, pulls {found['seconds']} s")
        assert found["gap"] < GAP
        assert found["segments"] > 1
    assert told[4][0]["versions"] == often["versions"]  # the tp peer


def make_model(path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False,
        eos_token_id=1, bos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(path)


def load_model(path: str) -> torch.nn.Module:
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def set_version(model: torch.nn.Module, version: int) -> None:
    """The weights of `version`, from everybody's same formula; DTensors get their rows."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    generator = torch.Generator().manual_seed(100 + version)
    for parameter in model.parameters():
        value = torch.randn(parameter.shape, generator=generator) * 0.05
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(value)


def host(context: Context, model: str) -> None:
    manifest = Manifest.from_model_dir(model, "float32")
    store = NodeStore.create(f"{context.token}-store", manifest)
    context.signal("store")
    group = context.group("publish", [*TRAINERS, HOST])
    relay = Relay(group, manifest, store, trainer_ranks_in_group=(0, 1))
    assert relay.ended.wait(500) and relay.failure is None
    for ranks in INSTANCES:
        for rank in ranks:
            context.await_signal(f"done {rank}", 500)
    store.close()


def trainer(context: Context, model: str) -> None:
    from torch.distributed.fsdp import fully_shard

    enter_role(context, "trainers", TRAINERS)
    policy = load_model(model)
    fully_shard(policy)
    publisher = Publisher(
        policy.named_parameters(), Manifest.from_model_dir(model, "float32"),
        context.group("publish", [*TRAINERS, HOST]), (0, 1), 64 << 10,
    )  # fmt: skip
    for version in range(LAST_VERSION + 1):
        set_version(policy, version)
        publisher.snapshot(version)
        if version < LAST_VERSION:
            context.await_signal(f"pulled {version}", 500)
    publisher.close()
    dist.destroy_process_group()


def rollout(context: Context, model: str, instance: int) -> None:
    ranks = INSTANCES[instance]
    context.await_signal("store")
    store = NodeStore.attach(f"{context.token}-store")
    group = context.group(f"tp {instance}", ranks)
    engine = start_engine(context, model, f"instance {instance}", ranks)
    puller = Puller(store, engine, partial(minimum, group))
    trajectories = Trajectories(engine)
    versions, seconds = [], []
    wanted = 0 if instance == 0 else LAST_VERSION
    while not versions or versions[-1] < LAST_VERSION:
        # The first instance takes every version; the other starts with any and then only takes the last.
        trajectories.interrupt()
        result = puller.pull(wanted if versions else 0, 200)
        versions.append(result.version)
        seconds.append(round(result.seconds, 3))
        if context.rank == INSTANCES[0][0]:
            context.signal(f"pulled {result.version}")
        wanted = result.version + 1 if instance == 0 else LAST_VERSION
        trajectories.go_on(result.version, steps=12)
    context.tell(
        {
            "versions": versions, "seconds": seconds, "segments": len(trajectories.segments[0]),
            "gap": trajectories.worst_gap(load_model(model)),
        }
    )  # fmt: skip
    engine.close()
    context.signal(f"done {context.rank}")


def minimum(group: dist.ProcessGroup, n: int) -> int:
    tensor = torch.tensor([n])
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MIN
    group.allreduce([tensor], options).wait()
    return int(tensor)


class Trajectories:
    """Four that live through all Pulls: tokens, log-probabilities, and segments [(version, first token)]."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.tokens = {i: [3 + (i + k) % 20 for k in range(PROMPT_TOKENS)] for i in range(4)}
        self.logprobs: dict[int, list[float]] = {i: [] for i in self.tokens}
        self.segments: dict[int, list[tuple[int, int]]] = {i: [] for i in self.tokens}

    def interrupt(self) -> None:
        self.engine.abort(list(self.tokens))

    def go_on(self, version: int, steps: int) -> None:
        from staleflow.engines.base import Request

        for tid, tokens in self.tokens.items():
            self.segments[tid].append((version, len(tokens)))
            self.engine.add(Request(tid=tid, tokens=tuple(tokens), max_new=300, temperature=1.0, seed=tid))
        for _ in range(steps):
            for delta in self.engine.step():
                self.tokens[delta.tid] += list(delta.tokens)
                self.logprobs[delta.tid] += list(delta.logprobs)

    def worst_gap(self, model: torch.nn.Module) -> float:
        """Largest |engine - Hugging Face at the segment's version| over all generated tokens."""
        gaps = [0.0]
        for version in sorted({version for found in self.segments.values() for version, _ in found}):
            set_version(model, version)
            for tid, tokens in self.tokens.items():
                bounds = [*self.segments[tid], (-1, len(tokens))]
                for (of, first), (_, last) in pairwise(bounds):
                    if of == version and last > first:
                        engine_side = torch.tensor(self.logprobs[tid][first - PROMPT_TOKENS : last - PROMPT_TOKENS])
                        gaps.append((engine_side - score(model, tokens[:last], first)).abs().max().item())
        return max(gaps)


@torch.no_grad()
def score(model: torch.nn.Module, tokens: list[int], first: int) -> torch.Tensor:
    logits = model(torch.tensor([tokens])).logits[0, first - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[first:])[:, None])[:, 0]

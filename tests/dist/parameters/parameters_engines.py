"""Real engines in a small world of processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from parameters_world import Context


def enter_role(context: Context, name: str, ranks: Sequence[int]) -> None:
    """The default process group of a rank is its own role, which is what FSDP2 and vLLM take for their world."""
    place = ranks.index(context.rank)
    os.environ.update(
        RANK=str(place), LOCAL_RANK=str(place), WORLD_SIZE=str(len(ranks)),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=context.token.rsplit("-", 1)[1],
    )  # fmt: skip
    store = dist.PrefixStore(name, context.store)
    dist.init_process_group("gloo", store=store, rank=place, world_size=len(ranks))


def start_engine(context: Context, model: str | Path, name: str, ranks: Sequence[int]) -> Any:
    """This rank's part of the vLLM instance `name` that these ranks make up."""
    from staleflow.engines.vllm import VllmEngine, VllmSettings, environment

    os.environ.update(environment(cpu=True))
    enter_role(context, name, ranks)
    place = ranks.index(context.rank)
    return VllmEngine(
        VllmSettings(
            model=Path(model), dtype="float32", seed=0, max_model_len=512, max_running=8, tensor_parallel=len(ranks),
            instance_name=f"{context.token}-{name.replace(' ', '-')}", instance_rank=place, device=place,
            gpu_memory_utilization=0.5, enforce_eager=True, kv_cache_tokens=None, top_p=1.0, top_k=0, stop=(),
        )
    )  # fmt: skip

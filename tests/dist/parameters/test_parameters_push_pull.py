"""Versions from trainers through relays and stores into engines, with real processes."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from parameters_world import MANIFEST, SHAPES, Context, DictEngine, World, weights
from torch import nn

from staleflow.parameters.publish import Publisher
from staleflow.parameters.pull import Puller
from staleflow.parameters.relay import Relay
from staleflow.parameters.store import NodeStore

pytestmark = pytest.mark.dist
VERSIONS = 4
SMALL_BUCKET = 4096  # several pieces per tensor


def trainer(context: Context, trainers: list[int], relays: list[int], delta: bool = False) -> None:
    """Publishes versions 0..VERSIONS-1 of a model whose rows are spread over the trainer ranks."""
    role = dist.PrefixStore("trainers", context.store)
    dist.init_process_group("gloo", store=role, rank=trainers.index(context.rank), world_size=len(trainers))
    model = Model()
    if len(trainers) > 1:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, ignored_params={model.scale})  # stays a plain tensor: FSDP2 shards no scalar
    parameters = {name.replace("_", "."): parameter for name, parameter in model.named_parameters()}
    group = context.group("publish", trainers + relays)
    publisher = Publisher(parameters.items(), MANIFEST, group, range(len(trainers)), SMALL_BUCKET, delta=delta)
    for version in range(VERSIONS):
        set_weights(parameters, version)
        publisher.snapshot(version)
        set_weights(parameters, 77)  # training goes on: the snapshot must not see this
        if version < VERSIONS - 1:
            context.await_signal(f"pulled {version}")
    publisher.close()
    context.tell(publisher.stats)
    dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES:
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.zeros(shape)))


@torch.no_grad()
def set_weights(parameters: dict[str, torch.Tensor], version: int) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, value in weights(version, torch.float32).items():
        target = parameters[name]
        if isinstance(target, DTensor):
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(value)


def host(context: Context, trainers: list[int], relays: list[int], readers: int) -> None:
    store = NodeStore.create(f"{context.token}-{context.rank}", MANIFEST)
    stored = []
    group = context.group("publish", trainers + relays)
    relay = Relay(
        group, MANIFEST, store, lambda version, seconds: stored.append(version),
        trainer_ranks_in_group=range(len(trainers)),
    )  # fmt: skip
    context.signal(f"store {context.rank}")
    while not store.all_mapped(readers):
        time.sleep(0.01)
    store.unlink()
    assert relay.ended.wait(60)
    relay.close()
    if relay.failure:
        raise relay.failure
    context.tell(stored)


def instance(context: Context, host_rank: int, reader: int, tp: list[int], count: int, instances: int) -> None:
    """Pulls every version and checks it bit by bit."""
    context.await_signal(f"store {host_rank}")
    store = NodeStore.attach(f"{context.token}-{host_rank}", reader)
    group = context.group(f"tp {tp[0]}", tp)
    engine = DictEngine()
    puller = Puller(store, engine, partial(minimum, group))
    for version in range(VERSIONS):
        result = puller.pull(version)
        assert engine.has(result.version), f"version {result.version} is not whole"
        assert store.read(exactly=result.version).checksum_ok()
        if context.store.add(f"count {version}", 1) == count:
            context.signal(f"pulled {version}")
        context.tell(result.version)


def minimum(group: dist.ProcessGroup, n: int) -> int:
    tensor = torch.tensor([n])
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MIN
    group.allreduce([tensor], options).wait()
    return int(tensor)


def test_one_trainer_one_node() -> None:
    ranks = [
        partial(host, trainers=[1], relays=[0], readers=1),
        partial(trainer, trainers=[1], relays=[0]),
        partial(instance, host_rank=0, reader=0, tp=[2], count=1, instances=1),
    ]
    with World(ranks) as world:
        told = world.finish()
    assert told[0] == [list(range(VERSIONS))]
    assert told[2] == list(range(VERSIONS))
    assert told[1][0].versions == VERSIONS


@pytest.mark.parametrize("delta", [False, True])
def test_two_fsdp_trainers_two_nodes_one_instance_with_tp_2(delta: bool) -> None:
    relays, trainers = [0, 3], [1, 2]
    ranks = [
        partial(host, trainers=trainers, relays=relays, readers=2),
        partial(trainer, trainers=trainers, relays=relays, delta=delta),
        partial(trainer, trainers=trainers, relays=relays, delta=delta),
        partial(host, trainers=trainers, relays=relays, readers=1),
        partial(instance, host_rank=0, reader=0, tp=[4, 5], count=3, instances=2),
        partial(instance, host_rank=0, reader=1, tp=[4, 5], count=3, instances=2),
        partial(instance, host_rank=3, reader=0, tp=[6], count=3, instances=2),
    ]
    with World(ranks) as world:
        told = world.finish()
    assert told[0] == told[3] == [list(range(VERSIONS))]
    for rank in (4, 5, 6):
        assert told[rank] == list(range(VERSIONS))

"""NCCL and FSDP2 in a group of one: the parts of a trainer rank that need a device but no neighbours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402


@pytest.fixture
def group_of_one(tmp_path) -> Iterator[None]:
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, device_id=torch.device("cuda:0")
    )
    yield
    dist.destroy_process_group()


def test_nccl_broadcast(group_of_one: None) -> None:
    weights = torch.arange(1000, dtype=torch.bfloat16, device="cuda")
    dist.broadcast(weights, src=0)
    dist.all_reduce(weights)
    torch.cuda.synchronize()
    assert torch.equal(weights.cpu(), torch.arange(1000, dtype=torch.bfloat16))


def test_one_fsdp2_step_lowers_the_loss(group_of_one: None) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).cuda()
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randn(32, 64, device="cuda")
    losses = []
    for _ in range(3):
        loss = (model(data) - data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]

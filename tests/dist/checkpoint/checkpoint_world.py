"""One trainer rank of a small world: `python checkpoint_world.py RANK SIZE FOLDER DEED MODEL`.

save   train two steps, save, go on training while it is written; keeps the weights at the save
early  save before the first step
load   load, keep the weights, train one step
full   save into a folder that cannot be written
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from staleflow.checkpoint.trainer_state import SaveResult, TrainerCheckpoints, load
from staleflow.learning.batch import PackedBatch, pack
from staleflow.learning.export import full_state
from staleflow.learning.settings import AlgorithmSettings, ModelSettings, OptimizerSettings
from staleflow.learning.trainer import PolicyTrainer
from staleflow.trajectories.schema import Trajectory


def batch(step: int) -> list[PackedBatch]:
    rng = np.random.default_rng(step)
    tokens = rng.integers(3, 30, 20).astype(np.int32)
    one = Trajectory(0, 0, 0, 5, tokens, np.full(15, -2.0, np.float32), ((0, 15),))
    return [pack([one], [float(step % 3) - 0.5])]


def keep(policy: PolicyTrainer, path: Path) -> None:
    state = full_state(policy.model)
    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)


def wait(checkpoints: TrainerCheckpoints) -> SaveResult:
    while (result := checkpoints.finished()) is None:
        time.sleep(0.02)
    return result


def main() -> None:
    rank, size, folder, deed, model = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5]
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{deed}-{size}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    policy = PolicyTrainer(ModelSettings(model), OptimizerSettings(lr=1e-2), AlgorithmSettings(), device="cpu", seed=0)
    checkpoints = TrainerCheckpoints(policy)
    if deed == "load":
        load(policy, folder / "trainer")
        keep(policy, folder / f"loaded-{size}.safetensors")
        steps = [s["step"].item() for s in policy.optimizer.state.values()]
        assert set(steps) == {2.0}, steps
        metrics = policy.train_step(2, batch(2))
        assert metrics["grad_norm"] > 0
    elif deed == "full":
        (folder / "blocked").touch()
        checkpoints.save(1, folder / "blocked" / "trainer")
        result = wait(checkpoints)
        assert result.error is not None and result.version == 1, result
        policy.train_step(0, batch(0))  # the run goes on
    else:
        if deed == "save":
            policy.train_step(0, batch(0))
            policy.train_step(1, batch(1))
        keep(policy, folder / f"{deed}.safetensors")
        checkpoints.save(2, folder / ("trainer" if deed == "save" else deed))
        policy.train_step(2, batch(2))
        policy.train_step(3, batch(3))
        result = wait(checkpoints)
        assert result.error is None, result
        if deed == "early":
            fresh = PolicyTrainer(
                ModelSettings(model), OptimizerSettings(lr=1e-2), AlgorithmSettings(), device="cpu", seed=0
            )
            load(fresh, folder / deed)
            assert not fresh.optimizer.state
            fresh.train_step(2, batch(2))
            fresh.train_step(3, batch(3))
            same, other = full_state(fresh.model), full_state(policy.model)
            assert all(torch.equal(same[name], other[name]) for name in same)
    dist.barrier()


main()

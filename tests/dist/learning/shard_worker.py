"""One rank of `test_learning_sharding.py`: trains the same global batch in several settings and writes what came out.

argv: rank, world size, store file, model directory root, output file, checkpoint directory
"""

import itertools
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from staleflow.learning.batch import pack, totals_of
from staleflow.learning.export import full_state
from staleflow.learning.settings import AlgorithmSettings, ModelSettings, OptimizerSettings
from staleflow.learning.trainer import PolicyTrainer
from staleflow.trajectories.schema import Trajectory

rank, world = int(sys.argv[1]), int(sys.argv[2])
models, out, checkpoint = Path(sys.argv[4]), Path(sys.argv[5]), Path(sys.argv[6])

CASES = {
    "dense": ({"path": str(models / "dense")}, {"kl_coefficient": 0.1}),
    "several_updates": ({"path": str(models / "dense")}, {"updates_per_step": 2, "proximal": "recompute"}),
    "recomputed_activations": ({"path": str(models / "dense"), "activation_checkpointing": True}, {}),
    "offloaded": ({"path": str(models / "dense"), "cpu_offload": True}, {}),
    "chunked_logits": ({"path": str(models / "dense"), "logits_chunk_tokens": 7}, {}),
    "bfloat16": ({"path": str(models / "dense"), "dtype": "bfloat16"}, {}),
    "experts": ({"path": str(models / "experts")}, {"aggregation": "sequence_mean"}),
    "tied": ({"path": str(models / "tied")}, {}),
}


def trajectory(i: int) -> Trajectory:
    rng = np.random.default_rng(i)
    prompt, response = int(rng.integers(1, 6)), int(rng.integers(1, 14))
    return Trajectory(
        group_id=i // 2,
        member=i % 2,
        v_traj=0,
        prompt_tokens=prompt,
        tokens=rng.integers(0, 37, prompt + response).astype(np.int32),
        logprobs=-rng.uniform(2.5, 4.5, response).astype(np.float32),
        segments=((0, response),),
    )


def trainer_for(model: dict, algorithm: dict) -> PolicyTrainer:
    return PolicyTrainer(
        ModelSettings(**model),
        OptimizerSettings(lr=1e-2, max_grad_norm=0.5, weight_decay=0.1),
        AlgorithmSettings(**algorithm),
        device="cpu",
        seed=3,
    )


def batches_of_rank() -> list:
    """24 trajectories in 8 micro-batches of unequal size, two halves of the step; the ranks take turns."""
    bounds = np.cumsum([0, 2, 4, 3, 3, 1, 5, 4, 2])
    parts = [list(range(a, b)) for a, b in itertools.pairwise(bounds)]
    return [pack([trajectory(i) for i in p], [float(np.sin(i)) for i in p]) for p in parts[rank::world]]


def run(model: dict, algorithm: dict) -> dict:
    trainer = trainer_for(model, algorithm)
    totals = totals_of([pack([trajectory(i) for i in range(24)], [0.0] * 24)])
    metrics = [trainer.train_step(step, batches_of_rank(), totals) for step in range(2)]
    return {"metrics": metrics, "state": full_state(trainer.model), "trainer": trainer}


def resumed() -> dict:
    """A third step, from the state that the two ranks saved after their second."""
    trainer = trainer_for(*CASES["dense"])
    state = trainer.state_dict()
    dcp.load(state, checkpoint_id=checkpoint)
    trainer.load_state_dict(state)
    return third_step(trainer)


def third_step(trainer: PolicyTrainer) -> dict:
    totals = totals_of([pack([trajectory(i) for i in range(24)], [0.0] * 24)])
    metrics = trainer.train_step(2, batches_of_rank(), totals)
    return {"metrics": [metrics], "state": full_state(trainer.model)}


torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[3], world), rank=rank, world_size=world)
results = {name: run(*case) for name, case in CASES.items()}
trainers = {name: result.pop("trainer") for name, result in results.items()}
if world == 2:
    dcp.save(trainers["dense"].state_dict(), checkpoint_id=checkpoint)
    results["resumed"] = third_step(trainers["dense"])
else:
    results["resumed"] = resumed()
if rank == 0:
    torch.save(results, out)
dist.barrier()
dist.destroy_process_group()

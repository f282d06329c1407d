"""The plan: who does what, the same on every rank, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow import config
from staleflow.config import ConfigError
from staleflow.jobs.describe import describe
from staleflow.jobs.plan import Node, plan, spread

DEMO = "configs/demo.toml"
GOLDEN = """\
demo: 4 ranks on 1 node(s); policy staleflow, eta 2, {groups} groups x {size} a step
localhost  shared memory {mib} MiB for rings and arena, and two versions of the model
  rank 0    host + coordinator
  rank 1    trainer   device 0
  rank 2    rollout   device 1  instance 0, tensor-parallel rank 0
  rank 3    rollout   device 2  instance 1, tensor-parallel rank 0
groups
  trainers     ranks 1  (their own world)
  instance-0   ranks 2  (their own world)
  instance-1   ranks 3  (their own world)
  publish      ranks 1 0
relays  ranks 0 land each version in their node's store
memory, estimated from the model's shape
  model   0.49 billion parameters
  trainer device  27.18 GiB: state 7.36 GiB, snapshot 1.84 GiB, gathered 1.18 GiB, activations 9.84 GiB, logits 6.96 GiB
  rollout device  weights 1.84 GiB, cache 24.0 KiB a token (0.00 GiB for the longest trajectory)
  host    parameter store 3.68 GiB on nodes with rollout
warning: rollout.top_k = 7: tokens come from a truncated distribution, log-probabilities do not; set 0"""


def test_demo_plan_in_words() -> None:
    demo = config.load(DEMO, ["model.path=Qwen2.5-0.5B", "rollout.top_k=7"])
    job = plan(demo, spread(demo, 1))
    s = demo.staleness
    expected = GOLDEN.format(groups=s.batch_groups, size=s.group_size, mib=job.shm_bytes(0) >> 20)
    assert describe(demo, job) == expected


def test_two_nodes_with_tensor_parallelism() -> None:
    demo = config.load(DEMO, ["trainer.ranks=2", "rollout.instances=3", "rollout.tensor_parallel=2"])
    job = plan(demo, (Node("a", 5), Node("b", 5)))
    assert job.hosts == (0, 5) and job.trainers == (1, 2)
    assert [job.instance(i) for i in range(3)] == [(3, 4), (6, 7), (8, 9)]
    assert job.relays == (0, 5)
    assert [r.device for r in job.devices_of(1)] == [0, 1, 2, 3]


def test_a_node_without_rollout_has_no_relay() -> None:
    demo = config.load(DEMO, ["trainer.ranks=2", "rollout.instances=1"])
    assert plan(demo, (Node("a", 3), Node("b", 2))).relays == (3,)


def test_wrong_number_of_ranks_says_how_many() -> None:
    with pytest.raises(ConfigError, match=r"3 ranks started on 1 node.*4 planned"):
        plan(config.load(DEMO), (Node("a", 3),))


def test_an_instance_never_lies_across_nodes() -> None:
    demo = config.load(DEMO, ["rollout.tensor_parallel=2"])
    with pytest.raises(ConfigError, match="would lie across node 'a'"):
        plan(demo, (Node("a", 3), Node("b", 4)))


@given(trainers=st.integers(1, 8), instances=st.integers(1, 12), nodes=st.integers(1, 8))
def test_every_rank_has_exactly_one_role(trainers: int, instances: int, nodes: int) -> None:
    demo = config.load(DEMO, [f"trainer.ranks={trainers}", f"rollout.instances={instances}"])
    nodes = min(nodes, demo.device_ranks)
    job = plan(demo, spread(demo, nodes))
    assert job.world_size == nodes + trainers + instances
    assert [r.rank for r in job.ranks] == list(range(job.world_size))
    assert len(job.hosts) == nodes and len(job.trainers) == trainers and job.instances == instances
    for n in range(nodes):
        assert [r.device for r in job.devices_of(n)] == list(range(job.nodes[n].ranks - 1))
    assert set(job.relays) == {job.hosts[r.node] for r in job.ranks if r.role == "rollout"}


def test_plan_needs_neither_torch_nor_vllm() -> None:
    """And no numpy either: what it imports is what a login node waits for."""
    program = (
        "import sys; from staleflow.cli import main; code = main(['plan', 'configs/demo.toml', '--json']);"
        "heavy = {'torch', 'vllm', 'transformers'} & set(sys.modules); sys.exit(f'imported {heavy}' if heavy else code)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["relays"] == [0]


def test_micro_batches_fit_into_the_trainers_ring() -> None:
    """Two of the largest fit into the ring, whatever the lengths of the trajectories in them."""
    from staleflow.jobs.plan import DOWN_RECORD_SHARE
    from staleflow.trajectories import microbatch
    from staleflow.trajectories.schema import record_bytes

    demo = config.load(DEMO)
    job = plan(demo, spread(demo, 1))
    limit = demo.trainer.microbatch_tokens
    for prompt, response in ((1, 1), (4, 2), (20, 96), (20, 1)):
        n = limit // (prompt + response)
        nbytes = microbatch.encoded_bytes([record_bytes(prompt, response, min(8, response))] * n)
        assert nbytes <= job.trainer_rings.down_bytes // DOWN_RECORD_SHARE, (prompt, response)


def test_configs_folder_is_where_tests_run() -> None:
    assert Path(DEMO).exists()

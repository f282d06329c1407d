"""Every reference config parses, plans on the machine it is written for, fits its memory, and has an unbiased loss."""

from pathlib import Path

import pytest

from staleflow.config import load
from staleflow.jobs.plan import plan, spread
from staleflow.learning import memory
from staleflow.learning.sampling import bias_warnings

ROOT = Path(__file__).parents[3] / "configs" / "reference"
CONFIGS = sorted(ROOT.glob("*.toml"))
SMALLEST_CARD = {"starter_1gpu": 24 * memory.GIB, "starter_2gpu": 24 * memory.GIB}
SHARED = {"starter_1gpu"}  # trainer and engine on one card


def test_there_are_reference_configs():
    assert len(CONFIGS) == 10


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_reference_config_plans_fits_and_is_unbiased(path):
    config = load(path)
    gpus = int(path.stem.rsplit("_", 1)[1].removesuffix("gpu"))
    devices = 2 if path.stem in SHARED else gpus
    assert plan(config, spread(config, max(gpus // 8, 1))).world_size == devices + max(gpus // 8, 1)
    lines = memory.describe(config)
    assert lines[0].startswith("model ")
    shape, m = memory.model_shape(config.model.path), config.model
    need = memory.trainer_memory(
        shape,
        ranks=config.trainer.ranks,
        microbatch_tokens=config.trainer.microbatch_tokens,
        activation_checkpointing=m.activation_checkpointing,
        logits_chunk_tokens=m.logits_chunk_tokens,
    )
    card = SMALLEST_CARD.get(path.stem, 80 * memory.GIB)
    taken = config.rollout.gpu_memory_utilization if path.stem in SHARED else 0.0
    assert need.total_bytes < (0.85 - taken) * card
    weights = memory.rollout_weight_bytes(shape, tensor_parallel=config.rollout.tensor_parallel)
    room = config.rollout.gpu_memory_utilization * card - weights
    cache = shape.kv_bytes_per_token() * config.longest_tokens / config.rollout.tensor_parallel
    assert room > 2 * cache, "not even two longest trajectories side by side"
    a, r = config.algorithm, config.rollout
    same = {"engine_dtype": m.dtype, "trainer_dtype": m.dtype}
    assert bias_warnings(a, eta=config.staleness.eta, top_p=r.top_p, top_k=r.top_k, stop=r.stop, **same) == []

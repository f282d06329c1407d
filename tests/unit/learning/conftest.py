"""A tiny model on disk, and a role of one rank: the default group that the trainer takes for its world."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from staleflow.trajectories.schema import Finish, Trajectory


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():  # the warm start ends its own world
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Directory of a Qwen2 with grouped heads and weights large enough that attention matters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=37,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    out = tmp_path_factory.mktemp("tiny")
    Qwen2ForCausalLM(config).save_pretrained(out)
    return str(out)


@pytest.fixture
def trajectories():
    """Prompt and response lengths of all kinds, also a response of one token; segments of versions 3 and 4."""
    rng = np.random.default_rng(5)

    def one(member, prompt, response):
        first = response // 2
        segments = tuple(s for s in ((3, first), (4, response - first)) if s[1])
        return Trajectory(
            group_id=7,
            member=member,
            v_traj=segments[0][0],
            prompt_tokens=prompt,
            tokens=rng.integers(0, 37, prompt + response).astype(np.int32),
            logprobs=-rng.uniform(1, 5, response).astype(np.float32),
            segments=segments,
            finish=Finish.STOP,
        )

    return [one(i, p, r) for i, (p, r) in enumerate([(3, 5), (1, 1), (4, 12), (2, 30), (6, 2)])]

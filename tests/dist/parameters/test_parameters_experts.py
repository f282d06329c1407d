"""A mixture of experts in the real engine: after each Pull it scores like the trainer's model of the same version."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from parameters_engines import start_engine
from parameters_world import Context, World

from staleflow.parameters.file import File, FileSource
from staleflow.parameters.manifest import Manifest
from staleflow.parameters.publish import Publisher
from staleflow.parameters.pull import Puller
from tests.moe import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]
pytest.importorskip("vllm")

GAP = 1e-4  # float32
VERSIONS = 3
TOKENS = [3 + 7 * i % 50 for i in range(100)]


def test_experts_agree_with_the_trainer_after_every_pull(tmp_path: Path) -> None:
    with World([partial(trainer_and_engine, path=str(tmp_path))]) as world:
        gaps = world.finish(280)[0][0]
    print(f"largest |difference| of a log-probability at each version: {gaps}")
    assert len(gaps) == VERSIONS and max(gaps) < GAP


def trainer_and_engine(context: Context, path: str) -> None:
    """Both in one process, by turns: transformers keeps the experts stacked, the files of the model apart."""
    model = make_model(path)
    manifest = Manifest.from_model_dir(path, "float32")
    versions = Path(path, "versions")
    publisher = Publisher(model.named_parameters(), manifest, None, transport=File(versions, manifest, 0, 1))
    engine = start_engine(context, path, "experts", [0])
    puller = Puller(FileSource(versions, manifest), engine)
    gaps = []
    for version in range(VERSIONS):
        set_version(model, version)
        publisher.snapshot(version)
        assert puller.pull(version, 60).version == version
        gaps.append((torch.tensor(engine.score(TOKENS)) - score(model)).abs().max().item())
    context.tell(gaps)
    publisher.close()
    engine.close()


@torch.no_grad()
def set_version(model: torch.nn.Module, version: int) -> None:
    torch.manual_seed(100 + version)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.15)


@torch.no_grad()
def score(model: torch.nn.Module) -> torch.Tensor:
    logprobs = model(torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0]

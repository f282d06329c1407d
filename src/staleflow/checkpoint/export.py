"""`staleflow export RUN DIR`: a checkpoint as a Hugging Face model that transformers and vLLM load.

One process reads what any number of trainer ranks wrote; the weights pass through host memory once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from staleflow.checkpoint import layout
from staleflow.checkpoint.layout import CheckpointError
from staleflow.config import Config, ConfigError, load

REFUSED = 2
DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        config, place = _find(parsed.run, parsed.step, parsed.best)
        _require_empty(parsed.out)
        dtype = export(config, place, parsed.out, parsed.dtype)
    except (CheckpointError, ConfigError) as error:
        print(f"staleflow: {error}", file=sys.stderr)
        return REFUSED
    print(f"{place} -> {parsed.out} ({dtype})")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="staleflow export", description="Write a checkpoint as a Hugging Face model.")
    parser.add_argument("run", type=Path, help="the run's directory, runs/NAME")
    parser.add_argument("out", type=Path, help="the folder to write; must not hold a model yet")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="training steps done; default: the newest checkpoint")
    which.add_argument("--best", action="store_true", help="the checkpoint that did best on held-out prompts")
    parser.add_argument("--dtype", choices=DTYPES, help="default: that of the model the run began with")
    return parser


def _find(run_dir: Path, step: int | None, best: bool) -> tuple[Config, Path]:
    """The resolved config of the run, and the checkpoint that is meant."""
    if not (run_dir / "config.toml").exists():
        raise CheckpointError(f"{run_dir}: no run directory (it has no config.toml); give runs/NAME")
    config = load(run_dir / "config.toml")
    if best:
        found = layout.best(run_dir)
        if found is None:
            raise CheckpointError(
                f"{run_dir}: no best checkpoint: none has been evaluated; let checkpoint.every_steps and "
                "evaluation.every_steps meet at common steps, or leave --best out"
            )
        place: Path | None = found[0]
    elif step is None:
        place = layout.latest(run_dir)
    else:
        named = [p for p in layout.complete(run_dir) if layout.version_of(p) == step]
        place = named[-1] if named else None
    if place is None:
        there = ", ".join(str(layout.version_of(p)) for p in layout.complete(run_dir)) or "none"
        raise CheckpointError(
            f"{run_dir}: no checkpoint{'' if step is None else f' of step {step}'}; there are: {there}"
        )
    return config, place


def _require_empty(out: Path) -> None:
    if (out / "config.json").exists():
        raise CheckpointError(f"{out}: there is a model already; give another folder, or remove it")


def export(config: Config, place: Path, out: Path, dtype: str | None = None) -> str:
    """Write the model of a checkpoint, with the tokenizer where there is one, to `out`; returns the dtype written."""
    import torch
    import torch.distributed.checkpoint as dcp
    from transformers import AutoModelForCausalLM

    from staleflow.checkpoint.trainer_state import MODEL
    from staleflow.data.tokenizer import load_tokenizer

    model = AutoModelForCausalLM.from_pretrained(config.model.path, local_files_only=True, dtype=torch.float32)
    chosen = dtype or _dtype_of(config.model.path)
    reader = dcp.FileSystemReader(place / layout.TRAINER)
    stored = reader.read_metadata().state_dict_metadata
    state = {f"{MODEL}.{name}": tensor for name, tensor in model.state_dict().items()}
    _require_all(state, stored.keys(), place)
    dcp.load({name: t for name, t in state.items() if name in stored}, storage_reader=reader, no_dist=True)
    model.to(getattr(torch, chosen)).save_pretrained(out)
    if any(Path(config.model.path).glob("tokenizer*")):
        load_tokenizer(config.model.path).save_pretrained(out)
    return chosen


def _require_all(state: Mapping[str, Any], stored: Collection[str], place: Path) -> None:
    """Every tensor is stored, by itself or as the one that it is tied to."""
    there = {tensor.data_ptr() for name, tensor in state.items() if name in stored}
    missing = [name for name, tensor in state.items() if tensor.data_ptr() not in there]
    if missing:
        raise CheckpointError(
            f"{place}: {missing[0]} is not in it; model.path is not the model that this run has trained"
        )


def _dtype_of(path: str) -> str:
    from transformers import AutoConfig

    dtype = AutoConfig.from_pretrained(path, local_files_only=True).dtype
    return "float32" if dtype is None else str(dtype).removeprefix("torch.")

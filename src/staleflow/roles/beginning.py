"""Where an attempt begins: rank 0 decides it from the disk, and tells the others before they need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from staleflow.checkpoint.recovery import Kept, Resume
from staleflow.config import Config, ConfigError
from staleflow.data.prompts import PromptSource
from staleflow.jobs.runtime import Job
from staleflow.trajectories.schema import trajectory_id

KEY = "start"


@dataclass(frozen=True)
class Start:
    """`version` is published first; `trainer` is the folder of weights and optimizer, None: those of `model.path`."""

    version: int
    trainer: str | None


def tell_start(job: Job, start: Start) -> None:
    job.post(KEY, asdict(start))


def wait_for_start(job: Job) -> Start:
    return Start(**job.read(KEY, job.config.fault.start_timeout_s, "rank 0 (host)"))


def restore_prompts(prompts: PromptSource, resume: Resume) -> None:
    """Prompts of surviving groups are not drawn again; those of lost ones come first. Raises ConfigError."""
    held = set(resume.prompt_of.values())
    state = resume.prompts
    if state is None:  # lost before its first checkpoint: nothing is settled
        state = prompts.state_dict() | {"next": 1 + max(held, default=-1)}
    try:
        prompts.load_state_dict(state, held)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def core_state(resume: Resume, prompts: PromptSource, config: Config) -> dict[str, Any]:
    """What the coordinator core loads (its `dump` has this form): every outstanding trajectory waits or is complete."""
    return {
        "groups": [_group(g, there, resume, prompts, config) for g, there in resume.members.items()],
        "last_group": resume.next_group - 1,
        "last_command": 0,
        "no_more_data": False,
        "discarded": {},
        "counts": {},
    }


def _group(
    group_id: int, there: Mapping[int, tuple[int, bool]], resume: Resume, prompts: PromptSource, config: Config
) -> dict[str, Any]:
    tids = {member: trajectory_id(group_id, member) for member in there}
    done = [tids[member] for member, (_, occupied) in there.items() if occupied]
    return {
        "id": group_id,
        "prompt_tokens": len(prompts.prompt(resume.prompt_of[group_id]).token_ids),
        "max_new_tokens": config.rollout.max_tokens,
        "expected_tokens": None,
        "size": config.members,
        "placed": config.members,
        "complete": len(done) == config.staleness.group_size,
        "rewards": [(tid, resume.kept[tid].reward) for tid in done],
        "works": [_work(tids[member], version, resume.kept[tids[member]]) for member, (version, _) in there.items()],
    }


def _work(tid: int, version: int, kept: Kept) -> list[Any]:
    """[tid, tokens, V_traj, oldest version that may go on with it, whether it is complete]"""
    newest = kept.segments[-1][0] if kept.segments else version
    return [tid, kept.tokens, version, max(version, newest), kept.generated]

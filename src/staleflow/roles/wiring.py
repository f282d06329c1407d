"""Puts a rank together from its parts: what `jobs.entry` calls once the job has met."""

from __future__ import annotations

from typing import TextIO

from staleflow.jobs.runtime import Job


def play(job: Job, console: TextIO) -> int:
    """Play this rank's role to the end; returns the exit code."""
    match job.me.role:
        case "host":
            from staleflow.roles.wiring_host import play_host

            return play_host(job, console)
        case "trainer":
            from staleflow.roles.wiring_device import play_trainer

            return play_trainer(job)
        case "rollout":
            from staleflow.roles.wiring_device import play_rollout

            return play_rollout(job)

"""What the job makes of the news that follow a node's death, in whatever order they come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from staleflow.config import load
from staleflow.jobs.plan import Node, plan
from staleflow.roles import messages as m
from staleflow.roles.survival import RELAY_WAITS_S, SETTLES_S, Holdings, Survival


class Job:
    """Two nodes: host, trainer and an instance on the first, host and two instances on the second."""

    def __init__(self) -> None:
        config = load(
            "configs/demo.toml", ["rollout.instances=3", "fault.survive_rollout=true", "checkpoint.every_steps=4"]
        )
        job_plan = plan(config, [Node("one", 3), Node("two", 3)])
        self.sent: list[Any] = []
        core: Any = SimpleNamespace(lost=lambda instance, known: None)
        checkpointing: Any = SimpleNamespace(leave_out=lambda node: None)
        holdings = Holdings({}, {}, {}, {}, {}, {0, 1})
        self.survival = Survival(
            config, job_plan, core, holdings, checkpointing, None, lambda node, message: self.sent.append(message),
            lambda group: pytest.fail("no prompt is needed"), lambda note: None,
        )  # fmt: skip

    def lose_node(self, now_s: float) -> None:
        assert self.survival.node_lost(1, "silent", now_s, starting=False)

    def verdict(self, until_s: float) -> str | None:
        """The first reason to end, if there is one until then."""
        return next((why for t in range(int(until_s)) if (why := self.survival.turn(float(t))) is not None), None)

    @property
    def regrouped(self) -> list[int]:
        return [message.generation for message in self.sent if isinstance(message, m.Regroup)]


@pytest.mark.parametrize("told_s", [0.0, 0.5, SETTLES_S + 5], ids=["before", "while it settles", "after"])
def test_a_relay_that_the_lost_node_stopped_does_not_end_the_job(told_s: float) -> None:
    job = Job()
    if told_s == 0.0:
        assert job.survival.relay_stopped("the relay of node 0 stopped", 0, 0.0)
    job.lose_node(0.1)
    if 0.0 < told_s < SETTLES_S:
        assert job.survival.relay_stopped("the relay of node 0 stopped", 0, told_s)
    assert job.verdict(told_s + 3) is None
    assert job.regrouped == [1]
    if told_s > SETTLES_S:
        assert job.survival.relay_stopped("the relay of node 0 stopped", 0, told_s)
    assert job.verdict(told_s + 2 * RELAY_WAITS_S) is None


def test_a_relay_that_stopped_for_no_lost_node_ends_it() -> None:
    job = Job()
    assert job.survival.relay_stopped("damaged", 0, 0.0)
    assert job.verdict(2 * RELAY_WAITS_S) == "damaged"
    after = Job()
    after.lose_node(0.0)
    assert after.verdict(3) is None and after.regrouped == [1]
    assert after.survival.relay_stopped("damaged", 1, 3.0)
    assert after.verdict(3 + 2 * RELAY_WAITS_S) == "damaged"

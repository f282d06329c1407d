"""`fault.survive_rollout`, a host's side: carries out what `roles.survival` decides.

consumes      LeaveOut, Adopt, Regroup
waits for     (own thread) the members of a new publish group, at most the collectives' time limit
unblocked by  trainers and other hosts, which all get the same Regroup
produces      the end of an instance; finished trajectories, as if they had been generated here; a new relay
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from staleflow.checkpoint import layout
from staleflow.jobs.runtime import Job
from staleflow.parameters.relay import Relay
from staleflow.roles import messages as m
from staleflow.roles import plane
from staleflow.roles.host import Host
from staleflow.roles.messages import Kind
from staleflow.trajectories.spool import FrameKind, read_segment, segments_in

log = logging.getLogger(__name__)


class Survivor:
    """`start_relay(group, ranks, generation)` makes a relay over a new group; None on a node without one."""

    def __init__(
        self, job: Job, host: Host, relay: Relay | None, start_relay: Callable[[Any, Any, int], Relay]
    ) -> None:
        self._job, self._host, self.relay, self._start_relay = job, host, relay, start_relay
        self._thread: threading.Thread | None = None

    def take(self, inbox: Sequence[m.ToHost]) -> list[m.ToHost]:
        """Carry out what is for it; returns the rest."""
        rest = []
        for message in inbox:
            match message:
                case m.LeaveOut(instance=instance):
                    self._leave_out(instance)
                case m.Adopt():
                    self._adopt(message)
                case m.Regroup():
                    self._regroup(message)
                case _:
                    rest.append(message)
        return rest

    def _leave_out(self, instance: int) -> None:
        """Peers of a lost rank may hang in a collective with it: they are killed. One that failed leaves by itself."""
        for link in self._host.links:
            if link.plan.instance == instance and not link.gone:
                link.gone = True
                if self._job.alive(link.plan.rank):
                    with suppress(ProcessLookupError):
                        os.kill(self._job.nodes_of[link.plan.rank]["pid"], signal.SIGKILL)

    def _adopt(self, order: m.Adopt) -> None:
        """Raises RuntimeError when the spool of the lost node lacks what it had told of."""
        wanted = set(order.tids)
        self._host.learn(order.prompts)
        for name, path in segments_in(layout.spool_dir(self._job.run_dir)).items():
            if name.node == order.node and name.attempt == self._job.attempt:
                for frame in read_segment(path):
                    if frame.kind is FrameKind.FINISHED and frame.tid in wanted:
                        wanted.discard(frame.tid)
                        self._host.adopt(frame.tid, frame.payload)
        if wanted:
            raise RuntimeError(f"{len(wanted)} finished trajectories of lost node {order.node} are not in its spool")

    def _regroup(self, order: m.Regroup) -> None:
        for link in self._host.links:
            if link.plan.role == "trainer":
                link.send(Kind.REGROUP, m.encode(order))
        if self._job.rank in order.ranks:
            self._thread = threading.Thread(target=self._new_relay, args=(order,), name="regroup", daemon=True)
            self._thread.start()

    def _new_relay(self, order: m.Regroup) -> None:
        try:
            if self.relay is not None:
                self.relay.abandon()
            group = self._job.group(plane.publish_name(order.generation), tuple(order.ranks))
            self.relay = self._start_relay(group, tuple(order.ranks), order.generation)
        except Exception as error:
            log.exception("no new publish group")
            self._host.on_relay_error(error, order.generation)

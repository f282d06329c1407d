"""Compares two accounts of the same trajectories: the protocol's and the trajectory server's. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from staleflow.protocol.errors import ProtocolError

Counters = Mapping[str, Mapping[str, Any]]
UNITS = ("groups", "trajectories")
COUNTS = ("reserved", "outstanding", "consumed", "released")


def audit(protocol_counters: Counters, server_counters: Counters) -> None:
    """Require that both accounts agree in every number; the coordinator calls it once a cycle.

    Both have the form of `StalenessProtocol.counters()`. The server may leave out "groups", if it knows trajectories
    only; reasons that it never saw may be absent or 0. Both must be taken at the same point of the same cycle.

    Raises:
        ProtocolError: they differ, or the server's account is incomplete; the text holds every difference and a dump
            of both.
    """
    differences = [line for unit in UNITS for line in _compare(unit, protocol_counters, server_counters)]
    if differences:
        raise ProtocolError(
            "the protocol and the trajectory server count differently: "
            + "; ".join(differences)
            + f"\nprotocol: {_text(protocol_counters)}\ntrajectory server: {_text(server_counters)}"
        )


def _compare(unit: str, protocol_counters: Counters, server_counters: Counters) -> list[str]:
    if unit not in server_counters:
        return [] if unit == "groups" else [f"the server's account has no {unit!r}"]
    protocol, server = protocol_counters[unit], server_counters[unit]
    missing = [f"the server's account has no {unit}.{name}" for name in COUNTS if name not in server]
    if missing:
        return missing
    pairs = [(name, protocol[name], server[name]) for name in COUNTS if name != "released"]
    reasons = sorted(set(protocol["released"]) | set(server["released"]))
    pairs += [(f"released.{r}", protocol["released"].get(r, 0), server["released"].get(r, 0)) for r in reasons]
    return [f"{unit}.{name} is {ours} and {theirs}" for name, ours, theirs in pairs if ours != theirs]


def _text(counters: Counters) -> str:
    return json.dumps(counters, sort_keys=True, default=dict)

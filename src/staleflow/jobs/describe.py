"""A plan in words: nodes, ranks, roles, devices, groups, memory, and what would bias the gradient. Without torch."""

from __future__ import annotations

from staleflow.config import Config
from staleflow.jobs.plan import JobPlan, RankPlan
from staleflow.learning import memory, sampling

SHOWN_NODES = 8  # a plan of a thousand nodes is shown by its first few


def describe(config: Config, plan: JobPlan) -> str:
    """The text that `staleflow plan` prints."""
    s = config.staleness
    lines = [
        f"{config.run.name}: {plan.world_size} ranks on {len(plan.nodes)} node(s); "
        f"policy {config.coordination.policy}, eta {s.eta}, {s.batch_groups} groups x {s.group_size} a step",
    ]
    for n, node in enumerate(plan.nodes[:SHOWN_NODES]):
        shared = f"shared memory {_mib(plan.shm_bytes(n))} for rings and arena, and two versions of the model"
        lines.append(f"{node.name}  {shared}")
        lines += [f"  rank {r.rank:<4} {_role(r)}" for r in plan.ranks if r.node == n]
    if len(plan.nodes) > SHOWN_NODES:
        lines.append(f"… and {len(plan.nodes) - SHOWN_NODES} more nodes alike (--json has all)")
    lines.append("groups")
    for group in plan.groups:
        own = "  (their own world)" if group.default else ""
        lines.append(f"  {group.name:<12} ranks {_ranges(group.ranks)}{own}")
    lines.append(_way_of_versions(config, plan))
    if config.fault.survive_rollout:
        lines += _survived(plan)
    lines.append("memory, estimated from the model's shape")
    lines += [f"  {line}" for line in memory.describe(config)]
    lines += [f"warning: {line}" for line in sampling.warnings_of(config)]
    return "\n".join(lines)


def _survived(plan: JobPlan) -> list[str]:
    """What the job goes on without, and which relay then takes a lost one's place in the chain."""
    hosts = tuple(plan.hosts[n] for n in plan.expendable_nodes)
    lines = [
        f"survives a lost rollout instance, and lost nodes of hosts {_ranges(hosts) or '-'}; not the last instance"
    ]
    for relay in [rank for rank in plan.relays if rank in hosts][:SHOWN_NODES]:
        lines.append(f"  relay {relay} lost: rank {plan.substitute(relay)} in its place")
    return lines


def _way_of_versions(config: Config, plan: JobPlan) -> str:
    match config.parameters.transport:
        case "broadcast":
            return f"relays  ranks {_ranges(plan.relays)} land each version in their node's store"
        case "file":
            return "versions  are files in the run directory, which all nodes must see"
        case _:
            return "versions  go from the trainers straight to all instances, which pull together"


def _role(r: RankPlan) -> str:
    if r.role == "host":
        return "host + coordinator" if r.rank == 0 else "host"
    if r.role == "trainer":
        return f"trainer   device {r.device}"
    return f"rollout   device {r.device}  instance {r.instance}, tensor-parallel rank {r.instance_rank}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.0f} MiB"


def _ranges(ranks: tuple[int, ...]) -> str:
    """1-3 7 9-12"""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return " ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[1]}" for p in parts)

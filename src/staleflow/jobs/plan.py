"""Who does what: `plan(config, world)` gives every rank its role, device, instance, groups and ring sizes.

A pure function without torch: `staleflow plan` prints it on a login node, every rank computes the same one at start.
Ranks are dense per node; local rank 0 of each node is its host, local rank r > 0 owns device r - 1 of the node.
Devices are handed out in rank order: first the trainers, then the rollout instances, an instance never across nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from staleflow.config import Config, ConfigError
from staleflow.trajectories.sizes import record_bytes

Role = Literal["host", "trainer", "rollout"]
DOWN_RECORD_SHARE = 8  # a ring's largest record is capacity / 8 (csrc)
MIN_RING_BYTES = 1 << 20
SEGMENTS_BOUND = 256  # a trajectory's version segments that the ring sizes allow for


@dataclass(frozen=True)
class Node:
    """One machine of the job: its name and how many ranks the launcher started on it."""

    name: str
    ranks: int


@dataclass(frozen=True)
class RankPlan:
    """One rank. `device` is the index on its node (None on hosts); `instance_rank` the place in its vLLM instance."""

    rank: int
    node: int
    local_rank: int
    role: Role
    device: int | None = None
    instance: int | None = None
    instance_rank: int = 0


@dataclass(frozen=True)
class Group:
    """A process group, made in the order of the plan. `default` groups are their members' own world."""

    name: str
    ranks: tuple[int, ...]
    default: bool = False


@dataclass(frozen=True)
class Rings:
    """Bytes of the two rings between a host and one of its device ranks."""

    down_bytes: int
    up_bytes: int


@dataclass(frozen=True)
class JobPlan:
    nodes: tuple[Node, ...]
    ranks: tuple[RankPlan, ...]
    groups: tuple[Group, ...]
    relays: tuple[int, ...]  # the host of each node with rollout ranks: sees to it that a version can be pulled there
    trainer_rings: Rings
    rollout_rings: Rings
    arena_bytes: int  # per host

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def trainers(self) -> tuple[int, ...]:
        return tuple(r.rank for r in self.ranks if r.role == "trainer")

    @property
    def publish(self) -> tuple[int, ...]:
        """Members of the group through which versions travel, trainers first; nobody with transport `file`."""
        return next((group.ranks for group in self.groups if group.name == "publish"), ())

    @property
    def hosts(self) -> tuple[int, ...]:
        return tuple(r.rank for r in self.ranks if r.role == "host")

    def instance(self, index: int) -> tuple[int, ...]:
        """Global ranks of one vLLM instance, leader first."""
        return tuple(r.rank for r in self.ranks if r.instance == index)

    @property
    def instances(self) -> int:
        return 1 + max((r.instance for r in self.ranks if r.instance is not None), default=-1)

    def devices_of(self, node: int) -> tuple[RankPlan, ...]:
        """The device ranks of a node, in rank order."""
        return tuple(r for r in self.ranks if r.node == node and r.role != "host")

    def host_of(self, rank: int) -> int:
        return self.hosts[self.ranks[rank].node]

    @property
    def expendable_nodes(self) -> tuple[int, ...]:
        """Nodes without which a job can go on: neither rank 0's nor one with trainers."""
        needed = {0} | {r.node for r in self.ranks if r.role == "trainer"}
        return tuple(n for n in range(len(self.nodes)) if n not in needed)

    def substitute(self, relay: int) -> int | None:
        """The relay that takes a lost one's place in the chain: the next one, which the one before it then feeds."""
        place = self.relays.index(relay)
        others = self.relays[place + 1 :] + self.relays[:place]
        return others[0] if others else None

    def rings_of(self, rank: int) -> Rings:
        return self.trainer_rings if self.ranks[rank].role == "trainer" else self.rollout_rings

    def shm_bytes(self, node: int) -> int:
        """Shared memory that rings and arena of a node take (the parameter store comes on top)."""
        rings = (self.rings_of(r.rank) for r in self.devices_of(node))
        return self.arena_bytes + sum(r.down_bytes + r.up_bytes for r in rings)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def spread(config: Config, nodes: int) -> tuple[Node, ...]:
    """The device ranks spread evenly over `nodes` machines (for `staleflow plan` and `submit`)."""
    devices = config.device_ranks
    if not 1 <= nodes <= devices:
        raise ConfigError(f"--nodes {nodes}: {devices} device ranks can be spread over 1 to {devices} nodes")
    share, extra = divmod(devices, nodes)
    return tuple(Node(f"node{i}" if nodes > 1 else "localhost", 1 + share + (i < extra)) for i in range(nodes))


def plan(config: Config, world: Sequence[Node]) -> JobPlan:
    """Assign roles. Raises ConfigError when the world has another size than the config needs."""
    devices = sum(node.ranks - 1 for node in world)
    if devices != config.device_ranks:
        raise ConfigError(_wrong_size(config, world))
    ranks = _assign(config, world)
    trainers = tuple(r.rank for r in ranks if r.role == "trainer")
    relays = tuple(
        r.rank for r in ranks if r.role == "host" and any(o.node == r.node and o.role == "rollout" for o in ranks)
    )
    instances = [
        Group(f"instance-{i}", tuple(r.rank for r in ranks if r.instance == i), default=True)
        for i in range(config.rollout.instances)
    ]
    groups = (Group("trainers", trainers, default=True), *instances, *_publish_group(config, ranks, trainers, relays))
    rings = _trainer_rings(config), _rollout_rings(config)
    return JobPlan(tuple(world), ranks, groups, relays, *rings, _arena(config))


def _publish_group(
    config: Config, ranks: Sequence[RankPlan], trainers: tuple[int, ...], relays: tuple[int, ...]
) -> tuple[Group, ...]:
    """Through which versions travel, by transport; `file` needs none."""
    match config.parameters.transport:
        case "broadcast":
            return (Group("publish", trainers + relays),)
        case "direct":
            return (Group("publish", trainers + tuple(r.rank for r in ranks if r.role == "rollout")),)
        case _:
            return ()


def _assign(config: Config, world: Sequence[Node]) -> tuple[RankPlan, ...]:
    ranks: list[RankPlan] = []
    trainers, instance, place = config.trainer.ranks, 0, 0
    for n, node in enumerate(world):
        ranks.append(RankPlan(len(ranks), n, 0, "host"))
        for local_rank in range(1, node.ranks):
            common = (len(ranks), n, local_rank)
            if trainers:
                trainers -= 1
                ranks.append(RankPlan(*common, "trainer", local_rank - 1))
                continue
            ranks.append(RankPlan(*common, "rollout", local_rank - 1, instance, place))
            place += 1
            if place == config.rollout.tensor_parallel:
                instance, place = instance + 1, 0
        if place:
            raise ConfigError(
                f"rollout.tensor_parallel = {config.rollout.tensor_parallel}: instance {instance} would lie across "
                f"node {node.name!r} and the next; choose ranks per node so that whole instances fit"
            )
    return tuple(ranks)


def _wrong_size(config: Config, world: Sequence[Node]) -> str:
    started = sum(node.ranks for node in world)
    needed = config.device_ranks + len(world)
    return (
        f"{started} ranks started on {len(world)} node(s), {needed} planned: 1 host per node + trainer.ranks = "
        f"{config.trainer.ranks} + rollout.instances x rollout.tensor_parallel = {config.rollout.instances} x "
        f"{config.rollout.tensor_parallel}; start {needed} ranks or change the config"
    )


def _power_of_two(nbytes: int) -> int:
    return 1 << max(MIN_RING_BYTES - 1, nbytes - 1).bit_length()


def longest_record_bytes(config: Config) -> int:
    return record_bytes(config.data.max_prompt_tokens, config.rollout.max_tokens, SEGMENTS_BOUND)


def microbatch_bytes(config: Config) -> int:
    """The largest micro-batch record: full of the shortest trajectories (two tokens), each token its own segment."""
    tokens = config.trainer.microbatch_tokens
    sequences = tokens // 2
    per_sequence = record_bytes(0, 0, 0) + 12 + 8  # its record's header, its offset and advantage, alignment
    return 64 + sequences * per_sequence + (8 + 8) * tokens


def _trainer_rings(config: Config) -> Rings:
    return Rings(_power_of_two(DOWN_RECORD_SHARE * microbatch_bytes(config)), MIN_RING_BYTES)


def _rollout_rings(config: Config) -> Rings:
    size = _power_of_two(DOWN_RECORD_SHARE * longest_record_bytes(config))
    return Rings(size, size)


def _arena(config: Config) -> int:
    """Room for everything outstanding under the bound, every trajectory at its longest, plus one batch in training."""
    s = config.staleness
    trajectories = (s.eta + 2) * (s.batch_groups + s.spare_groups) * config.members
    return _power_of_two(trajectories * longest_record_bytes(config))

"""One outstanding group: which members are reserved and finished, and which version began each of them."""


class Group:
    """Members are bits. Usual groups are packed in lists instead (usual.py).

    order: its place among all outstanding groups, in the order of their first reservation.
    version: the group's version, the oldest V_traj of its members (of its finished ones, once it is complete).
    reserved, running: the members that are outstanding, and those of them that are unfinished.
    missing: finished members that it still needs; 0 is complete.
    versions: V_traj by member, or None while every reserved member has the group's own (the usual case).
    """

    __slots__ = ("missing", "order", "reserved", "running", "version", "versions")

    def __init__(self, order: tuple[int, int], version: int, reserved: int, missing: int) -> None:
        self.order = order
        self.version = version
        self.reserved = reserved
        self.running = reserved
        self.missing = missing
        self.versions: dict[int, int] | None = None

    def add(self, member: int, bit: int, version: int) -> None:
        """Reserve one more member; the group's version is the oldest of its members'."""
        if version != self.version or self.versions is not None:
            self.spell_out()[member] = version
            self.version = min(self.version, version)
        self.reserved |= bit
        self.running |= bit

    def remove(self, member: int, bit: int) -> None:
        """Forget a member; the version is left to `refresh_version`, because a complete group keeps its own."""
        self.reserved ^= bit
        if self.running & bit:
            self.running ^= bit
        else:
            self.missing += 1
        if self.versions is not None:
            del self.versions[member]

    def refresh_version(self) -> None:
        """The version is the oldest of the reserved members'."""
        if self.versions is not None:
            self.version = min(self.versions.values())

    def keep_done(self) -> None:
        """The group is complete: only the finished members count for its version. A spare that still runs may be older.

        `versions` is spelled out even where all are equal, so that reserve() sees that the group is no usual case.
        """
        versions = self.spell_out()
        self.version = min(version for member, version in versions.items() if not self.running >> member & 1)

    def version_of(self, member: int) -> int:
        """V_traj of a reserved member."""
        return self.version if self.versions is None else self.versions[member]

    def spell_out(self) -> dict[int, int]:
        """`versions`, made explicit."""
        if self.versions is None:
            self.versions = {m: self.version for m in range(self.reserved.bit_length()) if self.reserved >> m & 1}
        return self.versions

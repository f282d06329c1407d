"""`staleflow doctor [CONFIG]`: is this machine, or this allocation, fit for the job?

Alone it looks at this node. Under a launcher (`srun … python -m staleflow doctor CONFIG`) every rank looks at its own
node, then they look at each other: one filesystem, equal versions, equal clocks, links that carry data. One line per
finding on rank 0, each failure with its remedy. Exit code: 0 well, 1 something failed, 2 cannot even start.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from staleflow.config import Config, load
from staleflow.jobs import checks
from staleflow.jobs.bootstrap import bootstrap_mpi, check_rendezvous, detect_here, listen
from staleflow.jobs.checks import Finding
from staleflow.jobs.env import LaunchInfo

FAILED, REFUSED = 1, 2
PATIENCE_S = 60.0
CANARY_S = 10.0
MOST_SKEW_S = 1.0
LINK_BYTES = 16 << 20
ROUNDS = 4


def main(argv: Sequence[str]) -> int:
    """Exit code of this rank."""
    parser = argparse.ArgumentParser(prog="staleflow doctor", description="Check machine, cluster and leftovers.")
    parser.add_argument("config", nargs="?", help="also check what this config needs")
    parser.add_argument("--reap", action="store_true", help="first remove shared memory that dead jobs of yours left")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args(argv)
    try:
        config = load(arguments.config, arguments.overrides) if arguments.config else None
        info = detect_here()
        check_rendezvous(info)
    except ValueError as error:  # ConfigError and LaunchError
        print(f"staleflow: {error}", file=sys.stderr)
        return REFUSED
    if info.launcher == "none":
        return _report(list(_local(config, info, arguments.reap)))
    return _together(config, info, arguments.reap)


def _local(config: Config | None, info: LaunchInfo, reap: bool) -> Iterator[Finding]:
    """What one rank finds out by itself. Per node once (local rank 0), but for the versions."""
    if config is not None and info.rank == 0:
        yield from checks.check_config(config)
    yield from checks.check_versions()
    if info.local_rank != 0:
        return
    yield from checks.check_byte_code()
    if reap:
        yield from checks.reap_leftovers()
    yield from checks.check_shared_memory(config, info.n_nodes or 1)
    yield from checks.check_leftovers()
    yield from checks.check_limits()
    yield from checks.check_gpus()
    yield from checks.check_network(info)
    yield from checks.check_ring()


def _report(findings: Sequence[Finding]) -> int:
    for finding in findings:
        print(finding.line())
    failed = sum(not finding.ok for finding in findings)
    print(f"{len(findings)} checks, {failed} failed")
    return FAILED if failed else 0


# ---- under a launcher ------------------------------------------------------------------------------------------------


def _together(config: Config | None, info: LaunchInfo, reap: bool) -> int:
    from torch.distributed import PrefixStore, TCPStore

    host, port = info.rendezvous or bootstrap_mpi(info)
    serves = info.rank == 0 and not info.agent_store
    timeout = timedelta(seconds=PATIENCE_S)
    fd = listen(info, host, port) if serves else None
    tcp_store = TCPStore(host, port, info.world_size, serves, timeout, wait_for_workers=False, master_listen_fd=fd)
    store = PrefixStore("doctor", tcp_store)
    run_dir = config.run_dir if config is not None else Path.cwd()
    mine = [*_local(config, info, reap), *_canary(store, info, run_dir)]
    facts = {"node": socket.gethostname(), "versions": checks.versions(), "clock": _clock(store, info)}
    links = _links(store, info)
    report = facts | {"findings": [asdict(f) for f in mine], "links": links, "listening": checks.listening()}
    store.set(f"report/{info.rank}", json.dumps(report))
    code = _report(_all_findings(store, info)) if info.rank == 0 else 0
    _leave(store, info)
    return code


def _canary(store: Any, info: LaunchInfo, run_dir: Path) -> Iterator[Finding]:
    """Rank 0 writes a file into the run directory; every other node must see it."""
    if info.rank == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / f".canary-{secrets.token_hex(4)}"
        path.write_text(path.name)
        store.set("canary", str(path.absolute()))
    if info.local_rank != 0:
        return
    path = Path(store.get("canary").decode())
    end_s = time.monotonic() + CANARY_S
    while not path.exists() and time.monotonic() < end_s:
        os.scandir(path.parent if path.parent.exists() else "/").close()  # makes NFS look again
        time.sleep(0.1)
    seen = path.exists() and path.read_text() == path.name
    store.set(f"canary/{info.rank}", "")
    remedy = "put run.dir on a filesystem that all nodes mount"
    yield Finding(
        seen, "shared filesystem", f"{path.parent} {'is' if seen else 'is not'} that of rank 0", "" if seen else remedy
    )


def _clock(store: Any, info: LaunchInfo) -> float:
    """This node's clock minus rank 0's, in seconds, to about half a round trip. Rank 0 answers one rank at a time."""
    offsets = []
    for rank in range(1, info.world_size):
        for i in range(ROUNDS):
            if info.rank == rank:
                before = time.time()
                store.set(f"ask/{rank}/{i}", "")
                answer = float(store.get(f"answer/{rank}/{i}"))
                offsets.append((before + time.time()) / 2 - answer)
            elif info.rank == 0:
                store.wait([f"ask/{rank}/{i}"])
                store.set(f"answer/{rank}/{i}", repr(time.time()))
    return statistics.median(offsets) if offsets else 0.0


def _links(store: Any, info: LaunchInfo) -> list[dict[str, Any]]:
    """Rank 0 exchanges LINK_BYTES with every other rank over Gloo, one at a time; on rank 0: bytes/s of each link."""
    import torch
    from torch.distributed import PrefixStore, ProcessGroupGloo

    begin = time.monotonic()
    group: Any = ProcessGroupGloo(PrefixStore("gloo", store), info.rank, info.world_size, timedelta(seconds=PATIENCE_S))
    group.barrier().wait()
    warm_s = time.monotonic() - begin
    block = torch.zeros(LINK_BYTES, dtype=torch.uint8)
    results = []
    for peer in range(1, info.world_size):
        if info.rank not in (0, peer):
            continue
        begin = time.monotonic()
        if info.rank == 0:
            group.send([block], peer, 0).wait()
            group.recv([block], peer, 0).wait()
            rate = 2 * LINK_BYTES / (time.monotonic() - begin)
            results.append({"peer": peer, "bytes_per_s": rate, "warm_s": warm_s})
        else:
            group.recv([block], 0, 0).wait()
            group.send([block], 0, 0).wait()
    return results


def _all_findings(store: Any, info: LaunchInfo) -> list[Finding]:
    """On rank 0: everybody's findings, once each, and what only the comparison shows."""
    reports = [json.loads(store.get(f"report/{rank}")) for rank in range(info.world_size)]
    findings: list[Finding] = []
    for rank, report in enumerate(reports):
        for fields in report["findings"]:
            finding = Finding(**fields)
            if finding.name == "versions" and finding.ok and rank:
                continue  # compared below
            findings.append(Finding(finding.ok, f"{finding.name} on {report['node']}", finding.detail, finding.remedy))
    findings += _compare(reports)
    return findings


def _compare(reports: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    for rank, report in enumerate(reports):
        if report["versions"] != reports[0]["versions"]:
            theirs, ours = report["versions"], reports[0]["versions"]
            which = [
                f"{k} {theirs.get(k)} instead of {ours.get(k)}"
                for k in {*theirs, *ours}
                if theirs.get(k) != ours.get(k)
            ]
            text = f"rank {rank} on {report['node']} has {', '.join(sorted(which))}"
            yield Finding(False, "equal versions", text, "use one environment on a filesystem that all nodes see")
    worst = max(range(len(reports)), key=lambda rank: abs(reports[rank]["clock"]))
    skew_s = reports[worst]["clock"]
    good = abs(skew_s) < MOST_SKEW_S
    yield Finding(
        good,
        "clocks",
        f"{reports[worst]['node']} differs most from rank 0: {skew_s:+.3f} s",
        "" if good else "start chrony or ntpd",
    )
    for link in reports[0]["links"]:
        name = f"link to rank {link['peer']} on {reports[link['peer']]['node']}"
        yield Finding(True, name, f"{link['bytes_per_s'] / 1e9:.2f} GB/s both ways, group up in {link['warm_s']:.2f} s")
    for rank, report in enumerate(reports):
        if report["listening"]:
            text = (
                f"rank {rank} on {report['node']}: {', '.join(report['listening'])} (the libraries' own: store, Gloo)"
            )
            yield Finding(True, "listening", text)


def _leave(store: Any, info: LaunchInfo) -> None:
    """Rank 0, which may hold the store and owns the canary, is the last to go."""
    store.set(f"left/{info.rank}", "")
    if info.rank == 0:
        store.wait([f"left/{rank}" for rank in range(info.world_size)])
        Path(store.get("canary").decode()).unlink(missing_ok=True)

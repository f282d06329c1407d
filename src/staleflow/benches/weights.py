"""`staleflow bench weights`: the parameter plane against its limits and against how peers move weights.

    push     from the staged shard (the return of `snapshot`) to the version in the slot, one trainer and one relay over
             Gloo. What the push got done while the snapshot was being copied does not count there, so the same with
             the snapshot is reported too, as `snapshot_and_push`, and `snapshot`, which is what training waits for
             limit: one Gloo broadcast of the same bytes in one call (and, before it, a copy); peer: one per parameter
    pull     from the slot into an engine's parameters, 1, 2 and 4 readers at once (GB/s of all of them together, from
             the first one's begin to the last one's end)
             limit: one memory copy of the image by each of as many readers
    delta    bytes and seconds at given shares of changed values, and on consecutive versions of a real model
             under Adam; end to end (snapshot to stored) also over a link of 250 MB/s between two namespaces

Best of the repeats everywhere, ours and limits alike, and CPU seconds of both ends: the machine may be busy.

Options: --sizes 50,500,2000 (MB), --readers 1,2,4, --repeats 5, --link-mb 500 (0: skip), --no-adam, --quick.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from staleflow.trajectories.ring import SEGMENT_PREFIX

LINK_BYTES_S = 250e6
SHARES = [0.001, 0.01, 0.1]
BUCKET_BYTES = 64 << 20
RANK_TIMEOUT_S = 900
LIMITS = {
    "push": "raw_broadcast",
    "snapshot_and_push": "copy_and_raw_broadcast",
    "snapshot": "snapshot_copy",
    "pull": "copy",
}


def run(args: list[str]) -> dict[str, Any]:
    """Measure everything; GB/s are 1e9 bytes a second. See the module's head for the options."""
    options = _options(args)
    sizes = {}
    for mb in options.sizes:
        found = sizes[f"{mb}_MB"] = _measure(mb, options.readers, options.repeats)
        _tell(f"{mb} MB", found)
    link = _over_link(options.link_mb, options.repeats) if options.link_mb else "not asked for"
    _tell("over the link", link)
    return {
        "bench": "weights",
        "unit": "GB/s",
        "ours": {f"{kind}_{size}": found[kind] for size, found in sizes.items() for kind in LIMITS},
        "limit": {f"{kind}_{size}": found[limit] for size, found in sizes.items() for kind, limit in LIMITS.items()},
        "peers": {f"per_parameter_broadcast_{size}": found["per_parameter"] for size, found in sizes.items()},
        "share_of_limit": {size: found["share_of_limit"] for size, found in sizes.items()},
        "cpu_s_per_GB": {size: found["cpu_s_per_GB"] for size, found in sizes.items()},
        "load_average": os.getloadavg()[0],
        "delta": {size: found["delta"] for size, found in sizes.items()},
        "delta_over_link": link,
        "delta_under_adam": _under_adam() if options.adam else "not asked for",
    }


def _tell(what: str, found: object) -> None:
    """It takes minutes: say on stderr how far it is."""
    print(f"{what}: {json.dumps(found)}", file=sys.stderr, flush=True)


def _options(args: list[str]) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(n) for n in text.split(",")]

    parser = argparse.ArgumentParser(prog="staleflow bench weights")
    parser.add_argument("--sizes", type=numbers, default=[50, 500, 2000])
    parser.add_argument("--readers", type=numbers, default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--link-mb", type=int, default=500)
    parser.add_argument("--no-adam", dest="adam", action="store_false")
    parser.add_argument("--quick", action="store_true", help="50 MB, three repeats")
    options = parser.parse_args(args)
    if options.quick:
        options.sizes, options.repeats, options.link_mb = [50], 3, min(options.link_mb, 100)
    return options


def shapes_of(nbytes: int) -> list[tuple[str, list[int]]]:
    """Names and shapes of a decoder of about `nbytes` in bf16: embedding, then layers until the size is reached."""
    hidden = 512 if nbytes < 200e6 else 1024 if nbytes < 1e9 else 2048
    shapes: list[tuple[str, list[int]]] = [("embed", [16 * hidden, hidden])]
    layer = {
        "norm": [hidden], "q": [hidden, hidden], "k": [hidden // 4, hidden], "v": [hidden // 4, hidden],
        "o": [hidden, hidden], "norm2": [hidden], "gate": [3 * hidden, hidden], "up": [3 * hidden, hidden],
        "down": [hidden, 3 * hidden],
    }  # fmt: skip
    total, index = 2 * 16 * hidden * hidden, 0
    while total < nbytes:
        shapes += [(f"layers.{index}.{name}", shape) for name, shape in layer.items()]
        total += 2 * sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in layer.values())
        index += 1
    return shapes


def _setup(mb: int, readers: list[int], repeats: int, address: str = "127.0.0.1", **changes: Any) -> dict[str, Any]:
    return {
        "address": address, "port": _free_port(),
        "token": f"{SEGMENT_PREFIX}-{os.getuid()}-bench-{os.getpid()}-{mb}",  # `doctor --reap` knows it
        "shapes": shapes_of(mb * 10**6), "readers": readers, "shares": SHARES, "repeats": repeats,
        "bucket_bytes": BUCKET_BYTES, "limits": True,
    } | changes  # fmt: skip


def _measure(mb: int, readers: list[int], repeats: int) -> dict[str, Any]:
    """One model size on this machine."""
    # Two readers are what fits beside a model of 2 GB, its staging buffer and both slots in 16 GB.
    readers = [count for count in readers if mb < 1000 or count <= 2]
    setup = _setup(mb, readers, repeats)
    told = _run_ranks(setup, {})
    trainer, host = told["trainer"], told["host"]
    gb = _image_bytes(setup) / 1e9
    full = [push for push in host["pushes"] if push["mode"] == "full"]
    raw_s, each_s = (min(wall for wall, _ in host[kind]) for kind in ("raw", "per_parameter"))
    push_s, both_s = (min(p[kind] for p in full) for kind in ("push_s", "end_to_end_s"))
    snapshot_s, copy_s = min(p["staged"] - p["begin"] for p in full), min(wall for wall, _ in trainer["copy"])
    copies, pulls = ({f"{n}_readers": _together(told, n, kind) for n in readers} for kind in ("copy", "pull"))
    kinds = ("raw", "per_parameter")
    cpu = {kind: min(a[1] + b[1] for a, b in zip(trainer[kind], host[kind], strict=True)) for kind in kinds}
    cpu["snapshot_and_push"] = min(p["trainer_cpu_s"] + p["relay_cpu_s"] for p in full)
    cpu |= {"copy_1_reader": copies["1_readers"][1], "pull_1_reader": pulls["1_readers"][1]}
    return {
        "push": gb / push_s,
        "snapshot_and_push": gb / both_s,
        "raw_broadcast": gb / raw_s,
        "copy_and_raw_broadcast": gb / (copy_s + raw_s),
        "snapshot": gb / snapshot_s,
        "snapshot_copy": gb / copy_s,
        "per_parameter": gb / each_s,
        "pull": {f"{n}_readers": n * gb / pulls[f"{n}_readers"][0] for n in readers},
        "copy": {f"{n}_readers": n * gb / copies[f"{n}_readers"][0] for n in readers},
        "share_of_limit": {
            "push": raw_s / push_s,
            "snapshot_and_push": (copy_s + raw_s) / both_s,
            "snapshot": copy_s / snapshot_s,
        }
        | {f"pull_{n}": copies[n][0] / pulls[n][0] for n in pulls},
        "cpu_s_per_GB": {kind: seconds / gb for kind, seconds in cpu.items()},
        "delta": _by_share(host["pushes"], _image_bytes(setup)),
    }


def _together(told: dict[str, Any], readers: int, kind: str) -> tuple[float, float]:
    """Of `readers` reading at once: seconds from the first begin to the last end, and CPU seconds of one; the best."""
    rounds = list(zip(*(told[f"reader{i}"][str(readers)][kind] for i in range(readers)), strict=True))
    spans = [max(end for _, end, _ in one) - min(begin for begin, _, _ in one) for one in rounds]
    return min(spans), min(cpu for one in rounds for _, _, cpu in one)


def _by_share(pushes: list[dict[str, Any]], nbytes: int) -> dict[str, Any]:
    """Deltas by share of changed values: bytes on the wire and seconds from snapshot to stored, beside full pushes."""
    full = min(p["end_to_end_s"] for p in pushes if p["mode"] == "full")
    found: dict[str, Any] = {"full": {"bytes": nbytes, "end_to_end_s": full}}
    for share in sorted({p["share"] for p in pushes if p["mode"] == "delta" and p["share"] < 1}):
        mine = [p for p in pushes if p["mode"] == "delta" and p["share"] == share]
        sent, took = mine[0]["bytes"], min(p["end_to_end_s"] for p in mine)
        found[f"{share:.1%}"] = {
            "bytes": sent, "fewer_bytes": nbytes / sent, "end_to_end_s": took, "faster": full / took,
            "cpu_s": min(p["trainer_cpu_s"] + p["relay_cpu_s"] for p in mine),
        }  # fmt: skip
    return found


def _over_link(mb: int, repeats: int) -> dict[str, Any] | str:
    """Full push and 1 % delta between two network namespaces whose link is shaped to 250 MB/s."""
    if os.geteuid() != 0:
        return "not run: network namespaces and a traffic shaper need root"
    try:
        with _link(LINK_BYTES_S) as (near, far, address):
            setup = _setup(mb, [], min(repeats, 3), address, shares=[0.01], limits=False)
            told = _run_ranks(setup, {"trainer": near, "host": far})
    except (OSError, subprocess.CalledProcessError) as error:
        return f"not run: {error}"
    nbytes = _image_bytes(setup)
    found = _by_share(told["host"]["pushes"], nbytes)
    small, full_s = found["1.0%"], found["full"]["end_to_end_s"]
    overhead_s = small["end_to_end_s"] - small["bytes"] / LINK_BYTES_S
    break_even = (nbytes - small["bytes"]) / overhead_s / 1e9 if overhead_s > 0 else float("inf")
    return found | {
        "link_GB_s": LINK_BYTES_S / 1e9,
        "full_push_GB_s": nbytes / full_s / 1e9,
        "delta_overhead_s": overhead_s,
        "break_even_link_GB_s": break_even,
    }


@contextlib.contextmanager
def _link(bytes_s: float) -> Iterator[tuple[list[str], list[str], str]]:
    """Two namespaces joined by a shaped veth pair: (command prefix of one, of the other, address of the first)."""
    tag = f"sfb{os.getpid() % 100000}"
    ends = [(f"{tag}{side}", f"{tag}{side}v", f"10.231.77.{number}") for number, side in ((1, "a"), (2, "b"))]
    try:
        for name, _, _ in ends:
            _ip("netns", "add", name)
        _ip("-n", ends[0][0], "link", "add", ends[0][1], "type", "veth", "peer", ends[1][1], "netns", ends[1][0])
        for name, device, address in ends:
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", device, "up")
            rate = ["rate", f"{int(8 * bytes_s)}bit", "burst", "256kb", "latency", "20ms"]
            subprocess.run(
                ["tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *rate], check=True, capture_output=True
            )
        near, far = (["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={device}"] for name, device, _ in ends)
        yield near, far, ends[0][2]
    finally:
        for name, _, _ in ends:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _run_ranks(setup: dict[str, Any], prefixes: dict[str, list[str]]) -> dict[str, Any]:
    """Start the ranks, wait for all, and return what each has printed. RuntimeError with its output when one fails."""
    roles = ["trainer", "host", *(f"reader{i}" for i in range(max(setup["readers"], default=0)))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "staleflow.benches.weights_ranks"]
    processes = {
        role: subprocess.Popen(
            [*prefixes.get(role, []), *command, role, json.dumps(setup)],
            stdout=subprocess.PIPE, env=environment, text=True,
        )
        for role in roles
    }  # fmt: skip
    try:
        found = {role: process.communicate(timeout=RANK_TIMEOUT_S)[0] for role, process in processes.items()}
        failed = [role for role, process in processes.items() if process.returncode != 0]
        if failed:
            raise RuntimeError(f"{', '.join(failed)} failed; see above")
        return {role: json.loads(text.splitlines()[-1]) for role, text in found.items() if text.strip()}
    finally:
        for process in processes.values():
            process.kill()
        Path("/dev/shm", f"{setup['token']}-store").unlink(missing_ok=True)


def _image_bytes(setup: dict[str, Any]) -> int:
    from staleflow.parameters.manifest import Manifest

    return Manifest.from_shapes(setup["shapes"], "bfloat16").nbytes


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _under_adam(steps: int = 60) -> dict[str, Any]:
    """Share of bf16 weights that differ between consecutive versions of a small decoder under Adam, and its delta."""
    found = {}
    for rate in (1e-6, 1e-5):
        changed = _adam_changes(rate, steps)[-10:]  # Adam's first steps move every weight by nearly the whole rate
        mean = statistics.mean(changed)
        found[f"lr_{rate:g}"] = {"changed": mean, "changed_max": max(changed), "fewer_bytes": 2 / (6 * mean)}
    return found


def _adam_changes(rate: float, steps: int) -> list[float]:
    """Shares of changed bf16 weights, step by step: float32 weights, next-token loss on a learnable text."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.999), weight_decay=0.0)
    shares, before = [], _as_bf16(model)
    for _ in range(steps):
        tokens = (torch.arange(64) * 7 + torch.randint(0, 500, (4, 1))) % 509 + torch.randint(0, 3, (4, 64))
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        after = _as_bf16(model)
        shares.append((after != before).float().mean().item())
        before = after
    return shares


def _as_bf16(model: Any) -> Any:
    import torch

    return torch.cat([p.detach().to(torch.bfloat16).view(torch.int16).reshape(-1) for p in model.parameters()])

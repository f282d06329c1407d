"""A rank without a model: says where it is, meets the others, then does what the script in the run directory tells.

{"do": "end"}                                 all ranks exit with 0
{"do": "exit", "rank": 2, "code": 7}          rank 2 exits with 7, the others would wait for ever
{"do": "kill", "rank": 2}                     rank 2 is killed with SIGKILL
{"do": "wait for STOP"}                       all ranks exit with 85 when the file STOP appears (first start only)
"""

import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path

from staleflow.config import load
from staleflow.jobs.bootstrap import bootstrap_mpi, check_rendezvous, detect_here
from staleflow.jobs.env import LaunchInfo
from staleflow.jobs.stop import StopWatch

STOPPED = 85


def main(config_path: str, *overrides: str) -> int:
    config = load(config_path, overrides)
    info = detect_here()
    check_rendezvous(info)
    host, port = info.rendezvous or bootstrap_mpi(info)
    start = os.environ.get("SLURM_RESTART_COUNT", "0")
    listener = socket.create_server((host, port)) if info.rank == 0 and not info.agent_store else None
    board = config.run_dir / f"board_{start}"
    board.mkdir(exist_ok=True)
    meet(board, "here", info, os.uname().nodename)
    socket.create_connection((host, port), timeout=10).close()  # the meeting place can be reached from everywhere
    nodes = [(board / f"here_{rank}").read_text() for rank in range(info.world_size)]
    seen = asdict(info) | {"nodes": nodes, "resume": config.checkpoint.resume}
    (config.run_dir / f"probe_{start}_{info.rank}.json").write_text(json.dumps(seen))
    script = json.loads((config.run_dir / "script.json").read_text())
    code = act(script, info.rank, StopWatch(config.run_dir, os.environ), int(start))
    meet(board, "left", info, "")
    if listener is not None:
        listener.close()
    return code


def meet(board: Path, what: str, info: LaunchInfo, text: str) -> None:
    """Wait until every rank has come here."""
    draft = board / f".{what}_{info.rank}"
    draft.write_text(text)
    draft.rename(board / f"{what}_{info.rank}")
    end_s = time.monotonic() + 60
    while missing := [rank for rank in range(info.world_size) if not (board / f"{what}_{rank}").exists()]:
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what}: ranks {missing} did not come")
        time.sleep(0.05)


def act(script: dict, rank: int, watch: StopWatch, start: int) -> int:
    if script["do"] == "wait for STOP":
        while start == 0 and not watch.asked(time.time()):
            time.sleep(0.1)
        return STOPPED if start == 0 else 0
    if script["do"] in ("exit", "kill"):
        if rank == script["rank"]:
            time.sleep(1.0)
            if script["do"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(script["code"])
        time.sleep(3600)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

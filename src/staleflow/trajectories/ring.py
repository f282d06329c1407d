"""Shared-memory rings between a host and its device ranks: one producer, one consumer, safe against SIGKILL.

The work is done in C++ (``csrc/ring``, layout in ``layout.h``); this module is its Python name and its documentation.
Importing it needs neither torch nor numpy.

Producer::

    ring = Ring.create(segment_name(job, run_id, "rank3-up"), 1 << 26, run_id=run_id, label="rollout rank 3")
    view = ring.reserve(nbytes, kind)      # writable memoryview, or None: full
    view[:] = ...
    ring.commit()                          # visible now; or ring.abort()
    ring.push(kind, header, tokens)        # the same in one call: False when full

Consumer::

    ring = Ring.attach(name, run_id=run_id)
    while ring.wait(1.0):
        for record in ring.peek(64):       # records not handed out before; payload points into the ring
            handle(record.kind, record.payload)
            ring.release(record.sequence)  # gives back everything up to and including this one

What to know beyond the signatures (``_ring.pyi`` has them all):

- Full is a value (``None``, ``False``, a smaller count): nothing is dropped and nothing blocks without a limit. A loop
  with an up and a down ring goes on draining one while the other is full.
- ``peek`` moves on: a second call gives the next records, also while earlier ones are still held. ``rewind`` (and a
  restarted consumer's ``attach``) begins again at the oldest record that was not released: at least once;
  ``record.sequence`` (1, 2, 3, …, never reset) tells what was seen before.
- A payload view is valid until its record is released; afterwards the producer writes over it. Its address is a
  multiple of 64. ``ring.data`` with ``record.offset`` names the same bytes in one buffer, for `pack`.
- ``wait`` returns True when there is something to read, False at the timeout or as soon as ``stop_code`` differs from
  what this side last read, and raises RingClosed when all is read and the producer has closed or died (its label and
  pid are in the message). While it sleeps it looks every 0.1 s whether the other process lives, without the GIL.
- The first use of either half claims it for the process; a second living claimant gets RingError. A claimant that died
  is succeeded: a new producer continues the sequence behind the last published record.
- ``set_stop`` may be called from either side, and overtakes whatever is queued.
- One thread at a time per half.
"""

from __future__ import annotations

import os
import re

from staleflow._ring import (
    Record,
    Ring,
    RingClosed,
    RingCorrupt,
    RingError,
    RingFull,
    SegmentError,
    wait_any,
)

__all__ = [
    "SEGMENT_PREFIX",
    "Record",
    "Ring",
    "RingClosed",
    "RingCorrupt",
    "RingError",
    "RingFull",
    "SegmentError",
    "segment_name",
    "wait_any",
]

SEGMENT_PREFIX = "staleflow"


def segment_name(job: str, run_id: int, what: str) -> str:
    """The name of a segment in /dev/shm: user, job and run, so that nobody takes it for somebody else's.

    Characters that a file name should not have become ``_``.
    """
    parts = [SEGMENT_PREFIX, str(os.getuid()), job, f"{run_id:x}", what]
    return "-".join(re.sub(r"[^A-Za-z0-9_.+-]", "_", part) for part in parts)

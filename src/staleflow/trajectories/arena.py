"""Where a host keeps its trajectories: one piece of shared memory, variable-size blocks freed in any order.

::

    arena = Arena.create(segment_name(job, run_id, "arena"), 8 << 30, run_id=run_id)
    block = arena.take(record)     # one copy from the ring, or None: full
    with arena.view(block) as view:  # writable memoryview; the block stays where it is while the view lives
        trajectory = decode(view)
    arena.free(block)

What to know beyond the signatures (``_ring.pyi``):

- `allocate` returns None only when the free bytes do not suffice, or when blocks with living views stand between
  them: without a hole that is large enough, it slides the cheapest stretch of blocks together. So a block's `offset`
  holds only while a view of it lives; ``arena.data`` with offsets is what `pack` takes.
- `free` of a block with living views takes effect when the last of them is gone. Freeing twice is a ValueError.
- `fragmentation` is the share of the free bytes outside the largest hole; `moved_bytes` what sliding has cost so far.
- Blocks begin at multiples of 64 and take multiples of 64 bytes.
- Threads take turns by the GIL; other processes do not allocate.
"""

from __future__ import annotations

from staleflow._ring import Arena, Block

__all__ = ["Arena", "Block"]

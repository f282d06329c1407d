"""Parameter names of the published checkpoints, where transformers' modules hold something else.

transformers keeps the experts of a layer in two stacked parameters; checkpoints, and the engines that load them, name
every expert's matrices. Everything else has one name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def published(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors by module names -> whole tensors by checkpoint names; views, nothing is copied.

    `…experts.gate_up_proj` [E, 2I, H] becomes `…experts.0.gate_proj.weight` [I, H], `…experts.0.up_proj.weight`, …;
    `…experts.down_proj` [E, H, I] becomes `…experts.0.down_proj.weight`, …
    """
    for name, tensor in named:
        if name.endswith(_GATE_UP):
            stem = name.removesuffix("gate_up_proj")
            for expert, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                yield f"{stem}{expert}.gate_proj.weight", gate
                yield f"{stem}{expert}.up_proj.weight", up
        elif name.endswith(_DOWN):
            stem = name.removesuffix("down_proj")
            yield from ((f"{stem}{expert}.down_proj.weight", matrix) for expert, matrix in enumerate(tensor))
        else:
            yield name, tensor

"""Read gathered weight codes inside graphs of torch.compile.

FSDP2 gathers the codes outside the graph and passes them in as an input.

    forward   reads the input tensor directly
    backward  narrowgauge::gathered_codes(data, index, after, orientation, use_history)

A `weight` in this file is a `weights.GatheredWeight`.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from narrowgauge.addresses import identity

# Not tested on torch 2.11 and 2.12: with those the layer runs between two graphs.
OLDEST = (2, 13)
SUPPORTED = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= OLDEST

# The index is a tensor, so that identical layers share one compiled graph.
_indices = count()
# Custom operators take only tensors and plain values, hence a table of weak references.
_weights: WeakValueDictionary[int, Any] = WeakValueDictionary()


def register(weight: Any) -> Tensor:
    """Register the weight and return its index (0-d int64 tensor on the CPU) for the operator."""
    index = next(_indices)
    _weights[index] = weight
    return torch.tensor(index, dtype=torch.int64)


def read(weight: Any, orientation: str, use_history: bool, after: Tensor | None) -> Tensor:
    """Return the codes of all rows, uint8 [N, width], while torch.compile traces.

    orientation  "rows" for the output GEMM, "cols" for grad_input
    use_history  the scale comes from the amax history (training), not from the weight itself
    after        the output gradient in backward, None in forward
    """
    gathered_bytes, rows = weight.gathered_bytes, weight.rows.total
    assert gathered_bytes is not None
    # With one set of codes forward and backward read the same bytes.
    if (
        after is None
        and not weight.coder.has_two_sets
        and weight.has_codes(orientation, use_history)
    ):
        return gathered_bytes.data[:rows]
    # FSDP refills the same tensor before backward, with the grad_input codes if the recipe has two
    # sets. Only an operator can check at run time which set it holds, and gather the other one.
    # `after` ties the read to backward: without that dependency torch's partitioner may move work
    # on these bytes into forward.
    found: Tensor = torch.ops.narrowgauge.gathered_codes(
        gathered_bytes.data, weight.graph_index, after, orientation, use_history
    )
    return found[:rows]


def _gathered_codes(
    data: Tensor, index: Tensor, after: Tensor | None, orientation: str, use_history: bool
) -> Tensor:
    weight = _weights[int(index)]
    found: Tensor = weight.bytes_of(orientation, use_history)
    # A custom operator must not return its input.
    return found.clone() if identity(found) == identity(data) else found


torch.library.define(
    "narrowgauge::gathered_codes",
    "(Tensor data, Tensor index, Tensor? after, str orientation, bool use_history) -> Tensor",
)
torch.library.impl("narrowgauge::gathered_codes", "CompositeExplicitAutograd", _gathered_codes)
torch.library.register_fake(
    "narrowgauge::gathered_codes", lambda data, *rest: torch.empty_like(data)
)

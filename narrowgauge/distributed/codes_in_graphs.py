"""Read gathered weight codes inside graphs of torch.compile.

FSDP2 gathers the codes outside the graph and passes them in as an input.

    forward   reads the input tensor directly
    backward  narrowgauge::gathered_codes(data, number, after, which, records)

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
WORKS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= OLDEST

# The index is a tensor, so that identical layers share one compiled graph.
_numbers = count()
# Custom operators take only tensors and plain values, hence a table of weak references.
_weights: WeakValueDictionary[int, Any] = WeakValueDictionary()


def numbered(weight: Any) -> Tensor:
    """Register the weight and return its index (0-d int64 tensor on the CPU) for the operator."""
    number = next(_numbers)
    _weights[number] = weight
    return torch.tensor(number, dtype=torch.int64)


def read(weight: Any, which: str, records: bool, after: Tensor | None) -> Tensor:
    """Return the codes of all rows, uint8 [N, width], while torch.compile traces.

    which    "rows" for the output GEMM, "cols" for grad_input
    records  the scale comes from the amax history (training), not from the weight itself
    after    the output gradient in backward, None in forward
    """
    held, rows = weight.held, weight.rows.whole
    assert held is not None
    # With one set of codes forward and backward read the same bytes.
    if after is None and not weight.coder.has_two_sets and weight.is_at_hand(which, records):
        return held.data[:rows]
    # FSDP refills the same tensor before backward, with the grad_input codes if the recipe has two
    # sets. Only an operator can check at run time which set it holds, and gather the other one.
    # `after` ties the read to backward: without that dependency torch's partitioner may move work
    # on these bytes into forward.
    found: Tensor = torch.ops.narrowgauge.gathered_codes(held.data, weight.number, after, which, records)
    return found[:rows]


def _gathered_codes(data: Tensor, number: Tensor, after: Tensor | None, which: str, records: bool) -> Tensor:
    weight = _weights[int(number)]
    found: Tensor = weight.bytes_of(which, records)
    # A custom operator must not return its input.
    return found.clone() if identity(found) == identity(data) else found


torch.library.define(
    "narrowgauge::gathered_codes", "(Tensor data, Tensor number, Tensor? after, str which, bool records) -> Tensor"
)
torch.library.impl("narrowgauge::gathered_codes", "CompositeExplicitAutograd", _gathered_codes)
torch.library.register_fake("narrowgauge::gathered_codes", lambda data, *rest: torch.empty_like(data))

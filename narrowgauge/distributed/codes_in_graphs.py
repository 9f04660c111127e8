"""Gathered codes inside of compiled code: what `fully_shard` has gathered is an input of the graph, and the products read it there.

    forward     the bytes at hand, as they are
    backward    narrowgauge::gathered_codes(bytes, number, gradient, which)      the bytes that the ranks have sent by then

A graph keeps inputs for backward and FSDP fills them anew before it, so the same tensor may hold other codes then: those of `grad_input`
where a weight travels as two sets. Only an operator knows at run time which they are, and gathers those that are not at hand, as eager
mode does. It is handed a number of the weight, which is a tensor, so that layers alike share one graph; and the gradient, without which
torch's partitioner would move what backward makes of the bytes into forward, and keep it, or compute it from the other set.
The operator copies the bytes: it may not return its input. A `weight` of this file is a weights.GatheredWeight.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from narrowgauge.addresses import identity

# torch 2.11 and 2.12 were not run: there a layer computes between two graphs.
OLDEST = (2, 13)
WORKS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= OLDEST

_numbers = count()
# An operator is handed nothing but tensors and plain values.
_weights: WeakValueDictionary[int, Any] = WeakValueDictionary()


def numbered(weight: Any) -> Tensor:
    """By which the operator finds the weight, 0-d int64 on the CPU."""
    number = next(_numbers)
    _weights[number] = weight
    return torch.tensor(number, dtype=torch.int64)


def read(weight: Any, which: str, records: bool, after: Tensor | None) -> Tensor:
    """The bytes of all rows, [N, width], while torch.compile traces. after: the gradient, in backward."""
    held, rows = weight.held, weight.rows.whole
    assert held is not None
    if after is None and not weight.coder.has_two_sets and weight.is_at_hand(which, records):
        return held.data[:rows]
    found: Tensor = torch.ops.narrowgauge.gathered_codes(held.data, weight.number, after, which, records)
    return found[:rows]


def _gathered_codes(data: Tensor, number: Tensor, after: Tensor | None, which: str, records: bool) -> Tensor:
    weight = _weights[int(number)]
    found: Tensor = weight.bytes_of(which, records)
    return found.clone() if identity(found) == identity(data) else found


torch.library.define(
    "narrowgauge::gathered_codes", "(Tensor data, Tensor number, Tensor? after, str which, bool records) -> Tensor"
)
torch.library.impl("narrowgauge::gathered_codes", "CompositeExplicitAutograd", _gathered_codes)
torch.library.register_fake("narrowgauge::gathered_codes", lambda data, *rest: torch.empty_like(data))

"""Predicts forward and backward of one Linear, where it cannot be measured: its operations, counted, at the rates of a card.

The layer runs under fake tensors, with the kernels of that card; what they multiply and move is timed as `narrowgauge plan` does it
(`ops.timing`). Time of the host, which runs ahead of large products, is left out. Cost: some tens of milliseconds per candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.addresses import dry_run
from narrowgauge.conversion.measure import LinearWorkload, inputs, step
from narrowgauge.ops import rng
from narrowgauge.ops.timing import rates
from narrowgauge.ops.timing.cards import Card
from narrowgauge.ops.timing.work import Work, of_kernel, of_operator

HOST = torch.device("cpu")  # where fake tensors are, whatever they stand for


def predicted(workload: LinearWorkload, names: Sequence[str], card: Card) -> dict[str, float]:
    """Candidate -> seconds on the card, in eager mode. Raises ConfigError for one that its units cannot multiply."""
    return {name: sum(rates.seconds(each, card) for each in counted(workload, name, card)) for name in names}


def counted(workload: LinearWorkload, name: str, card: Card) -> list[Work]:
    """What one forward and backward does, the weight cast anew; the second one, when the state of the recipe is there."""
    done: list[Work] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if (work := of_operator(0, func, args, kwargs or {}, found)) is not None:
                done.append(work)
            return found

    def launched(kernel: str, tensors: Any) -> None:
        done.append(of_kernel(0, kernel, tensors))

    with ExitStack() as stack:
        stack.enter_context(rng.preserved())
        for mode in (
            torch.enable_grad(),
            FakeTensorMode(allow_non_fake_inputs=True),
            dry_run(card.device, launched),
            Noting(),
        ):
            stack.enter_context(mode)
        run = step(workload, name, [inputs(workload, HOST)], HOST)
        run(0)
        done.clear()
        run(1)
    return done

"""Predict the time of one Linear's forward and backward on a card from counted operations.

Used if the layer cannot be measured. It runs under fake tensors with the kernels of that card. Its
GEMMs and memory traffic are timed as in `narrowgauge plan` (`ops.timing`). Host time, which is
hidden behind large GEMMs, is left out. Cost: some tens of milliseconds per candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.addresses import dry_run
from narrowgauge.conversion.measure import LinearWorkload, inputs, step
from narrowgauge.ops import rng
from narrowgauge.ops.timing import rates
from narrowgauge.ops.timing.work import Work, of_kernel, of_operator

if TYPE_CHECKING:
    from narrowgauge.ops.timing.cards import Card

ERROR = rates.ERROR["layer"]  # relative, of two in three predictions
HOST = torch.device("cpu")  # device of the fake tensors; `dry_run` pretends the card's


def likely_gain(plain_s: float, own_s: float, of: str) -> str:
    """A predicted gain as the range that published ones lie in: "1.14 to 1.35".

    of  "layer" or "step", see `rates.likely_gain`
    """
    low, high = rates.likely_gain(plain_s / own_s, of)
    return f"{low:.2f} to {high:.2f}"


def predicted(workload: LinearWorkload, names: Sequence[str], card: Card) -> dict[str, float]:
    """Candidate -> seconds on the card, in eager mode.

    Raises ConfigError for a candidate that the card's units cannot multiply.
    """
    return {
        name: sum(rates.seconds(each, card) for each in counted(workload, name, card))
        for name in names
    }


def counted(workload: LinearWorkload, name: str, card: Card) -> list[Work]:
    """List the work of one forward and backward pass, the cast of the weight included."""
    return counted_step(lambda: step(workload, name, [inputs(workload, HOST)], HOST), card)


def counted_step(made: Callable[[], Callable[[int], object]], card: Card) -> list[Work]:
    """List the work of one step on a card, under fake tensors on the CPU.

    made  builds the model, and returns a function of the number of the step
    """
    done: list[Work] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = func(*args, **(kwargs or {}))
            if (work := of_operator(0, func, args, kwargs or {}, found)) is not None:
                done.append(work)
            return found

    def launched(kernel: str, tensors: Any) -> None:
        done.append(of_kernel(0, kernel, tensors))

    # The modes nest in this order. Noting is the innermost, so it receives each operator first and
    # reads the fake result. Kernels outside the dispatcher report to `launched`.
    with ExitStack() as stack:
        # Fake tensors draw from the CPU's generator, which must not change.
        stack.enter_context(rng.preserved())
        for mode in (
            torch.enable_grad(),
            FakeTensorMode(allow_non_fake_inputs=True),
            dry_run(card.device, launched),
            Noting(),
        ):
            stack.enter_context(mode)
        run = made()
        run(0)  # the first pass creates state of the recipe; count the second one
        done.clear()
        run(1)
    return done

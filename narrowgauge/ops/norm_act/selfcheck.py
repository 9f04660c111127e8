"""Self-check of the kernels of `ops.norm_act` (see `ops.selfcheck`) on a 36 x 1072 sample.

Values, statistics and gradients may be off by two units of the coarsest dtype. Sums have another
order, which may add 72 units of float32 relative to the largest element in a row. Casts must be
bit-identical to `quantize` of the values that the kernel wrote. So must amax states, with an amax
of earlier steps and without one. LARGE is for `KernelCheck.large`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from narrowgauge.formats import E4M3, E5M2
from narrowgauge.ops.norm_act import definition
from narrowgauge.ops.norm_act.spec import (
    KINDS,
    NARROW,
    CastRequest,
    Given,
    Kind,
    NormActSpec,
    StoredAsCodes,
)
from narrowgauge.ops.quantize import quantize
from narrowgauge.ops.quantize.selfcheck import compared
from narrowgauge.ops.registry import Device
from narrowgauge.ops.selfcheck import KernelCheck, OutputComparison
from narrowgauge.recipe import WHOLE, Cast, DelayedScaling

ROWS, COLUMNS, SEED = 36, 1072, 20261122
SMALL, LARGE = (ROWS, COLUMNS), (2048, 4096)


def tensors_of(kind: Kind) -> int:
    """Return the number of input tensors of a function."""
    return {"layer-norm": 3}.get(kind.name, 2 if kind.is_norm or kind.is_gated else 1)


def _kind(spec: NormActSpec) -> tuple[Hashable, ...]:
    """Return the parts of a spec that numbers depend on.

    A spec with only the dtype of x uses that dtype for all tensors.
    """
    count = tensors_of(spec.kind)
    return spec.kind, (*spec.dtypes, *spec.dtypes[:1] * count)[:count], spec.casts, spec.kept


def _compare(
    of_gradients: bool, run: Callable[..., Any], kind: Any, device: torch.device,
    shape: tuple[int, int] = SMALL,
) -> Iterator[OutputComparison]:  # fmt: skip
    function, dtypes, casts, kept = kind
    generator = torch.Generator().manual_seed(SEED)
    shapes = [shape[1:] if place and function.is_norm else shape for place in range(len(dtypes))]
    tensors = [
        torch.randn(size, generator=generator).to(dtype)
        for size, dtype in zip(shapes, dtypes, strict=True)
    ]
    y, statistics = definition.forward(function, tensors, None)
    gy = torch.randn(shape, generator=generator).to(y.value.dtype)
    count = 2 if of_gradients and function.is_gated else 1
    given: list[Given] = list(tensors)
    if kept is not None:
        given[: 1 if function.is_norm else None] = [
            StoredAsCodes(
                quantize(each.T if turned else each, cast, backend="reference"), each.dtype, turned
            )
            for cast, turned in [kept]
            for each in ([y.value] if function.is_norm else tensors)
        ]

    def computed(run: Callable[..., Any], device: str | torch.device, requests: list[Any]) -> Any:
        """Return (values with their casts, other results) of the operator on the device."""
        there = [each.to(device) for each in given]
        numbers = tuple(each if each is None else each.to(device) for each in statistics)
        if of_gradients:
            return run(function, there, numbers, gy.to(device), requests)
        made, found = run(function, there, *requests)
        return [made], found

    def requests(in_use: float, device: str | torch.device) -> list[Any]:
        def live(cast: Cast) -> Tensor | None:
            return (
                torch.tensor([in_use, 0.5, 0.0], device=device)
                if isinstance(cast.calibrate, DelayedScaling)
                else None
            )

        return [CastRequest(cast, live(cast), True, turned) for cast, turned in casts] + [None] * (
            count - len(casts)
        )

    truth, rest = computed(
        definition.backward if of_gradients else definition.forward, "cpu", [None] * count
    )
    wanted = [*(each.value for each in truth), *rest]
    # With an amax of earlier steps, and in a first step.
    for in_use in (3.0, 0.0):
        there, here = requests(in_use, device), requests(in_use, "cpu")
        made, rest = computed(run, device, there)
        for place, (got, x) in enumerate(
            zip([*(each.value for each in made), *rest], wanted, strict=True)
        ):
            if x is not None:
                unit = max(torch.finfo(each.dtype).eps for each in (*tensors, x))
                wide = x.to(torch.float64).abs()
                bound = 2 * unit * wide + 72 * 2.0**-23 * wide.amax(-1, keepdim=True)
                yield OutputComparison(f"result {place}", got, x, bound)
        for result, moved, request in zip(made, there, here, strict=True):
            if request is not None:
                # The reference casts the kernel's own values: they differ from the definition's by
                # the order of sums.
                cast = definition.cast(result.value.to("cpu"), request)
                window = (
                    None if request.amax_state is None else (moved.amax_state, request.amax_state)
                )
                mine, theirs = ((x.plain, x.transposed, x.amax) for x in (result, cast))
                yield from compared(mine, theirs, window, poisoned=False)


def _examples(of_gradients: bool) -> Iterator[NormActSpec]:
    """Yield every function, with its casts.

    Casts have one scale per tensor, with and without delayed scaling; in the forward pass also one
    per row. Norms also have float32 weights.
    """
    format = E5M2 if of_gradients else E4M3
    for name in KINDS:
        function = Kind(name, 1e-5)
        count = 2 if of_gradients and function.is_gated else 1
        casts = [
            (Cast(format=format, calibrate=DelayedScaling()), True),
            (Cast(format=format), True),
        ]
        casts += [] if of_gradients else [(Cast(format=format, tile=(1, WHOLE)), False)]
        chosen = [()] if of_gradients and function.is_norm else [(cast,) * count for cast in casts]
        for each in chosen:
            yield NormActSpec(function, Device("cpu"), (torch.float16,), COLUMNS, each)
        kept = (
            [(Cast(format=E4M3), True)]
            if function.is_norm
            else [(cast, False) for cast in NARROW.values()]
        )
        if of_gradients or not function.is_norm:
            for how in kept:
                yield NormActSpec(
                    function, Device("cpu"), (torch.float16,), COLUMNS, chosen[0], kept=how
                )
    casts = [] if of_gradients else [(Cast(format=format, calibrate=DelayedScaling()), True)]
    for name in ("rms-norm", "gemma-norm", "layer-norm"):
        dtypes = (torch.float16, *(torch.float32,) * (tensors_of(Kind(name)) - 1))
        yield NormActSpec(Kind(name, 1e-5, wide=True), Device("cpu"), dtypes, COLUMNS, tuple(casts))


FORWARD, BACKWARD = (
    KernelCheck(
        _kind,
        partial(_compare, each),
        partial(_examples, each),
        large=partial(_compare, each, shape=LARGE),
    )
    for each in (False, True)
)

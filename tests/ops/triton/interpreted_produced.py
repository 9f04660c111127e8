"""Runs the kernels of `ops.norm_act` under Triton's interpreter and says what differs from the definition; a process of its own.

    TRITON_INTERPRET=1 python -m tests.ops.triton.cases quick interpreted_produced      tests/ops/triton/cases.py says what is printed

Before the cast: each value within 8 units of float32's rounding of the largest one of its row (sums of 200 terms, in another order),
and one unit of its dtype. After it: the codes and scales are to the bit those that `quantize` gives of the values that were stored.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from narrowgauge.formats import E4M3, E5M2, INT8
from narrowgauge.ops.norm_act import BACKWARD, FORWARD, definition, spec, triton_launch, value
from narrowgauge.ops.norm_act.spec import NARROW, CastRequest, CastResult, Kind, StoredAsCodes
from narrowgauge.ops.quantize import quantize, tile_amax
from narrowgauge.ops.quantize.amax_state import update_amax
from narrowgauge.recipe import WHOLE, Cast
from narrowgauge.scaling import E8M0_CEIL, POW2
from tests.compare import assert_same
from tests.ops.triton.cases import Case

TENSOR, ROW = Cast(format=E4M3), Cast(format=INT8, tile=(1, WHOLE))
VECTOR, MX = (
    Cast(format=E4M3, tile=(1, 128), scale=POW2),
    Cast(format=E5M2, tile=(1, 32), scale=E8M0_CEIL),
)
LIVE = (0.0, 3.0)
UNIT = {torch.float32: 2.0**-23, torch.float16: 2.0**-10}


def kind_of(name: str) -> Kind:
    return Kind(name, 1e-5)  # type: ignore[arg-type]


def tensors_of(kind: Kind, rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    x = torch.randn(rows, columns) * torch.exp2(torch.randn(rows, 1)) + (
        0.5 if kind.name == "layer-norm" else 0.0
    )
    x.view(-1)[:4] = torch.tensor([0.0, -0.0, 8.0, -8.0])
    if kind.is_norm:
        return [
            x.to(dtype),
            *(1 + 0.2 * torch.randn(2, columns)).to(dtype)[: 1 + (kind.name == "layer-norm")],
        ]
    return [x.to(dtype)] + [torch.randn(rows, columns).to(dtype)] * kind.is_gated


def near(got: Tensor, expected: Tensor, name: str, units: float = 1.0, sums: float = 0.0) -> None:
    """Within `units` of the dtype's rounding, element by element, and rounding of sums relative to the largest of a row."""
    wide, other = got.to(torch.float64), expected.to(torch.float64)
    largest = other.abs().amax(-1, keepdim=True)
    bound = units * UNIT[got.dtype] * other.abs() + (8 + sums) * 2.0**-23 * largest
    excess = ((wide - other).abs() - bound).max().item()
    assert excess <= 0, f"{name}: off by {excess:.3g} more than the bound {bound.min().item():.3g}"


def order_of(cast: Cast, turned: bool, in_use: float | None) -> CastRequest:
    live = None if in_use is None else torch.tensor([in_use, 0.5, 0.0])
    return CastRequest(cast, live, True, turned)


def check_casts(made: CastResult, order: CastRequest, spoiled: bool = False) -> None:
    """The codes of what was stored."""
    assert made.plain is not None
    amax = None
    if order.amax_state is not None:
        live = torch.tensor([order.amax_state[0].item(), 0.5, 0.0])
        amax = update_amax(live, tile_amax(made.value, (WHOLE, WHOLE)))
        assert_same(order.amax_state, live, at="live")
        assert made.amax is not None
        assert_same(made.amax, amax, any_nan=True, at="amax")
    expected = quantize(made.value, order.cast, amax=amax, backend="reference")
    turned = quantize(made.value.T, order.cast, amax=amax, backend="reference")
    for name, got, wanted in (("codes", made.plain, expected), ("turned", made.transposed, turned)):
        if got is None:
            assert name == "turned" and not order.transposed
            continue
        assert_same(
            got.scale.contiguous(), wanted.scale.contiguous(), any_nan=True, at=f"{name}: scale"
        )
        if not spoiled:
            assert_same(got.data, wanted.data, at=name)


def compare_forward(
    kind: Kind,
    order: CastRequest,
    shape: tuple[int, int],
    dtype: torch.dtype,
    spoiled: float | None = None,
) -> None:
    tensors = tensors_of(kind, *shape, dtype)
    if spoiled is not None:
        tensors[0][1, 2] = spoiled
    made, statistics = FORWARD.kernels[0].run(kind, tensors, order)
    check_casts(made, order, spoiled is not None)
    if spoiled is None:
        wide = [each.to(torch.float64) for each in tensors]
        near(made.value, value(kind, tensors), "y", 2.0)
        for name, got, expected in zip(
            "ab", statistics, definition.statistics(kind, wide), strict=True
        ):
            assert (got is None) == (expected is None)
            if got is None or expected is None:
                continue
            assert ((got - expected).abs() <= 2.0**-20 * expected.abs() + 1e-6).all(), (
                f"statistic {name}"
            )


def kept_in_codes(
    kind: Kind, tensors: list[Tensor], cast: Cast = NARROW["fp8"]
) -> list[Tensor | StoredAsCodes]:
    """Of a norm the codes of y.T, of an activation those of its inputs. One weight is 0, which y tells nothing about."""
    if not kind.is_norm:
        return [
            StoredAsCodes(quantize(each, cast, backend="reference"), each.dtype) for each in tensors
        ]
    tensors[1][5] = -1.0 if kind.name == "gemma-norm" else 0.0
    return [
        StoredAsCodes(
            quantize(value(kind, tensors).T, TENSOR, backend="reference"), tensors[0].dtype, True
        ),
        *tensors[1:],
    ]


def compare_values_of_codes(kind: Kind, shape: tuple[int, int], dtype: torch.dtype) -> None:
    kept = kept_in_codes(
        kind, tensors_of(kind, *shape, dtype), NARROW["int8" if dtype == torch.float16 else "fp8"]
    )
    kernel, *_, reference = FORWARD.kernels
    near(kernel.run(kind, kept, None)[0].value, reference.run(kind, kept, None)[0].value, "y", 2.0)


def compare_gradients(
    kind: Kind,
    orders: list[CastRequest | None],
    shape: tuple[int, int],
    dtype: torch.dtype,
    of_codes: bool = False,
) -> None:
    """Beside the definition's; the sums of a weight's gradient over rows among them."""
    tensors: list[Tensor | StoredAsCodes] = [*tensors_of(kind, *shape, dtype)]
    gy = torch.randn(shape).to(dtype)
    statistics = definition.statistics(kind, tensors)
    if of_codes:
        tensors = kept_in_codes(kind, tensors)
    kernel, *_, reference = BACKWARD.kernels
    made, of_parameters = kernel.run(kind, tensors, statistics, gy, orders)
    expected, expected_parameters = reference.run(
        kind, tensors, statistics, gy, [None] * len(orders)
    )
    for number, (got, wanted, order) in enumerate(zip(made, expected, orders, strict=True)):
        near(got.value, wanted.value, f"gradient {number}", 1.0, sums=32.0)
        if order is not None:
            check_casts(got, order)
    for got_sum, wanted_sum in zip(of_parameters, expected_parameters, strict=True):
        near(got_sum, wanted_sum, "gradient of a weight", 1.0, sums=64.0)


KINDS = tuple(
    f"{of}{kind} " for of in ("", "backward ") for kind in spec.KINDS
)  # what a case begins with
QUICK = ("rms-norm", "layer-norm", "swiglu", "gelu", "gelu-tanh")
WIDE = ("plain (", "mx (", "first step (")
# Whose casts are those of swiglu and of rms-norm.
FEW = ("gelu", "gelu-tanh", "layer-norm")


def is_quick(name: str) -> bool:
    """Most functions and all casts of one shape and dtype: wide rows of float16 for some, more rows of float32 for the others."""
    function = name.removeprefix("backward ").split()[0]
    if " of codes " in name:
        return function in ("rms-norm", "swiglu") and name.endswith("(37, 131)")
    few = (" delayed (37, 131)", "backward layer-norm none (37, 131)")
    if function not in QUICK or (function in FEW and not name.endswith(few)):
        return False
    if name.endswith(" within"):
        return "nan" in name or "delayed" in name
    forward_in_wide_rows = not name.startswith("backward") and any(part in name for part in WIDE)
    return name.endswith("(5, 1030)" if forward_in_wide_rows else "(37, 131)")


def cases() -> Iterator[Case]:
    triton_launch.PARTS = (
        16  # each of them is a program to interpret; less than there are pieces, so they are shared
    )
    orders = {
        "delayed": (TENSOR, True, 3.0), "delayed, first step": (TENSOR, True, 0.0), "delayed, plain": (TENSOR, False, 3.0),
        "current": (TENSOR, True, None), "current, plain": (TENSOR, False, None), "row": (ROW, False, None),
        "vector": (VECTOR, False, None), "mx": (MX, False, None),
    }  # fmt: skip
    for name in spec.KINDS:
        kind = kind_of(name)
        for title, (cast, turned, in_use) in orders.items():
            for shape, dtype in (((37, 131), torch.float32), ((5, 1030), torch.float16)):
                order = order_of(cast, turned, in_use)
                yield (
                    f"{name} {title} {shape}",
                    lambda kind=kind, order=order, shape=shape, dtype=dtype: compare_forward(
                        kind, order, shape, dtype
                    ),
                )
        for strange in (float("nan"), float("inf")):
            for title in ("delayed", "vector", "row"):
                order = order_of(*orders[title])
                yield (
                    f"{name} {title} {strange} within",
                    lambda kind=kind, order=order, value=strange: compare_forward(
                        kind, order, (9, 140), torch.float32, value
                    ),
                )
        yield from _gradients(kind)


def _gradients(kind: Kind) -> Iterator[Case]:
    count = 2 if kind.is_gated else 1
    choices: dict[str, list[CastRequest | None]] = {"none": [None] * count}
    if not kind.is_norm:
        e5m2 = Cast(format=E5M2)
        choices["delayed"] = [order_of(e5m2, True, in_use) for in_use in (3.0, 0.0)][:count]
        choices["current"] = [order_of(e5m2, True, None) for _ in range(count)]
        choices["mixed"] = [None, order_of(e5m2, True, 3.0)][-count:]
    for title, orders in choices.items():
        for shape, dtype in (((37, 131), torch.float32), ((150, 260), torch.float16)):
            yield (
                f"backward {kind.name} {title} {shape}",
                lambda orders=orders, shape=shape, dtype=dtype: compare_gradients(
                    kind, _fresh(orders), shape, dtype
                ),
            )
    for shape, dtype in (((37, 131), torch.float32), ((70, 260), torch.float16)):
        orders = list(choices.values())[0 if kind.is_norm else 1]
        yield (
            f"backward {kind.name} of codes {shape}",
            lambda orders=orders, shape=shape, dtype=dtype: compare_gradients(
                kind, _fresh(orders), shape, dtype, True
            ),
        )
        if not kind.is_norm:
            yield (
                f"{kind.name} of codes {shape}",
                lambda shape=shape, dtype=dtype: compare_values_of_codes(kind, shape, dtype),
            )


def _fresh(orders: list[CastRequest | None]) -> list[CastRequest | None]:
    return [
        each
        and CastRequest(
            each.cast,
            None if each.amax_state is None else each.amax_state.clone(),
            True,
            each.transposed,
        )
        for each in orders
    ]

"""Every operator that the library registers with torch passes torch.library.opcheck (exact): schema, shapes of fake tensors, tracing.

Operators are found in torch's own table, and each needs a line in GIVEN, which draws arguments for it: empty, ragged and strided
tensors, one element, all float types, all casts of all recipes. `block_mm` and `int4_mm` have no kernel for the CPU: there their
fake tensors are compared with the definition, and a GPU checks the rest. Triton's interpreter stands in for the numbers
(tests/ops/triton/interpreted_products.py), and threads of the CPU (test_int4_units.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from narrowgauge import recipes
from narrowgauge.distributed import codes_in_graphs
from narrowgauge.ops.flat_cast import flatten_cast, is_flattenable
from narrowgauge.ops.mm import int8_cpp
from narrowgauge.recipe import Cast
from tests.ops.registries import registries

NAMESPACE = "narrowgauge::"
CASTS: dict[str, Cast] = {
    str(cast): cast
    for recipe in recipes.ALL for gemm in recipe.gemms().values() for cast in (gemm.lhs, gemm.rhs)
    if cast is not None and is_flattenable(cast)
}  # fmt: skip
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (0, 1, 2, 5, 16, 33, 130)
# Tracing by AOTAutograd takes a quarter of a second, the other three checks together 15 ms.
CHEAP = ("test_schema", "test_autograd_registration", "test_faketensor")
TRACED = ("test_aot_dispatch_dynamic",)
WITHOUT_CPU = {"block_mm", "int4_mm"}

Arguments = Iterator[tuple[Any, ...]]


def registered() -> set[str]:
    registries()  # imports all modules that may register one
    names = torch._C._dispatch_get_all_op_names()
    return {
        name.removeprefix(NAMESPACE).partition(".")[0]
        for name in names
        if name.startswith(NAMESPACE)
    }


def tensor(draw: random.Random, rows: int, columns: int, device: str = "cpu") -> Tensor:
    """[rows, columns] of a random float type, lying in memory in a random way."""
    dtype, scale = draw.choice(FLOATS), 10.0 ** draw.randint(-3, 3)
    x = torch.randn(2 * rows + 1, 2 * columns + 1, device=device).mul(scale).to(dtype)
    ways: list[Callable[[], Tensor]] = [
        lambda: x[:rows, :columns].clone(memory_format=torch.contiguous_format),
        lambda: x[1 : rows + 1, 1 : columns + 1],
        lambda: x[: 2 * rows : 2, : 2 * columns : 2],
        lambda: x[:rows, :columns].T.contiguous().T,
        lambda: x[:1, :columns].expand(rows, columns),
        lambda: torch.zeros(rows, columns, dtype=dtype, device=device),
    ]
    # opcheck (torch 2.13) cannot copy an empty view with the strides of another tensor: it counts a negative length.
    return draw.choice(ways if rows and columns else [ways[0], ways[-1]])()


def shapes(draw: random.Random, number: int) -> Iterator[tuple[int, int]]:
    """All that are empty, and so many others."""
    yield from ((0, 0), (0, 33), (33, 0), (1, 1))
    for _ in range(number):
        yield draw.choice(LENGTHS), draw.choice(LENGTHS)


def casts(draw: random.Random, number: int, device: str = "cpu") -> Arguments:
    for cast, shape, cols in product(CASTS.values(), list(shapes(draw, number)), (False, True)):
        format, tile, rule, headroom = flatten_cast(cast)
        amax = (
            torch.full((1, 1), 2.0, device=device)
            if cast.is_per_tensor and draw.random() < 0.5
            else None
        )
        yield tensor(draw, *shape, device), amax, format, list(tile), rule, headroom, cols


def delayed_casts(draw: random.Random, number: int, device: str = "cpu") -> Arguments:
    """Before the first step of a window, and after it."""
    whole = [cast for cast in CASTS.values() if cast.is_per_tensor]
    for cast, shape, cols, records in product(
        whole, list(shapes(draw, number)), (False, True), (False, True)
    ):
        format, tile, rule, headroom = flatten_cast(cast)
        state = torch.tensor([draw.choice((0.0, 3.0)), draw.choice((0.0, 0.5)), 0.0], device=device)
        yield tensor(draw, *shape, device), state, format, list(tile), rule, headroom, records, cols


def gathered_codes(draw: random.Random, number: int, device: str = "cpu") -> Arguments:
    class Weight:
        def __init__(self, shape: tuple[int, int], has_codes: bool) -> None:
            self.gathered = torch.ones(shape, dtype=torch.uint8, device=device)
            self.given = self.gathered if has_codes else torch.zeros_like(self.gathered)

        def bytes_of(self, orientation: str, use_history: bool) -> Tensor:
            return self.given

    for shape, has_codes in product(shapes(draw, number), (False, True)):
        weight = Weight(shape, has_codes)
        after = tensor(draw, *shape, device) if draw.random() < 0.5 else None
        # The operator looks the weight up by its number, and holds it weakly.
        yield (
            weight.gathered,
            codes_in_graphs.register(weight),
            after,
            draw.choice(("rows", "cols")),
            draw.random() < 0.5,
        )


def scaled_products(draw: random.Random, number: int, device: str = "cpu") -> Arguments:
    """Of the kinds that a CPU multiplies: one scale per tensor; sides of 16 elements, which torch asks for."""
    kind = torch.nn.functional.ScalingType.TensorWise.value
    for _ in range(number):
        m, k, n = (16 * draw.randint(1, 4) for _ in range(3))
        lhs, rhs = (torch.randn(rows, k, device=device).to(torch.float8_e4m3fn) for rows in (m, n))
        scale = torch.ones((), device=device)
        bias = torch.randn(n, device=device, dtype=torch.bfloat16) if draw.random() < 0.5 else None
        yield lhs, rhs, [scale], [kind], [], [scale], [kind], [], bias, torch.bfloat16


def block_products(draw: random.Random, number: int, device: str = "cpu") -> Arguments:
    for _ in range(number):
        m, k, n = (draw.choice((1, 16, 33, 128, 200)) for _ in range(3))
        lhs, rhs = (torch.randn(rows, k, device=device).to(torch.float8_e4m3fn) for rows in (m, n))
        scales = [
            torch.ones(-(-rows // side), -(-k // 128), device=device)
            for rows, side in ((m, 1), (n, 128))
        ]
        bias = torch.randn(n, device=device) if draw.random() < 0.5 else None
        yield lhs, scales[0], rhs, scales[1], bias, [1, 128, 128, 128], draw.choice(FLOATS)


def int4_products(draw: random.Random, number: int, device: str = "cpu") -> Arguments:
    for _ in range(number):
        m, k, n = (draw.choice((1, 16, 33, 128, 200)) for _ in range(3))
        lhs, rhs = (
            torch.randint(-7, 8, (rows, k), dtype=torch.int8, device=device) for rows in (m, n)
        )
        bias = torch.randn(n, device=device) if draw.random() < 0.5 else None
        scale = torch.ones(1, 1, device=device)
        yield lhs, scale, rhs, scale, bias, draw.choice(FLOATS)


def int8_products(draw: random.Random, number: int, device: str = "cpu") -> Arguments:
    for _ in range(number):
        m, k, n = (draw.choice((1, 16, 33, 128, 200)) for _ in range(3))
        lhs, rhs = (
            torch.randint(-127, 128, (rows, k), dtype=torch.int8, device=device) for rows in (m, n)
        )
        rhs = rhs.T.contiguous().T if draw.random() < 0.5 else rhs
        scales = (
            torch.rand(rows if draw.random() < 0.5 else 1, 1, device=device) for rows in (m, n)
        )
        bias = torch.randn(n, device=device) if draw.random() < 0.5 else None
        yield lhs, rhs, *scales, bias, draw.choice(FLOATS)


# Operator -> (draws arguments, further shapes in the quick tests and in the slow ones).
GIVEN: dict[str, tuple[Callable[..., Arguments], int, int]] = {
    "cast": (casts, 0, 12),
    "cast_delayed": (delayed_casts, 0, 12),
    "gathered_codes": (gathered_codes, 4, 40),
    "scaled_mm": (scaled_products, 6, 40),
    "block_mm": (block_products, 6, 40),
    "int4_mm": (int4_products, 6, 40),
    "int8_mm": (int8_products, 6, 40),
}
# The check of schemas multiplies FP8 by numbers, which torch does not.
CHECKS = {"scaled_mm": ("test_faketensor",)}


def check(
    name: str, number: int, utils: tuple[str, ...], share: float = 1.0, device: str = "cpu"
) -> int:
    """Runs opcheck on a share of what GIVEN draws; how many calls it checked. A failure names the arguments."""
    registries()
    op, draw, failed, done = (
        getattr(torch.ops.narrowgauge, name).default,
        random.Random(name),
        [],
        0,
    )
    for given in GIVEN[name][0](draw, number, device):
        if draw.random() >= share:
            continue
        done += 1
        try:
            torch.library.opcheck(op, given, test_utils=utils)
        except Exception as error:
            words = [
                f"{each.dtype} {list(each.shape)} {each.stride()}"
                if isinstance(each, Tensor)
                else each
                for each in given
            ]
            failed.append(f"{words}: {type(error).__name__}: {str(error).splitlines()[0]}")
    assert not failed, f"{len(failed)} of {done} calls of {name}:\n" + "\n".join(failed[:8])
    return done


def test_every_operator_is_checked() -> None:
    assert registered() == GIVEN.keys()


def test_operators_without_a_kernel_for_the_cpu_are_those_that_are_named() -> None:
    keys = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert {
        name for name in registered() if not any(has(NAMESPACE + name, key) for key in keys)
    } == WITHOUT_CPU


@pytest.mark.parametrize("name", sorted(GIVEN.keys() - WITHOUT_CPU))
def test_torch_checks_the_operators(name: str) -> None:
    """Empty tensors and one element. Delayed casts of empty tensors raised torch's error of shapes."""
    if name == "int8_mm" and int8_cpp.LIBRARY.missing:
        pytest.skip(int8_cpp.LIBRARY.missing)
    calls = len(list(GIVEN[name][0](random.Random(name), GIVEN[name][1])))
    assert check(name, GIVEN[name][1], CHECKS.get(name, CHEAP), 40 / calls) >= 6


@pytest.mark.parametrize("name", sorted(GIVEN.keys() - WITHOUT_CPU - CHECKS.keys()))
def test_torch_traces_the_operators(name: str) -> None:
    """A few calls of each, with dynamic shapes."""
    calls = len(list(GIVEN[name][0](random.Random(name), GIVEN[name][1])))
    check(name, GIVEN[name][1], TRACED, 3 / calls)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(GIVEN.keys() - WITHOUT_CPU))
def test_torch_checks_the_operators_on_random_tensors(name: str) -> None:
    assert check(name, GIVEN[name][2], CHECKS.get(name, CHEAP)) >= 40
    if name not in CHECKS:
        check(name, GIVEN[name][2], TRACED, 0.04)


@pytest.mark.parametrize("name", sorted(WITHOUT_CPU))
def test_fake_tensors_of_a_kernel_for_gpus_have_the_shape_of_a_product(name: str) -> None:
    op = getattr(torch.ops.narrowgauge, name).default
    for given in GIVEN[name][0](random.Random(name), GIVEN[name][1]):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in given]
            found = op(*fakes)
        lhs, rhs = given[0], given[2]
        assert (
            found.shape == (len(lhs), len(rhs))
            and found.dtype == given[-1]
            and found.is_contiguous()
        )


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(GIVEN))
def test_torch_checks_the_operators_on_a_gpu(name: str) -> None:
    assert check(name, 1, CHECKS.get(name, ("test_faketensor",)), device="cuda")

"""Do guard and blame serve torchao's modules? Healthy runs and planted faults, emulated on a CPU; needs torchao.

    python -m benchmarks.foreign_faults guard --data shakespeare.txt --runs tensorwise rowwise --seeds 0 1
    python -m benchmarks.foreign_faults blame

The models, steps and checks are those of guard_planted and blame_faults; the Linears of the blocks are torchao's instead of ours.

    guard    healthy: `tensorwise`, `rowwise`, `rowwise_with_gw_hp` (Float8Linear) and `mxfp8` (MXFP8Linear), all eight checks.
             Faults, in every Linear of `tensorwise`, over three checks: see FAULTS
    blame    the Llama of blame_faults after 120 steps in `tensorwise`; then each fault of OF_ONE in one product of one layer, alone
             and beside the healthy step before

A fault wraps torchao's own cast or its product, so the code that decides is the code of the library.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import narrowgauge as ng
from benchmarks.blame_faults import LAYERS, MODELS, STEPS, Trained, _place
from benchmarks.guard_planted import KEPT, SETTINGS, Run, batches, build
from benchmarks.harness import RESULTS, record
from narrowgauge.diagnose.verdict import EQUIVALENT, GUARD, WORSE, outcome_of
from narrowgauge.nn.plan import OPERANDS, PRODUCTS
from narrowgauge.recipe import GEMMS

HEALTHY = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
KEPT_FOR = 1  # steps for which blame's frozen scale is kept before the observed one
DROPPED = 16  # of the contracted axis, as in the planted faults of our own modules
ROLES = {"input": "x", "weight": "w", "grad_output": "gy"}


def converted(model: nn.Module, name: str) -> nn.Module:
    """The Linears of the blocks as torchao's, emulated. Each Float8Linear gets a configuration object of its own."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    if name != "mxfp8":
        config = replace(Float8LinearConfig.from_recipe_name(name), emulate=True)
        convert_to_float8_training(
            model, config=config, module_filter_fn=lambda _, name: not name.endswith("lm_head")
        )
        for layer in model.modules():
            if type(layer).__name__ == "Float8Linear":
                layer.linear_mm_config = type(layer.linear_mm_config)(*layer.linear_mm_config)
        return model
    for owner in list(model.modules()):
        for own, child in list(owner.named_children()):
            if type(child) is nn.Linear and own != "lm_head":
                layer = MXFP8Linear(
                    child.in_features, child.out_features, child.bias is not None, kernel_preference=KernelPreference.EMULATED
                )  # fmt: skip
                layer.weight, layer.bias = child.weight, child.bias
                setattr(owner, own, layer)
    return model


# Faults

# (original cast, its arguments, the operand's key) -> codes
Cast = Callable[[Callable[..., Any], Tensor, tuple[Any, ...], dict[str, Any], Any], Any]


class Frozen:
    """The scale of the first call for ever."""

    def __init__(self) -> None:
        self.scales: dict[Any, Tensor] = {}

    def __call__(self, cast: Any, x: Tensor, rest: Any, named: Any, key: Any) -> Any:
        made = cast(x, *rest, **named)
        return _rescaled(x, made, self.scales.setdefault(key, made._scale))


class Stale:
    """The codes of the weight of the first call for ever."""

    def __init__(self) -> None:
        self.weights: dict[Any, Tensor] = {}

    def __call__(self, cast: Any, x: Tensor, rest: Any, named: Any, key: Any) -> Any:
        if key[1] == "w":
            x = self.weights.setdefault(key, x.detach().clone())
        return cast(x, *rest, **named)


def saturating(cast: Any, x: Tensor, rest: Any, named: Any, key: Any) -> Any:
    """The scale is made for a sixteenth of the largest magnitude."""
    made = cast(x, *rest, **named)
    return _rescaled(x, made, made._scale * 16)


def short_amax(cast: Any, x: Tensor, rest: Any, named: Any, key: Any) -> Any:
    """The scale of gy is that of the first half of its rows."""
    if key[1] != "gy":
        return cast(x, *rest, **named)
    return _rescaled(x, cast(x, *rest, **named), cast(x[: len(x) // 2], *rest, **named)._scale)


def _rescaled(x: Tensor, made: Any, scale: Tensor) -> Any:
    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

    dtype, axis = made._data.dtype, made._axiswise_dim
    return hp_tensor_and_scale_to_float8(
        x, scale, dtype, made._linear_mm_config, made._gemm_input_role, axis
    )


def dropped(multiply: Any, lhs: Tensor, rhs: Tensor) -> Any:
    """The kernel leaves out the first columns of the contracted axis."""
    return multiply(*(_without(each, axis, DROPPED) for each, axis in ((lhs, 1), (rhs, 0))))


def lost_tokens(multiply: Any, lhs: Tensor, rhs: Tensor) -> Any:
    """The kernel of grad_weight leaves out half of the tokens."""
    half = lhs.shape[1] // 2 if _gemm(lhs, rhs) == "grad_weight" else 0
    return multiply(*(_without(each, axis, half) for each, axis in ((lhs, 1), (rhs, 0))))


def _without(codes: Any, axis: int, number: int) -> Any:
    data = codes._data.clone()
    data.view(torch.uint8).narrow(axis, 0, number).zero_()
    return type(codes)(
        data, codes._scale, codes._orig_dtype, codes._linear_mm_config, codes._gemm_input_role, codes._axiswise_dim
    )  # fmt: skip


def _gemm(lhs: Any, rhs: Any) -> str:
    """torchao multiplies gy.T @ x, so the roles name the product."""
    roles = ROLES[lhs._gemm_input_role.value], ROLES[rhs._gemm_input_role.value]
    return next(name for name, own in OPERANDS.items() if own == roles)


CASTS: dict[str, Callable[[], Cast]] = {
    "frozen-scale": Frozen, "stale-weights": Stale, "saturating": lambda: saturating, "short-amax": lambda: short_amax,
}  # fmt: skip
KERNELS = {"dropped-columns": dropped, "lost-tokens": lost_tokens}
FAULTS = (*CASTS, *KERNELS, "dead-layer")
OF_ONE = ("frozen-scale", "saturating", "dropped-columns")


@contextmanager
def planted(layers: Sequence[Any], fault: str, product: str = "", side: str = "") -> Iterator[None]:
    """Inside the block the cast or the product of these layers is at fault: all of them, or one product, and one side of it."""
    import torchao.float8.float8_linear as own
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

    wrong, calls = CASTS[fault]() if fault in CASTS else None, Counter[Any]()
    role = OPERANDS[product][side == "rhs"] if product else ""
    configs = {id(layer.linear_mm_config) for layer in layers}
    cast_of, mm = own.hp_tensor_to_float8_dynamic, torch.ops.aten.mm.default
    multiply_of = FLOAT8_OPS_TABLE[mm]

    def cast(x: Tensor, dtype: Any, config: Any, *rest: Any, **named: Any) -> Any:
        key = id(config), ROLES[named["gemm_input_role"].value]
        # Forward and backward cast each tensor once for each of its two products, in their order.
        now = PRODUCTS[key[1]][calls[key] % 2]
        calls[key] += 1
        given = (dtype, config, *rest)
        if wrong is None or key[0] not in configs or (product and (now, key[1]) != (product, role)):
            return cast_of(x, *given, **named)
        return wrong(cast_of, x, given, named, (*key, now))

    def multiply(operator: Any, args: Any, kwargs: Any = None) -> Any:
        lhs, rhs = args
        is_here = id(lhs._linear_mm_config) in configs
        if fault not in KERNELS or not is_here or (product and _gemm(lhs, rhs) != product):
            return multiply_of(operator, args, kwargs)
        return KERNELS[fault](lambda *pair: multiply_of(operator, pair, kwargs), lhs, rhs)

    with ExitStack() as stack:
        stack.enter_context(patch.object(own, "hp_tensor_to_float8_dynamic", cast))
        stack.enter_context(patch.dict(FLOAT8_OPS_TABLE, {mm: multiply}))
        if fault == "dead-layer":
            dead = layers[len(layers) // 2]
            before = dead.forward
            dead.forward = lambda x: before(x) * 0
            stack.callback(vars(dead).pop, "forward")
        yield


def float8_linears(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if type(each).__name__ == "Float8Linear"]


# Guard


def guarded(name: str, seed: int, data: Path) -> dict[str, Any]:
    """One run with its checks: eight of a healthy run, three of a fault."""
    torch.manual_seed(seed)
    text = torch.frombuffer(bytearray(data.read_bytes()), dtype=torch.uint8).long()
    every, first = SETTINGS["every"], SETTINGS["first"]
    model = converted(build(SETTINGS), name if name in HEALTHY else "tensorwise")
    run = Run(model, SETTINGS["rate"], SETTINGS["warmup"], SETTINGS["steps"])
    checks: list[dict[str, Any]] = []
    guard = ng.Guard(
        f"every={every},steps={every},then=warn", model, run.optimizer, run.step, also=[run.scheduler], warmup_steps=first,
        tell=checks.append,
    )  # fmt: skip
    steps = SETTINGS["steps"] if name in HEALTHY else first + 3 * every
    with planted(float8_linears(model), name) if name in FAULTS else ExitStack():
        losses = [
            float(guard(ids)) for ids in batches(text, seed, SETTINGS["steps"], SETTINGS)[:steps]
        ]
    outcomes = [outcome_of(GUARD, check) for check in checks]
    alarmed = outcomes.index(WORSE) + 1 if WORSE in outcomes else None
    return {
        "part": "guard", "run": name, "seed": seed, "steps": steps, "loss": losses[-1], "alarmed": alarmed,
        "seen_on": checks[alarmed - 1]["seen_on"] if alarmed else "",
        "certified": outcomes.index(EQUIVALENT) + 1 if EQUIVALENT in outcomes else None,
        "checks": [{key: check[key] for key in KEPT} for check in checks],
    }  # fmt: skip


# Blame


def blamed(seed: int, faults: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each fault, product and layer, alone and beside a healthy step."""
    torch.manual_seed(seed)
    make, loss = MODELS["llama"]
    model = converted(make().train(), "tensorwise")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    trained = Trained(model, loss, optimizer, torch.Generator().manual_seed(seed))
    with planted([], "none"):
        trained.train(STEPS)
        healthy = trained.blamed(trained.batch())
    yield {
        "part": "blame", "fault": "none", "seed": seed, "suspects": len(healthy.suspects), "products": len(healthy.findings),
        "times": healthy.findings[0].worse.times, "uncast": max(each.worse.uncast for each in healthy.findings),
    }  # fmt: skip
    for fault in faults:
        for place, name in enumerate(LAYERS):
            layer = next(each for own, each in model.named_modules() if own.endswith(name))
            for product in GEMMS:
                side = ("lhs", "rhs")[place % 2]
                with planted([layer], fault, product, side):
                    if fault == "frozen-scale":
                        trained.train(KEPT_FOR)
                    for beside in (None, healthy):
                        found = trained.blamed(trained.batch(), beside)
                        yield {
                            "part": "blame", "fault": fault, "layer": name, "product": product, "side": side, "seed": seed,
                            "baseline": beside is not None, **_place(found, name, {product}),
                        }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Guard and blame over torchao's modules.")
    parser.add_argument("part", choices=("guard", "blame"))
    parser.add_argument("--data", type=Path, help="any text file, for guard")
    parser.add_argument(
        "--runs", nargs="+", choices=(*HEALTHY, *FAULTS), default=[*HEALTHY, *FAULTS]
    )
    parser.add_argument(
        "--faults", nargs="+", choices=OF_ONE, default=list(OF_ONE), help="of blame"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = RESULTS / "foreign_faults.jsonl"
    for seed in options.seeds:
        if options.part == "guard":
            for name in options.runs:
                row = guarded(name, seed, options.data)
                record("foreign_faults", [row], results)
                shown = ("run", "seed", "loss", "alarmed", "seen_on", "certified")
                print(*(f"{key} {row[key]}" for key in shown), sep="  ", flush=True)
            continue
        rows = []
        for row in blamed(seed, options.faults):
            rows.append(row)
            print(row, flush=True)
        record("foreign_faults", rows, results)
        for fault in options.faults:
            own = [row for row in rows if row["fault"] == fault]
            first = sum(row["rank"] == 1 and row["is_suspect"] for row in own)
            others = sum(row["other_suspects"] > 0 for row in own)
            print(f"{fault}: rank one {first} of {len(own)}; others suspect beside it {others}")


if __name__ == "__main__":
    main()

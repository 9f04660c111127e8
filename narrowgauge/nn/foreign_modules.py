"""Adapters for low-precision modules of other libraries, which are not imported here.

    class, in any version                         16 bits               operands observed
    torchao Float8Linear                          weight                yes, emulated or native
    torchao MXFP8Linear                           weight                yes
    torchao NVFP4Linear, Float8BlockwiseLinear,   weight                no: kernels of their own
        Int8MixedPrecisionTrainingLinear
    TransformerEngine, modules with `fp8_meta`    its autocast is off   no: kernels of their own
    bitsandbytes Linear8bitLt                     decoded weight        no: kernels of their own
    bitsandbytes Linear4bit                       as it is              no: already 16-bit products

Modules are recognized by the names of their classes and by their attributes. accelerate's FP8 gives
modules of torchao or of TransformerEngine. Casts follow the definitions of each library (torchao
0.18: float8_utils.amax_to_scale, mx_formats.mx_tensor.to_mx), written in this library's words, so
that a fault in the library's own cast does not hide in the comparison.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import recipes
from narrowgauge.errors import Reason
from narrowgauge.formats import E4M3, E5M2, INT8, FloatFormat
from narrowgauge.nn.foreign_linear import HELD, ForeignLinear
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, Gemm, Recipe
from narrowgauge.scaling import E8M0_CEIL, E8M0_FLOOR, WHOLE, ScaleRule

SMALLEST_AMAX = 1e-12  # float8_utils.EPS: torchao scales a smaller amax as this one
FORMATS: dict[torch.dtype, FloatFormat] = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
OWN_KERNELS = Reason(
    "foreign.own-kernels", "its library multiplies in kernels that show torch no operands"
)
# Packages whose modules compute in low precision. Of these, a module with a matrix needs an adapter.
LIBRARIES = (
    "torchao", "transformer_engine", "bitsandbytes", "msamp", "quanto", "optimum", "hqq", "gptqmodel", "auto_gptq", "awq",
    "compressed_tensors", "aqlm", "eetq", "fbgemm_gpu", "deep_gemm", "deepspeed", "modelopt",
)  # fmt: skip


def adapter(module: nn.Module) -> ForeignLinear | None:
    """The adapter of a module of another library, or None.

    The module holds it while its forward is replaced; otherwise each call makes a new one.
    """
    held: ForeignLinear | None = vars(module).get(HELD)
    if held is not None:
        return held
    kind = _kind(module)
    return None if kind is None else kind(module)


def why_foreign(module: nn.Module) -> Reason | None:
    """Reason why `convert` leaves a module to another library, or None."""
    if (known := adapter(module)) is not None:
        return Reason("foreign", f"{known.library} computes it: {known.recipe.name}")
    return why_unknown(module)


def why_unknown(module: nn.Module) -> Reason | None:
    """Reason why a module may compute in low precision that nothing here can switch, or None."""
    if adapter(module) is not None:
        return None
    matrices = [each for each in module._parameters.values() if each is not None and each.ndim == 2]
    if not matrices:
        return None
    own = type(module).__module__
    if library := _library(own):
        return Reason(
            "foreign.no-adapter",
            f"no adapter knows {library}'s {type(module).__name__}, which computes alike in a run and in its reference",
        )
    for kind in (type(tensor) for each in matrices for tensor in (each, each.data)):
        if library := _library(kind.__module__):
            return Reason(
                "foreign.weight-class",
                f"its weight is a {kind.__name__} of {library}, which multiplies by itself, alike in a run and in its reference",
            )
    return None


def unknown_layers(model: nn.Module) -> dict[str, Reason]:
    """Name -> reason, of modules of other low-precision libraries that no adapter knows."""
    found = ((name, why_unknown(module)) for name, module in model.named_modules())
    return {name: reason for name, reason in found if reason is not None}


def words_on_unknown(model: nn.Module) -> str:
    """Sentence on the modules of `unknown_layers`, or ''."""
    unknown = unknown_layers(model)
    if not unknown:
        return ""
    name, reason = next(iter(unknown.items()))
    many = "1 module is" if len(unknown) == 1 else f"{len(unknown)} modules are"
    return Reason(
        "foreign.unknown", f"{many} not judged, {name or 'the model'} the first: {reason}."
    )


def _library(module: str) -> str:
    package = module.partition(".")[0]
    return package if package in LIBRARIES else ""


def _kind(module: nn.Module) -> Callable[[nn.Module], ForeignLinear] | None:
    """Class of the adapter, by the class of the module and by the attributes that it reads."""
    for each in type(module).__mro__:
        known = KINDS.get(each.__name__)
        if known is not None and all(hasattr(module, name) for name in known[0]):
            return known[1]
        if each.__module__.startswith("transformer_engine.") and hasattr(module, "fp8_meta"):
            return _OfTransformerEngine
        if each is nn.Linear or each is nn.Module:
            return None
    return None


# --- torchao


def _floored_fp32(amax: Tensor, format: Any) -> Tensor:
    # 1 / (max / amax), both rounded to float32, in torchao's order: it stores the reciprocal.
    largest = amax.to(torch.float64).clamp(min=SMALLEST_AMAX)
    return (format.max / largest).to(torch.float32).reciprocal()


def _floored_pow2(amax: Tensor, format: Any) -> Tensor:
    factor = _floored_fp32(amax, format).reciprocal()
    return (
        torch.exp2(torch.floor(torch.log2(factor.to(torch.float64)))).to(torch.float32).reciprocal()
    )


TORCHAO_FP32 = ScaleRule("fp32-floored", _floored_fp32)
TORCHAO_POW2 = ScaleRule("pow2-floored", _floored_pow2, power_of_two=True)


@dataclass(frozen=True, kw_only=True)
class FactoredQTensor(QTensor):
    """Codes of x times a factor, of which `scale` is the reciprocal.

    factor    float32, one number or [outer, 1]

    The reciprocal of the reciprocal is another float32 now and then. In 16-bit tensors many elements
    lie half-way between two codes: there the last bit of the factor decides (0.9 % of the codes
    of one tensor, decisions/trust.md), so a fresh cast multiplies by the factor itself.
    """

    factor: Tensor

    def cast_again(self, x: Tensor) -> Tensor:
        """A fresh cast of x [outer, contracted], decoded: float32."""
        return self.cast.format.round(x.to(torch.float32) * self.factor) * self.full_scale()


class _OfFloat8Linear(ForeignLinear):
    """torchao.float8's Float8Linear: dynamic scales per tensor or row, in three GEMMs."""

    def __init__(self, module: nn.Module) -> None:
        config: Any = module.config
        rule = TORCHAO_POW2 if config.round_scales_to_power_of_2 else TORCHAO_FP32

        def cast(of: Any) -> Cast | None:
            if of.scaling_type.name == "DISABLED":
                return None
            tile = (WHOLE, WHOLE) if of.scaling_granularity.name == "TENSORWISE" else (1, WHOLE)
            return Cast(format=FORMATS[of.target_dtype], tile=tile, scale=rule)

        def gemm(lhs: Any, rhs: Any, of: Any) -> Gemm:
            return Gemm(lhs=cast(lhs), rhs=cast(rhs), fast_accumulate=of.use_fast_accum)

        recipe = Recipe(
            name="torchao float8",
            output=gemm(
                config.cast_config_input, config.cast_config_weight, config.gemm_config_output
            ),
            grad_input=gemm(
                config.cast_config_grad_output,
                config.cast_config_weight_for_grad_input,
                config.gemm_config_grad_input,
            ),
            grad_weight=gemm(
                config.cast_config_grad_output_for_grad_weight,
                config.cast_config_input_for_grad_weight,
                config.gemm_config_grad_weight,
            ),
        )
        super().__init__(module, recipe, "torchao Float8Linear")
        self._rule = rule

    def operand(self, stored: Tensor, is_rhs: bool) -> QTensor | Tensor | None:
        """A Float8TrainingTensor: codes, and the factor that they were multiplied by."""
        if not hasattr(stored, "_scale"):
            return super().operand(stored, is_rhs)
        made: Any = stored
        if made._data.dtype not in FORMATS:
            return None
        data, factor = made._data, made._scale.to(torch.float32)
        if is_rhs:
            data, factor = data.t(), factor.t() if factor.ndim == 2 else factor
        tile = (1, WHOLE) if factor.ndim == 2 else (WHOLE, WHOLE)
        cast = Cast(format=FORMATS[data.dtype], tile=tile, scale=self._rule)
        found = _qtensor(data, factor.reciprocal(), cast)
        return (
            None if found is None else FactoredQTensor(**vars(found), factor=factor, checked=True)
        )


class _OfMXLinear(ForeignLinear):
    """torchao's MXFP8Linear: E4M3 with a power of two for 32 elements of the contracted axis."""

    def __init__(self, module: nn.Module) -> None:
        held: Any = module
        mode = getattr(held.scale_calculation_mode, "name", "")
        self._rule = E8M0_CEIL if mode == "RCEIL" else E8M0_FLOOR
        gemm = Gemm(lhs=self._cast(E4M3, 32), rhs=self._cast(E4M3, 32))
        weight = Gemm() if getattr(module, "wgrad_with_hp", False) else gemm
        recipe = Recipe(name="torchao mxfp8", output=gemm, grad_input=gemm, grad_weight=weight)
        super().__init__(module, recipe, "torchao MXFP8Linear")

    def _cast(self, format: FloatFormat, block: int) -> Cast:
        return Cast(format=format, tile=(1, block), scale=self._rule)

    def operand(self, stored: Tensor, is_rhs: bool) -> QTensor | Tensor | None:
        """An MXTensor: codes, and E8M0 scales along the contracted axis."""
        made: Any = stored
        if not hasattr(made, "qdata"):
            return super().operand(stored, is_rhs)
        if made.qdata.dtype not in FORMATS or getattr(made, "is_swizzled_scales", False):
            return None
        if made.qdata.numel() != made.scale.numel() * made.block_size:
            return None
        data, scale = (each.t() if is_rhs else each for each in (made.qdata, made.scale))
        cast = self._cast(FORMATS[data.dtype], made.block_size)
        # A block of zeros has the smallest E8M0 there, 2**-127, and 1 by the rules here.
        zeros = data.to(torch.float32).unflatten(1, (scale.shape[1], -1)).abs().amax(-1) == 0
        return _qtensor(data, torch.where(zeros, 1.0, scale.to(torch.float32)), cast)


def _qtensor(data: Tensor, scale: Tensor, cast: Cast) -> QTensor | None:
    """The operand, or None if codes and scales do not fit as the library is known to store them."""
    if data.ndim != 2:
        return None
    outer, inner = data.shape
    sizes = [
        1 if tile == WHOLE else -(-length // tile)
        for length, tile in zip((outer, inner), cast.tile, strict=True)
    ]
    if scale.numel() != sizes[0] * sizes[1]:
        return None
    return QTensor(data=data, scale=scale.reshape(sizes), cast=cast, inner=inner, checked=True)


def _opaque(library: str, recipe: Callable[[Any], Recipe]) -> Callable[[nn.Module], ForeignLinear]:
    """Adapter of a Linear with a weight of 16 or 32 bits whose kernels show no operands."""

    def make(module: nn.Module) -> ForeignLinear:
        made = ForeignLinear(module, recipe(module), library)
        made.unobserved = OWN_KERNELS
        return made

    return make


def _int8(module: Any) -> Recipe:
    own = module.config
    cast = Cast(format=INT8, tile=(1, WHOLE))
    output, grad_input, grad_weight = (
        Gemm(lhs=cast, rhs=cast) if is_narrow else Gemm()
        for is_narrow in (own.output, own.grad_input, own.grad_weight)
    )
    return Recipe(
        name="torchao int8", output=output, grad_input=grad_input, grad_weight=grad_weight
    )


# --- TransformerEngine

# Class of the recipe of an autocast -> a recipe here with the same formats and tiles.
OF_TE = {
    "DelayedScaling": "fp8-delayed", "Float8CurrentScaling": "fp8-current", "Float8BlockScaling": "fp8-block",
    "MXFP8BlockScaling": "mxfp8", "NVFP4BlockScaling": "nvfp4",
}  # fmt: skip


class _OfTransformerEngine(ForeignLinear):
    """A module with `fp8_meta`: Linear, LayerNormLinear, LayerNormMLP, GroupedLinear.

    In 16 bits it computes by its own code, outside of the autocast for FP8. The recipe of that
    autocast is known after the first pass inside one; before it, delayed scaling stands for it.
    """

    def __init__(self, module: nn.Module) -> None:
        meta: Any = module.fp8_meta
        known = type(meta.get("recipe")).__name__ if isinstance(meta, dict) else ""
        likeness = recipes.get(OF_TE.get(known, "fp8-delayed"))
        name = known if known in OF_TE else "of its autocast"
        super().__init__(
            module,
            replace(likeness, name=f"TransformerEngine {name}"),
            f"TransformerEngine {type(module).__name__}",
        )
        self.unobserved = OWN_KERNELS

    def wide(self, *given: Any, **named: Any) -> Any:
        with _outside_of_fp8():
            return self.narrow(*given, **named)


def _outside_of_fp8() -> Any:
    """TransformerEngine's context without FP8: `autocast` since 2.8, `fp8_autocast` before."""
    pytorch: Any = sys.modules["transformer_engine.pytorch"]
    if hasattr(pytorch, "autocast"):
        return pytorch.autocast(enabled=False)
    return pytorch.fp8_autocast(enabled=False)


# --- bitsandbytes


class _OfLinear8bit(ForeignLinear):
    """bitsandbytes' Linear8bitLt: INT8 rows of x by INT8 rows of the weight; gradient in 16 bits."""

    def __init__(self, module: nn.Module) -> None:
        cast = Cast(format=INT8, tile=(1, WHOLE))
        recipe = Recipe(name="bitsandbytes int8", output=Gemm(lhs=cast, rhs=cast))
        super().__init__(module, recipe, "bitsandbytes Linear8bitLt")
        self.unobserved = OWN_KERNELS

    def weight_in_16_bits(self, x: Tensor) -> Tensor:
        """Codes times the largest magnitude of their row, over 127."""
        module: Any = self.module
        weight = module.weight
        if weight.dtype != torch.int8:  # not on a device yet, or has_fp16_weights
            return weight
        codes, scale = (
            (module.state.CB, module.state.SCB)
            if module.state.CB is not None
            else (weight, weight.SCB)
        )
        return (codes.to(torch.float32) * (scale.to(torch.float32) / 127)[:, None]).to(x.dtype)


class _OfLinear4bit(ForeignLinear):
    """bitsandbytes' Linear4bit, which decodes its weight and multiplies in 16 bits."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(
            module,
            replace(recipes.BF16, name="16 bits, weight of 4-bit codes"),
            "bitsandbytes Linear4bit",
        )
        self.unobserved = Reason(
            "foreign.decoded-weight",
            "it multiplies in 16 bits by the weight that its codes decode to",
        )

    def wide(self, *given: Any, **named: Any) -> Any:
        return self.narrow(*given, **named)


# Name of a class -> (attributes that its adapter reads, the adapter).
KINDS: dict[str, tuple[tuple[str, ...], Callable[[nn.Module], ForeignLinear]]] = {
    "Float8Linear": (("config", "linear_mm_config", "weight"), _OfFloat8Linear),
    "MXFP8Linear": (("kernel_preference", "scale_calculation_mode", "weight"), _OfMXLinear),
    "NVFP4Linear": (
        ("kernel_preference", "weight"),
        _opaque(
            "torchao NVFP4Linear", lambda _: replace(recipes.get("nvfp4"), name="torchao nvfp4")
        ),
    ),
    "Float8BlockwiseLinear": (
        ("weight",),
        _opaque(
            "torchao Float8BlockwiseLinear",
            lambda _: replace(recipes.get("fp8-block"), name="torchao fp8 blockwise"),
        ),
    ),
    "Int8MixedPrecisionTrainingLinear": (
        ("config", "weight"),
        _opaque("torchao Int8MixedPrecisionTrainingLinear", _int8),
    ),
    "Linear8bitLt": (("weight", "state"), _OfLinear8bit),
    "Linear4bit": (("weight", "compute_dtype"), _OfLinear4bit),
}

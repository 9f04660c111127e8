"""Stand-ins for Linears of other libraries, with the classes' names and the attributes that adapters read.

Float8Linear          torchao's, emulated: codes and a factor in a tensor subclass, which aten.mm decodes
TELinear              TransformerEngine's: `fp8_meta`, and FP8 inside the context of a module of that name
Linear8bitLt          bitsandbytes': INT8 rows of the weight and their largest magnitudes
NF4Linear             of a package for low precision that no adapter knows
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# (GEMM, side) -> what a fault does to the factor of this operand, or to the codes that its kernel reads.
Fault = Callable[[Tensor], Tensor]


class Codes(torch.Tensor):
    """A matrix as codes, value = code / factor, as torchao's Float8TrainingTensor."""

    _data: Tensor
    _scale: Tensor

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, dtype: torch.dtype) -> Codes:
        made = torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=dtype
        )
        made._data, made._scale = data, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.t.default:
            [own] = args
            scale = own._scale.t() if own._scale.ndim == 2 else own._scale
            return Codes(own._data.t(), scale, own.dtype)
        assert func is torch.ops.aten.mm.default, func
        lhs, _ = args
        dropped = getattr(lhs, "dropped", 0)
        left, right = (each._data.float() / each._scale for each in args)
        return (left[:, dropped:] @ right[dropped:]).to(lhs.dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl


def cast(x: Tensor, dtype: torch.dtype, rows: bool, fault: Fault | None = None) -> Codes:
    """x [outer, contracted] by its largest magnitude, or those of its rows."""
    amax = x.abs().amax(1, keepdim=True) if rows else x.abs().amax()
    largest = torch.finfo(dtype).max
    factor = (largest / amax.double().clamp(min=1e-12)).float()
    factor = factor if fault is None else fault(factor)
    return Codes((x.float() * factor).clamp(-largest, largest).to(dtype), factor, x.dtype)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight, layer):
        context.save_for_backward(x, weight)
        context.layer = layer
        return layer.product("output", x.reshape(-1, x.shape[-1]), weight).reshape(
            *x.shape[:-1], -1
        )

    @staticmethod
    def backward(context, gy):
        x, weight = context.saved_tensors
        rows, own = gy.reshape(-1, gy.shape[-1]), x.reshape(-1, x.shape[-1])
        gx = context.layer.product("grad_input", rows, weight.t())
        return gx.reshape(x.shape), context.layer.product("grad_weight", rows.t(), own.t()), None


class Float8Linear(nn.Linear):
    """faults   (GEMM, side) -> change of that operand's factor; dropped: GEMM -> columns its kernel leaves out"""

    def __init__(
        self, layer: nn.Linear, granularity: str = "TENSORWISE", wide: tuple[str, ...] = ()
    ) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None)
        self.weight, self.bias = layer.weight, layer.bias
        self.linear_mm_config = None
        self.faults: dict[tuple[str, str], Fault] = {}
        self.dropped: dict[str, int] = {}

        def of(dtype: torch.dtype, gemm: str) -> SimpleNamespace:
            return SimpleNamespace(
                scaling_type=SimpleNamespace(name="DISABLED" if gemm in wide else "DYNAMIC"),
                scaling_granularity=SimpleNamespace(name=granularity), target_dtype=dtype,
            )  # fmt: skip

        gemm = SimpleNamespace(use_fast_accum=False)
        self.config = SimpleNamespace(
            cast_config_input=of(E4M3, "output"), cast_config_weight=of(E4M3, "output"),
            cast_config_grad_output=of(E5M2, "grad_input"), cast_config_weight_for_grad_input=of(E4M3, "grad_input"),
            cast_config_grad_output_for_grad_weight=of(E5M2, "grad_weight"), cast_config_input_for_grad_weight=of(E4M3, "grad_weight"),
            gemm_config_output=gemm, gemm_config_grad_input=gemm, gemm_config_grad_weight=gemm, round_scales_to_power_of_2=False,
        )  # fmt: skip

    def product(self, gemm: str, lhs: Tensor, rhs: Tensor) -> Tensor:
        config = self.config
        casts = {
            "output": (config.cast_config_input, config.cast_config_weight),
            "grad_input": (config.cast_config_grad_output, config.cast_config_weight_for_grad_input),
            "grad_weight": (config.cast_config_grad_output_for_grad_weight, config.cast_config_input_for_grad_weight),
        }[gemm]  # fmt: skip
        if casts[0].scaling_type.name == "DISABLED":
            return torch.mm(lhs, rhs.to(lhs.dtype).t())
        made = [
            cast(
                each,
                of.target_dtype,
                of.scaling_granularity.name == "AXISWISE",
                self.faults.get((gemm, side)),
            )
            for each, of, side in zip((lhs, rhs), casts, ("lhs", "rhs"), strict=True)
        ]
        made[0].dropped = self.dropped.get(gemm, 0)
        return torch.mm(made[0], made[1].t())

    def forward(self, x: Tensor) -> Tensor:
        y = _Products.apply(x, self.weight, self)
        return y if self.bias is None else y + self.bias


class MXCodes(torch.Tensor):
    """A matrix as codes and a power of two for 32 elements of its contracted axis, as torchao's MXTensor."""

    qdata: Tensor
    scale: Tensor
    block_size = 32

    @staticmethod
    def __new__(cls, qdata: Tensor, scale: Tensor, dtype: torch.dtype) -> MXCodes:
        made = torch.Tensor._make_wrapper_subclass(
            cls, qdata.size(), strides=qdata.stride(), dtype=dtype
        )
        made.qdata, made.scale = qdata, scale
        return made

    def decoded(self) -> Tensor:
        across = self.qdata.shape[1] != self.scale.shape[1]
        scale = self.scale.float().repeat_interleave(32, 1 if across else 0)
        return self.qdata.float() * scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.t.default:
            return MXCodes(args[0].qdata.t(), args[0].scale.t(), args[0].dtype)
        assert func is torch.ops.aten.mm.default, func
        return (args[0].decoded() @ args[1].decoded()).to(args[0].dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl


class MXFP8Linear(nn.Linear):
    """shift   binary digits by which the scale of x in `output` is too small"""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features)
        self.weight, self.bias, self.shift = layer.weight, layer.bias, 0
        self.kernel_preference = SimpleNamespace(name="EMULATED")
        self.scale_calculation_mode = SimpleNamespace(name="RCEIL")

    def product(self, gemm: str, lhs: Tensor, rhs: Tensor) -> Tensor:
        shift = self.shift if gemm == "output" else 0
        return torch.mm(mx_cast(lhs, shift), mx_cast(rhs).t())

    def forward(self, x: Tensor) -> Tensor:
        return _Products.apply(x, self.weight, self) + self.bias


def mx_cast(x: Tensor, shift: int = 0) -> MXCodes:
    """x [outer, contracted] with the smallest powers of two under which no element saturates; E8M0's smallest for zeros."""
    blocks = x.float().reshape(len(x), -1, 32)
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1) / 448)).clamp(min=-127) - shift
    codes = (blocks * torch.exp2(-exponent)[..., None]).clamp(-448, 448).to(E4M3).reshape(x.shape)
    biased = (exponent + 127).clamp(min=0).to(torch.uint8).view(torch.float8_e8m0fnu)
    return MXCodes(codes, biased, x.dtype)


def converted(
    model: nn.Module,
    make: Callable[[nn.Linear], nn.Module] = Float8Linear,
    but: tuple[str, ...] = ("lm_head", "gate"),
) -> nn.Module:
    """The model with its Linears replaced, as libraries convert one, except those whose names end so."""
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if type(child) is nn.Linear and name not in but:
                setattr(owner, name, make(child))
    return model


class TELinear(nn.Linear):
    """Rounds its operands to E4M3 inside `fp8_autocast`, as a class of TransformerEngine's."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features)
        self.weight, self.bias, self.fp8_meta = layer.weight, layer.bias, {}

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        if not TE.is_fp8:
            return nn.functional.linear(x, self.weight, self.bias)
        self.fp8_meta["recipe"] = TE.recipe
        left, right = (
            each + (each.detach().to(E4M3).to(each.dtype) - each.detach())
            for each in (x, self.weight)
        )
        return nn.functional.linear(left, right, self.bias)


class DelayedScaling:
    """Named as TransformerEngine's recipe."""


class TE:
    is_fp8 = False
    recipe = DelayedScaling()


@contextmanager
def fp8_autocast(enabled: bool = True) -> Iterator[None]:
    before, TE.is_fp8 = TE.is_fp8, enabled
    try:
        yield
    finally:
        TE.is_fp8 = before


@contextmanager
def transformer_engine() -> Iterator[type[TELinear]]:
    """Inside the block sys.modules has a transformer_engine.pytorch with this context, and a class of that package."""
    package = types.ModuleType("transformer_engine.pytorch")
    package.fp8_autocast = fp8_autocast  # type: ignore[attr-defined]
    before, TELinear.__module__ = TELinear.__module__, "transformer_engine.pytorch.module.linear"
    sys.modules["transformer_engine.pytorch"] = package
    try:
        yield TELinear
    finally:
        del sys.modules["transformer_engine.pytorch"]
        TELinear.__module__ = before


class Linear8bitLt(nn.Linear):
    """The weight as INT8 rows with their largest magnitudes; x is rounded to INT8 rows at each call."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features)
        amax = layer.weight.detach().abs().amax(1)
        codes = (layer.weight.detach() * 127 / amax[:, None]).round().to(torch.int8)
        self.weight, self.bias = nn.Parameter(codes, requires_grad=False), layer.bias
        self.state = SimpleNamespace(CB=codes, SCB=amax)

    def forward(self, x: Tensor) -> Tensor:
        step = x.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        rounded = x + ((x.detach() / step).round() * step - x.detach())
        decoded = self.state.CB.to(x.dtype) * (self.state.SCB / 127)[:, None]
        return nn.functional.linear(rounded, decoded, self.bias)


class NF4Linear(nn.Linear):
    """Its package is one of low precision."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features)
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(
            x,
            self.weight + (self.weight.detach().to(E5M2).to(x.dtype) - self.weight.detach()),
            self.bias,
        )


NF4Linear.__module__ = "hqq.core.quantize"
__all__ = [
    "Float8Linear",
    "Linear8bitLt",
    "MXCodes",
    "MXFP8Linear",
    "NF4Linear",
    "TELinear",
    "converted",
    "transformer_engine",
]

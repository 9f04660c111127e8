"""The Linear: three matrix products, each with its own casts, as one autograd function.

    T tokens, K in_features, N out_features; x [T, K], w [N, K], gy [T, N]

    output       = mm(x,    w)    + bias     [T, N]
    grad_input   = mm(gy,   w.T)             [T, K]
    grad_weight  = mm(gy.T, x.T)             [N, K]

Everything inside works on plain tensors, so `torch.compile(fullgraph=True)` traces through. Autocast decides the type of the
output, as it does for nn.Linear; operands are cast from the tensors as they come.

What is left out: second derivatives (they raise).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from narrowgauge.delayed import AmaxWindow, observe
from narrowgauge.errors import ConfigError, ShapeError
from narrowgauge.ops.mm import Plan, high_precision, plan
from narrowgauge.ops.quantize import dequantize, quantize, tile_amax
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import GEMMS, Cast, Recipe, Window
from narrowgauge.tiles import WHOLE

# Called with (gemm, role, original tensor, operand as it enters the GEMM) for each operand of each product. Eager mode only.
Observer = Callable[[str, str, Tensor, "QTensor | Tensor"], None]


_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class WeightCache:
    """The casts of a weight, kept from one optimizer step to the next.

    Valid while the weight is the same tensor at the same version; `advance` empties it, for the optimizers that write
    through raw pointers and leave the version as it was. `held` keeps the memory of the weight: freed, its address could
    come back as another weight's.
    """

    key: tuple[Any, ...] = ()
    held: Tensor | None = None
    casts: dict[str, QTensor | Tensor] = field(default_factory=dict)

    def get(
        self, gemm: str, weight: Tensor, settings: Settings, build: Callable[[], QTensor | Tensor]
    ) -> QTensor | Tensor:
        """The weight as an operand of `gemm`, built at most once per step."""
        if weight.is_inference():  # has no version counter
            return build()
        address = (weight.device, weight.data_ptr(), weight.shape, weight.stride())
        key = (weight._version, *address, weight.dtype, settings.out_dtype, id(settings.recipe))
        if key != self.key:
            self.key, self.held, self.casts = key, weight.detach(), {}
        casts = self.casts  # of this key, should another thread bring another one meanwhile
        if gemm not in casts:
            casts[gemm] = build()
        return casts[gemm]


@dataclass(frozen=True)
class Plans:
    """What a recipe means on a device, worked out once: it would cost more than a small GEMM to do so at every call.

    output, grad_input, grad_weight       the kernel of each product and the form of its operands
    turn_x, turn_w, turn_gy               whether one quantization serves both products that read the tensor
    """

    output: Plan
    grad_input: Plan
    grad_weight: Plan
    turn_x: bool
    turn_w: bool
    turn_gy: bool

    @classmethod
    def of(cls, recipe: Recipe, device: torch.device) -> Plans:
        output, grad_input, grad_weight = (plan(getattr(recipe, gemm), device) for gemm in GEMMS)
        return cls(
            output,
            grad_input,
            grad_weight,
            turn_x=_serves_both(recipe.output.lhs, recipe.grad_weight.rhs),
            turn_w=_serves_both(recipe.output.rhs, recipe.grad_input.rhs) and output.expand == grad_input.expand,
            turn_gy=_serves_both(recipe.grad_input.lhs, recipe.grad_weight.lhs)
            and grad_input.expand == grad_weight.expand,
        )


@dataclass(frozen=True)
class Settings:
    """What the products need besides tensors.

    records  whether delayed scaling notes what it sees: in training, not in evaluation
    """

    recipe: Recipe
    plans: Plans
    out_dtype: torch.dtype
    records: bool = True
    cache: WeightCache | None = None
    observer: Observer | None = None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """x [..., K] @ weight [N, K].T + bias [N] -> [..., N], differentiable in all three, by `recipe`.

    For recipes without memory; delayed scaling needs a QLinear, which holds its windows. The result has autocast's dtype, or
    x's where autocast is off. Raises ShapeError on a wrong last axis, ConfigError on a recipe with a Window.
    """
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"linear: recipe is {recipe!r}; it must be a Recipe. Look a name up with narrowgauge.recipes.get."
        )
    _check(x, weight, bias)
    if recipe.windows():
        raise ConfigError(
            f"linear: recipe {recipe.name!r} remembers amax from step to step and a function cannot. "
            "Use narrowgauge.QLinear, or convert the model."
        )
    return _apply(x, weight, bias, Settings(recipe, Plans.of(recipe, x.device), _out_dtype(x)), (None, None, None))


class QLinear(nn.Linear):
    """nn.Linear whose products follow a recipe. `layer.recipe` may be changed at any time; None is an ordinary nn.Linear.

    Changing it drops the amax windows of the old recipe. `observer` sees every operand in eager mode (see `Observer`).
    """

    scaling: nn.ModuleDict | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._become(recipe)

    @classmethod
    def adopt(cls, module: nn.Linear, recipe: Recipe | None) -> QLinear:
        """Turns an nn.Linear into a QLinear in place: its identity, parameters, hooks and users stay the same."""
        module.__class__ = cls
        assert isinstance(module, cls)
        module._become(recipe)
        return module

    def _become(self, recipe: Recipe | None) -> None:
        self.observer: Observer | None = None
        self.is_suspended = False
        self._cache: WeightCache | None = None
        self._recipe: Recipe | None = None
        self._plans: tuple[torch.device, Plans] | None = None
        self.scaling = None
        self.recipe = recipe

    @property
    def recipe(self) -> Recipe | None:
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | None) -> None:
        if recipe is not None and not isinstance(recipe, Recipe):
            raise ConfigError(
                f"QLinear.recipe is {recipe!r}; it must be a Recipe or None. Look a name up with narrowgauge.recipes.get."
            )
        windows = {} if recipe is None else recipe.windows()
        self._recipe = recipe
        self._plans = None
        self.empty_cache()
        self.scaling = nn.ModuleDict(
            {role: AmaxWindow(window, self.weight.device) for role, (window, _) in windows.items()}
        ) if windows else None  # fmt: skip

    def empty_cache(self, keep: bool = False) -> None:
        """Forgets the quantized weight. keep=True: from now on keep casts until the next call (what `advance` does)."""
        self._cache = WeightCache() if keep or self._cache is not None else None

    def forward(self, x: Tensor) -> Tensor:
        if self._recipe is None or self.is_suspended:
            return super().forward(x)
        weight, bias = self.weight, self.bias
        _check(x, weight, bias)
        lives = tuple(None if self.scaling is None else _live(self.scaling, role) for role in ("x", "w", "gy"))
        compiling = torch.compiler.is_compiling()
        settings = Settings(
            self._recipe,
            Plans.of(self._recipe, x.device) if compiling else self._planned(x.device),
            _out_dtype(x),
            self.training,
            None if compiling else self._cache,
            None if compiling else self.observer,
        )
        return _apply(x, weight, bias, settings, lives)

    def train(self, mode: bool = True) -> QLinear:
        """As ever; and a change of mode forgets the quantized weight, since averaged weights are swapped in around it."""
        if mode != self.training:
            self.empty_cache()
        super().train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> QLinear:
        """model.to(...), and all that moves or converts the weight: its casts are made anew."""
        super()._apply(fn, recurse)
        self.empty_cache()
        return self

    def _planned(self, device: torch.device) -> Plans:
        assert self._recipe is not None
        if self._plans is None or self._plans[0] != device:
            self._plans = (device, Plans.of(self._recipe, device))
        return self._plans[1]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={None if self._recipe is None else self._recipe.name}"

    def __getstate__(self) -> dict[str, Any]:
        """What copy and pickle take: all but the cached casts and the observer."""
        kept = None if self._cache is None else WeightCache()
        return self.__dict__ | {"_cache": kept, "observer": None, "_plans": None}


def _live(scaling: nn.ModuleDict, role: str) -> Tensor | None:
    if role not in scaling:
        return None
    window = scaling[role]
    assert isinstance(window, AmaxWindow)
    return window.live


def _out_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    if kind == "meta" or x.dtype == torch.float64:  # no autocast there; and as nn.Linear, it leaves float64 alone
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Refuses in words what the products would compute wrongly or stumble over."""
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is None and name == "bias":
            continue
        if not isinstance(tensor, Tensor) or tensor.dtype not in _FLOATS or tensor.layout != torch.strided:
            kind = f"{tensor.dtype} {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ShapeError(
                f"linear: {name} is a {kind}; it must be a dense tensor of float32, float64, bfloat16 or float16. "
                f"Convert it first."
            )
        if tensor.device != x.device:
            raise ShapeError(f"linear: x is on {x.device}, {name} on {tensor.device}. Move them to one device.")
    if weight.ndim != 2:
        raise ShapeError(f"linear: weight is {list(weight.shape)}; it must be [out_features, in_features].")
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"linear: x is {list(x.shape)}, weight {list(weight.shape)}; the last axis of x must be {weight.shape[1]}."
        )
    if bias is not None and (bias.ndim != 1 or bias.shape[0] != weight.shape[0]):
        raise ShapeError(
            f"linear: bias is {list(bias.shape)}, weight {list(weight.shape)}; bias must be [{weight.shape[0]}]."
        )


def _apply(
    x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings, lives: tuple[Tensor | None, ...]
) -> Tensor:
    y = _Products.apply(x.reshape(-1, x.shape[-1]), weight, bias, settings, *lives)
    return y.reshape(*x.shape[:-1], weight.shape[0])


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: Settings,
        x_live: Tensor | None,
        w_live: Tensor | None,
        gy_live: Tensor | None,
    ) -> Tensor:
        recipe, how = settings.recipe, settings.plans.output
        x_amax, w_amax = _amax(x, x_live, settings), _amax(weight, w_live, settings)
        lhs = _operand(x, recipe.output.lhs, how.expand, x_amax, settings)
        rhs = _weight_operand("output", weight, settings, how, w_amax)
        _show(settings, "output", ("x", x, lhs), ("w", weight, rhs))
        y = how.choice.kernel.run(lhs, rhs, bias, settings.out_dtype, recipe.output.fast_accumulate)

        kept: tuple[Tensor | None, ...] = (None, None, None)
        ctx.kept_cast = None
        if ctx.needs_input_grad[1]:
            kept, ctx.kept_cast = _keep(x, lhs, settings, x_amax)
        ctx.settings, ctx.x_dtype = settings, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.gy_live = gy_live  # an attribute: saved tensors may not change before backward, and this one does
        ctx.save_for_backward(weight, x_amax, w_amax, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        weight, x_amax, w_amax, *kept = ctx.saved_tensors
        settings: Settings = ctx.settings
        recipe = settings.recipe
        grad_input = grad_weight = grad_bias = lhs = None
        gy_amax = _amax(gy, ctx.gy_live, settings)
        how = settings.plans.grad_input
        if ctx.needs_input_grad[0]:
            lhs = _operand(gy, recipe.grad_input.lhs, how.expand, gy_amax, settings)
            rhs = _weight_operand("grad_input", weight, settings, how, w_amax)
            _show(settings, "grad_input", ("gy", gy, lhs), ("w", weight, rhs))
            grad_input = how.choice.kernel.run(lhs, rhs, None, ctx.x_dtype, recipe.grad_input.fast_accumulate)
        if ctx.needs_input_grad[1]:
            how = settings.plans.grad_weight
            if lhs is not None and settings.plans.turn_gy:
                lhs = _turned(lhs)
            else:
                lhs = _operand(gy.T, recipe.grad_weight.lhs, how.expand, gy_amax, settings)
            rhs = _kept_operand(kept, ctx.kept_cast, gy.shape[0], settings, how.expand, x_amax)
            if settings.observer is not None:
                x = dequantize(rhs).T if ctx.kept_cast is not None and isinstance(rhs, QTensor) else kept[0]
                _show(settings, "grad_weight", ("gy", gy, lhs), ("x", x, rhs))
            grad_weight = how.choice.kernel.run(lhs, rhs, None, weight.dtype, recipe.grad_weight.fast_accumulate)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = gy.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _amax(x: Tensor, live: Tensor | None, settings: Settings) -> Tensor | None:
    """The amax [1, 1] that delayed scaling gives this tensor, noted in its window; None for a tensor without a window."""
    if live is None or x.numel() == 0:
        return None
    return observe(live, tile_amax(x.detach(), (WHOLE, WHOLE)), records=settings.records)


def _operand(
    x: Tensor, cast: Cast | None, expand: torch.dtype | None, amax: Tensor | None, settings: Settings
) -> QTensor | Tensor:
    """x [outer, inner] as it enters a GEMM: 16 bits, or quantized with its own or its window's amax."""
    if cast is None:
        return high_precision(x, settings.out_dtype)
    return _quantized(x, cast, expand, amax)


def _quantized(x: Tensor, cast: Cast, expand: torch.dtype | None, amax: Tensor | None) -> QTensor:
    noise = torch.rand(x.shape, dtype=torch.float32, device=x.device) if cast.rounding == "stochastic" else None
    return quantize(x, cast, amax=amax if isinstance(cast.calibrate, Window) else None, noise=noise, expand=expand)


def _weight_operand(gemm: str, weight: Tensor, settings: Settings, how: Plan, amax: Tensor | None) -> QTensor | Tensor:
    """The weight for `gemm`, from the cache where there is one. For grad_input it is w.T, from w's codes if they serve."""
    recipe, cache = settings.recipe, settings.cache

    def build() -> QTensor | Tensor:
        if gemm == "output":
            return _operand(weight, recipe.output.rhs, how.expand, amax, settings)
        if cache is not None and settings.plans.turn_w:
            turned = _turned(_weight_operand("output", weight, settings, how, amax))
            return turned if how.expand is not None else _row_major(turned)
        return _operand(weight.T, recipe.grad_input.rhs, how.expand, amax, settings)

    if cache is None:
        return build()
    built = False

    def noted() -> QTensor | Tensor:
        nonlocal built
        built = True
        return build()

    operand = cache.get(gemm, weight, settings, noted)
    cast = recipe.output.rhs
    if gemm == "output" and not built and cast is not None and cast.rounding == "stochastic":
        # Draws what casting drew: activation checkpointing repeats a forward that cast with one that finds the cast here.
        torch.rand(weight.shape, dtype=torch.float32, device=weight.device)
    return operand


def _serves_both(cast: Cast | None, transposed: Cast | None) -> bool:
    """Whether a tensor cast by `cast` can be turned instead of casting the turned tensor."""
    return cast == transposed and (cast is None or (cast.is_symmetric and cast.format.codes_per_byte == 1))


def _turned(operand: QTensor | Tensor) -> QTensor | Tensor:
    return operand.transposed() if isinstance(operand, QTensor) else operand.T


def _row_major(operand: QTensor | Tensor) -> QTensor | Tensor:
    """Contiguous codes: native GEMMs would otherwise turn the weight at every micro-batch."""
    return replace(operand, data=operand.data.contiguous()) if isinstance(operand, QTensor) else operand.contiguous()


def _keep(
    x: Tensor, lhs: QTensor | Tensor, settings: Settings, amax: Tensor | None
) -> tuple[tuple[Tensor | None, ...], Cast | None]:
    """What backward needs of x: (x, None, None), or (codes, scale, global scale) of x.T and the cast that made them."""
    recipe = settings.recipe
    cast = recipe.grad_weight.rhs
    if recipe.save == "original" or cast is None:
        return (x, None, None), None
    if not isinstance(lhs, QTensor) or not settings.plans.turn_x:
        turned = _quantized(x.T, cast, None, amax)
    elif lhs.is_expanded and x.device.type == "cpu":
        turned = lhs.transposed()  # encoding and decoding on a CPU takes longer than the GEMM
    else:
        turned = lhs.compact().transposed()
    return (turned.data, turned.scale, turned.global_scale), cast


def _kept_operand(
    kept: list[Tensor | None],
    kept_cast: Cast | None,
    tokens: int,
    settings: Settings,
    expand: torch.dtype | None,
    amax: Tensor | None,
) -> QTensor | Tensor:
    """x.T [K, T] for grad_weight, from what `_keep` left."""
    data, scale, global_scale = kept
    assert data is not None
    if kept_cast is None:
        return _operand(data.T, settings.recipe.grad_weight.rhs, expand, amax, settings)
    assert scale is not None
    q = QTensor(data=data, scale=scale, cast=kept_cast, inner=tokens, global_scale=global_scale)
    return q if expand is None or q.is_expanded else q.expanded(expand)


def _show(settings: Settings, gemm: str, *operands: tuple[str, Tensor, QTensor | Tensor]) -> None:
    if settings.observer is not None:
        for role, original, operand in operands:
            settings.observer(gemm, role, original, operand)

"""ForeignLinear: a Linear of another library, as guard and blame use it (`narrow_layer`).

The module is not converted. While it is suspended, observed or computes some GEMMs in 16 bits, an
instance attribute `forward` replaces the forward of its class:

    suspended    y = x @ weight.T + bias by torch, in autocast's dtype or that of x
    observed     forward and backward of the library run inside one autograd function. There a
                 dispatch mode sees each aten.mm with its operands, and the observer receives them
                 as QTensors beside x, weight and grad_output
    some wide    both are computed, and each of y, grad_x and grad_weight is taken from one

Observed results are bit-identical, since the same kernels read the same tensors. Observing keeps
what backward reads until the graph is freed. Without an observer or a wide GEMM the module is as
it was, also for torch.compile.

Kernels that take other operators than aten.mm are not seen; `unobserved` gives the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import ConfigError
from narrowgauge.nn.gemm_calls import GemmCall, GemmCalls, assigned
from narrowgauge.nn.plan import OPERANDS, PRODUCTS
from narrowgauge.nn.suspended_linear import suspended_linear

if TYPE_CHECKING:
    from narrowgauge.qtensor import QTensor
    from narrowgauge.recipe import Recipe

HELD = "_narrowgauge_adapter"  # key in the `__dict__` of a module whose forward is replaced


class ForeignLinear:
    """Adapter of one module. Subclasses name its recipe, and decode the operands of its GEMMs.

    module        the module of the other library
    recipe        casts of its three GEMMs, in this library's words
    library       name for messages, such as "torchao Float8Linear"
    unobserved    reason why operands cannot be observed, or ''
    """

    code_source = frozen = sampling = None

    def __init__(self, module: nn.Module, recipe: Recipe, library: str) -> None:
        self.module, self.library = module, library
        self._own = self._recipe = recipe
        self._is_suspended = False
        self._observer: Any = None
        self._before: Any = None  # a forward that the module had as an attribute of its own
        self.unobserved: str = ""

    # --- the verbs

    @property
    def _current(self) -> ForeignLinear:
        """The adapter in charge. One made earlier may outlive the one that the module holds now."""
        held: ForeignLinear = vars(self.module).get(HELD, self)
        return held

    @property
    def recipe(self) -> Recipe:
        return self._current._recipe

    @property
    def is_suspended(self) -> bool:
        return self._current._is_suspended

    @is_suspended.setter
    def is_suspended(self, value: bool) -> None:
        current = self._current
        current._is_suspended = value
        current._put()

    @property
    def observer(self) -> Any:
        return self._current._observer

    @observer.setter
    def observer(self, value: Any) -> None:
        current = self._current
        current._observer = value
        current._put()

    def compute_as(self, recipe: Recipe | None) -> None:
        """Compute by the module's own recipe, or by one that has some of its GEMMs in 16 bits.

        Raises ConfigError for another recipe: the module has no kernels for it.
        """
        current = self._current
        gemms = current._own.gemms() if recipe is None else recipe.gemms()
        for name, own in current._own.gemms().items():
            if gemms[name] != own and (gemms[name].lhs or gemms[name].rhs) is not None:
                raise ConfigError(
                    f"{self.library}: {name} cannot be computed as {gemms[name]}: another library computes it, as {own}. "
                    "Name its own recipe, or 16 bits.",
                    code="foreign.other-recipe",
                )
        current._recipe = current._own if recipe is None else recipe
        current._put()

    @property
    def wide_gemms(self) -> set[str]:
        """GEMMs that are computed in 16 bits, and by the module itself are not."""
        now = self._recipe.gemms()
        return {name for name, own in self._own.gemms().items() if now[name] != own}

    def matrices(self) -> dict[str, nn.Parameter]:
        """Matrices of 16 bits or more, by their name in the module."""
        own = self.module._parameters
        return {
            name: each
            for name, each in own.items()
            if each is not None and each.ndim == 2 and each.dtype.itemsize > 1
        }

    # --- for subclasses

    def wide(self, x: Tensor, *rest: Any, **named: Any) -> Any:
        """The forward pass in 16 bits, differentiable in x and in the parameters."""
        return linear_in_16_bits(x, self.weight_in_16_bits(x), self.module._parameters.get("bias"))

    def weight_in_16_bits(self, x: Tensor) -> Tensor:
        """The weight [out_features, in_features], decoded if it is stored as codes."""
        return self.module.weight  # type: ignore[return-value]

    def operand(self, stored: Tensor, is_rhs: bool) -> QTensor | Tensor | None:
        """An operand of aten.mm as a QTensor [outer, contracted]; None if its layout is unknown.

        stored  as the library has it: [outer, contracted], of rhs [contracted, outer]
        """
        return None if type(stored) is not Tensor else stored.t() if is_rhs else stored

    # --- the replaced forward

    def narrow(self, *given: Any, **named: Any) -> Any:
        """The forward pass of the library."""
        own = self._before
        return (
            type(self.module).forward(self.module, *given, **named)
            if own is None
            else own(*given, **named)
        )

    def _put(self) -> None:
        """Replace the forward of the module, or give its own back."""
        held = vars(self.module)
        is_needed = self._is_suspended or self._observer is not None or self._recipe != self._own
        if is_needed and HELD not in held:
            self._before = held.get("forward")
            held[HELD], held["forward"] = self, self._forward
        elif not is_needed and HELD in held:
            del held[HELD], held["forward"]
            if self._before is not None:
                held["forward"] = self._before
            self._before = None

    def _forward(self, *given: Any, **named: Any) -> Any:
        if not given:  # x by its name, of which each library has its own
            found = next((key for key, each in named.items() if isinstance(each, Tensor)), None)
            if found is None:
                return self.narrow(**named)
            given = (named.pop(found),)
        if self._is_suspended:
            return self.wide(*given, **named)
        x, *rest = given
        # A library whose operands are hidden has nothing to observe, and keeps its own graph.
        is_seen = self._observer is not None and not self.unobserved
        if not isinstance(x, Tensor) or not (is_seen or self.wide_gemms):
            return self.narrow(*given, **named)
        if not torch.is_grad_enabled():
            if "output" in self.wide_gemms:
                return self.wide(*given, **named)
            with self._seen(x) as seen:
                y = self.narrow(*given, **named)
            self._tell(seen, ("output",), x, None)
            return y
        return _InParts.apply(self, rest, named, x, *self._trained())

    def _trained(self) -> list[nn.Parameter]:
        return [each for each in self.module.parameters() if each.requires_grad]

    @contextmanager
    def _seen(self, x: Tensor) -> Iterator[list[GemmCall]]:
        """Yield the list of GEMMs that the library computes inside the block."""
        mode = GemmCalls() if self._observer is not None and not self.unobserved else None
        with mode or nullcontext():
            yield [] if mode is None else mode.found

    def _tell(
        self, calls: Sequence[GemmCall], names: Sequence[str], x: Tensor, gy: Tensor | None
    ) -> None:
        """Pass the GEMMs called `names` to the observer, in this order."""
        observer = self._observer
        originals = {
            "x": x.detach().reshape(-1, x.shape[-1]),
            "w": self.module.weight.detach(),  # type: ignore[operator]
        }
        if gy is not None:
            originals["gy"] = gy.detach().reshape(-1, gy.shape[-1])
        narrow = [name for name in names if name not in self.wide_gemms]
        sides = [
            [
                originals[role] if PRODUCTS[role][0] == name else originals[role].t()
                for role in OPERANDS[name]
            ]
            for name in narrow
        ]
        shapes = [(lhs.shape[0], rhs.shape[0], lhs.shape[1]) for lhs, rhs in sides]
        for name, call in zip(narrow, assigned(calls, shapes), strict=True):
            if call is None or observer is None:
                continue
            operands = self.operand(call.lhs, False), self.operand(call.rhs, True)
            if operands[0] is None or operands[1] is None:
                continue
            for role, each in zip(OPERANDS[name], operands, strict=True):
                observer(name, role, originals[role], each)
            if hasattr(observer, "multiplied"):
                observer.multiplied(name, call.bias, call.result)


class _InParts(torch.autograd.Function):
    """Forward and backward of a module, observed, or with some GEMMs in 16 bits.

    rest, named  further arguments of the module
    """

    @staticmethod
    def forward(
        context: Any, layer: ForeignLinear, rest: Any, named: Any, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        # The inner graph ends at a leaf in place of x, and at the parameters themselves, whose
        # `.grad` autograd.grad leaves alone.
        with torch.enable_grad():
            leaf = x.detach().requires_grad_(x.requires_grad)
            with layer._seen(x) as seen:
                narrow = layer.narrow(leaf, *rest, **named)
            wide = layer.wide(leaf, *rest, **named) if layer.wide_gemms else None
        layer._tell(seen, ("output",), x, None)
        context.layer, context.leaf, context.parts = layer, leaf, (narrow, wide)
        context.wide_gemms, context.parameters = layer.wide_gemms, parameters
        y = wide if wide is not None and "output" in layer.wide_gemms else narrow
        return y.detach()

    @staticmethod
    def backward(context: Any, gy: Tensor) -> Any:
        layer, leaf, wide_gemms = context.layer, context.leaf, context.wide_gemms
        narrow, wide = context.parts
        leaves = [each for each in (leaf, *context.parameters) if each.requires_grad]
        with layer._seen(leaf) as seen:
            found = _gradients(narrow, leaves, gy)
        needed = ["grad_input"] if leaf.requires_grad else []
        layer._tell(seen, (*needed, "grad_weight"), leaf, gy)
        if wide is not None and {"grad_input", "grad_weight"} & wide_gemms:
            for place, other in enumerate(_gradients(wide, leaves, gy)):
                if ("grad_input" if leaves[place] is leaf else "grad_weight") in wide_gemms:
                    found[place] = other
        return None, None, None, *([] if leaf.requires_grad else [None]), *found


def _gradients(y: Tensor, leaves: list[Tensor], gy: Tensor) -> list[Tensor | None]:
    # retain_graph: a loop may call backward twice, and this function cannot know it.
    return list(
        torch.autograd.grad(y, leaves, gy.to(y.dtype), retain_graph=True, allow_unused=True)
    )


def linear_in_16_bits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias in autocast's dtype, or in that of x."""
    if not torch.is_autocast_enabled(x.device.type) and weight.dtype != x.dtype:
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return suspended_linear(x, weight, bias)

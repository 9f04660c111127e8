"""What the products of a layer need besides tensors: kernels and forms of operands (Plans), and the casts of its weight (WeightCache)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from narrowgauge.addresses import identity
from narrowgauge.nn.caches import Share, SharedGradients
from narrowgauge.ops.mm import Plan, plan
from narrowgauge.ops.quantize.precast_weight import Stepped
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import GEMMS, Cast, Gemm, Recipe

# Called with (gemm, role, original tensor, operand as it enters the GEMM) for each operand of each product. Eager mode only.
Observer = Callable[[str, str, Tensor, "QTensor | Tensor"], None]


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
        self,
        gemm: str,
        weight: Tensor,
        settings: Settings,
        build: Callable[[], QTensor | Tensor],
    ) -> QTensor | Tensor:
        """The weight as an operand of `gemm`, built at most once per step."""
        if weight.is_inference():  # has no version counter
            return build()
        casts = self._of(weight, settings)
        if gemm not in casts:
            casts[gemm] = build()
        return casts[gemm]

    def has(self, gemm: str, weight: Tensor, settings: Settings) -> bool:
        """Whether the weight, as it is now, was cast for `gemm` already."""
        return gemm in self._of(weight, settings)

    def amax(self, weight: Tensor, settings: Settings) -> Tensor | None:
        """The amax of the weight's window [1, 1], where both orientations were cast by it."""
        found = self._of(weight, settings).get("amax")
        assert found is None or isinstance(found, Tensor)
        return found

    def _of(self, weight: Tensor, settings: Settings) -> dict[str, QTensor | Tensor]:
        """The casts of the weight as it is now; another thread may bring another one meanwhile, but not into these."""
        address = (weight.device, identity(weight), weight.shape, weight.stride())
        # What is made in inference mode cannot be saved for backward.
        made = (settings.out_dtype, id(settings.recipe), settings.steps_version, torch.is_inference_mode_enabled())
        key = (weight._version, *address, weight.dtype, *made)
        if key != self.key:
            self.key, self.held, self.casts = key, weight.detach(), {}
        return self.casts


class StepCasts(WeightCache):
    """Casts that are made once per step by others, such as a CUDA graph: valid whatever the weight's version says.

    What is not among them is built at every call, and not kept.
    """

    def get(
        self, gemm: str, weight: Tensor, settings: Settings, build: Callable[[], QTensor | Tensor]
    ) -> QTensor | Tensor:
        return self.casts[gemm] if gemm in self.casts else build()

    def _of(self, weight: Tensor, settings: Settings) -> dict[str, QTensor | Tensor]:
        return self.casts


@dataclass(frozen=True)
class Plans:
    """What a recipe means on a device, worked out once: it would cost more than a small GEMM to do so at every call.

    output, grad_input, grad_weight       the kernel of each product and the form of its operands
    turn_x, turn_w, turn_gy               whether one quantization serves both products that read the tensor
    both_x, both_w, both_gy               whether both products read codes of the same cast, one the tensor's, one its transpose's:
                                          then one read gives both, where a kernel does so (see `ops.quantize.pair`)
    """

    output: Plan
    grad_input: Plan
    grad_weight: Plan
    turn_x: bool
    turn_w: bool
    turn_gy: bool
    both_x: bool = False
    both_w: bool = False
    both_gy: bool = False

    @classmethod
    def of(cls, recipe: Recipe, device: torch.device, hidden_by: str = "") -> Plans:
        """hidden_by: what hides the memory of the operands, see `addresses.wrapper`."""
        of = partial(plan, hidden_by=hidden_by) if hidden_by else plan
        output, grad_input, grad_weight = (of(getattr(recipe, gemm), device) for gemm in GEMMS)
        return cls(
            output,
            grad_input,
            grad_weight,
            turn_x=_serves_both(recipe.output.lhs, recipe.grad_weight.rhs)
            and recipe.output.rotate is recipe.grad_weight.rotate is None,
            turn_w=_serves_both(recipe.output.rhs, recipe.grad_input.rhs)
            and recipe.output.rotate is recipe.grad_input.rotate is None
            and output.expand == grad_input.expand,
            turn_gy=_serves_both(recipe.grad_input.lhs, recipe.grad_weight.lhs)
            and recipe.grad_input.rotate is recipe.grad_weight.rotate is None
            and grad_input.expand == grad_weight.expand,
            both_x=_in_both(recipe.output.lhs, recipe.grad_weight.rhs, recipe.output, recipe.grad_weight)
            and output.expand is grad_weight.expand is None,
            both_w=_in_both(recipe.output.rhs, recipe.grad_input.rhs, recipe.output, recipe.grad_input)
            and output.expand is grad_input.expand is None,
            both_gy=_in_both(recipe.grad_input.lhs, recipe.grad_weight.lhs, recipe.grad_input, recipe.grad_weight)
            and grad_input.expand is grad_weight.expand is None,
        )


def _in_both(cast: Cast | None, transposed: Cast | None, *gemms: Gemm) -> bool:
    """Whether the same cast applies to a tensor and its transpose, neither rotated."""
    return cast is not None and cast == transposed and all(gemm.rotate is None for gemm in gemms)


def _serves_both(cast: Cast | None, transposed: Cast | None) -> bool:
    """Whether a tensor cast by `cast` can be turned instead of casting the turned tensor."""
    return cast == transposed and (cast is None or (cast.is_symmetric and cast.format.codes_per_byte == 1))


@dataclass(frozen=True)
class Settings:
    """What the products need besides tensors.

    records  whether delayed scaling notes what it sees: in training, not in evaluation
    grads    whether autograd records, so that a backward pass may come
    is_cold  whether learned steps are in their cold start
    sampled  the products whose rows are sampled in this step
    share    the casts of x that other layers made or will use, open during forward
    gradients  the casts of output gradients that their producers made
    stepped  what the optimizer's step left of the weight's cast
    steps_version  changes whenever the learned steps do
    """

    recipe: Recipe
    plans: Plans
    out_dtype: torch.dtype
    records: bool = True
    grads: bool = True
    cache: WeightCache | None = None
    observer: Observer | None = None
    is_cold: bool = False
    sampled: tuple[str, ...] = ()
    share: Share | None = None
    gradients: SharedGradients | None = None
    stepped: Stepped | None = None
    steps_version: tuple[int, ...] = ()

"""NarrowLayer: the protocol by which guard, blame and coverage use a low-precision Linear.

    compute narrow       the layer's own forward, while `is_suspended` is False
    compute wide         is_suspended = True: all three GEMMs in 16 bits, on the same weights;
                         compute_as(recipe): some of them
    name the GEMMs       `recipe` has the casts of each GEMM; `observer` receives the operands and
                         the result of each one in a step

QLinear satisfies it as it is. Modules of other libraries get an adapter (`foreign_modules`), which
the module holds while it is suspended or observed, and at no other time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from narrowgauge.nn.foreign_linear import ForeignLinear
from narrowgauge.nn.foreign_modules import adapter, unknown_layers, words_on_unknown
from narrowgauge.nn.linear import QLinear

if TYPE_CHECKING:
    from narrowgauge.recipe import Recipe


__all__ = [
    "NarrowLayer",
    "matrices",
    "narrow_layer",
    "narrow_layers",
    "recipe_of",
    "resumption",
    "unknown_layers",
    "unobserved",
    "words_on_unknown",
]


class NarrowLayer(Protocol):
    """A layer that computes three GEMMs by a recipe.

    recipe        casts of each GEMM; None: an ordinary Linear
    is_suspended  True: compute in 16 bits. Settable
    observer      receives operands and results (`observer.ProductObserver`), or None. Settable
    code_source   not None: the codes of the weight come from elsewhere
    frozen        not None: the weight is stored as codes, and no 16-bit GEMM can read it
    sampling      sampler of rows (`leverage_score`), or None
    """

    @property
    def recipe(self) -> Recipe | None: ...
    @property
    def code_source(self) -> Any: ...
    @property
    def frozen(self) -> Any: ...
    @property
    def sampling(self) -> Any: ...

    is_suspended: Any
    observer: Any

    def compute_as(self, recipe: Recipe | None) -> None:
        """Compute by another recipe until the next call; the layer's state stays as it is."""


def narrow_layer(module: nn.Module) -> NarrowLayer | None:
    """The module as a NarrowLayer: itself if it is a QLinear, an adapter, or None."""
    return module if isinstance(module, QLinear) else adapter(module)


def narrow_layers(model: nn.Module) -> Iterator[tuple[str, NarrowLayer]]:
    """(name, layer) of each low-precision Linear of the model, of this library or another one."""
    for name, module in model.named_modules():
        if (layer := narrow_layer(module)) is not None:
            yield name, layer


def recipe_of(module: nn.Module) -> Recipe | None:
    """Recipe by which a module computes its GEMMs, or None."""
    layer = narrow_layer(module)
    return None if layer is None else layer.recipe


def matrices(layer: NarrowLayer) -> Iterator[tuple[str, Any]]:
    """(name, matrix) of each trained matrix of a layer; the name is '' for its `weight`."""
    if isinstance(layer, QLinear):
        yield "", layer.weight
    elif isinstance(layer, ForeignLinear):
        for name, weight in layer.matrices().items():
            yield "" if name == "weight" else name, weight


def unobserved(layer: NarrowLayer) -> str:
    """Reason why the operands of a layer cannot be observed, or ''."""
    return layer.unobserved if isinstance(layer, ForeignLinear) else ""


def resumption(layer: Any) -> Callable[[], None]:
    """Return a function that sets `is_suspended` back to its present value.

    It works at interpreter exit too, where names of modules may be None already.
    """
    was = layer.is_suspended
    if not isinstance(layer, nn.Module):  # an adapter, or the state of an attention
        return partial(setattr, layer, "is_suspended", was)
    fields = vars(layer)

    def back() -> None:
        # Not `layer.is_suspended`: nn.Module.__setattr__ fails at interpreter exit. A layer that
        # was turned back inside a `suspended` block has no state.
        if (state := fields.get("state")) is not None:
            state.is_suspended = was

    return back

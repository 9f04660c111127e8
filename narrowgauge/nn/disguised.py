"""QLinears of modules that compute a Linear under another class.

    transformers' Conv1D    y = x @ weight + bias, weight [in_features, out_features]
    subclass of nn.Linear   y = x @ weight.T + bias, by a forward of its own (Falcon)

The class of such a module becomes one made of QLinear, whose forward runs, and of the module's own
class, so that its other methods and `isinstance` answer as before. The weight stays the parameter
that it was, as it is stored: names, ties, optimizers and state dicts do not change.
`QLinear.matrix` is its view [out_features, in_features], which the products read. Its gradient has
the parameter's shape. A suspended layer runs the forward of its own class.

`conversion.disguises` decides which modules get such a class.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn

from narrowgauge.nn.linear import QLinear
from narrowgauge.nn.suspended_linear import multiplies_slowly, suspended_linear
from narrowgauge.structure import is_conv1d


class DisguisedLinear(QLinear):
    """Base of the classes that `class_of` makes, with the weight as nn.Linear stores it."""

    def as_before(self, x: Tensor, weight: Tensor) -> Tensor:
        """The forward of the module's own class. weight: as `matrix`."""
        if self.is_suspended and multiplies_slowly(x, weight):
            return suspended_linear(x, weight, self.bias)
        # Not F.linear: it adds the bias within the product, which rounds otherwise than Falcon's sum.
        found: Tensor = self.original.forward(self, x)
        return found

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)  # Conv1D's own names no recipe

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the original class: the made class has no place from which it is imported."""
        return _blank, (self.original, self.is_transposed), self.__getstate__()


class TransposedLinear(DisguisedLinear):
    """The same, with a weight [in_features, out_features]."""

    is_transposed = True

    @property
    def in_features(self) -> int:  # type: ignore[override]
        return self.weight.shape[0]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return self.weight.shape[1]


def adopt(layer: nn.Module) -> QLinear:
    """Turn a Linear into a QLinear of its class, in place, without a recipe.

    layer  one that `conversion.disguises` has tried out, or an nn.Linear
    """
    own: Any = type(layer)
    return class_of(own, is_conv1d(layer)).adopt(layer, None)  # type: ignore[arg-type]


@cache
def class_of(original: type[nn.Module], is_transposed: bool) -> type[QLinear]:
    """The QLinear of a module's class, the same for each call.

    original       nn.Linear itself gives QLinear
    is_transposed  the weight is stored [in_features, out_features]
    """
    if original is nn.Linear:
        return QLinear
    # QLinear comes first, so that its forward, copies and state dicts win over the original's.
    base = TransposedLinear if is_transposed else DisguisedLinear
    return type(f"Q{original.__name__}", (base, original), {"original": original})


def _blank(original: Any, is_transposed: bool) -> QLinear:
    """A layer without attributes, for copies and pickles to fill."""
    made = class_of(original, is_transposed)
    return made.__new__(made)

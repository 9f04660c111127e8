"""Convolutions whose kernels do not overlap, computed as a Linear over patches.

    y[b, :, i, j] = weight.flatten(1) @ patch[b, i, j] + bias

`ops.patches` cuts the patches, and says which convolutions have some. `adopt` changes the class of
the convolution and gives it a PatchLinear, named LINEAR. Its weight [out_channels, K] is a view of
the convolution's parameter. The parameter, its name and its shape stay, so optimizers and state
dicts do not change. Without a recipe, and suspended, torch's own convolution runs. It sums in
another order, so its float32 results differ in the last bits.

`conversion.disguises` tries a convolution out before `convert` adopts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from narrowgauge.errors import ConfigError, Reason
from narrowgauge.nn import step_end
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.patches import KINDS, LINEAR, patches_of, refuse_overlap
from narrowgauge.structure import plain_name


class PatchLinear(QLinear):
    """A QLinear whose weight is a view of its convolution's parameter, which it does not register.

    parameters_of_owner  `_parameters` of the convolution. A copy of the model copies both together,
                         and a replaced Parameter is found
    """

    parameter_name = "weight"

    def __init__(self, convolution: nn.Module) -> None:
        nn.Module.__init__(self)
        self.parameters_of_owner = convolution._parameters
        weight: Any = convolution._parameters["weight"]
        self.out_features, self.in_features = weight.shape[0], weight.shape[1:].numel()
        self._become(None)

    # In the class, so that they precede nn.Module's search for attributes.
    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        own = self.parameter
        if own is None:
            raise ConfigError(
                "a convolution's weight is no parameter any more: it was pruned or parametrized after convert, and a Linear over "
                "patches reads the parameter. Undo that (torch.nn.utils.prune.remove, parametrize.remove_parametrizations), "
                "or keep the convolution in 16 bits by its name in convert.",
                code="patches.reparametrized",
            )
        return self.rows_of(own)

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        return self.parameters_of_owner.get("bias")

    def rows_of(self, whole: Tensor) -> Tensor:
        """The matrix [out_channels, K] of a tensor of the weight's shape."""
        return whole.flatten(1)

    @property
    def parameter(self) -> Tensor | None:
        return self.parameters_of_owner.get("weight")

    def held_parameters(self) -> Iterator[Tensor]:
        return (each for each in self.parameters_of_owner.values() if each is not None)

    def weight_in_memory(self) -> Tensor | None:
        return None if self.parameter is None else self.weight

    def names(self, name: str) -> tuple[str, ...]:
        """ "embeddings.projection.linear" is also found as "embeddings.projection"."""
        return name, name.removesuffix(LINEAR).rstrip(".")

    def restore(self) -> None:
        """Nothing to turn back: the convolution drops it."""
        self.recipe = None


class PatchConvolution(nn.Module):
    """Base class of adopted convolutions; torch's class, or the model's, stands behind it.

    original         that class
    always_projects  True: call the PatchLinear without a recipe too, so that a count of products
                     sees it (conversion/coverage.py)
    """

    original: type[nn.Module]
    always_projects = False

    @property
    def product(self) -> PatchLinear:
        return self._modules[LINEAR]  # type: ignore[return-value]

    def forward(self, input: Tensor) -> Tensor:
        module: Any = self
        layer = self.product
        is_narrow = layer.recipe is not None and not layer.is_suspended
        axes = len(module.kernel_size)
        fits = isinstance(input, Tensor) and input.ndim in (axes + 1, axes + 2)
        fits = fits and all(map(int.__ge__, input.shape[-axes:], module.kernel_size))
        # Its own forward says what is wrong with other operands.
        if not (is_narrow or self.always_projects) or not fits:
            found: Tensor = self.original.forward(self, input)
            return found
        x = input if input.ndim == axes + 2 else input.unsqueeze(0)
        if (reason := refuse_overlap(module)) is not None:
            raise ConfigError(
                f"{type(module).__name__.removeprefix('Q')}: {reason}, since its settings were changed after convert. "
                "Change them before convert, or keep it in 16 bits by its name.",
                code="patches.changed",
            )
        # Contiguous, as torch's own result is: models call `view` on it.
        y = layer(patches_of(x, module.kernel_size, module.stride)).movedim(-1, 1).contiguous()
        return y if input.ndim == axes + 2 else y.squeeze(0)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class is made at run time, so a pickle names the one behind it."""
        return _blank, (self.original,), self.__getstate__()


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}  # class of a model -> its adopted class


def _class_of(original: type[nn.Module]) -> type[nn.Module]:
    if original not in _CLASSES:
        own = {"original": original, "__module__": original.__module__}
        _CLASSES[original] = type(f"Q{original.__name__}", (PatchConvolution, original), own)
    return _CLASSES[original]


def _blank(original: type[nn.Module]) -> nn.Module:
    """An object without attributes, for copies and pickles."""
    made = _class_of(original)
    return made.__new__(made)


def adopt(module: nn.Module) -> None:
    """Give a convolution its PatchLinear without a recipe, in place. Call `disguises` before."""
    module.__class__ = _class_of(type(module))
    module._modules[LINEAR] = PatchLinear(module).train(module.training)


def give_back(module: PatchConvolution) -> None:
    """Turn it into its original class again, in place, and drop the PatchLinear."""
    step_end.forget(module._modules.pop(LINEAR))
    module.__class__ = module.original  # type: ignore[assignment]


def convolutions(model: nn.Module) -> Iterator[PatchConvolution]:
    return (each for each in model.modules() if isinstance(each, PatchConvolution))


@contextmanager
def opened(model: nn.Module, refuse: Callable[[nn.Module], Reason | None]) -> Iterator[None]:
    """Inside the block, all convolutions that `refuse` gives no reason for have a PatchLinear.

    Afterwards, those without a recipe are as they were.
    """
    for module in list(model.modules()):
        is_plain = isinstance(module, KINDS) and not isinstance(module, PatchConvolution)
        if is_plain and refuse(module) is None:
            adopt(module)
    try:
        yield
    finally:
        close(model)


def close(model: nn.Module) -> None:
    """Turn back the convolutions without a recipe."""
    for module in list(convolutions(model)):
        if module.product.recipe is None:
            give_back(module)


def opened_like(policy: nn.Module, reference: nn.Module) -> Any:
    """`opened` for the convolutions of `reference` whose namesakes in `policy` have a recipe."""
    theirs = [name for name, each in policy.named_modules() if isinstance(each, PatchConvolution)]
    # An adapter's names end in those of its model.
    wanted = {
        module
        for name, module in reference.named_modules()
        if any(f".{plain_name(each)}".endswith(f".{plain_name(name)}") for each in theirs)
    }

    def refuse(module: nn.Module) -> Reason | None:
        return None if module in wanted else Reason("like", "it is an ordinary one in the policy")

    return opened(reference, refuse)

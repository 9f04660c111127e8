"""What a recipe added to a QLinear, as tensors with names: amax windows, learned steps, readings of a sampler. And loading them.

A state that was saved without any of them leaves them as they are, and says so; that of another recipe is told. A weight that is frozen as
codes takes a 16-bit one, which it casts, or such codes. `layer` is a QLinear, which imports this where it loads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

ADDED = {
    "scaling": "amax windows",
    "steps": "learned steps",
    "sampling": "readings of the sampler",
}  # submodule -> words


def added(layer: Any) -> dict[str, Tensor]:
    """Name -> tensor of all that the recipe has added to the layer."""
    modules = {name: getattr(layer, name, None) for name in ADDED}
    return {
        f"{name}.{key}": tensor
        for name, module in modules.items() if module is not None for key, tensor in module.state_dict().items()
    }  # fmt: skip


def words(names: Iterable[str]) -> str:
    """What tensors of these names hold, in words."""
    modules = {name.partition(".")[0] for name in names}
    return ", ".join(words for name, words in ADDED.items() if name in modules)


def load(layer: Any, inherited: Callable[..., None], state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """`_load_from_state_dict` of the layer. inherited: that of nn.Linear. rest: what torch hands on, with missing keys and errors."""
    whole = _take_whole_weight(layer, state_dict, prefix, rest[-1])
    inherited(state_dict, prefix, *rest)
    if layer.frozen is not None:
        rest[2][:] = [key for key in rest[2] if key != f"{prefix}weight"]  # of the missing ones
    if whole is not None:
        state_dict[f"{prefix}weight"] = whole
    if layer.gathered is not None:
        layer.gathered.invalidate()
    if not layer.weight.is_meta and any(each.is_meta for each in added(layer).values()):
        layer.steps = None  # what `assign=True` leaves on meta has no numbers: made anew where the weight is now
        layer.renew_state()
    own = {f"{prefix}{name}": value for name, value in added(layer).items()}
    given = {key for key in state_dict if key.startswith(tuple(f"{prefix}{name}." for name in ADDED))}
    recipe = None if layer.recipe is None else layer.recipe.name
    if own and f"{prefix}weight" in state_dict and not given:
        state_dict.update(own)  # a copy that load_state_dict made
        warnings.warn(
            f"load_state_dict: what is loaded has no {words(added(layer))} for recipe {recipe!r}: it was saved before the model was "
            "converted, or with another recipe. They stay as they are: of a model just converted they begin with the data of the "
            "next steps. Where they are of other weights, convert again.",
            stacklevel=3,
        )
    elif given - own.keys():  # torch raises or, not strict, leaves them out: which it is, it does not say here
        warnings.warn(
            f"load_state_dict: what is loaded was saved with another recipe than {recipe!r}, which has no place for "
            f"{words(key.removeprefix(prefix) for key in given - own.keys())}. Convert the model as the one that was saved "
            f"was, load, and convert again to {recipe!r}; or leave out what belongs to recipes with strict=False.",
            stacklevel=3,
        )


def _take_whole_weight(layer: Any, state_dict: dict[str, Any], prefix: str, errors: list[str]) -> Tensor | None:
    """Leaves of a weight and its codes what the layer loads, and returns the weight that it removed.

    A layer without codes loads the weight; codes alone are an error. A layer with codes loads codes: those of the state if they decode to
    the weight beside them, or if there is none, else a cast of the weight.
    """
    frozen, key = f"{prefix}frozen.", f"{prefix}weight"
    codes = [each for each in state_dict if each.startswith(frozen)]
    if layer.frozen is None:
        for each in codes:
            state_dict.pop(each)
        if codes and key not in state_dict:
            errors.append(
                f"{key} was saved as the codes of a frozen weight. Call narrowgauge.memory.freeze(model, patterns, codes=True) before "
                "loading, or save after narrowgauge.memory.thaw(model)."
            )
        return None
    whole: Tensor | None = state_dict.pop(key, None)
    if whole is None:
        return None
    if whole.shape != layer.weight.shape:
        errors.append(
            f"size mismatch for {key}: {list(whole.shape)} in the state, {list(layer.weight.shape)} in the model."
        )
    elif codes and (
        layer.frozen.differs_in_words(state_dict, frozen) or layer.frozen.encodes(whole, state_dict, frozen)
    ):
        return whole
    else:
        layer.frozen.write(layer, whole.to(layer.weight.device, layer.weight.dtype))
        if codes:
            warnings.warn(
                f"load_state_dict: {key} is not what {frozen}codes beside it decode to, so it was changed since it was saved. It is "
                "cast anew. Remove the codes from the state if that is what you want, or load both as they were saved.",
                stacklevel=4,
            )
    state_dict.update({f"{frozen}{name}": own for name, own in layer.frozen.state_dict().items()})
    return whole

"""Names of the state that a recipe added to a QLinear, and loading of that state.

    scaling.ROLE.history    [length] float32  amax history of ROLE, one of x, w, gy: fp8-delayed
    scaling.ROLE.live       [3] float32
    scaling.ROLE.nonfinite  [1] int64
    steps.x, steps.w        [1] float32       learned steps: int4-lsq-luq, int4-hq-lss
    steps.cold_left         [1] int64
    sampling.variance       [2] float32       of a row sampler: int4-hq-lss
    frozen.*                                  codes in place of the weight (frozen.py)

Other recipes add no key. A state dict without any such entry leaves the layer's state as it is, with
a warning and without a missing key, so `strict=True` accepts it. One with some of a layer's entries
has missing keys: an error with `strict=True`. Entries of another recipe are reported too. A weight that is frozen as codes loads codes,
or casts a 16-bit weight. QLinear imports this module on the first load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from narrowgauge.errors import warn
from narrowgauge.nn.converted_state import ADDED


def added(layer: Any) -> dict[str, Tensor]:
    """Name -> tensor for all state that the recipe added to the layer."""
    modules = {name: getattr(layer, name, None) for name in ADDED}
    return {
        f"{name}.{key}": tensor
        for name, module in modules.items() if module is not None for key, tensor in module.state_dict().items()
    }  # fmt: skip


def words(names: Iterable[str]) -> str:
    """Name the kinds of state behind these tensor names, for messages."""
    modules = {name.partition(".")[0] for name in names}
    return ", ".join(words for name, words in ADDED.items() if name in modules)


def load(
    layer: Any, inherited: Callable[..., None], state_dict: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Implement `_load_from_state_dict` for QLinear.

    layer      a QLinear
    inherited  the method of nn.Linear
    rest       torch's further arguments: metadata, strict, missing keys, unexpected keys, errors
    """
    whole = _take_whole_weight(layer, state_dict, prefix, rest[-1])
    inherited(state_dict, prefix, *rest)
    if layer.frozen is not None:
        rest[2][:] = [key for key in rest[2] if key != f"{prefix}weight"]  # the codes stand for it
    if whole is not None:
        state_dict[f"{prefix}weight"] = whole
    if layer.state.gathered is not None:
        layer.state.gathered.invalidate()
    if not layer.weight.is_meta and any(each.is_meta for each in added(layer).values()):
        # load_state_dict(assign=True) replaces the tensors it loads. The others are still on meta.
        layer.put_submodule("steps", None)
        layer.renew_state()
    own = {f"{prefix}{name}": value for name, value in added(layer).items()}
    given = {
        key for key in state_dict if key.startswith(tuple(f"{prefix}{name}." for name in ADDED))
    }
    recipe = None if layer.recipe is None else layer.recipe.name
    if own and f"{prefix}weight" in state_dict and not given:
        state_dict.update(own)  # load_state_dict passes a copy, so the caller's dict stays as it is
        warn(
            f"load_state_dict: what is loaded has no {words(added(layer))} for recipe {recipe!r}: it was saved before the model was "
            "converted, or with another recipe. They stay as they are: of a model just converted they begin with the data of the "
            "next steps. Where they are of other weights, convert again.",
            code="load.no-recipe-state",
            stacklevel=3,
        )
    # Warn instead of raising: torch 2.13 passes strict=True to this method whatever the caller
    # chose, so an error here would break strict=False. With strict=True torch raises afterwards.
    elif given - own.keys():
        warn(
            f"load_state_dict: what is loaded was saved with another recipe than {recipe!r}, which has no place for "
            f"{words(key.removeprefix(prefix) for key in given - own.keys())}. Convert the model as the one that was saved "
            f"was, load, and convert again to {recipe!r}; or leave out what belongs to recipes with strict=False.",
            code="load.other-recipe",
            stacklevel=3,
        )


def _take_whole_weight(
    layer: Any, state_dict: dict[str, Any], prefix: str, errors: list[str]
) -> Tensor | None:
    """Prepare a weight's entries for loading; return the 16-bit weight that was removed, or None.

    A layer without codes loads `weight`. A state dict with codes alone is an error. A layer with
    codes loads the codes of the state dict if they decode to the `weight` beside them, or if
    `weight` is missing. Else it casts `weight`.
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
        layer.frozen.differs_in_words(state_dict, frozen)
        or layer.frozen.encodes(whole, state_dict, frozen)
    ):
        return whole
    else:
        layer.frozen.write(layer, whole.to(layer.weight.device, layer.weight.dtype))
        if codes:
            warn(
                f"load_state_dict: {key} is not what {frozen}codes beside it decode to, so it was changed since it was saved. It is "
                "cast anew. Remove the codes from the state if that is what you want, or load both as they were saved.",
                code="load.changed-codes",
                stacklevel=4,
            )
    state_dict.update({f"{frozen}{name}": own for name, own in layer.frozen.state_dict().items()})
    return whole

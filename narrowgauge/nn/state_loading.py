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
    if layer.frozen is not None:
        layer.frozen.check(layer)  # drops the codes if the weight was replaced
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


def load_stacks(
    module: Any, names: Iterable[str], inherited: Callable[..., None], state_dict: dict[str, Any],
    prefix: str, *rest: Any,
) -> None:  # fmt: skip
    """Implement `_load_from_state_dict` for experts in one parameter (`nn.experts`).

    As `load`: of a stack that is stored as codes, each expert loads the codes of the state, or casts
    its matrix of the stack in the state.

    names      parameters that hold all experts
    inherited  the method of the model's own class
    """
    taken = {name: _take_whole_stack(module, name, state_dict, prefix, rest[-1]) for name in names}
    inherited(state_dict, prefix, *rest)
    for name, whole in taken.items():
        if module.slices(name)[0].frozen is not None:
            rest[2][:] = [key for key in rest[2] if key != f"{prefix}{name}"]
        if whole is not None:
            state_dict[f"{prefix}{name}"] = whole


def _take_whole_stack(
    module: Any, name: str, state_dict: dict[str, Any], prefix: str, errors: list[str]
) -> Tensor | None:
    """As `_take_whole_weight`, for all experts of one parameter."""
    key, layers = f"{prefix}{name}", module.slices(name)
    places = [f"{prefix}{index}.{name}.frozen." for index in range(len(layers))]
    # torch loads this module before its experts, which find in the state what is put there.
    if any(layer.frozen is None for layer in layers):
        for place in places:
            _leave_out_codes(state_dict, place, key, errors)
        return None
    whole: Tensor | None = state_dict.pop(key, None)
    if whole is None:
        return None
    stack = module._parameters[name]
    if whole.shape != stack.shape:
        errors.append(_other_size(key, whole, stack))
        for layer, place in zip(layers, places, strict=True):
            _keep_codes(layer, state_dict, place)
        return whole
    changed = [
        place
        for layer, place in zip(layers, places, strict=True)
        if _takes_whole(layer, layer.place.matrix(whole), state_dict, place)
    ]
    if changed:
        _warn_of_changed(key, changed[0], stacklevel=5)
    return whole


def _take_whole_weight(
    layer: Any, state_dict: dict[str, Any], prefix: str, errors: list[str]
) -> Tensor | None:
    """Prepare a weight's entries for loading; return the 16-bit weight that was removed, or None.

    A layer without codes loads `weight`. A state dict with codes alone is an error. A layer with
    codes loads the codes of the state dict if they decode to the `weight` beside them, or if
    `weight` is missing. Else it casts `weight`.
    """
    frozen, key = f"{prefix}frozen.", f"{prefix}weight"
    if layer.frozen is None:
        _leave_out_codes(state_dict, frozen, key, errors)
        return None
    whole: Tensor | None = state_dict.pop(key, None)
    if whole is None:
        return None
    if whole.shape != layer.weight.shape:
        errors.append(_other_size(key, whole, layer.weight))
        _keep_codes(layer, state_dict, frozen)
    elif _takes_whole(layer, whole, state_dict, frozen):
        _warn_of_changed(key, frozen, stacklevel=5)
    return whole


def _leave_out_codes(state_dict: dict[str, Any], frozen: str, key: str, errors: list[str]) -> None:
    """Remove the codes of a weight that is not stored as codes. Codes alone are an error.

    frozen  what the names of the codes begin with
    key     name of the weight
    """
    codes = [each for each in state_dict if each.startswith(frozen)]
    for each in codes:
        state_dict.pop(each)
    if codes and key not in state_dict:
        errors.append(
            f"{key} was saved as the codes of a frozen weight. Call narrowgauge.memory.freeze(model, patterns, codes=True) before "
            "loading, or save after narrowgauge.memory.thaw(model)."
        )


def _takes_whole(layer: Any, whole: Tensor, state_dict: dict[str, Any], frozen: str) -> bool:
    """Prepare a state whose codes decode to the weight beside them, or cast that weight.

    frozen  what the names of the codes begin with
    ->      True if the state has codes that decode to something else
    """
    has_codes = any(each.startswith(frozen) for each in state_dict)
    if has_codes and (
        layer.frozen.differs_in_words(state_dict, frozen)
        or layer.frozen.encodes(whole, state_dict, frozen)
    ):
        return False
    layer.frozen.write(layer, whole.to(layer.weight.device, layer.weight.dtype))
    _keep_codes(layer, state_dict, frozen)
    return has_codes


def _keep_codes(layer: Any, state_dict: dict[str, Any], frozen: str) -> None:
    """Put the layer's own codes into the state, so that loading leaves them as they are."""
    state_dict.update({f"{frozen}{name}": own for name, own in layer.frozen.state_dict().items()})


def _other_size(key: str, given: Tensor, own: Tensor) -> str:
    return f"size mismatch for {key}: {list(given.shape)} in the state, {list(own.shape)} in the model."


def _warn_of_changed(key: str, frozen: str, stacklevel: int) -> None:
    warn(
        f"load_state_dict: {key} is not what {frozen}codes beside it decode to, so it was changed since it was saved. It is "
        "cast anew. Remove the codes from the state if that is what you want, or load both as they were saved.",
        code="load.changed-codes",
        stacklevel=stacklevel,
    )

"""Settings that were several settings before, and how their former keys make up their value.

Files, flags and config.toml of run folders may use the former keys, in the same table or flat, as
long as CONTRIBUTING.md, "Former names", says: `optimizer.beta2 = 0.999` is the second number of
`optimizer.betas`. A former key overrides that part of the new one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from narrowgauge.errors import ConfigError
from narrowgauge.train.config import augment_syntax


@dataclass(frozen=True)
class Merged:
    """Former keys of a setting, which stood in its table.

    kinds    {former key: type of its value}
    combine  (value of the setting, {former key: value}) -> value with these parts
    since    version that merged them
    beside   values that the setting already had beside these keys; they contradict no part
    """

    kinds: Mapping[str, type]
    combine: Callable[[Any, Mapping[str, Any]], Any]
    since: str
    beside: tuple[str, ...] = ()


def _betas(betas: Any, parts: Mapping[str, Any]) -> Any:
    if not isinstance(betas, tuple) or len(betas) != 2:
        return betas  # refused by its type
    return parts.get("beta1", betas[0]), parts.get("beta2", betas[1])


def _held_gradients(held: Any, parts: Mapping[str, Any]) -> Any:
    steps = parts["step_in_backward"]
    if steps and held == "fp8":
        raise ConfigError(
            f"optimizer.step_in_backward = true: holds no gradients, and optimizer.held_gradients = {held!r} holds them. Remove one of "
            "them; step_in_backward = true is held_gradients = 'none' now.",
            code="config.step_in_backward",
        )
    if not isinstance(steps, bool):
        return steps  # refused as a value of held_gradients
    return "none" if steps else "16bit" if held == "none" else held


def _augment(augment: Any, parts: Mapping[str, Any]) -> Any:
    wrong = next((part for part in parts.values() if not isinstance(part, int)), None)
    if wrong is not None or not isinstance(augment, str) or augment_syntax.RULE.refuse(augment):
        return augment if wrong is None else wrong
    before = augment_syntax.parse(augment)
    crop, flip = parts.get("crop_padding", before.crop), parts.get("flip", before.flip)
    return str(augment_syntax.Augment(crop, bool(flip)))


MERGED = {
    "augment": Merged({"crop_padding": int, "flip": bool}, _augment, "0.2.0"),
    "betas": Merged({"beta1": float, "beta2": float}, _betas, "0.2.0"),
    "held_gradients": Merged(
        {"step_in_backward": bool}, _held_gradients, "0.2.0", ("16bit", "fp8")
    ),
}

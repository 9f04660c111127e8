"""Table `[lora]`, `base` and `merge`: adapters over a frozen base. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from narrowgauge.train.config import lora_syntax
from narrowgauge.train.config.rules import Check, OneOf, setting, shown

# Recipes whose weights can be held as codes
BASES = (
    "fp8-block", "nvfp4", "nvfp4-46", "mxfp4", "int8", "nvfp4+shared-scales", "nvfp4-46+shared-scales", "int8+shared-scales",
)  # fmt: skip
LORA, ROOT = (partial(setting, name) for name in ("lora", ""))


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """Adapters of the package peft, and the numbers of the base below them."""

    # fmt: off
    lora: str = LORA("",
        "Train adapters of low rank over frozen weights, as r=16,alpha=32,targets=all-linear; empty: train the model.",
        key="adapter", short=True, parts=lora_syntax.KEYS)
    base: str = ROOT("",
        "With lora: hold the frozen weights as codes of this recipe, read shard by shard; empty: as the precision has them.",
        OneOf(("", *BASES)))
    merge: bool = ROOT(False,
        "With lora: also write the model with its adapters added, and say how much of the change survives rounding.", free=True)
    # fmt: on


def adapter_checks(c: Any, writing: Sequence[str]) -> Iterator[Check]:
    """Rules between these settings and others: (broken, keys, message) each.

    c        a TrainConfig
    writing  tasks whose model writes
    """
    for message in lora_syntax.problems(c.lora):
        yield True, "lora", f"lora = {shown(c.lora)}: {message}"
    for name in ("base", "merge"):
        value = getattr(c, name)
        yield (
            value and not c.lora,
            f"{name} lora",
            f"{name} = {shown(value)}: is of the frozen model below adapters. Add lora, as lora = 'r=16,alpha=32', or remove it.",
        )
    if not c.lora:
        return
    own = f"lora = {shown(c.lora)}"
    for broken, keys, message in (
        (not c.model or c.from_scratch, "model", "adapts a trained model. Name one by model, without from_scratch."),
        (c.task not in writing, "task",
         f"adapts models that write ({', '.join(writing)}), and task = {c.task!r} begins with a new head."),
        (c.freeze, "freeze", "freezes all but the adapters. Remove model.freeze, or name the layers by lora.targets."),
        (c.parallel, "parallel", "trains on one process. Remove parallel."),
        (c.embedding_codes, "embedding_codes", "freezes embeddings, whose steps recipe.embedding_codes learns. Remove it."),
        (c.fuse, "fuse", "wraps Linears, which recipe.fuse hands their casts. Remove fuse."),
        (c.switch and c.base, "switch", f"with base = {c.base!r} the weights are codes of one recipe. Remove recipe.switch."),
        (c.base and c.recipe not in (c.base, type(c).recipe), "base recipe",
         f"base = {c.base!r} is the recipe of the products as well, and recipe = {c.recipe!r} is another. Remove one of them."),
        (c.base and "init=pissa" in c.lora.replace(" ", ""), "base",
         f"init=pissa takes the largest singular vectors out of the base, which base = {c.base!r} holds as codes. Remove base, or take "
         "another init."),
    ):  # fmt: skip
        yield broken, f"lora {keys}", f"{own}: {message}"

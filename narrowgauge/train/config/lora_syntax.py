"""Parser of the setting `lora`: "r=16,alpha=32,targets=all-linear".

    r        rank of the two factors of an adapter                       8
    alpha    scale of the adapter's product: alpha / r, or alpha / sqrt(r) with rslora     2 r
    targets  Linears that get an adapter: all-linear (all but the output head), or ends of names
             with + between, as q_proj+v_proj                            all-linear
    dropout  of the adapter's input                                      0
    dora     without a number: the adapter learns magnitudes too (DoRA, arXiv 2402.09353)
    rslora   without a number: the rank-stabilized scale (arXiv 2312.03732)
    init     first factors: kaiming (the product is 0), gaussian (likewise), or pissa (the largest
             singular vectors, taken out of the base; arXiv 2404.02948)   kaiming

LoRA is arXiv 2106.09685. The adapters are those of the package peft. An empty setting trains the
whole model. Imports no torch, so that --help is quick.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from narrowgauge.errors import ConfigError, closest

# Each part, and its words in --help
KEYS = {
    "r": "Rank of the adapters. [8]",
    "alpha": "Scale of the adapters, divided by their rank. [2 r]",
    "targets": "all-linear, or ends of names of Linears with + between, as q_proj+v_proj. [all-linear]",
    "dropout": "Dropout of what adapters read. [0]",
    "dora": "true: adapters learn magnitudes too (DoRA).",
    "rslora": "true: the scale is divided by the root of the rank (rsLoRA).",
    "init": "First factors: kaiming, gaussian or pissa. [kaiming]",
}
INITS = ("kaiming", "gaussian", "pissa")
ALL_LINEAR = "all-linear"
_FLAGS = ("dora", "rslora")
_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")
_NAME = re.compile(r"[A-Za-z_][\w.]*")


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Shape of the adapters; see the module docstring."""

    r: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    dropout: float = 0.0
    dora: bool = False
    rslora: bool = False
    init: str = "kaiming"

    def __str__(self) -> str:
        """The setting that `parse` reads as this, with every part."""
        parts = [f"r={self.r}", f"alpha={self.alpha:g}", f"targets={'+'.join(self.targets)}"]
        parts += [f"dropout={self.dropout:g}"] if self.dropout else []
        parts += [name for name in _FLAGS if getattr(self, name)]
        return ",".join([*parts, *([f"init={self.init}"] if self.init != INITS[0] else [])])


def parse(text: str) -> Lora:
    """The adapters that a text describes. Raises ConfigError for a text that is invalid."""
    found, wrong = _read(text)
    if wrong:
        raise ConfigError(f"lora = {text!r}: {wrong[0]}", code="config.lora")
    return found


def problems(text: str) -> list[str]:
    """Sentences about errors in the text; [] for the empty text."""
    return _read(text)[1] if text else []


def _read(text: str) -> tuple[Lora, list[str]]:
    given: dict[str, str] = {}
    wrong: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if name not in KEYS:
            near = closest(name, KEYS, limit=1)
            wrong.append(
                f"{name!r} is none of {', '.join(KEYS)}. {f'Closest: {near}. ' if near else ''}Write it as 'r=16,alpha=32'."
            )
        elif name in given:
            wrong.append(f"{name!r} is given twice. Keep one.")
        elif name in _FLAGS and equals:
            wrong.append(f"{part!r} has a value. Write '{name}' alone, or leave it out.")
        elif reason := _refuse(name, value):
            wrong.append(f"{part!r}: must be {reason}.")
        else:
            given[name] = value
    if wrong:
        return Lora(), wrong
    rank = int(given.get("r", Lora.r))
    return Lora(
        r=rank,
        alpha=float(given.get("alpha", 2 * rank)),
        targets=tuple(given.get("targets", ALL_LINEAR).split("+")),
        dropout=float(given.get("dropout", 0)),
        dora="dora" in given,
        rslora="rslora" in given,
        init=given.get("init", INITS[0]),
    ), []


def _refuse(name: str, value: str) -> str:
    """What a value of this part must be, if it is not that; else ''."""
    if name == "r":
        is_right = bool(re.fullmatch(r"[1-9]\d{0,4}", value))
        return "" if is_right else "a whole number from 1 to 99999"
    if name == "alpha":
        is_right = bool(_NUMBER.fullmatch(value)) and float(value) > 0
        return "" if is_right else "a number above 0"
    if name == "dropout":
        is_right = bool(_NUMBER.fullmatch(value)) and float(value) < 1
        return "" if is_right else "a number of at least 0 and below 1"
    if name == "init":
        return "" if value in INITS else f"one of {', '.join(INITS)}"
    if name == "targets":
        names = value.split("+")
        is_right = all(each == ALL_LINEAR or _NAME.fullmatch(each) for each in names)
        is_right = is_right and (ALL_LINEAR not in names or len(names) == 1)
        return "" if is_right else "all-linear, or names with + between, as q_proj+v_proj"
    return ""

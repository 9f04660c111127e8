"""Parser of the setting `switch`: layers that change to a higher-precision recipe, and when.

    [LAYERS=]RECIPE@START[:PRODUCTS], separated by commas

    fp8-current@80%                        all layers, all matmuls, after 80 % of the steps
    bf16@82%:forward                       the forward matmul only; `backward` means both gradients
    layers.[0-3].*=bf16@240                blocks 0 to 3, after 240 steps
    fp8-row@50%, bf16@90%:grad_weight      two switches; entries at one step apply in this order

Imports no torch, so that the command line rejects an invalid value at once.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from narrowgauge.errors import ConfigError, Reason
from narrowgauge.train.config.recipe_syntax import ALL, PRODUCTS

ENTRY = re.compile(
    r"(?:(?P<layers>[^=@]+)=)?(?P<recipe>[^=@:%]+)@(?P<start>[^=@:]+)(?::(?P<products>[^=@:]+))?"
)
FORM = "the form is [LAYERS=]RECIPE@START[:PRODUCTS], such as fp8-current@80% or layers.0.*=bf16@240:forward"


@dataclass(frozen=True)
class Switch:
    """One entry of the setting.

    text      the entry as written, which identifies it in the log
    layers    pattern of layers
    recipe    name of the higher-precision recipe
    after     finished steps before the switch: an integer, or a fraction of the run below 1
    products  names of the matmuls of a Linear
    """

    text: str
    layers: str
    recipe: str
    after: Fraction
    products: tuple[str, ...]

    def after_step(self, steps: int) -> int:
        """Finished steps before the switch in a run of `steps`; a fraction is rounded down."""
        # Fraction is exact; in floating point, int(0.57 * 100) is 56.
        return int(self.after * steps) if self.after < 1 else int(self.after)


def parse(text: str) -> list[Switch]:
    """Entries of the setting in order; [] for ''. Raises ConfigError for a malformed entry."""
    return [_entry(part.strip()) for part in text.split(",")] if text.strip() else []


def _entry(text: str) -> Switch:
    match = ENTRY.fullmatch(text)
    if not match:
        raise ConfigError(f"{text!r} is no switch: {FORM}", code="switch.syntax")
    layers, recipe, start, products = (
        match[name] and match[name].strip() for name in match.groupdict()
    )
    if products and products not in PRODUCTS:
        raise ConfigError(
            f"{text!r} names products {products!r}: choose from {', '.join(PRODUCTS)}, or leave them out for all",
            code="switch.products",
        )
    percent = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)\s*%", start)
    if not percent and not re.fullmatch(r"[1-9]\d{0,9}", start):
        raise ConfigError(
            f"{text!r} starts at {start!r}: give a share of the run (80%), or a number of steps of at least 1 (240)",
            code="switch.start",
        )
    after = Fraction(percent[1]) / 100 if percent else Fraction(start)
    if percent and not 0 < after < 1:
        raise ConfigError(
            f"{text!r} starts at {start}: give a share above 0% and below 100%",
            code="switch.start-share",
        )
    return Switch(text, layers or "*", recipe, after, PRODUCTS[products] if products else ALL)


def problems(text: str, steps: int) -> Iterator[Reason]:
    """Sentences about errors of the setting in a run of `steps`."""
    try:
        entries = parse(text)
    except ConfigError as error:
        yield Reason(error.code, f"{error}.")
        return
    for entry in entries:
        after = entry.after_step(steps)
        if after < 1:
            yield Reason(
                "switch.before-first",
                f"{entry.text!r} starts before the first of {steps} steps. Give the recipe itself, or a later start.",
            )
        if after >= steps:
            yield Reason(
                "switch.after-last",
                f"{entry.text!r} starts after step {after}, but the run has {steps} steps, so it would never happen. Start earlier.",
            )
    places = [
        (entry.layers, entry.after_step(steps), product)
        for entry in entries
        for product in entry.products
    ]
    # Two recipes for one matmul at one step: the order would decide silently.
    if len(set(places)) < len(places):
        yield Reason(
            "switch.twice",
            f"{text!r} switches the same layers and product twice at one step. Leave one out.",
        )

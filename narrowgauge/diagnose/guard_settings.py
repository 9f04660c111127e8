"""The setting `guard`: interval, length and margin of the checks, and the action if worse.

    every=2000,steps=100,margin=0.25%,then=stay     each key once, in any order; the rest as in
                                                    `GuardSettings`

    every    steps from the start of a check to the start of the next one
    steps    length of a BF16 probe; its second half counts
    margin   largest harmless difference of the loss: a share of the loss (0.25%), or nats (0.003).
             0.25% means at least 0.003 nats, other shares in proportion, as long as that is at most
             1 % of the loss (the loss need not be a cross-entropy)
    then     action if the run is worse: `warn`; `stay`, in BF16 until the next check, which tries
             low precision again; `bf16` from there on, or the name of another, more precise recipe

Imports no torch, so that the command line can refuse a bad value at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from narrowgauge.errors import ConfigError, closest

MARGIN = 0.0025  # of the loss; differences of sound FP8 runs are of the order of 1e-3
LEAST_MARGIN = 0.003  # nats
WIDEST = 0.01  # of the loss: upper limit of the margin in nats
# Each part, and its words in --help
KEYS = {
    "every": "Steps from the start of a check to the start of the next one. [2000]",
    "steps": "Steps of a check in BF16. [100]",
    "margin": "Largest harmless difference of the loss, as 0.25% or 0.003 nats. [0.25%]",
    "then": "What follows if the run is worse: warn, stay, bf16 or another recipe. [warn]",
}
WARN, STAY = "warn", "stay"
FORM = "every=2000,steps=100,margin=0.25%,then=stay"
COPIES = 2  # most copies of the state at a time in a check: its begin and its end, for a control
FEWEST = 2  # steps of a probe: its second half then has one


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """Settings of a guard. Raises ConfigError for impossible values.

    every, steps, then                as in the module docstring
    margin, least_margin, is_in_nats  arguments of `Evidence`
    """

    every: int = 2000
    steps: int = 100
    margin: float = MARGIN
    least_margin: float = LEAST_MARGIN
    is_in_nats: bool = False
    then: str = WARN

    def __post_init__(self) -> None:
        if not (
            is_whole(self.every) and is_whole(self.steps) and FEWEST <= self.steps <= self.every
        ):
            raise ConfigError(
                f"guard: every = {self.every!r}, steps = {self.steps!r}: must be whole numbers, steps from {FEWEST} to every.",
                code="guard.every-steps",
            )
        for name in ("margin", "least_margin"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, Real)
                or not 0 < float(value) < math.inf
            ):
                raise ConfigError(
                    f"guard: {name} = {value!r}: must be a positive number. Choose for example {MARGIN}.",
                    code="guard.margin",
                )
        if not isinstance(self.is_in_nats, bool):
            raise ConfigError(
                f"guard: is_in_nats = {self.is_in_nats!r}: must be True or False.",
                code="guard.is-in-nats",
            )
        if not isinstance(self.then, str) or not self.then:
            raise ConfigError(
                f"guard: then = {self.then!r}: must be {WARN!r}, {STAY!r} or the name of a recipe.",
                code="guard.then",
            )

    @property
    def keeps_reference(self) -> bool:
        """True if the run may continue from the end of a BF16 probe."""
        return self.then != WARN

    @property
    def recipe(self) -> str:
        """Recipe that a run gets for good if it is worse, or ''."""
        return "" if self.then in (WARN, STAY) else self.then

    def begins(self, warmup_steps: int, steps: int) -> range:
        """Steps after which checks start in a run of `steps` steps.

        None before the end of warm-up, and none that the end of the run would cut.
        """
        first = -(-max(warmup_steps, 1) // self.every) * self.every
        return range(first, steps - self.steps + 1, self.every)

    def margin_words(self) -> str:
        if self.is_in_nats:
            return f"{self.least_margin:g} nats"
        return f"{100 * self.margin:g} % of the loss, {self.least_margin:g} nats at least (as far as that is {100 * WIDEST:g} %)"


def is_whole(value: object) -> bool:
    """True for an integer; False for True and False."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def refuse_counts(**counts: object) -> None:
    """Raise ConfigError for arguments of a guard that are not numbers of steps."""
    for name, value in counts.items():
        if not is_whole(value) or value < 0:  # type: ignore[operator]
            raise ConfigError(
                f"Guard: {name} = {value!r}: must be a whole number of steps, 0 or more.",
                code="guard.whole-number",
            )


def parse(text: str) -> GuardSettings | None:
    """Parse the setting; None for ''. Raises ConfigError with every reason."""
    if not text.strip():
        return None
    found, wrong = _read(text)
    if wrong:
        raise ConfigError(f"guard = {text!r}: {' '.join(wrong)}", code="guard.settings-text")
    return found


def chosen(given: str | GuardSettings) -> GuardSettings:
    """Settings for a loop that asks for a guard.

    Raises ConfigError for invalid or empty settings.
    """
    found = parse(given) if isinstance(given, str) else given
    if isinstance(found, GuardSettings):
        return found
    what = (
        "the settings are empty"
        if found is None
        else f"{given!r} is neither text nor GuardSettings"
    )
    raise ConfigError(
        f"Guard: {what}. Write them as 'every=2000,steps=100,margin=0.25%,then=warn'.",
        code="guard.settings-empty" if found is None else "guard.settings-type",
    )


def problems(text: str, steps: int, warmup_steps: int) -> Iterator[str]:
    """Yield sentences on errors in the setting for a run of `steps` steps.

    steps  0: not known yet
    """
    if not text.strip():
        return
    found, wrong = _read(text)
    yield from wrong
    if wrong or not steps:
        return
    if found.steps > steps:
        yield f"a stretch of {found.steps} steps is longer than the run of {steps}. Shorten it, or train longer."
    elif not found.begins(warmup_steps, steps):
        first = found.begins(warmup_steps, 2**62)[0]
        yield (
            f"no check would end within the run: the first one begins after step {first} (every {found.every} steps, after a warm-up of "
            f"{warmup_steps}) and takes {found.steps}, and the run has {steps}. Check more often, or train longer."
        )


def _read(text: str) -> tuple[GuardSettings, list[str]]:
    values: dict[str, str] = {}
    wrong = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if key not in KEYS:
            near = closest(key, KEYS, limit=1)
            wrong.append(
                f"{key!r} is none of {', '.join(map(repr, KEYS))}. {f'Closest: {near}. ' if near else ''}Write it as '{FORM}'."
            )
        elif key in values:
            wrong.append(f"{key!r} is given twice. Keep one.")
        elif not equals or not value:
            wrong.append(f"{part!r} has no value. Write it as '{FORM}'.")
        else:
            values[key] = value
    given: dict[str, Any] = {}
    for key, fewest in (("every", 1), ("steps", FEWEST)):
        if key in values:
            if re.fullmatch(r"[1-9]\d{0,9}", values[key]) and int(values[key]) >= fewest:
                given[key] = int(values[key])
            else:
                wrong.append(
                    f"{key} = {values[key]!r} is no number of steps of at least {fewest}. Write it as '{FORM}'."
                )
    margins, said = _margins(values.get("margin", ""))
    wrong += said
    every, steps = (given.get(key, getattr(GuardSettings, key)) for key in ("every", "steps"))
    if not wrong and steps > every:
        wrong.append(
            f"a stretch of {steps} steps is longer than its interval of {every}. Shorten steps, or raise every."
        )
    if wrong:
        return GuardSettings(), wrong
    return GuardSettings(**margins, then=values.get("then", WARN), **given), []


def _margins(text: str) -> tuple[dict[str, Any], list[str]]:
    """(arguments of `Evidence`, error messages)."""
    if not text:
        return {}, []
    number, percent = text.removesuffix("%").strip(), text.endswith("%")
    value = float(number) if re.fullmatch(r"[-+]?\d{0,9}(\d|\.\d{1,12})", number) else 0.0
    if value <= 0 or (percent and value >= 100):
        form = "a share of the loss above 0 % and below 100 %, as 0.25%, or nats above 0, as 0.003"
        why = "differences of sound runs are of the order of 0.001"
        return {}, [f"margin = {text!r} is not {form}: {why}. Write such a number."]
    if percent:
        # The margin in nats scales with the share, so that 0.25% gives LEAST_MARGIN.
        return {"margin": value / 100, "least_margin": LEAST_MARGIN * value / 100 / MARGIN}, []
    return {"least_margin": value, "is_in_nats": True}, []

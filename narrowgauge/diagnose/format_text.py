"""Format numbers for readers: units, true minus signs, significant digits."""

from __future__ import annotations

import math
from collections.abc import Mapping

PERCENT = "\N{NO-BREAK SPACE}%"  # no line break before the sign


def decimals(value: float) -> int:
    """Number of decimal places (4 to 7) that shows two digits of the value."""
    return (
        min(max(4, 1 - math.floor(math.log10(abs(value)))), 7)
        if value and math.isfinite(value)
        else 4
    )


def signed(value: float | None, places: int = 4) -> str:
    """Format a value with its sign; zero has none."""
    if value is None or not math.isfinite(value):
        return "not known"
    text = true_minus(f"{value:+.{places}f}")
    # A value that rounds to zero would read "−0.0000".
    return text if any(digit in text for digit in "123456789") else text[1:]


def true_minus(text: str) -> str:
    return text.replace("-", "−")


def count(value: float) -> str:
    """Format as 1,234,567; text is returned unchanged."""
    return (
        f"{value:,.0f}" if isinstance(value, int | float) and math.isfinite(value) else str(value)
    )


def plural(value: float, noun: str) -> str:
    """Format a count with its noun: '1 step', '300 steps'."""
    return f"{count(value)} {noun}{'' if value == 1 else 's'}"


def rounded(value: float) -> str:
    """Format with three digits and a word: 3.2 million."""
    for unit, word in ((1e12, " trillion"), (1e9, " billion"), (1e6, " million")):
        if value >= unit:
            return f"{value / unit:.3g}{word}"
    return count(value)


def size_parts(value: float) -> tuple[str, str]:
    """Format bytes as ("1.25", "GiB")."""
    for unit, word in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= unit:
            return (f"{value / unit:.3g}" if value < 1000 * unit else f"{value / unit:,.0f}"), word
    return f"{value:.0f}", "bytes"


def size(value: float) -> str:
    """Format bytes as '1.25 GiB'."""
    return " ".join(size_parts(value))


def duration(seconds: float) -> str:
    """Format seconds as '12.3 s', '4 min 05 s', '3 h 07 min'."""
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes} min {rest:02} s"
        if minutes < 100
        else f"{minutes // 60} h {minutes % 60:02} min"
    )


def loss_value(value: float) -> str:
    """Format with four decimal places, or as 'NaN' or 'infinite'."""
    return (
        true_minus(f"{value:.4f}")
        if math.isfinite(value)
        else "NaN"
        if math.isnan(value)
        else "infinite"
    )


def perplexity(loss: float) -> str:
    return f"{math.exp(loss):,.2f}" if math.isfinite(loss) and loss < 30 else "–"


def percent(share: float | None) -> str:
    """Format a share as a percentage with three digits.

    '0 %' only for exactly zero; '< 0.0001 %' below that limit.
    """
    if share is None or not math.isfinite(share):
        return "–"
    value = 100 * share
    if value == 0:
        return f"0{PERCENT}"
    if value < 0.0001:
        return f"<\N{NO-BREAK SPACE}0.0001{PERCENT}"
    return f"{value:.{max(0, min(4, 2 - math.floor(math.log10(value))))}f}{PERCENT}"


def magnitude(value: float | None) -> str:
    """Format as '1.23 × 10⁻⁵' (no-break spaces), or as '0.0123' from 0.001 to 10,000."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return loss_value(value)
    if value == 0 or 0.001 <= abs(value) < 10000:
        return true_minus(f"{value:.4g}")
    mantissa, exponent = f"{value:.2e}".split("e")
    return (
        f"{true_minus(mantissa)}\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}10{superscript(int(exponent))}"
    )


SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def superscript(value: int) -> str:
    return str(value).translate(SUPERSCRIPTS)


def elsewhere(recipes: Mapping[str, str], embedding_codes: str = "", attention: str = "") -> str:
    """Suffix for layers with other formats than the recipe.

    Example: " with bf16 in lm_head, int4 in embeddings, fp8 in attention".
    """
    said = [f"{recipe} in {pattern}" for pattern, recipe in recipes.items()]
    said += [f"{embedding_codes} in embeddings"] if embedding_codes else []
    said += [f"{attention} in attention"] if attention else []
    return f" with {', '.join(said)}" if said else ""

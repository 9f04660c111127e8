"""Table of the report, per layer: norms of gradient rows and peaks of activation channels.

A strip is a histogram as one line of boxes, one octave each: the darker, the more rows or channels.
All strips of a column share one axis, so that layers can be compared by eye.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from narrowgauge.diagnose import format_text

if TYPE_CHECKING:
    from narrowgauge.report.run_data import Recorded

MOST_LAYERS = 64
WIDEST = 12  # octaves of an axis; values beyond it are counted in its end boxes
BOX, HEIGHT = 12, 14  # CSS pixels


def table(recorded: Recorded) -> dict[str, Any] | None:
    """`lines`, `drawn` and `layers` (their number) from each layer's last reading, or None.

    Draws at most MOST_LAYERS, those with the most unequal rows.
    """
    last: dict[str, dict[str, Any]] = {}
    for event in recorded.of("spread"):
        # Rows and channels of a layer are separate events; the last one of each kind counts.
        last.setdefault(event["module"], {}).update(
            {key: event[key] for key in ("rows", "channels", "step") if key in event}
        )
    if not last:
        return None
    chosen = sorted(
        last, key=lambda module: last[module].get("rows", {}).get("effective", math.inf)
    )[:MOST_LAYERS]
    # In the order of the backward pass.
    shown = {module: found for module, found in last.items() if module in chosen}
    norms = axis(found["rows"]["norms"] for found in shown.values() if "rows" in found)
    both = [found["channels"] for found in shown.values() if "channels" in found]
    peaks = axis(each[name] for each in both for name in ("peaks", "rotated_peaks"))
    lines = [line(module, found, norms, peaks) for module, found in shown.items()]
    return {
        "lines": sorted(lines, key=lambda each: each["order"]),
        "drawn": len(lines),
        "layers": len(last),
    }


def line(
    module: str, found: Mapping[str, Any], norms: tuple[int, int], peaks: tuple[int, int]
) -> dict[str, Any]:
    rows, channels = found.get("rows"), found.get("channels")
    cells: dict[str, Any] = {
        "module": module,
        "order": natural(module),
        "step": found["step"],
        "norms": "",
        "peaks": "",
        "rotated": "",
    }
    if rows:
        cells |= {
            "norms": strip(rows["norms"], norms),
            "effective": format_text.percent(rows["effective"]),
            "top": format_text.percent(rows["top"]),
        }
    if channels:
        cells |= {
            "peaks": strip(channels["peaks"], peaks),
            "rotated": strip(channels["rotated_peaks"], peaks),
        }
        cells |= {
            "largest": f"{channels['largest']:.3g}",
            "rotated_largest": f"{channels['rotated_largest']:.3g}",
        }
    return cells


def natural(module: str) -> list[tuple[int, str]]:
    """Sort key that puts layers.2 before layers.10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in module.split(".")]


def axis(histograms: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """First and last octave of a column of strips."""
    ends = [
        (each["lowest_exponent"], each["lowest_exponent"] + len(each["counts"]) - 1)
        for each in histograms
        if each["counts"]
    ]
    low, high = min((low for low, _ in ends), default=0), max((high for _, high in ends), default=0)
    return max(low, high - WIDEST + 1), high


def strip(histogram: Mapping[str, Any], axis: tuple[int, int]) -> str:
    """SVG of boxes, with a line at 1 (the mean row, or the median channel)."""
    low, high = axis
    shares = dict.fromkeys(range(low, high + 1), 0.0)
    for place, counted in enumerate(histogram["counts"], histogram["lowest_exponent"]):
        shares[min(max(place, low), high)] += counted / (sum(histogram["counts"]) or 1)
    box = '<rect x="{}" width="{}" height="{}" fill="var(--run)" opacity="{:.2f}"/>'
    boxes = [
        box.format(BOX * (octave - low), BOX - 1, HEIGHT, max(0.12, math.sqrt(share)))
        for octave, share in shares.items()
        if share
    ]
    if low <= 0 <= high:
        boxes.append(f'<path d="M{BOX * (0 - low) - 0.5} -2V{HEIGHT + 2}" stroke="var(--muted)"/>')
    width, height = BOX * (high - low + 1), HEIGHT + 4
    head = f'<svg role="img" aria-label="octaves {low} to {high}" viewBox="0 -2 {width} {height}" width="{width}" height="{height}">'
    return f"{head}{''.join(boxes)}</svg>"

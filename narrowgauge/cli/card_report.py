"""`narrowgauge card-report`: try the kernels of this GPU, time them, and write one file to send back.

With --read it writes the page of such a file, beside the predictions for its card. Neither sends
anything anywhere.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from narrowgauge.errors import ConfigError, NumericsError


def card_report(
    *,
    read: Annotated[
        Path | None,
        Parameter(help="Archive to read: its page is written beside it.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        Parameter(
            help="File that is written. [narrowgauge-card-GPU.zip; with --read the archive's name as .html]",
            show_default=False,
        ),
    ] = None,
    minutes: Annotated[float, Parameter(help="Minutes of the whole report.")] = 30.0,
    limit_s: Annotated[
        float | None,
        Parameter(
            help="Seconds that one process may take at most. [its own limit]", show_default=False
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        Parameter(
            help="Parts: checks, rates, linear, optimizer, layer, step, communication. [all]",
            show_default=False,
            negative=(),
            consume_multiple=True,
        ),
    ] = None,
) -> int:
    """Try and time the kernels of this machine's GPU, and write one archive of at most 5 MB.

    Each kernel and form is tried in a process of its own, with its own limit: one that faults or
    hangs is named, and the rest goes on. Nothing is sent anywhere. Exit code 0, or 5 if a process
    computed wrong numbers, faulted, hung or failed.
    """
    from narrowgauge.lab import card

    if read is not None:
        if only or limit_s is not None or minutes != 30.0:
            raise ConfigError(
                "card-report: minutes, limit-s and only are of a new report, and --read reads one. Leave them out.",
                code="card-report.read-options",
            )
        print(card.write_page(read, output))
        return 0
    if sys.platform != "linux":
        raise ConfigError(
            f"card-report: it starts its processes as Linux does, and this is {sys.platform}. Run it on Linux, or in WSL 2.",
            code="card-report.system",
        )
    chosen = tuple(only or card.PARTS)
    if unknown := [each for each in chosen if each not in card.PARTS]:
        raise ConfigError(
            f"card-report: only = {unknown[0]!r} is no part of the report. Choose from {', '.join(card.PARTS)}.",
            code="card-report.part",
        )
    if not 0 < minutes <= 24 * 60 or (limit_s is not None and limit_s <= 0):
        raise ConfigError(
            f"card-report: minutes = {minutes:g} and limit-s = {limit_s}; both are above 0, and minutes at most {24 * 60}.",
            code="card-report.minutes",
        )
    settings = card.CardSettings(minutes=minutes, most_s=limit_s, parts=chosen)
    _, lines = card.report(output, settings)
    return NumericsError.exit_code if card.culprits(lines) else 0

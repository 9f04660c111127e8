"""`narrowgauge plan [CONFIG] [FLAGS]`: estimate the memory and time of a run by tracing one step.

Takes the flags of `train` and a few more. Answers are cached in the user's cache folder: repeating
a question imports no torch. No run folder is written.
"""

from __future__ import annotations

import gc
import json as json_format
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from narrowgauge.cli.flags import FILE, configuration, refuse_unknown_recipes, signature_of
from narrowgauge.errors import OutOfMemoryError
from narrowgauge.train import first_look
from narrowgauge.train.console import counting
from narrowgauge.train.console import tell as say
from narrowgauge.train.planning import cache

PLAN = Group("plan", sort_key=0)
DRIVER = Path("/proc/driver/nvidia/version")


def _flag(words: str) -> Parameter:
    return Parameter(help=words, group=PLAN, show_default=False, negative=())


def plan(
    config: Annotated[str, FILE] = "",
    *,
    card: Annotated[str, _flag("GPU to plan for, as h100; empty: the one that is here.")] = "",
    memory: Annotated[str, _flag("Memory of the GPU instead of the card's, as 24GiB.")] = "",
    json: Annotated[bool, _flag("Print the answer as JSON.")] = False,
    table: Annotated[bool, _flag("Also the table from these settings to smaller ones, one technique more in each row.")] = False,
    full: Annotated[bool, _flag("Count every layer instead of 3 and 4 of them.")] = False,
    measure: Annotated[bool, _flag("Also run two steps on the device of this machine, and say how far off the count is.")] = False,
    picture: Annotated[str, _flag("Draw memory over the step to this file (.png, .svg).")] = "",
    **given: Any,
) -> int:  # fmt: skip
    """Say what a run of `narrowgauge train` with these settings needs, before it runs.

    Every allocation is traced under fake tensors: no GPU, no data and no weights are needed, and no
    run folder is written. Exit code 0 if the run fits or no card is named, 9 if it does not fit.
    """
    settings = configuration(config, given)
    if picture:
        from narrowgauge.report import memory_picture

        memory_picture.refuse(Path(picture))
    question = ["answer", cache.question_of(settings), card, memory, table, full]
    # With no card named, the answer depends on the GPU of this machine, so it is cached only where
    # no NVIDIA driver is loaded. Reading /proc costs nothing; asking torch would import it.
    may_be_kept = not measure and bool(card or memory or not DRIVER.exists())
    answer = cache.load(question) if may_be_kept else None
    if answer is None:
        first_look.refuse_model(settings)
        refuse_unknown_recipes(settings)
        from narrowgauge.train.planning import command

        # A collection would scan all objects of the imports: a tenth of the tracing time.
        gc.freeze()
        try:
            with counting() as tell:
                answer = command.answered(
                    settings, card, memory, table=table, full=full, measure=measure, tell=tell
                )
        finally:
            gc.unfreeze()
        if may_be_kept:
            cache.store(question, answer)
    if picture:
        instead = " (in place of the file that was there)" if Path(picture).exists() else ""
        memory_picture.draw(answer, Path(picture))
        say(f"Picture: {picture}{instead}")
    text = answer.pop("text")
    print(json_format.dumps(answer, indent=2) if json else text)
    return OutOfMemoryError.exit_code if answer["fits"] is False else 0


plan.__signature__ = signature_of(plan)  # type: ignore[attr-defined]

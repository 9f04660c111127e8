"""`narrowgauge study FILE --seeds 5 --recipes bf16,int8`: compare recipes over several seeds.

`narrowgauge study RUN RUN ...` judges run folders that were trained elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from narrowgauge.cli.flags import flag_of, refuse_unknown_names, shared_settings, signature_of
from narrowgauge.errors import ConfigError
from narrowgauge.train import first_look
from narrowgauge.train.config.settings import NO_RECIPE

STUDY = Group("study", sort_key=0)
SOURCES = Parameter(
    help="TOML file with settings; or folders of runs, two at least, that are judged and not trained.",
    show_default=False, group=Group("file", sort_key=0),
)  # fmt: skip
USUAL = {"recipes": "bf16,fp8-current", "seeds": "5", "output": "runs/study"}
MOST = 1000  # largest number of seeds
OF_STUDY = (
    "recipe",
    "layers_recipe",
    "seed",
    "parallel",
    "output",
    "resume",
    "compare",
)  # settings that the study sets itself


def _flag(words: str) -> Parameter:
    return Parameter(help=words, group=STUDY, show_default=False)


def study(
    *sources: Annotated[str, SOURCES],
    recipes: Annotated[str, _flag("Recipes, the reference first; of run folders the reference alone. [bf16,fp8-current]")] = "",
    seeds: Annotated[str, _flag("How many seeds, from 0 on; or the seeds, with commas. [5]")] = "",
    margin: Annotated[str, _flag("Difference that does not matter, as 0.25% or 0.003. [0.25% of a loss, 0.01 of a score]")] = "",
    metric: Annotated[str, _flag("What is judged, at the last evaluation. [what chooses the best weights, or the loss]")] = "",
    parallel: Annotated[str, _flag("Runs at a time; auto: as cores, memory and GPUs allow. [auto]")] = "auto",
    control: Annotated[
        bool, _flag("Also train a recipe that is bad on purpose, once a seed: the verdicts need to see that it is. [on]")
    ] = True,
    output: Annotated[str, _flag("Folder of the study. [runs/study; of run folders the one that holds the first]")] = "",
    **given: Any,
) -> int:  # fmt: skip
    """Train several recipes with several seeds each, and judge each recipe against the first.

    The verdict says whether a recipe ends where the first one ends.

    Every run is a `narrowgauge train` in its own folder. The same command resumes a study that
    was stopped or killed. Flags override the file; its own recipe and seed do not count.

    Run folders may come from other training loops (narrowgauge.integrations.RunFolder).
    """
    # A folder is never a file of settings, so one alone gets the error that names `report`.
    if any(Path(each).is_dir() for each in sources) or len(sources) > 1:
        # Only flags that differ from their defaults are there to refuse.
        own = {"seeds": seeds, "parallel": parallel != "auto", "no-control": not control} | given
        _refuse_sources(sources, [name for name, value in own.items() if value], recipes)
        from narrowgauge.lab.study import conclusion

        folders = [Path(each) for each in sources]
        place = Path(output) if output else folders[0].resolve().parent
        return conclusion.conclude_runs(folders, place, recipes, metric, margin).exit_code
    # The defaults are filled in here: run folders need to know what was typed.
    recipes, seeds = recipes or USUAL["recipes"], seeds or USUAL["seeds"]
    output = output or USUAL["output"]
    # `parallel` of the file stays, so that plan.Study refuses it with a message; the rest that the
    # study sets itself is ignored. `compare` asks for the second run that a study has anyway.
    left_out = {*OF_STUDY} - {"layers_recipe", "parallel"}
    settings = shared_settings(sources[0] if sources else "", given, left_out)
    first_look.refuse(settings)
    # "auto" and "none" have answers of their own.
    refuse_unknown_names("recipes", {*_names(recipes)} - {"auto", NO_RECIPE})
    from narrowgauge.lab.study import plan, runner

    asked = plan.Study(
        config=settings, recipes=_names(recipes), seeds=_seeds(seeds), output=Path(output), metric=metric, margin=margin,
        parallel=_parallel(parallel), control=control,
    )  # fmt: skip
    return runner.run(asked).exit_code


def _refuse_sources(sources: Sequence[str], settings: Sequence[str], reference: str) -> None:
    """Raise ConfigError unless all sources are run folders and every flag is about judging."""
    if no_folder := [each for each in sources if not Path(each).is_dir()]:
        raise ConfigError(
            f"study: {no_folder[0]} is no folder, and several names are folders of runs. Name one file with settings, or runs alone.",
            code="study.sources",
        )
    if len(sources) < 2:
        raise ConfigError(
            f"study: {sources[0]} is one folder. Name the folders of two runs at least; narrowgauge report {sources[0]} writes the page "
            "of a run, or of a study.",
            code="study.one-folder",
        )
    if settings:
        raise ConfigError(
            f"study: {flag_of(settings[0])} is of runs that a study trains, and these are trained. Leave it out, or name a file with "
            "settings instead of folders.",
            code="study.of-runs",
        )
    if "," in reference:
        raise ConfigError(
            f"recipes = {reference!r}: of run folders the reference alone is named. Name the folders of the recipes that you compare.",
            code="study.of-runs",
        )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _seeds(text: str) -> tuple[int, ...]:
    """Parse '5' as seeds 0 to 4, and '0,3' as these two seeds."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d{1,9}", word) for word in words):
        raise ConfigError(
            f"seeds = {text!r}: are no whole numbers. Write their number, as 5, or the seeds, as 0,1,2.",
            code="study.seeds",
        )
    if len(words) > 1:
        return tuple(map(int, words))
    count = int(words[0])
    if not 2 <= count <= MOST:
        raise ConfigError(
            f"seeds = {text!r}: a spread takes two seeds at least, and {MOST:,} at most. Write their number, as 5.",
            code="study.seed-count",
        )
    return tuple(range(count))


def _parallel(text: str) -> int:
    if text == "auto":
        return 0
    if not re.fullmatch(r"[1-9]\d{0,3}", text):
        raise ConfigError(
            f"parallel = {text!r}: is no number of runs. Write auto, or a number, as 2.",
            code="study.parallel",
        )
    return int(text)


study.__signature__ = signature_of(study, without=OF_STUDY)  # type: ignore[attr-defined]

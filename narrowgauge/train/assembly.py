"""Builds the parts of a run in the order in which they depend on each other.

model -> data feed -> memory options and loss -> recipe switches -> ranks -> optimizer -> passes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from narrowgauge.conversion import coverage
from narrowgauge.conversion.auto import chosen
from narrowgauge.diagnose.runs import read_run
from narrowgauge.optim import precision as precisions
from narrowgauge.structure import is_weight
from narrowgauge.train import step
from narrowgauge.train.checkpoint import state
from narrowgauge.train.loss import inputs_of
from narrowgauge.train.model import build
from narrowgauge.train.optimizer import build_optimizer
from narrowgauge.train.parallel.spread import Parallel
from narrowgauge.train.parallel.stage_state import WholeNumbers
from narrowgauge.train.passes import Passes
from narrowgauge.train.recipe_schedule import RecipeSchedule, recipe_switches
from narrowgauge.train.run_checkpoints import Counters, RunCheckpoints
from narrowgauge.train.tasks.feed import SkippingFeed
from narrowgauge.train.validation import Validation

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.parallel.ranks import Ranks
    from narrowgauge.train.run_folder import RunFolder
    from narrowgauge.train.tasks import TrainTask


@dataclass(frozen=True, kw_only=True)
class Given:
    """Facts that are known before the parts of a run are built.

    has_own_peak  the process's peak memory belongs to this run alone; if False, earlier runs
                  contribute to it and the peak is not recorded
    policy_note   why checkpointing "auto" became the policy of the settings, or ''
    """

    has_own_peak: bool = True
    policy_note: str = ""


ALONE = Given()  # of a process that trains nothing else


@dataclass(frozen=True)
class SetUp:
    """Facts about the parts of a run, for its messages and run.json.

    memory_notes  a sentence for each memory option
    parameters    number of weights
    shapes        name -> shape of each weight of the whole model
    auto          layer -> recipe that "auto" chose
    coverage      shares of matrix-product operations in low precision, for run.json
    has_own_peak  see `Given`
    """

    memory_notes: list[str]
    parameters: int
    shapes: dict[str, torch.Size]
    auto: dict[str, str]
    coverage: dict[str, Any]
    has_own_peak: bool


@dataclass(frozen=True)
class Assembly:
    """Parts of a run."""

    setup: SetUp
    counters: Counters
    model: Any
    feed: SkippingFeed
    switches: RecipeSchedule
    parallel: Parallel
    optimizer: Any
    passes: Passes
    checkpoints: RunCheckpoints
    validation: Validation


def assembled(
    config: TrainConfig, folder: RunFolder, task: TrainTask, ranks: Ranks, given: Given
) -> Assembly:
    """Builds all parts of a run. Loads no checkpoint.

    config  settings whose checkpointing is not "auto": `planning.policy` resolves it before
    """
    device, precision = ranks.device(config.device), precisions.get(config.precision)
    # Read the recorded choices of recipe "auto": a new measurement could choose other recipes, and a
    # resumed run must compute the same numbers.
    has_choices = folder.run.exists() and (folder.has_run() or config.parent)
    choices = read_run(folder.run).get("auto") if has_choices else None
    model = built(config, task, ranks, device, choices or None)
    feed = SkippingFeed(task.feed(model))
    feed.share = ranks.layout.share(ranks.rank)
    on_gpu = device.type == "cuda"
    # Before memory options and ranks: the whole model, as the task hands it over.
    with precision.context(device.type):
        share = coverage.recorded(model, inputs_of(feed.probe(), device, task.options))
    notes, objective = step.ready(config, task, model, precision, device, feed.probe, on_gpu=on_gpu)
    parameters = sum(each.numel() for name, each in model.named_parameters() if is_weight(name))
    shapes = {
        name: each.shape for name, each in state.saved_state(model).items() if is_weight(name)
    }
    auto = chosen(model)
    switches = RecipeSchedule(recipe_switches(config, model))
    # Index parameters as an optimizer of the unsplit model would, so that checkpoints do not depend
    # on the number of pipeline stages.
    numbers = (
        WholeNumbers(model, build_optimizer(config, model, precision))
        if ranks.layout.pp > 1
        else None
    )
    parallel = Parallel(
        config, model, ranks, objective, lambda: inputs_of(feed.probe(), device, task.options)
    )
    if parallel.pipeline is not None:
        # The task's objective refers to the head of the whole model
        objective = parallel.pipeline.objective
    optimizer = build_optimizer(config, model, precision)
    passes = Passes(config, ranks, device, precision, model, objective, parallel, optimizer)
    adapted = state.adapter_notes(model)
    memory_notes = [*filter(None, [given.policy_note]), *adapted, *notes, *passes.notes]
    return Assembly(
        SetUp(memory_notes, parameters, shapes, auto, share, given.has_own_peak),
        Counters(), model, feed, switches, parallel, optimizer, passes,
        RunCheckpoints(config, folder, task, passes, feed, switches, auto, numbers),
        Validation(config, task, passes, feed.share),
    )  # fmt: skip


def built(
    config: TrainConfig,
    task: TrainTask,
    ranks: Ranks,
    device: torch.device,
    choices: dict[str, str] | None,
) -> Any:
    """Builds the model.

    Rank 0 measures for recipe "auto", and all other ranks build with its choices.
    """
    model: Any = None
    if ranks.is_first or "auto" not in (config.recipe, *config.layers_recipe.values()):
        model = build(config, task.model, device, task.tokens_per_forward(), choices)
    chosen_first = ranks.told_by_first(lambda: chosen(model))
    return model or build(config, task.model, device, task.tokens_per_forward(), chosen_first)

"""Implementation of `narrowgauge plan`: the answer as JSON and text.

Two real steps can be measured beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from narrowgauge import recipes
from narrowgauge.errors import ConfigError, OutOfMemoryError
from narrowgauge.ops.registry import device_facts
from narrowgauge.ops.timing import rates
from narrowgauge.plan.allocations import most_allocated
from narrowgauge.plan.room import Room
from narrowgauge.plan.text import rendered
from narrowgauge.train import stepping
from narrowgauge.train.config import parallel_syntax
from narrowgauge.train.config.settings import NO_RECIPE
from narrowgauge.train.device import chosen_device, device_name
from narrowgauge.train.parallel import pipeline, spread, tensor_plans
from narrowgauge.train.planning.answer import Answers
from narrowgauge.train.planning.counts import Counts, generators_kept, probe_in_bf16, silent
from narrowgauge.train.planning.policy import chosen
from narrowgauge.train.planning.steps import Source, without_values

if TYPE_CHECKING:
    from narrowgauge.memory import Choice
    from narrowgauge.plan.forecast import Forecast
    from narrowgauge.train.config.settings import TrainConfig


def answered(
    config: TrainConfig,
    card: str,
    memory: str,
    *,
    table: bool,
    full: bool,
    measure: bool,
    tell: Callable[[int], None] = silent,
) -> dict[str, Any]:
    """JSON answer, with its text under `text`.

    card, memory  card or memory size that the user names; '' for none
    table         add the table of techniques
    full          trace every layer
    measure       run two real steps on this machine
    tell          see `Counts`
    """
    _refuse_layout(config)
    room = Room.of(card, memory, config.device)
    counts, why = Counts(room.device, full, tell), ""
    if config.checkpointing == "auto":
        choice = _chosen(config, counts, room)
        config, why = replace(config, checkpointing=choice.policy), f"checkpointing {choice}"
    answer = Answers(config, room, counts).answer(table)
    answer["notes"] += [why] if why else []
    if "time" in answer and config.recipe not in (NO_RECIPE, recipes.BF16.name):
        try:
            answer["wide"] = _wide(config, room, counts, answer["time"]["seconds"])
        except ConfigError as error:  # a setting that needs the recipe
            answer["notes"].append(
                f"the step without low precision is not predicted: {str(error).rstrip('.')}"
            )
    if measure:
        answer["measured"] = measured(config)
    answer["text"] = rendered(answer)
    return answer


def _wide(config: TrainConfig, room: Room, counts: Counts, own_s: float) -> dict[str, Any]:
    """Time and memory of the same step without low precision, and the range of the likely gain.

    Costs a trace more. own_s: predicted seconds of the step of `config`
    """
    # A frozen base of codes is low precision as well.
    wide = Answers(probe_in_bf16(replace(config, base="")), room, counts)
    found = counts.of(wide.config)
    assert room.card is not None
    sizes = parallel_syntax.named(config.parallel)
    wide_s = wide.time(found, wide.shape(), room.card, sizes)["seconds"]
    return {
        "precision": config.precision,
        "seconds": wide_s,
        "allocated_bytes": found.allocated,
        "times_as_fast": list(rates.likely_gain(wide_s / own_s, "step")),
    }


def _refuse_layout(config: TrainConfig) -> None:
    """Raises ConfigError for a layout that `narrowgauge train` would reject."""
    keys = ("dp", "fsdp", "tp", "pp") if config.parallel.strip() else ()
    if key := next((key for key in keys if parallel_syntax.is_open(config.parallel, key)), ""):
        raise ConfigError(
            f"parallel = {config.parallel!r}: says not how many ranks, and a plan has no torchrun to ask. Name the number, as {key}=8.",
            code="plan.rank-count",
        )
    sizes = parallel_syntax.named(config.parallel)
    spread.refuse(config, sizes)
    spread.parts_of(config, sizes)
    stepping.refuse(config, sizes)
    if sizes.pp > 1:
        stages_of_rank = pipeline.SCHEDULES[config.schedule][1]
        pipeline.refuse(config, config.micro_batches, sizes.pp, sizes.pp * stages_of_rank)
    if sizes.tp > 1:
        source = Source.of(config, sizes.data)
        # plan_of reads module names and sizes only, so a meta model of one layer suffices.
        with without_values(), torch.device("meta"):
            tensor_plans.plan_of(source.model(1), sizes.tp)


def _chosen(config: TrainConfig, counts: Counts, room: Room) -> Choice:
    if not room.usable:
        raise ConfigError(
            "memory.checkpointing = 'auto': chooses by the memory of a card, and none is named. Pass --card h100 or --memory 24GiB, or "
            "a policy.",
            code="plan.auto-checkpointing",
        )
    return chosen(config, counts, room.usable)


def measured(config: TrainConfig) -> dict[str, Any]:
    """Measures two real steps of one process, with random weights and tokens.

    Returns `device`, `allocated_bytes`, `planned_bytes`, and `error`, the relative error of the
    plan.
    """
    device = chosen_device(config.device)
    copies = parallel_syntax.named(config.parallel)
    source = Source.of(config, copies.data)
    # full=True: an extrapolation error would be mistaken for an error of the trace.
    planned = second_step(Counts(device_facts(device.type, device.index), full=True).whole(source))
    try:
        with generators_kept():
            found = most_allocated(source.builder(place=device, real=True)(), device)
    except RuntimeError as error:
        # The CPU allocator raises a plain RuntimeError.
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise OutOfMemoryError(
                f"measure: {str(error).splitlines()[0]} Planned are {planned / 2**30:.2f} GiB. Leave --measure out, or plan a smaller run.",
                code="memory.measure",
            ) from error
        raise
    return {
        "device": device_name(device), "allocated_bytes": found, "planned_bytes": planned, "error": planned / found - 1,
    }  # fmt: skip


def second_step(found: Forecast) -> int:
    """Peak bytes of the second step, the first with optimizer states."""
    return max(
        each.allocated if found.on_gpu else each.alive for each in found.moments if each.step == 2
    )

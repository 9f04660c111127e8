"""What `narrowgauge plan` asks for: the answer as a dictionary and as text, with two real steps beside it if they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from narrowgauge.errors import ConfigError
from narrowgauge.memory import Choice
from narrowgauge.plan.room import Room
from narrowgauge.plan.text import rendered
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.planning.answer import Answers
from narrowgauge.train.planning.counts import Counts, silent
from narrowgauge.train.planning.measured import measured
from narrowgauge.train.planning.policy import chosen


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
    """The answer in JSON's types, with its `text`. tell: see `Counts`."""
    room = Room.of(card, memory, config.device)
    counts, why = Counts(room.device, full, tell), ""
    if config.checkpointing == "auto":
        choice = _chosen(config, counts, room)
        config, why = replace(config, checkpointing=choice.policy), f"checkpointing {choice}"
    answer = Answers(config, room, counts).answer(table)
    answer["notes"] += [why] if why else []
    if measure:
        answer["measured"] = measured(config)
    answer["text"] = rendered(answer)
    return answer


def _chosen(config: TrainConfig, counts: Counts, room: Room) -> Choice:
    if not room.usable:
        raise ConfigError(
            "checkpointing = 'auto': chooses by the memory of a card, and none is named. Pass --card h100 or --memory 24GiB, or a policy."
        )
    return chosen(config, counts, room.usable)

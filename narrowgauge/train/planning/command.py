"""What `narrowgauge plan` asks for: the answer as a dictionary and as text, with two real steps beside it if they are asked for."""

from __future__ import annotations

from typing import Any

from narrowgauge.plan.room import Room
from narrowgauge.plan.text import rendered
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.planning.answer import Answers
from narrowgauge.train.planning.counts import Counts
from narrowgauge.train.planning.measured import measured


def answered(config: TrainConfig, card: str, memory: str, *, table: bool, full: bool, measure: bool) -> dict[str, Any]:
    """The answer in JSON's types, with its `text`."""
    room = Room.of(card, memory, config.device)
    answer = Answers(config, room, Counts(room.device, full)).answer(table)
    if measure:
        answer["measured"] = measured(config)
    answer["text"] = rendered(answer)
    return answer

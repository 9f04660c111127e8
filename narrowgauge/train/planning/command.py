"""What `narrowgauge plan` asks for: the card, the answer as a dictionary and as text, two real steps, the picture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from narrowgauge.errors import ConfigError
from narrowgauge.memory import Choice
from narrowgauge.ops.registry import device_facts
from narrowgauge.plan.cards import CARDS, CONTEXT, card, of_memory
from narrowgauge.plan.text import rendered
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.planning.answer import Answers, Room
from narrowgauge.train.planning.counts import Counts
from narrowgauge.train.planning.measured import measured
from narrowgauge.train.planning.policy import chosen

HOPPER = CARDS["h100"].device


def answered(
    config: TrainConfig, card_name: str, memory: str, *, table: bool, full: bool, measure: bool
) -> dict[str, Any]:
    """The answer in JSON's types, with its `text`."""
    room = room_of(config, card_name, memory)
    counts, why = Counts(room.device, full), ""
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


def room_of(config: TrainConfig, card_name: str, memory: str) -> Room:
    """The card that is named, or the GPU of this machine; else one of unknown memory, with Hopper's kernels."""
    assert HOPPER is not None
    if memory:
        return Room.of(of_memory(memory, card(card_name) if card_name else None), HOPPER)
    if card_name:
        return Room.of(card(card_name), HOPPER)
    if config.device != "cpu" and torch.cuda.is_available():
        index = torch.device(config.device).index if config.device.startswith("cuda:") else 0
        total = torch.cuda.get_device_properties(index).total_memory
        return Room(torch.cuda.get_device_name(index), total, total - CONTEXT, device_facts("cuda", index))
    return Room("a GPU like an H100", 0, 0, HOPPER)

"""Facts of a model with adapters: their shape, and the frozen base that they belong to.

    Adapters      what a model carries about its adapters
    FrozenBase    the frozen model below, known by the SHA-256 of its weights (`coded_base.digest`)

A checkpoint of an adapter has a thousandth of the bytes of its base. The base is read from its
folder again, so a checkpoint names the hash of its weights, and another base is refused
(`checkpoint.state`).

The adapters themselves are made in `adapter`, by the package peft.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import nn

from narrowgauge.errors import ConfigError

if TYPE_CHECKING:
    from narrowgauge.train.config.lora_syntax import Lora
    from narrowgauge.train.config.settings import TrainConfig

KEY = "_narrowgauge_adapters"  # of a model's __dict__


@dataclass(frozen=True)
class FrozenBase:
    """The frozen model below adapters.

    model   folder or Hub name
    sha256  digest of its weights; '' for a model that only a plan builds
    codes   recipe of the codes that hold its weights; '' if they are wide
    """

    model: str
    sha256: str
    codes: str = ""


@dataclass
class Adapters:
    """What `adapt` did to a model.

    lora    shape of the adapters
    base    the model below
    config  peft's LoraConfig
    notes   sentences for the user
    """

    lora: Lora
    base: FrozenBase
    config: Any
    notes: list[str] = field(default_factory=list)


def adapters_of(model: nn.Module) -> Adapters | None:
    """The adapters of a model; None if it has none."""
    found: Adapters | None = model.__dict__.get(KEY)
    return found


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of the adapters."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def refuse_run(config: TrainConfig, world: int) -> None:
    """Raises ConfigError if adapters cannot train: without peft, or on several ranks."""
    if not config.lora:
        return
    if find_spec("peft") is None:
        raise ConfigError(
            f"lora = {config.lora!r}: needs the package peft. Run: pip install 'narrowgauge[adapt]'.",
            code="lora.no-peft",
        )
    if world > 1:  # the frozen codes are not shared out
        raise ConfigError(
            f"lora = {config.lora!r}: adapters train on one process, and there are {world} ranks. Start it without torchrun, or leave "
            "lora out.",
            code="lora.ranks",
        )

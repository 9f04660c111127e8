"""State of a model with adapters: what checkpoints hold, and which base they belong to.

    saved_state   what checkpoints, best weights and exports hold: all but the base
    load_state    its counterpart
    FrozenBase    the frozen model below, known by the SHA-256 of its weights (`coded_base.digest`)

A checkpoint of an adapter has a thousandth of the bytes of its base. The base is read from its
folder again, so a checkpoint names the hash of its weights, and another base is refused. A model
without adapters is saved and loaded as a whole.

The adapters themselves are made in `adapter`, by the package peft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from narrowgauge.diagnose import forms
from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.storage import reading
from narrowgauge.structure import is_weight

if TYPE_CHECKING:
    from narrowgauge.train.config.lora_syntax import Lora
    from narrowgauge.train.config.settings import TrainConfig

KEY = "_narrowgauge_adapters"  # of a model's __dict__
BASE = "base.json"  # beside an exported adapter
BASE_FILE = reading.Kind(
    most_bytes=reading.MIB,
    step="Restore it, or train the adapter anew.",
    form=forms.record({"model": forms.text, "sha256": forms.text}, {"codes": forms.text}),
)


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


def saved_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model without the base of its adapters.

    All of the model if it has no adapters. State of recipes (amax histories) is a part.
    """
    if adapters_of(model) is None:
        return model.state_dict()
    own = trained(model)
    return {
        name: each
        for name, each in model.state_dict().items()
        if name in own or not (is_weight(name) or ".frozen." in name)
    }


def load_state(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Loads what `saved_state` returned; names were compared before."""
    model.load_state_dict(dict(saved), strict=adapters_of(model) is None)


def base_facts(model: nn.Module) -> dict[str, Any]:
    """Facts of a checkpoint about the base of a model; {} without adapters."""
    found = adapters_of(model)
    return {} if found is None else {"base": asdict(found.base)}


def refuse_other_base(model: nn.Module, facts: Mapping[str, Any], where: str) -> None:
    """Raises CheckpointError if a checkpoint's adapters were trained over another base."""
    found, there = adapters_of(model), facts.get("base")
    # Best weights have no facts: those of the checkpoints beside them were compared.
    if found is None or there is None or there.get("sha256") == found.base.sha256:
        return
    raise CheckpointError(
        f"{where}: its adapters were trained over weights with the SHA-256 {str(there.get('sha256'))[:12]} ({there.get('model')!r}), and "
        f"those of {found.base.model!r} have {found.base.sha256[:12]}. Restore the base, or name the folder that holds it.",
        code="adapter.other-base",
    )


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


def read_base(folder: Path) -> FrozenBase:
    """The base that an exported adapter names."""
    known = reading.json_of(folder / BASE, BASE_FILE)
    return FrozenBase(known["model"], known["sha256"], known.get("codes", ""))

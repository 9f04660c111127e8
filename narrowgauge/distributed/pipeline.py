"""Stages of a pipeline on the schedules of torch.distributed.pipelining: what they send, and weights that two of them share.

    stage = PipelineStage(module, index, count, device)
    stage = narrowgauge.distribute(stage, activations="fp8")       # [stage, stage] where a rank has several
    Schedule1F1B(stage, ...)

With "fp8" every stage but the first decodes its inputs and every one but the last encodes its outputs (`stage_messages`), in hooks of its
module, so that torch sends half as many bytes in both directions and knows nothing of it. Neighbours on the same rank, as in a V, hand over
what they have, unrounded. A PipelineStage that is told its shapes is told those of messages: `input_args=message_like(x)`.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from narrowgauge.distributed.agreement import Agreement
from narrowgauge.distributed.stage_messages import Pack, Unpack, is_packed, message_like
from narrowgauge.distributed.torch_private import STAGES, is_rehearsal, parameter_group
from narrowgauge.errors import ConfigError

__all__ = ["StageEnds", "install", "is_stage", "message_like"]

ATTRIBUTE = "_narrowgauge_stage_ends"  # of the module of a stage
FORMS = ("16bit", "fp8")
_SAMPLE = 64  # rows of a weight that are compared

Stage = Any  # torch.distributed.pipelining.PipelineStage, which is imported by who has one


def is_stage(thing: object) -> bool:
    module = sys.modules.get(STAGES)
    return module is not None and isinstance(thing, module._PipelineStageBase)


def install(stages: Sequence[Stage], agreements: Sequence[Agreement], activations: str) -> None:
    """Has the stages of this rank send their messages so. All ranks of the pipeline call it together.

    Raises ConfigError on all of them where they do not ask for the same, or where two stages hold copies of one tied weight.
    """
    if activations not in FORMS:
        raise ConfigError(f"distribute: activations is {activations!r}. Pass one of {', '.join(map(repr, FORMS))}.")
    own = [(each.stage_index, each.num_stages, activations, _tables(each.submod)) for each in stages]
    gathered: list[Any] = [None] * dist.get_world_size(stages[0].group)
    dist.all_gather_object(gathered, own, group=stages[0].group)
    everywhere = sorted((each for rank in gathered for each in rank), key=lambda each: each[0])
    _check_forms(everywhere)
    _check_tied(everywhere)
    _tell_of_resharding(stages)
    for stage, agreement in zip(stages, agreements, strict=True):
        before = stage.submod.__dict__.pop(ATTRIBUTE, None)
        for handle in () if before is None else before.hooks:
            handle.remove()
        if activations == "fp8":
            stage.submod.__dict__[ATTRIBUTE] = StageEnds(stage, agreement).attached()


@dataclass(eq=False)
class StageEnds:
    """The hooks of one stage's module. stage: None in a copy of the module, which is no stage of anything."""

    stage: Stage | None = None
    agreement: Agreement | None = None
    hooks: list[Any] = field(default_factory=list)
    is_counting: bool = field(default=True, init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return StageEnds, ()

    def attached(self) -> StageEnds:
        module: nn.Module = self.stage.submod  # type: ignore[union-attr]
        # Decoding comes before all other hooks: those of fully_shard would round the message to another dtype.
        first = module.register_forward_pre_hook(self.unpack, prepend=True)
        self.hooks = [first, module.register_forward_hook(self.pack)]
        return self

    def unpack(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A forward pre-hook."""
        self.is_counting = not is_rehearsal()
        if not self._is_open(-1):
            return args
        sent = self._count_gradient if self.is_counting else _ignore
        return tuple(Unpack.apply(each, sent) if is_packed(each) else each for each in args)

    def pack(self, module: nn.Module, _: Any, output: Any) -> Any:
        """A forward hook."""
        if not self._is_open(1):
            return output
        if isinstance(output, tuple | list):
            return type(output)(self._packed(each) for each in output)
        return self._packed(output)

    def _packed(self, x: Any) -> Any:
        message = Pack.apply(x) if is_packed(x) else x
        if self.is_counting and self.agreement is not None and isinstance(message, Tensor):
            self.agreement.count("activations", message)
        return message

    def _count_gradient(self, message: Tensor) -> None:
        if self.agreement is not None:
            self.agreement.count("gradients of activations", message)

    def _is_open(self, offset: int) -> bool:
        """Whether there is a next stage (1), or one before (-1), on another rank. A schedule says which rank after the stage was made."""
        stage = self.stage
        if stage is None or (stage.is_first if offset < 0 else stage.is_last):
            return False
        ranks: dict[int, int] = stage.stage_index_to_group_rank
        return ranks[stage.stage_index + offset] != stage.group_rank


def _ignore(message: Tensor) -> None:
    pass


def _tell_of_resharding(stages: Sequence[Stage]) -> None:
    """Nothing says which schedule will run them. The root of fully_shard keeps its weights unless it is told otherwise."""
    for stage in stages:
        parts = {name: each for name, each in stage.submod.named_modules() if name and isinstance(each, FSDPModule)}
        groups = {name: parameter_group(each) for name, each in parts.items()}
        found = [
            name for name, group in groups.items() if group is not None and group.post_forward_mesh_info is not None
        ]
        if found:
            warnings.warn(
                f"distribute: stage {stage.stage_index} reshards the weights of {found[0]!r} after forward. Schedules of torch that "
                "split the backward pass (zero-bubble) compute no gradient of such weights, without a word. Pass "
                "reshard_after_forward=False to fully_shard.",
                stacklevel=4,
            )
            return


def _check_forms(everywhere: list[Any]) -> None:
    forms = {index: form for index, _, form, _ in everywhere}
    if len(set(forms.values())) > 1:
        words = ", ".join(f"{form!r} of stage {index}" for index, form in forms.items())
        raise ConfigError(f"distribute: stages have different activations: {words}. Pass the same for every stage.")


@dataclass(frozen=True)
class Table:
    """The weight of an embedding or a Linear. digest: of its first and last rows; parameter: which of the rank it is."""

    name: str
    is_embedding: bool
    digest: str
    parameter: tuple[int, int]


def _check_tied(everywhere: list[Any]) -> None:
    """An embedding on one stage and a Linear on another with the same numbers are copies of one weight, which training would part."""
    tables = [(index, each) for index, _, _, found in everywhere for each in found]
    heads = {(each.digest, index): each for index, each in tables if not each.is_embedding}
    for index, table in tables:
        for (digest, other), head in heads.items() if table.is_embedding else ():
            if index != other and digest == table.digest and head.parameter != table.parameter:
                raise ConfigError(
                    f"distribute: {table.name!r} of stage {index} and {head.name!r} of stage {other} hold the same numbers: copies of a "
                    "tied weight, of which each stage would train its own. Untie them (tie_word_embeddings=False) and give the head "
                    "numbers of its own, or put both on one rank, where their stages share the parameter (ScheduleZBVZeroBubble)."
                )


def _tables(module: nn.Module) -> list[Table]:
    found = []
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.Linear) and (digest := _digest(each.weight)):
            parameter = dist.get_rank(), id(each.weight)
            found.append(Table(f"{name}.weight".lstrip("."), isinstance(each, nn.Embedding), digest, parameter))
    return found


@torch.no_grad()
def _digest(weight: Tensor) -> str:
    """'' for a weight without numbers, or with one number only, as a constant has."""
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    if local.is_meta or local.numel() == 0:
        return ""
    rows = torch.cat((local[:_SAMPLE], local[-_SAMPLE:])).contiguous().cpu()
    if bool((rows == rows.flatten()[0]).all()):
        return ""
    numbers = rows.view(torch.uint8).numpy().tobytes()
    return f"{list(weight.shape)} {hashlib.sha256(numbers).hexdigest()}"

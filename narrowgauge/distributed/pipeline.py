"""Pipeline parallelism on torch.distributed.pipelining: 8-bit messages, checks of tied weights.

    stage = PipelineStage(module, index, count, device)
    stage = narrowgauge.distribute(stage, activations="fp8")  # or a list: the stages of this rank
    Schedule1F1B(stage, ...)

With "fp8", forward hooks decode the inputs of every stage but the first and encode the outputs of
every stage but the last (`stage_messages`). torch then sends half as many bytes in both directions,
and sees only tensors of another shape. Neighboring stages on one rank (V-shaped schedules) exchange
unquantized tensors. A PipelineStage with explicit shapes needs the message shapes:
`input_args=message_like(x)`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from narrowgauge.distributed.stage_messages import (
    DecodeMessage,
    EncodeMessage,
    is_sent_as_codes,
    message_like,
)
from narrowgauge.distributed.torch_private import STAGES, is_shape_inference, parameter_group
from narrowgauge.errors import ConfigError, warn

if TYPE_CHECKING:
    from narrowgauge.distributed.state import DistributedState

__all__ = ["StageHooks", "install", "is_stage", "message_like"]

# Key in the `__dict__` of a stage's module.
ATTRIBUTE = "_narrowgauge_stage_hooks"
FORMATS = ("16bit", "fp8")
# Rows at each end of a weight that the digest covers.
ACTIVATION_GRADIENTS = "gradients of activations"  # key of `bytes_sent`, beside "activations"
_SAMPLE = 64

# torch.distributed.pipelining.PipelineStage, not imported here to keep startup fast.
Stage = Any


def is_stage(thing: object) -> bool:
    """Return True for a torch PipelineStage, without importing torch.distributed.pipelining."""
    module = sys.modules.get(STAGES)
    return module is not None and isinstance(thing, module._PipelineStageBase)


def install(stages: Sequence[Stage], states: Sequence[DistributedState], activations: str) -> None:
    """Set the message format of this rank's stages; all ranks of the pipeline call it together.

    Raises ConfigError on all ranks if they ask for different formats, or if two stages have copies
    of one tied weight.
    """
    if activations not in FORMATS:
        raise ConfigError(
            f"distribute: activations is {activations!r}. Pass one of {', '.join(map(repr, FORMATS))}.",
            code="pipeline.activations",
        )
    own = [
        (each.stage_index, each.num_stages, activations, _weight_digests(each.submod))
        for each in stages
    ]
    gathered: list[Any] = [None] * dist.get_world_size(stages[0].group)
    dist.all_gather_object(gathered, own, group=stages[0].group)
    # Every rank evaluates the same list, so all raise the same error.
    everywhere = sorted((each for rank in gathered for each in rank), key=lambda each: each[0])
    _require_same_format(everywhere)
    _refuse_tied_copies(everywhere)
    _warn_about_resharding(stages)
    for stage, state in zip(stages, states, strict=True):
        before = stage.submod.__dict__.pop(ATTRIBUTE, None)
        for handle in () if before is None else before.hooks:
            handle.remove()
        if activations == "fp8":
            stage.submod.__dict__[ATTRIBUTE] = StageHooks(stage, state).attach()


@dataclass(eq=False)
class StageHooks:
    """Hooks at both ends of one stage's module.

    stage         the PipelineStage; None in a copy of the module, which belongs to no pipeline
    state         counts the bytes sent
    hooks         handles to remove when the stage is distributed again
    counts_bytes  False while torch infers shapes
    """

    stage: Stage | None = None
    state: DistributedState | None = None
    hooks: list[Any] = field(default_factory=list)
    counts_bytes: bool = field(default=True, init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return StageHooks, ()

    def attach(self) -> StageHooks:
        module: nn.Module = self.stage.submod  # type: ignore[union-attr]
        # Decode before all other hooks: fully_shard's pre-hook would cast the message to another
        # dtype.
        first = module.register_forward_pre_hook(self.decode_inputs, prepend=True)
        self.hooks = [first, module.register_forward_hook(self.encode_outputs)]
        return self

    def decode_inputs(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Forward pre-hook: decode the inputs."""
        self.counts_bytes = not is_shape_inference()
        if not self._crosses_ranks(-1):
            return args
        on_send = self._count_gradient if self.counts_bytes else _ignore
        return tuple(
            DecodeMessage.apply(each, on_send) if is_sent_as_codes(each) else each for each in args
        )

    def encode_outputs(self, module: nn.Module, _: Any, output: Any) -> Any:
        """Forward hook: encode the outputs."""
        if not self._crosses_ranks(1):
            return output
        if isinstance(output, tuple | list):
            return type(output)(self._encoded(each) for each in output)
        return self._encoded(output)

    def _encoded(self, x: Any) -> Any:
        # Pack is differentiable: its backward decodes the message of the gradient.
        message = EncodeMessage.apply(x) if is_sent_as_codes(x) else x
        if self.counts_bytes and self.state is not None and isinstance(message, Tensor):
            self.state.count("activations", message)
        return message

    def _count_gradient(self, message: Tensor) -> None:
        if self.state is not None:
            self.state.count(ACTIVATION_GRADIENTS, message)

    def _crosses_ranks(self, offset: int) -> bool:
        """Return True if the next stage (offset 1) or the previous stage (-1) is on another rank.

        Evaluated at run time, since the schedule sets the rank of each stage after the stage is
        built.
        """
        stage = self.stage
        if stage is None or (stage.is_first if offset < 0 else stage.is_last):
            return False
        ranks: dict[int, int] = stage.stage_index_to_group_rank
        return ranks[stage.stage_index + offset] != stage.group_rank


def _ignore(message: Tensor) -> None:
    pass


def _warn_about_resharding(stages: Sequence[Stage]) -> None:
    """Warn if FSDP2 modules inside a stage reshard after forward.

    The schedule is not known here. torch's root module of fully_shard does not reshard by default,
    hence inner modules only.
    """
    # Zero-bubble schedules look up a stage's weights as registered at that moment. After resharding
    # those are other parameter objects, and their gradients are lost silently.
    for stage in stages:
        parts = {
            name: each
            for name, each in stage.submod.named_modules()
            if name and isinstance(each, FSDPModule)
        }
        groups = {name: parameter_group(each) for name, each in parts.items()}
        found = [
            name
            for name, group in groups.items()
            if group is not None and group.post_forward_mesh_info is not None
        ]
        if found:
            warn(
                f"distribute: stage {stage.stage_index} reshards the weights of {found[0]!r} after forward. Schedules of torch that "
                "split the backward pass (zero-bubble) compute no gradient of such weights, without a word. Pass "
                "reshard_after_forward=False to fully_shard.",
                code="distribute.reshards",
                stacklevel=4,
            )
            return


def _require_same_format(everywhere: list[Any]) -> None:
    forms = {index: form for index, _, form, _ in everywhere}
    if len(set(forms.values())) > 1:
        words = ", ".join(f"{form!r} of stage {index}" for index, form in forms.items())
        raise ConfigError(
            f"distribute: stages have different activations: {words}. Pass the same for every stage.",
            code="pipeline.activations-differ",
        )


@dataclass(frozen=True)
class WeightDigest:
    """Weight of an embedding or Linear, to detect tied copies on different stages.

    digest     shape, and SHA-256 of its first and last rows
    parameter  (rank, id of the parameter), equal for a weight that two stages on one rank share
    """

    name: str
    is_embedding: bool
    digest: str
    parameter: tuple[int, int]


def _refuse_tied_copies(everywhere: list[Any]) -> None:
    """Raise ConfigError if an embedding and a Linear on different stages have equal weights.

    Such copies of a tied weight would be trained separately.
    """
    digests = [(index, each) for index, _, _, found in everywhere for each in found]
    heads = {(each.digest, index): each for index, each in digests if not each.is_embedding}
    for index, weight in digests:
        for (digest, other), head in heads.items() if weight.is_embedding else ():
            if index != other and digest == weight.digest and head.parameter != weight.parameter:
                raise ConfigError(
                    f"distribute: {weight.name!r} of stage {index} and {head.name!r} of stage {other} hold the same numbers: copies of a "
                    "tied weight, of which each stage would train its own. Untie them (tie_word_embeddings=False) and give the head "
                    "numbers of its own, or put both on one rank, where their stages share the parameter (ScheduleZBVZeroBubble).",
                    code="pipeline.tied-weights",
                )


def _weight_digests(module: nn.Module) -> list[WeightDigest]:
    found = []
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.Linear) and (digest := _digest(each.weight)):
            parameter = dist.get_rank(), id(each.weight)
            found.append(
                WeightDigest(
                    f"{name}.weight".lstrip("."), isinstance(each, nn.Embedding), digest, parameter
                )
            )
    return found


@torch.no_grad()
def _digest(weight: Tensor) -> str:
    """Return the digest of a weight; "" for meta, empty or constant weights."""
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    if local.is_meta or local.numel() == 0:
        return ""
    rows = torch.cat((local[:_SAMPLE], local[-_SAMPLE:])).contiguous().cpu()
    if bool((rows == rows.flatten()[0]).all()):
        return ""
    numbers = rows.view(torch.uint8).numpy().tobytes()
    return f"{list(weight.shape)} {hashlib.sha256(numbers).hexdigest()}"

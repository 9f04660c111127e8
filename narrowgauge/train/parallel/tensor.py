"""Tensor parallelism: shards the layers of a model over a tp group and verifies the result.

    columns, rows    by `tensor_plans`; q, k and v read one shared DTensor of x
    output head      if untied, sharded by vocabulary: no rank holds all logits of a token in
                     `memory.chunked_cross_entropy`
    dropout          between columns and rows, each rank draws its own
    sp               between matmuls, each rank has its own tokens (`sequence`)
    the rest         whole, plain and equal on every rank: gradients are the whole model's, and
                     digests compare the ranks

A layer's name alone is not trusted: logits of one batch are computed before and after sharding, and
a difference raises ConfigError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import parallel as styles
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from narrowgauge.distributed.all_ranks import is_lost
from narrowgauge.distributed.per_rank_dropout import PerRankDropout
from narrowgauge.errors import ConfigError
from narrowgauge.nn.converted_model import suspended
from narrowgauge.nn.linear import QLinear
from narrowgauge.nn.sharded import cut_tiles
from narrowgauge.train.parallel import sequence, tensor_plans
from narrowgauge.train.parallel.tensor_plans import (
    COLUMNS,
    GATHERED_COLUMNS,
    PER_HEAD,
    ROWS,
    SPLIT_ROWS,
)

if TYPE_CHECKING:
    from narrowgauge.distributed.state import DistributedState

HEADS_AXIS = 2  # axis of the heads in the input of a per-head norm: [batch, tokens, heads, width]
# Largest accepted |after - before| / |before| of the logits. Another order of summation causes
# 1e-6, or 1e-2 in 16 bits. The smallest error of a wrong plan was 0.23 (OPT, whose attention
# mistook tokens for heads).
NEAR = {torch.float32: 1e-3}
NEAR_IN_16_BITS = 0.1


class SharedInputDTensors:
    """Input DTensors of the column-wise layers directly below `parent`.

    Entries live until the parent's forward pass ends.
    """

    def __init__(self, parent: nn.Module) -> None:
        self._found: dict[tuple[int, bool], tuple[Tensor, DTensor]] = {}
        parent.register_forward_hook(lambda *_: self._found.clear(), always_call=True)

    def of(self, x: Tensor, mesh: DeviceMesh) -> DTensor:
        if isinstance(x, DTensor):
            return x
        # The grad mode is part of the key: a DTensor made under no_grad has no graph.
        key = id(x), torch.is_grad_enabled()
        if key not in self._found:
            # The entry also stores x, so that its id is not reused.
            self._found[key] = x, DTensor.from_local(x, mesh, (Replicate(),), run_check=False)
        return self._found[key][1]


class ColwiseParallel(styles.ColwiseParallel):
    """torch's ColwiseParallel for an input that is replicated on all ranks.

    The gradient of the shared DTensor is summed over the ranks once. torch's ColwiseParallel
    creates a DTensor per layer, and each has its own all-reduce in backward. torch's
    PrepareModuleInput creates one at the parent module, but needs the names of the parent's forward
    arguments.

    shared  SharedInputDTensors of the layers that read the same input, such as q, k and v
    """

    def __init__(
        self, *, shared: SharedInputDTensors, output_layouts: Placement | None = None
    ) -> None:
        super().__init__(output_layouts=output_layouts)
        self.shared = shared

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            return self.shared.of(given[0], device_mesh), *given[1:]

        module.register_forward_pre_hook(replicate)
        return super()._apply(module, device_mesh)


@dataclass(frozen=True)
class Shared:
    """A model sharded over a tp group.

    mesh    one-dimensional tp mesh
    plan    {module name: style}
    stacks  stacks of blocks with sequence parallelism, else empty
    """

    mesh: DeviceMesh
    plan: Mapping[str, str]
    stacks: list[sequence.Stack]


def cut(model: Any, mesh: DeviceMesh, inputs: Mapping[str, Any], cuts_tokens: bool) -> Shared:
    """Shards a model in place. Weights must be equal on all ranks before.

    mesh         one-dimensional tp mesh
    inputs       a batch, equal on all ranks of the mesh
    cuts_tokens  use sequence parallelism between matmuls

    Raises ConfigError on all ranks if model or recipe cannot be sharded so; the model is then
    unusable.
    """
    ways = mesh.size()
    plan = tensor_plans.plan_of(model, ways)
    before = _logits(model, inputs)
    stacks, gathering = sequence.styles_of(model, plan, mesh) if cuts_tokens else ([], {})
    styles = _styles(model, plan, cuts_tokens)
    if (head := _own_head(model)) is not None:
        styles[head] = ColwiseParallel(
            shared=SharedInputDTensors(model.get_submodule(head)), output_layouts=Replicate()
        )
    if (attribute := tensor_plans.HEADS_IN_CODE.get(model.config.model_type)) is not None:
        for name in {name.rpartition(".")[0] for name in plan}:
            attention = model.get_submodule(name)
            if hasattr(attention, attribute):
                # T5 reads its number of heads from the module and not from the shape of q.
                setattr(attention, attribute, getattr(attention, attribute) // ways)
    # Order matters: the hook that gathers a layer's input must run before the layer's own.
    for name, style in (*gathering.items(), *styles.items()):
        # src_data_rank=None: every rank has the weights already, so none are broadcast.
        parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
    for name, kind in plan.items():
        if kind == PER_HEAD:
            for parameter in model.get_submodule(name).parameters():
                if parameter.requires_grad:
                    parameter.register_hook(_summed)
    _refuse_cut_tiles(model, ways)
    _refuse_other_numbers(model, inputs, before, ways)
    return Shared(mesh, plan, stacks)


def per_rank_dropout(model: Any, shared: Shared, state: DistributedState | None) -> None:
    """Gives each rank its own dropout generators between column-wise and row-wise layers.

    Does nothing for a model without dropout. A pipeline stage handles the layers that it has.
    """
    if not any(
        "drop" in key and isinstance(value, float) and value > 0
        for key, value in model.config.to_dict().items()
    ):
        return
    device = next(model.parameters()).device
    # With common generators, head n of every rank would get the same dropout mask.
    dropout = PerRankDropout(shared.mesh.get_local_rank(), device, state)
    for stack in shared.stacks:
        stack.per_rank_dropout(dropout)
    if shared.stacks:
        return
    plan = shared.plan
    linears = {
        name: each
        for name, each in model.named_modules()
        if name in plan and isinstance(each, nn.Linear)
    }
    columns = [each for name, each in linears.items() if plan[name] == COLUMNS]
    rows = [each for name, each in linears.items() if plan[name] == ROWS]
    dropout.install(columns, rows)


def _styles(model: Any, plan: Mapping[str, str], cuts_tokens: bool) -> dict[str, ParallelStyle]:
    shared: dict[str, SharedInputDTensors] = {}
    found: dict[str, ParallelStyle] = {}
    for name, style in plan.items():
        parent = name.rpartition(".")[0]
        if style in (COLUMNS, GATHERED_COLUMNS):
            if parent not in shared:
                shared[parent] = SharedInputDTensors(model.get_submodule(parent))
            output = Replicate() if style == GATHERED_COLUMNS else None
            found[name] = ColwiseParallel(shared=shared[parent], output_layouts=output)
        elif style in (ROWS, SPLIT_ROWS):
            given = Replicate() if style == SPLIT_ROWS else None
            if cuts_tokens:
                found[name] = sequence.RowwiseParallel(
                    input_layouts=given, axis=sequence.TOKENS, activations="16bit"
                )
            else:
                found[name] = RowwiseParallel(input_layouts=given)
        else:
            found[name] = SequenceParallel(sequence_dim=HEADS_AXIS, use_local_output=True)
    return found


def _own_head(model: Any) -> str | None:
    """Name of the output head, if it is a Linear with an untied weight."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, nn.Linear):
        return None
    holders = [
        each
        for each in model.modules()
        if any(own is head.weight for own in each.parameters(recurse=False))
    ]
    return (
        next(name for name, each in model.named_modules() if each is head)
        if len(holders) == 1
        else None
    )


def _summed(gradient: Tensor) -> Tensor:
    """Gradient hook of a per-head norm's weight: all-reduces the sums of each rank's heads."""
    return (
        gradient.redistribute(placements=(Replicate(),))
        if isinstance(gradient, DTensor)
        else gradient
    )


def _refuse_cut_tiles(model: nn.Module, ways: int) -> None:
    """Raises ConfigError if a shard border would cut a recipe's tile or block of a weight."""
    for name, layer in model.named_modules():
        if (
            isinstance(layer, QLinear)
            and layer.recipe is not None
            and (words := cut_tiles(layer.weight, layer.recipe))
        ):
            raise ConfigError(
                f"parallel with tp={ways}: {name!r} {list(layer.weight.shape)} follows {layer.recipe.name}, and ranks would cut its "
                f"tiles or blocks: {words}. Take a smaller tp, fsdp, or another recipe with --recipe.layers '{name}=fp8-row'.",
                code="tensor-parallel.tiles",
            )


@torch.no_grad()
def _logits(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    """Logits of a batch in evaluation mode, with recipes suspended."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with suspended(model):
            output = model(**inputs)
    finally:
        for module, mode in modes:
            module.training = mode
    if "start_logits" in output:  # extractive question answering
        return torch.stack((output.start_logits, output.end_logits), dim=-1)
    logits: Tensor = output.logits
    return logits


def _refuse_other_numbers(model: Any, inputs: Mapping[str, Any], before: Tensor, ways: int) -> None:
    """Raises ConfigError if the sharded model's logits differ from those before.

    Recipes are suspended, because their rounding depends on shards.
    """
    try:
        after = _logits(model, inputs)
    except (RuntimeError, ValueError, TypeError) as error:
        # A lost peer is not the model's fault.
        if is_lost(error):
            raise
        said = str(error).splitlines()[0][:200]
        raise ConfigError(
            f"parallel with tp={ways}: {type(model).__name__} does not compute with a part of its heads or features: {said} "
            "Take fsdp instead.",
            code="tensor-parallel.heads",
        ) from error
    size = float(before.float().norm())
    apart = float((after.float() - before.float()).norm()) / size if size > 0 else 0.0
    # size == size is False for NaN: a model that gives NaN before sharding says nothing about the
    # plan. `not <=` also catches NaN afterwards.
    if size == size and not apart <= NEAR.get(before.dtype, NEAR_IN_16_BITS):
        raise ConfigError(
            f"parallel with tp={ways}: {type(model).__name__} computes other logits when it is cut by its plan, {apart:.2g} of their "
            "size apart. Take fsdp instead.",
            code="tensor-parallel.other-logits",
        )

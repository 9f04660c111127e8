"""Tensor parallelism of a run: cuts the layers of a model among ranks, and makes sure that it still computes the same.

    columns, rows    as `tensor_plans` says; one DTensor of x for q, k and v
    output head      an untied one by its words: `memory.chunked_cross_entropy` never has a token's logits of all words on one rank
    dropout          between columns and rows each rank's own
    sp               between them each rank its own tokens (`sequence`)
    the rest         whole, plain and equal on every rank: a rank's gradient is that of the whole, and digests compare it

Nothing is cut on a name alone: the model computes a batch before and after, and refuses where that differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, SequenceParallel, parallelize_module

from narrowgauge.conversion import suspended
from narrowgauge.distributed.lost import is_lost
from narrowgauge.distributed.per_rank_dropout import PerRankDropout
from narrowgauge.distributed.shared_columns import ColwiseParallel, SharedInputs
from narrowgauge.distributed.state import DistributedState
from narrowgauge.errors import ConfigError
from narrowgauge.nn.linear import QLinear
from narrowgauge.nn.sharded import cut_tiles
from narrowgauge.train.parallel import sequence, tensor_plans
from narrowgauge.train.parallel.tensor_plans import COLUMNS, GATHERED_COLUMNS, PER_HEAD, ROWS, SPLIT_ROWS

HEADS_AXIS = 2  # of what a norm of heads reads: [batch, tokens, heads, width]
# |logits - those before| / |those before|. Another order of sums makes 1e-6, or 1e-2 in 16 bits; the smallest that a wrong cut made was
# 0.23 (OPT, whose heads took tokens for heads).
NEAR = {torch.float32: 1e-3}
NEAR_IN_16_BITS = 0.1


@dataclass(frozen=True)
class Shared:
    """A model whose layers ranks share. plan: by names of modules; stacks: of blocks that compute with a rank's own tokens."""

    mesh: DeviceMesh
    plan: Mapping[str, str]
    stacks: list[sequence.Stack]


def cut(model: Any, mesh: DeviceMesh, inputs: Mapping[str, Any], cuts_tokens: bool) -> Shared:
    """Cuts a model in place; its weights are the same on all ranks before.

    mesh         its one axis of tensor parallelism
    inputs       of a batch, the same on all ranks of the mesh
    cuts_tokens  between products each rank has its own tokens
    Raises ConfigError, on all ranks, for a model or a recipe that cannot be cut so; the model is of no use then.
    """
    ways = mesh.size()
    plan = tensor_plans.plan_of(model, ways)
    before = _logits(model, inputs)
    stacks, gathering = sequence.styles_of(model, plan, mesh) if cuts_tokens else ([], {})
    styles = _styles(model, plan, cuts_tokens)
    if (head := _own_head(model)) is not None:
        styles[head] = ColwiseParallel(shared=SharedInputs(model.get_submodule(head)), output_layouts=Replicate())
    if (attribute := tensor_plans.HEADS_IN_CODE.get(model.config.model_type)) is not None:
        for name in {name.rpartition(".")[0] for name in plan}:
            attention = model.get_submodule(name)
            if hasattr(attention, attribute):
                setattr(attention, attribute, getattr(attention, attribute) // ways)
    for name, style in (*gathering.items(), *styles.items()):  # a layer gathers before it reads
        # Every rank has the weights already: nothing is sent.
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
    """Gives each rank its own dropout between columns and rows, if the model has any. Of a stage, in the layers that it has."""
    if not any(
        "drop" in key and isinstance(value, float) and value > 0 for key, value in model.config.to_dict().items()
    ):
        return
    device = next(model.parameters()).device
    dropout = PerRankDropout(shared.mesh.get_local_rank(), device, state)
    for stack in shared.stacks:
        stack.per_rank_dropout(dropout)
    if shared.stacks:
        return
    plan = shared.plan
    linears = {name: each for name, each in model.named_modules() if name in plan and isinstance(each, nn.Linear)}
    columns = [each for name, each in linears.items() if plan[name] == COLUMNS]
    rows = [each for name, each in linears.items() if plan[name] == ROWS]
    dropout.install(columns, rows)


def _styles(model: Any, plan: Mapping[str, str], cuts_tokens: bool) -> dict[str, ParallelStyle]:
    shared: dict[str, SharedInputs] = {}
    found: dict[str, ParallelStyle] = {}
    for name, style in plan.items():
        parent = name.rpartition(".")[0]
        if style in (COLUMNS, GATHERED_COLUMNS):
            if parent not in shared:
                shared[parent] = SharedInputs(model.get_submodule(parent))
            output = Replicate() if style == GATHERED_COLUMNS else None
            found[name] = ColwiseParallel(shared=shared[parent], output_layouts=output)
        elif style in (ROWS, SPLIT_ROWS):
            given = Replicate() if style == SPLIT_ROWS else None
            if cuts_tokens:
                found[name] = sequence.RowwiseParallel(input_layouts=given, axis=sequence.TOKENS, activations="16bit")
            else:
                found[name] = RowwiseParallel(input_layouts=given)
        else:
            found[name] = SequenceParallel(sequence_dim=HEADS_AXIS, use_local_output=True)
    return found


def _own_head(model: Any) -> str | None:
    """The name of the output head, if it is a Linear whose weight is its own."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, nn.Linear):
        return None
    holders = [each for each in model.modules() if any(own is head.weight for own in each.parameters(recurse=False))]
    return next(name for name, each in model.named_modules() if each is head) if len(holders) == 1 else None


def _summed(gradient: Tensor) -> Tensor:
    """Of parts of a sum, which a norm of a rank's own heads gives its weight, the sum."""
    return gradient.redistribute(placements=(Replicate(),)) if isinstance(gradient, DTensor) else gradient


def _refuse_cut_tiles(model: nn.Module, ways: int) -> None:
    for name, layer in model.named_modules():
        if isinstance(layer, QLinear) and layer.recipe is not None and (words := cut_tiles(layer.weight, layer.recipe)):
            raise ConfigError(
                f"parallel with tp={ways}: {name!r} {list(layer.weight.shape)} follows {layer.recipe.name}, and ranks would cut its "
                f"tiles or blocks: {words}. Take a smaller tp, fsdp, or another recipe with --recipes '{name}=fp8-row'."
            )


@torch.no_grad()
def _logits(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with suspended(model):
            output = model(**inputs)
    finally:
        for module, mode in modes:
            module.training = mode
    if "start_logits" in output:  # of answers
        return torch.stack((output.start_logits, output.end_logits), dim=-1)
    logits: Tensor = output.logits
    return logits


def _refuse_other_numbers(model: Any, inputs: Mapping[str, Any], before: Tensor, ways: int) -> None:
    """Without recipes, which round by shards."""
    try:
        after = _logits(model, inputs)
    except (RuntimeError, ValueError, TypeError) as error:
        if is_lost(error):
            raise
        said = str(error).splitlines()[0][:200]
        raise ConfigError(
            f"parallel with tp={ways}: {type(model).__name__} does not compute with a part of its heads or features: {said} "
            "Take fsdp instead."
        ) from error
    size = float(before.float().norm())
    apart = float((after.float() - before.float()).norm()) / size if size > 0 else 0.0
    if size == size and not apart <= NEAR.get(before.dtype, NEAR_IN_16_BITS):
        raise ConfigError(
            f"parallel with tp={ways}: {type(model).__name__} computes other logits when it is cut by its plan, {apart:.2g} of their "
            "size apart. Take fsdp instead."
        )

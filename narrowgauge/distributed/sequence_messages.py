"""8-bit messages of sequence parallelism: all-gather of token shards, reduce-scatter of sums.

    gather          [.., tokens / ranks, K] per rank -> [.., tokens, K] on all ranks, and its casts
    reduce_scatter  a partial sum [.., tokens, K] per rank -> the sum of the rank's own tokens

`gather` sends codes and then scales, as uint8. A tensor-wide scale uses the maximum amax of all
ranks (one small all-reduce), as if one rank had all tokens. The amax history records that maximum
too.

`reduce_scatter` sends E4M3 codes in 1 x 128 tiles with E8M0 scales by all-to-all. The receiver
dequantizes and adds in float32, in rank order; gradient sums use the same code (`messages`).

A non-finite element makes its tile NaN on every rank. Ranks may have unequal numbers of tokens, as
Shard splits them: messages are padded.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from narrowgauge.distributed import messages
from narrowgauge.distributed.messages import Link
from narrowgauge.formats import E8M0
from narrowgauge.fuse.precast import refuse_reader
from narrowgauge.nn.cast_sources import CacheStats
from narrowgauge.nn.operands import Casts, Operand
from narrowgauge.nn.sharded import local_part, owner_of
from narrowgauge.ops.quantize import dequantize, quantize, tile_amax
from narrowgauge.ops.quantize.amax_state import update_amax
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import DelayedScaling, LearnedStep
from narrowgauge.scaling import WHOLE

if TYPE_CHECKING:
    from narrowgauge.nn.linear import QLinear


@torch.no_grad()
def gather(
    x: DTensor, axis: int, role: str, layers: list[QLinear], bytes_sent: Counter[str]
) -> DTensor:
    """Return x of all ranks, dequantized to x's dtype, and cache its casts for the layers.

    role        "x" (input of all the layers) or "gy" (gradient of one layer's output)
    layers      the layers that read the result; the first supported one defines the cast
    bytes_sent  counter of bytes, by kind of collective
    """
    mesh, group = x.device_mesh, x.device_mesh.get_group()
    own = local_part(x)
    reader = next((layer for layer in layers if _refuse(layer, role) is None), None)
    operand = None if reader is None else _operand(reader, role, own)
    cast = messages.MESSAGE if operand is None else operand.plan.rows
    assert cast is not None

    # Equal shapes on all ranks, as the collective requires; the padding is cut off after it.
    filled, shape = _filled(own, axis, x.shape[axis], group.size())
    rows = filled.reshape(-1, filled.shape[-1])
    amax = None
    if cast.tile == (WHOLE, WHOLE):
        assert operand is not None
        # A whole-tensor tile spans all ranks, so its scale needs the maximum of all of them.
        amax = _global_amax(rows, group, bytes_sent)
        if operand.state is not None and isinstance(cast.calibrate, DelayedScaling):
            amax = operand.casts.amax = update_amax(
                operand.state, amax, records=operand.context.records
            )

    codes = _gathered_codes(
        quantize(rows, cast, amax=amax), group, shape, axis, x.shape[axis], bytes_sent
    )
    whole = dequantize(codes, x.dtype).reshape(x.shape)
    found = DTensor.from_local(whole, mesh, (Replicate(),), run_check=False)
    if operand is not None and reader is not None:
        # If the GEMM reads dequantized values, expand once here and not in every layer.
        operand.casts.rows = (
            codes if operand.plan.rows_expand is None else codes.expanded(operand.plan.rows_expand)
        )
        _cache_casts(found, operand, reader, layers)
    return found


@torch.no_grad()
def reduce_scatter(parts: DTensor, axis: int, bytes_sent: Counter[str]) -> DTensor:
    """Return the sum of all ranks' parts, sharded along `axis`, in their dtype."""
    mesh, group = parts.device_mesh, parts.device_mesh.get_group()
    own, size = local_part(parts), group.size()
    each = -(-parts.shape[axis] // size)
    filled = _padded(own, axis, each * size).unflatten(axis, (size, each)).movedim(axis, 0)
    link = Link(group)
    total = (
        messages.reduce_scatter(filled.reshape(size, -1), link)
        .reshape(filled.shape[1:])
        .to(own.dtype)
    )
    bytes_sent += link.bytes_sent
    start = min(each * group.rank(), parts.shape[axis])
    tokens = min(each, parts.shape[axis] - start)
    own_tokens = total.narrow(axis, 0, tokens).contiguous()
    return DTensor.from_local(
        own_tokens, mesh, (Shard(axis),), run_check=False, shape=parts.shape, stride=parts.stride()
    )


def _gathered_codes(
    q: QTensor,
    group: dist.ProcessGroup,
    shape: torch.Size,
    axis: int,
    tokens: int,
    bytes_sent: Counter[str],
) -> QTensor:
    """Gather the codes of all ranks in token order.

    shape   of one rank's padded tensor
    tokens  of all ranks, without padding
    """
    scale = q.scale.contiguous().view(torch.uint8).flatten()
    # All ranks computed the same scale already: send none.
    if q.cast.tile == (WHOLE, WHOLE):
        scale = scale[:0]
    # Power-of-two scales are exact in one byte; others travel as float32, four bytes.
    elif q.cast.scale.power_of_two:
        scale = E8M0.encode(q.scale).flatten()
    data = q.data.view(torch.uint8).flatten()
    link = Link(group)
    received = link.all_gather(torch.cat((data, scale)))
    bytes_sent += link.bytes_sent
    codes, scales = received.split((data.numel(), scale.numel()), dim=1)
    columns = q.scale.shape[1]
    # The ranks' blocks are concatenated along the token axis, which need not be the first.
    found = _in_order(codes, shape, axis, tokens).view(q.data.dtype)
    if not scale.numel():
        return QTensor(data=found, scale=q.scale, cast=q.cast, inner=q.inner)
    if q.cast.scale.power_of_two:
        whole = E8M0.decode(_in_order(scales, torch.Size((*shape[:-1], columns)), axis, tokens))
    else:
        whole = _in_order(scales, torch.Size((*shape[:-1], 4 * columns)), axis, tokens).view(
            torch.float32
        )
    return QTensor(data=found, scale=whole, cast=q.cast, inner=q.inner)


def _in_order(received: Tensor, shape: torch.Size, axis: int, tokens: int) -> Tensor:
    """Reorder [ranks, elements of `shape`] to [rows of all tokens, last axis], contiguous."""
    each = received.reshape(-1, *shape).movedim(0, axis).flatten(axis, axis + 1)
    return each.narrow(axis, 0, tokens).reshape(-1, shape[-1]).contiguous()


def _global_amax(rows: Tensor, group: dist.ProcessGroup, bytes_sent: Counter[str]) -> Tensor:
    """Return the maximum amax of all ranks, [1, 1]; NaN if any rank has a non-finite element."""
    amax = (
        tile_amax(rows, (WHOLE, WHOLE)).reshape(1)
        if rows.numel()
        else rows.new_zeros(1, dtype=torch.float32)
    )
    finite = amax.isfinite()
    # A finite maximum and a flag: some backends lose NaN in a MAX.
    both = torch.cat((torch.where(finite, amax, 0.0), (~finite).to(torch.float32)))
    bytes_sent["maximum"] += both.nbytes
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return torch.where(both[1:] > 0, torch.nan, both[:1]).reshape(1, 1)


def _refuse(layer: QLinear, role: str) -> str | None:
    """Return the reason why a message cannot be the codes that the layer's GEMM reads, or None."""
    reason = refuse_reader(layer)
    if reason is not None:
        return reason
    plan = getattr(layer.plan(layer.weight.device), role)
    rotated = plan.rows_rotate is not None
    cast = plan.rows
    if (
        cast is None
        or rotated
        or cast.rounding != "nearest"
        or isinstance(cast.calibrate, LearnedStep)
    ):
        return "its cast is wide, rotated, random or learned"
    if cast.format.codes_per_byte > 1 or cast.has_global_scale or cast.format.storage.itemsize != 1:
        return f"{cast.format} has two codes to a byte, or two scales"
    if cast.tile != (WHOLE, WHOLE) and cast.tile[0] != 1:
        return f"a tile of {cast.tile} has several tokens"
    return None


def describe_traffic(layer: QLinear, role: str) -> str:
    """Describe the message of a layer's gathered input or gradient, for `describe`."""
    reason = _refuse(layer, role)
    if reason is not None:
        return f"{messages.MESSAGE}, cast again on arrival: {reason}"
    return str(getattr(layer.plan(layer.weight.device), role).rows)


def _operand(layer: QLinear, role: str, like: Tensor) -> Operand:
    """Build the Operand by which the layer will look up its cast."""
    context = layer.context(like)
    plan = getattr(context.plan, role)
    needs = True, layer.weight.requires_grad
    return Operand(like, plan, context, needs, layer.amax_state(role))


def _cache_casts(found: DTensor, operand: Operand, reader: QLinear, layers: list[QLinear]) -> None:
    whole: Any = local_part(found)
    shared = reader.state.shared_inputs
    if shared is None:
        return
    operand.tensor = whole.reshape(-1, whole.shape[-1])
    if operand.plan.role == "gy":
        shared.gradients.put(whole, Casts(operand.casts.rows, None, operand.casts.amax))
        return
    inputs = shared.of(whole, None, owner_of(found))
    if inputs is None:
        return
    operand.saved()
    inputs.put(operand, CacheStats())
    if operand.state is None or not operand.context.records:
        return

    # Layers with the same recipe read the same tensor, so their histories get the same state.
    same_recipe = [each for each in layers if each is not reader and each.recipe == reader.recipe]
    amax_states = [
        state
        for each in same_recipe
        if _refuse(each, "x") is None and (state := each.amax_state("x")) is not None
    ]
    if amax_states:
        torch._foreach_copy_(amax_states, [operand.state] * len(amax_states))


def _filled(x: Tensor, axis: int, tokens: int, ranks: int) -> tuple[Tensor, torch.Size]:
    """Pad x to the largest number of tokens of any rank; return it and its shape."""
    filled = _padded(x, axis, -(-tokens // ranks))
    return filled, filled.shape


def _padded(x: Tensor, axis: int, size: int) -> Tensor:
    if x.shape[axis] == size:
        return x
    shape = [*x.shape]
    shape[axis] = size - x.shape[axis]
    return torch.cat((x, x.new_zeros(shape)), dim=axis)

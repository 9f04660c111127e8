"""Weights of `fully_shard` travel as codes: a rank casts its rows of the sharded master, and sends what the products read.

    before a gather     codes of this rank's rows -> bytes            by the scales of the whole weight (weight_scales)
    after it            the bytes of all rows are the layer's casts   QLinear.gathered
    after resharding    FSDP frees the bytes, and nothing else was kept

The parameter that FSDP makes is a carrier: it has a shape and takes the gradient, and reading it gives NaN. What is sent is cast from
the sharded parameter as it is, in float32 usually, whatever `mp_policy.param_dtype` says of the others.

Bytes per weight and gather: 1; of 4-bit formats 1/2, of those with backward="straight-through" 5/8, one bit more for what was clipped.
Where the two products of a weight read different codes (per row, 1x32), those of `output` are sent before the forward pass and those of
`grad_input` before the backward one. Whoever needs others than those at hand (a forward pass repeated by checkpointing, a module
that is not resharded after forward) gathers them then, for that product alone.

Left to FSDP's own gather, each with its reason (`travels`): casts that round stochastically or turn the sharded axis, which need the
original rows beside each other; learned steps, whose gradient needs rounding errors; products in 16 bits; weights sharded along columns,
shared by two modules, or offloaded to the CPU.

torch (checked on 2.13) takes the hooks as attributes of the local tensor; that, and the policy, is
private and used here alone. One argument for the first hook is its older form, in which inputs may have any shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports Dynamo at once
from torch.distributed.tensor import DTensor

from narrowgauge.addresses import is_compiling, validity
from narrowgauge.distributed import codes_in_graphs
from narrowgauge.distributed.agreement import Agreement
from narrowgauge.distributed.topology import Topology
from narrowgauge.distributed.torch_private import in_backward, local_tensor, parameter_group
from narrowgauge.distributed.weight_codes import coder_of
from narrowgauge.distributed.weight_scales import Rows, exchange, gather
from narrowgauge.errors import ConfigError
from narrowgauge.nn.linear import QLinear
from narrowgauge.nn.operands import Casts, Operand
from narrowgauge.nn.plan import OperandPlan
from narrowgauge.nn.weight_cache import CHECK_EVERY
from narrowgauge.ops.fingerprint import Fingerprint, Readback, fingerprint
from narrowgauge.recipe import ClippedRms, LearnedStep, Recipe

_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


class Travel(NamedTuple):
    """How the weight of a layer travels. bytes: of the whole weight, in one gather; why_not_narrower: or ''."""

    format: str
    bytes: int
    why_not_narrower: str

    def __str__(self) -> str:
        return f"{self.format}: {self.bytes:,} bytes a gather" + (
            f" ({self.why_not_narrower})" if self.why_not_narrower else ""
        )


class Held(NamedTuple):
    """Gathered bytes [S * P, width], what they are of ("rows" or "cols"; "": out of date), and whether a window's scale made them."""

    data: Tensor
    which: str
    records: bool


class GatheredWeight:
    """The weight of one layer, [N, K] by rows on the ranks of `group`. See the module."""

    is_gathered, recasts = True, False

    def __init__(self, layer: QLinear, name: str, parameter: DTensor, group: dist.ProcessGroup, rows: Rows) -> None:
        self.layer, self.name, self.parameter, self.group, self.rows = layer, name, parameter, group, rows
        self.placements = parameter.placements
        assert layer.recipe is not None
        self.recipe, self.columns = layer.recipe, local_tensor(parameter).shape[1]
        self.plan: OperandPlan = layer.plan(local_tensor(parameter).device).w
        self.coder = coder_of(self.recipe, self.plan, rows, self.columns, partial(layer.amax_state, "w"))
        self.agreement: Agreement | None = None
        self.held: Held | None = None
        self.number = codes_in_graphs.numbered(self)
        self.was_gathered = False
        self.is_fresh = False  # nobody has said since the last exchange that the weight may be another
        self.exchanged: Any = ()  # the weight's state at the last exchange
        self.exchanges = 0
        self.seen: Fingerprint | None = (
            None  # the bytes of the shard at the last exchange; on a GPU a sample, at every eighth
        )
        self.suspects: tuple[Readback, ...] = ()  # whether that sample has changed

    def __reduce__(self) -> tuple[Any, ...]:
        return _Pickled, ()  # with the tensor whose hooks are its methods

    # --- the shard

    @property
    def shard(self) -> Tensor:
        """This rank's rows, [count, K]."""
        own = self.layer._parameters.get("weight")
        if isinstance(own, DTensor) and own is not self.parameter and own.placements == self.placements:
            self.parameter = own  # loading with assign=True, or model.to, made another
        local: Tensor = local_tensor(self.parameter)
        return local.detach()

    def attach(self) -> None:
        """(Again) to the local tensor, which torch replaces now and then."""
        self.shard  # noqa: B018  finds the parameter
        local: Any = local_tensor(self.parameter)
        for hook in _HOOKS:
            setattr(local, hook, getattr(self, hook))

    def detach(self) -> None:
        local: Any = local_tensor(self.parameter)
        for hook in _HOOKS:
            vars(local).pop(hook, None)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor], tuple[str, bool]]:
        """Called by FSDP: what this rank sends."""
        if not isinstance(self.layer, QLinear):
            raise ConfigError(
                f"{self.name}: it was distributed with weights as codes and is no QLinear any more. Build the model anew, shard it and "
                "call narrowgauge.distribute again."
            )
        backward = in_backward()
        which = "cols" if backward and self.coder.has_two_sets else "rows"
        records = self.layer.training
        return (self._own_codes(which, records),), (which, records)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: tuple[str, bool], param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Called by FSDP: what all ranks sent."""
        self.held, self.was_gathered = Held(outputs[0].view(-1, self.coder.width), *metadata), True
        self._count(outputs[0])
        if out is not None:
            return None
        # torch looks at the carrier once as a tensor with memory; `release` gives that back.
        return torch.empty(self.rows.whole, self.columns, dtype=param_dtype, device=outputs[0].device), ()

    def release(self, weight: Tensor) -> None:
        """The parameter of this forward pass reads as NaN, and has no memory."""
        local = local_tensor(weight) if isinstance(weight, DTensor) else weight
        if local.shape == (self.rows.whole, self.columns) and any(local.stride()):
            local.data = torch.full((1, 1), float("nan"), dtype=local.dtype, device=local.device).expand(local.shape)

    def _own_codes(self, which: str, records: bool) -> Tensor:
        shard = self.shard
        self._refuse_writes()
        codes = self.coder.encode(shard, which, records) if self.rows.count else shard.new_empty(0, dtype=torch.uint8)
        sent = torch.zeros(self.rows.padded, self.coder.width, dtype=torch.uint8, device=shard.device)
        if self.rows.count:
            sent[: self.rows.count, : codes.shape[1]] = codes
        return sent

    def forget(self) -> None:
        """Codes at hand may be of another scale, or of other weights, than those to come. Every rank does it."""
        self.is_fresh = False
        if self.held is not None:
            self.held = self.held._replace(which="")

    def exchange_ended(self) -> None:
        self.is_fresh, self.exchanged = True, self._state()
        seen, shard = self.seen, self.shard
        if seen is not None and seen.changed is not None:
            self.suspects += (Readback(seen.changed),)
        is_compared = shard.device.type == "cpu" or self.exchanges % CHECK_EVERY == 0
        self.seen = fingerprint(shard) if is_compared and self.rows.count else None
        self.exchanges += 1
        here = [each for each in self.suspects if each.is_here]
        self.suspects = tuple(each for each in self.suspects if each not in here)
        if any(each.value for each in here):
            self._refuse()

    def _refuse_writes(self) -> None:
        """Raises ConfigError if the weight was written since its scales were exchanged, also through `.data`.

        On a GPU `.data` is not compared here, since that would wait for the device: `exchange_ended` raises in a later step.
        """
        if self.exchanged != self._state() or (self.seen is not None and not self.seen.is_same()):
            self._refuse()

    def _refuse(self) -> None:
        raise ConfigError(
            f"{self.name}: the weight was written since its scales were exchanged, or no forward pass of the whole model has exchanged "
            "them. Ranks exchange them in the first forward pass of a step: call the model that distribute was given (what "
            "torch.compile returned, if the whole model is compiled), and end the step with narrowgauge.advance(model) after "
            "weights are written."
        )

    def _state(self) -> Any:
        """Differs from an earlier one if the weight was written or replaced. An operator on a DTensor raises its version alone."""
        shard = self.shard
        return None if self.parameter.is_inference() else self.parameter._version, validity(shard)

    def _count(self, sent: Tensor) -> None:
        if self.agreement is not None:
            self.agreement.count("weights", sent)

    # --- the layer's source of casts

    def lookup(self, operand: Operand) -> Casts | None:
        """What the product of this pass reads; nothing is kept."""
        if not self.serves(operand.context.plan.recipe):  # changed since: the original is gathered for it
            operand.tensor = self._original(operand.tensor)
            return None
        casts = Casts(amax=operand.casts.amax)
        operand.is_carrier = True
        if operand.is_restored and not operand.needs[0] and self.recipe.backward == "recast":
            return casts
        which = "cols" if operand.is_restored and self.coder.has_two_sets else "rows"
        records = operand.context.records
        if is_compiling():
            data = codes_in_graphs.read(self, which, records, operand.after)
        else:
            data = self.bytes_of(which, records)[: self.rows.whole]
        self.coder.fill(casts, operand, data)
        return casts

    def serves(self, recipe: Recipe | None) -> bool:
        return recipe is self.recipe

    @property
    def joins_graphs(self) -> bool:
        """Whether compiled code can read the codes; else the layer computes between two graphs."""
        return codes_in_graphs.WORKS and self.held is not None

    def bytes_of(self, which: str, records: bool) -> Tensor:
        """[S * P, width]: those at hand, or gathered now."""
        held = self.held
        if held is None or not self.is_at_hand(which, records) or _is_freed(held.data):
            found = gather(self._own_codes(which, records), self.group)
            self._count(found)
            return found.view(-1, self.coder.width)
        if not in_backward():  # which reads the codes of its forward pass
            self._refuse_writes()
        return held.data

    def is_at_hand(self, which: str, records: bool) -> bool:
        held = self.held
        return held is not None and held.which == which and (not self.plan.is_delayed or held.records == records)

    def original(self, weight: Tensor) -> Tensor:
        """[N, K] as it is, for a layer without a recipe; its gradient is that of `weight`."""
        found: Tensor = _Substitute.apply(weight, self._original(weight))
        return found

    def _original(self, weight: Tensor) -> Tensor:
        shard = self.shard.to(weight.dtype)
        own = shard.new_zeros(self.rows.padded, self.columns)
        own[: self.rows.count] = shard
        found = gather(own.view(torch.uint8), self.group)
        self._count(found)
        return found.view(weight.dtype).view(-1, self.columns)[: self.rows.whole]


class _Substitute(torch.autograd.Function):
    """The values of one tensor with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class WeightGathers:
    """Those of one model. `gathered`: layer -> its weight as codes; `reasons`: why not, of the others."""

    def __init__(self, gathered: dict[QLinear, GatheredWeight], reasons: dict[nn.Module, str], count: Any) -> None:
        self.gathered, self.reasons, self.count = gathered, reasons, count

    @torch.no_grad()
    def before_forward(self, is_first: bool) -> None:
        """Called before each forward pass of the whole model. is_first: of an optimizer step, or an evaluation."""
        for weight in self.gathered.values():
            weight.attach()
        if is_first or not all(weight.is_fresh for weight in self.gathered.values()):
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """The scales of the weights as they are now; every rank calls it."""
        groups: dict[dist.ProcessGroup, list[GatheredWeight]] = {}
        for weight in self.gathered.values():
            groups.setdefault(weight.group, []).append(weight)
        for group, weights in groups.items():
            found = [(statistic, each.shard) for each in weights for statistic in each.coder.statistics]
            exchange(found, group, self.count)
        for weight in self.gathered.values():
            weight.exchange_ended()

    def travels(self, layer: QLinear) -> Travel:
        """How the weight of a layer travels. fully_shard gathers it before forward, and again before backward if it reshards."""
        weight = self.gathered.get(layer)
        if weight is None:
            own = layer.weight
            size = own.numel() * own.element_size() if isinstance(own, DTensor) else 0
            form = f"{str(own.dtype).removeprefix('torch.')}, or as mp_policy says"
            return Travel(form, size, self.reasons.get(layer, "it is not distributed"))
        formats = dict.fromkeys(str(cast.format) for cast in (weight.plan.rows, weight.plan.cols) if cast is not None)
        sets = "two sets of codes" if weight.coder.has_two_sets else "codes"
        size = weight.rows.padded * weight.rows.world * weight.coder.width
        return Travel(f"{' and '.join(formats)} {sets}", size, "")


def install(model: nn.Module, topology: Topology, agreement: Agreement) -> WeightGathers:
    """From now on the weights of `model` that fully_shard has sharded travel as codes, where their recipes let them.

    Raises ConfigError for a mesh that reshards to fewer ranks than it gathers from.
    """
    _check_resharding(topology)
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(f"{name}.{key}")
    gathered: dict[QLinear, GatheredWeight] = {}
    reasons: dict[nn.Module, str] = {}
    for layer, peers in agreement.layers.items():
        others = owners.get(id(layer._parameters.get("weight")), [])[1:]
        found = f"its weight is also {others[0]!r}" if others else _gathered(layer, peers.name, topology)
        before = layer.gathered
        if isinstance(found, str):
            reasons[layer] = found
            if before is not None and before.was_gathered:
                raise ConfigError(
                    f"distribute: the weight of {peers.name!r} has travelled as codes, and now {found}. "
                    "Build the model anew, and distribute it once as it shall be."
                )
            layer.gathered = None
            continue
        if before is not None and before.was_gathered and before.coder.width != found.coder.width:
            raise ConfigError(
                f"distribute: the weight of {peers.name!r} has travelled as {before.coder.width} bytes per row, and recipe "
                f"{found.recipe.name!r} needs {found.coder.width}. Build the model anew, and distribute it once as it shall be."
            )
        found.was_gathered, found.agreement = before is not None and before.was_gathered, agreement
        layer.gathered = gathered[layer] = found
        found.attach()
    for module, layers in _by_owner(topology, gathered).items():
        agreement.follow(module.register_forward_pre_hook(partial(_release, layers)))
    agreement.weights = WeightGathers(gathered, reasons, agreement.count)
    return agreement.weights


def leave(agreement: Agreement) -> None:
    """Weights travel as torch sends them again, for a model that is distributed anew. Raises ConfigError once codes have travelled."""
    for layer, peers in agreement.layers.items():
        if layer.gathered is None:
            continue
        if layer.gathered.was_gathered:
            raise ConfigError(
                f"distribute: the weight of {peers.name!r} has travelled as codes, which fully_shard goes on with. "
                'Take weights="codes", or build the model anew.'
            )
        layer.gathered.detach()
        layer.gathered = None


def _by_owner(topology: Topology, layers: Iterable[QLinear]) -> dict[nn.Module, list[QLinear]]:
    """The module of `fully_shard` that gathers a layer's weight -> such layers."""
    sharded: Any = topology.fsdp
    nearest = {each: module for module in sharded for each in module.modules()}  # inner modules come later
    found: dict[nn.Module, list[QLinear]] = {}
    for layer in layers:
        found.setdefault(nearest[layer], []).append(layer)
    return found


@_disable_dynamo
def _release(layers: list[QLinear], *_: Any) -> None:
    """A forward pre-hook, after that of FSDP: compiled code finds carriers as they stay."""
    for layer in layers:
        if layer.gathered is not None:
            layer.gathered.release(layer.weight)


def _gathered(layer: QLinear, name: str, topology: Topology) -> GatheredWeight | str:
    """Or why its weight does not travel as codes, a clause. The same on all ranks."""
    weight, mesh = layer._parameters.get("weight"), topology.mesh
    if layer.gathered is not None:
        weight = layer.gathered.parameter
    if mesh is None or not isinstance(weight, DTensor):
        return "fully_shard does not shard it"
    if layer.recipe is None:
        return "it has no recipe"
    own = weight.device_mesh
    dim = own.ndim - 1
    if own.ndim != mesh.ndim:  # another style shards it as well
        names = own.mesh_dim_names or ()
        if not mesh.mesh_dim_names or mesh.mesh_dim_names[-1] not in names:
            return "the mesh of fully_shard has no name among those of its weight"
        dim = names.index(mesh.mesh_dim_names[-1])
    group = own.get_group(dim)
    if getattr(weight.placements[dim], "dim", None) != 0:
        return "fully_shard shards its weight along columns"
    if dist.get_world_size(group) == 1:
        return "one rank has all of it"
    if local_tensor(weight).device.type not in (own.device_type, "meta"):
        return f"its shards are kept on the {local_tensor(weight).device.type}"
    whole = weight.shape[0]
    for other, placement in enumerate(weight.placements):
        if other not in (dim,) and getattr(placement, "dim", None) == 0:
            if whole % own.size(other):
                return f"{own.size(other)} ranks do not divide its {weight.shape[0]} rows"
            whole //= own.size(other)
    if reason := _why_not(layer):
        return reason
    rows = Rows(whole, dist.get_world_size(group), dist.get_rank(group))
    if local_tensor(weight).shape[0] != rows.count:
        raise ConfigError(
            f"distribute: rank {rows.rank} has {local_tensor(weight).shape[0]} rows of {name!r}, where {rows.count} of {whole} were "
            "expected. Shard it with fully_shard, along rows."
        )
    return GatheredWeight(layer, name, weight, group, rows)


def _why_not(layer: QLinear) -> str:
    """What in the recipe needs the original beside the codes, a clause, or ''."""
    recipe = layer.recipe
    assert recipe is not None
    rows, cols = recipe.roles()["w"]
    if rows is None or cols is None:
        product = "grad_input" if rows is not None else "output"
        return f"{product} takes it in 16 bits"
    casts = {"output": rows, "grad_input": cols}
    for product, cast in casts.items():
        if cast.rounding != "nearest":
            return f"{product} rounds the original stochastically"
        if isinstance(cast.calibrate, LearnedStep):
            return "the gradient of its learned step needs the rounding errors of the original"
    if recipe.output.rotate is not None and recipe.output.rotate.signs == "random":
        return "output turns the original with new signs in each pass"
    if recipe.backward == "straight-through":
        return ""
    if recipe.grad_input.rotate is not None:
        return "grad_input turns the original along the axis that ranks share"
    if any(isinstance(cast.calibrate, ClippedRms) for cast in casts.values()):
        return "its scales are by the spread of tiles"
    return ""


def _check_resharding(topology: Topology) -> None:
    for module in topology.fsdp:
        if getattr(parameter_group(module), "_use_post_forward_mesh", False):
            raise ConfigError(
                "distribute: fully_shard was given a number for reshard_after_forward, for which torch has no hooks. Give it True or "
                'False, or distribute with weights="16bit".'
            )


def _is_freed(data: Tensor) -> bool:
    return data.numel() > 0 and data.untyped_storage().size() == 0


class _Pickled:
    """What became of the hooks of a tensor that was saved as it stands."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise ConfigError(
            "This parameter was pickled while its weight travelled as codes. Save model.state_dict() instead, or call "
            'narrowgauge.distribute(model, weights="codes") again.'
        )

    fsdp_post_all_gather = fsdp_pre_all_gather

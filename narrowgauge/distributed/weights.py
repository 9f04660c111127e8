"""All-gather weights of `fully_shard` as quantized codes instead of 16-bit values.

    before the all-gather  quantize this rank's rows with the full weight's scales (weight_scales)
    after the all-gather   the bytes of all rows become the layer's casts (QLinear.gathered)
    after resharding       FSDP frees the bytes; nothing else was allocated

The parameter that FSDP creates has a shape and accumulates the gradient, but has no storage and
reads as NaN. Codes are quantized from the sharded parameter itself, usually float32, whatever
`mp_policy.param_dtype` says about the other parameters.

    bytes per weight and all-gather
    1    8-bit formats
    1/2  4-bit formats
    5/8  4-bit formats with backward="straight-through": one more bit marks unclipped elements

The two GEMMs of a weight may read different codes (one scale per row, 1 x 32 tiles). Then the codes
of `output` are gathered before forward, and the codes of `grad_input` before backward. A GEMM that
finds the other set gathers its own. This happens in a forward pass recomputed by checkpointing, and
if the module is not resharded after forward.

FSDP gathers the following unquantized; `WeightGathers.traffic` reports the reason:

- casts with stochastic rounding, or a rotation along the sharded axis: they need all master rows
- learned step sizes: their gradient needs the rounding errors
- GEMMs in 16 bits
- weights sharded along columns, shared by two modules, or offloaded to the CPU

torch (checked on 2.13) takes the hooks as attributes of the local tensor. That and
`_use_post_forward_mesh` are private APIs used in this file alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable would import all of Dynamo
from torch.distributed.tensor import DTensor

from narrowgauge.addresses import is_compiling, validity
from narrowgauge.distributed import codes_in_graphs
from narrowgauge.distributed.torch_private import in_backward, local_tensor, parameter_group
from narrowgauge.distributed.weight_codes import coder_of
from narrowgauge.distributed.weight_scales import LocalRows, exchange, gather
from narrowgauge.errors import ConfigError
from narrowgauge.nn.linear import QLinear
from narrowgauge.nn.operands import Casts, Operand
from narrowgauge.nn.weight_cache import CHECK_EVERY
from narrowgauge.ops.fingerprint import Fingerprint, Readback, fingerprint
from narrowgauge.recipe import ClippedRms, LearnedStep, Recipe

if TYPE_CHECKING:
    from narrowgauge.distributed.state import DistributedState
    from narrowgauge.distributed.topology import Topology
    from narrowgauge.nn.plan import OperandPlan

_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


class WeightTraffic(NamedTuple):
    """Message format of a layer's weight.

    format        codes or dtype, in words
    bytes         of the full weight in one all-gather
    reason_16bit  reason for a 16-bit message, or ""
    """

    format: str
    bytes: int
    reason_16bit: str

    def __str__(self) -> str:
        return f"{self.format}: {self.bytes:,} bytes a gather" + (
            f" ({self.reason_16bit})" if self.reason_16bit else ""
        )


class GatheredBytes(NamedTuple):
    """Gathered bytes of a weight.

    data         uint8 [S * P, width]
    orientation  "rows", "cols", or "" if the bytes are out of date
    use_history  quantized by the amax history's scale (training)
    """

    data: Tensor
    orientation: str
    use_history: bool


class GatheredWeight:
    """A sharded weight whose codes are gathered; a source of casts for its layer.

    layer, name          the layer, and its name in the whole model
    parameter            the sharded DTensor, [N, K]; replaced by `shard` when the layer has a new
                         one
    group, rows          ranks that shard the rows, and this rank's rows
    coder                encodes rows, and decodes gathered bytes (weight_codes)
    gathered_bytes       bytes of the latest gather by FSDP
    graph_index          index for the operator in compiled graphs (codes_in_graphs)
    was_gathered         codes have been sent, so FSDP's buffers have their size
    is_fresh             no write to the weight was reported since the last exchange of scales
    exchanged_state      state of the weight at the last exchange (see `_state`)
    exchanges            number of exchanges
    last_fingerprint     fingerprint of the shard at the last exchange; on a GPU a sample, every
                         CHECK_EVERY exchanges
    pending_comparisons  pending comparisons of such samples, read back without waiting
    """

    is_gathered, recasts = True, False

    def __init__(
        self,
        layer: QLinear,
        name: str,
        parameter: DTensor,
        group: dist.ProcessGroup,
        rows: LocalRows,
    ) -> None:
        self.layer, self.name, self.parameter, self.group, self.rows = (
            layer,
            name,
            parameter,
            group,
            rows,
        )
        self.placements = parameter.placements
        assert layer.recipe is not None
        self.recipe, self.columns = layer.recipe, local_tensor(parameter).shape[1]
        self.plan: OperandPlan = layer.plan(local_tensor(parameter).device).w
        self.coder = coder_of(
            self.recipe, self.plan, rows, self.columns, partial(layer.amax_state, "w")
        )
        self.state: DistributedState | None = None
        self.gathered_bytes: GatheredBytes | None = None
        self.graph_index = codes_in_graphs.register(self)
        self.was_gathered = False
        self.is_fresh = False
        self.exchanged_state: Any = ()
        self.exchanges = 0
        self.last_fingerprint: Fingerprint | None = None
        self.pending_comparisons: tuple[Readback, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # The methods of this object are attributes of the local tensor and are pickled with it.
        return _Pickled, ()

    # --- the shard

    @property
    def shard(self) -> Tensor:
        """This rank's rows [count, K], of the layer's current parameter."""
        own = self.layer._parameters.get("weight")
        if (
            isinstance(own, DTensor)
            and own is not self.parameter
            and own.placements == self.placements
        ):
            # load_state_dict(assign=True) and model.to create another parameter.
            self.parameter = own
        local: Tensor = local_tensor(self.parameter)
        return local.detach()

    def attach(self) -> None:
        """Set FSDP's hooks on the local tensor; repeated, since torch replaces that tensor at times."""
        # Reading the property updates self.parameter.
        self.shard  # noqa: B018
        local: Any = local_tensor(self.parameter)
        for hook in _HOOKS:
            setattr(local, hook, getattr(self, hook))

    def detach(self) -> None:
        local: Any = local_tensor(self.parameter)
        for hook in _HOOKS:
            vars(local).pop(hook, None)

    # The one-argument form of this hook is its older one, in which inputs may have any shape.
    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor], tuple[str, bool]]:
        """Return the codes that this rank sends. Called by FSDP."""
        if not isinstance(self.layer, QLinear):
            raise ConfigError(
                f"{self.name}: it was distributed with weights as codes and is no QLinear any more. Build the model anew, shard it and "
                "call narrowgauge.distribute again.",
                code="weight-codes.not-converted",
            )
        backward = in_backward()
        orientation = "cols" if backward and self.coder.has_two_sets else "rows"
        use_history = self.layer.training
        return (self._local_codes(orientation, use_history),), (orientation, use_history)

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: tuple[str, bool],
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        """Store the codes of all ranks, and return the parameter's tensor. Called by FSDP."""
        self.gathered_bytes, self.was_gathered = (
            GatheredBytes(outputs[0].view(-1, self.coder.width), *metadata),
            True,
        )
        self._count(outputs[0])
        if out is not None:
            return None
        # torch reads the storage of this tensor once, so it is allocated here and freed by
        # `free_storage`.
        return torch.empty(
            self.rows.total, self.columns, dtype=param_dtype, device=outputs[0].device
        ), ()

    def free_storage(self, weight: Tensor) -> None:
        """Free the storage of this forward pass's parameter; it reads as NaN from then on."""
        local = local_tensor(weight) if isinstance(weight, DTensor) else weight
        if local.shape == (self.rows.total, self.columns) and any(local.stride()):
            local.data = torch.full(
                (1, 1), float("nan"), dtype=local.dtype, device=local.device
            ).expand(local.shape)

    def _local_codes(self, orientation: str, use_history: bool) -> Tensor:
        """Return this rank's codes, padded to uint8 [P, width]."""
        shard = self.shard
        self._refuse_writes()
        codes = (
            self.coder.encode(shard, orientation, use_history)
            if self.rows.count
            else shard.new_empty(0, dtype=torch.uint8)
        )
        # Equal sizes on all ranks, as an all-gather requires: the last ranks may have fewer rows or
        # none.
        sent = torch.zeros(
            self.rows.padded, self.coder.width, dtype=torch.uint8, device=shard.device
        )
        if self.rows.count:
            sent[: self.rows.count, : codes.shape[1]] = codes
        return sent

    def invalidate(self) -> None:
        """Mark gathered codes as out of date; called on every rank.

        The next scales or weights may differ from the present ones.
        """
        self.is_fresh = False
        if self.gathered_bytes is not None:
            self.gathered_bytes = self.gathered_bytes._replace(orientation="")

    def exchange_ended(self) -> None:
        """Record the state of the weight whose scales were just exchanged."""
        self.is_fresh, self.exchanged_state = True, self._state()
        last_fingerprint, shard = self.last_fingerprint, self.shard
        if last_fingerprint is not None and last_fingerprint.changed is not None:
            self.pending_comparisons += (Readback(last_fingerprint.changed),)
        is_compared = shard.device.type == "cpu" or self.exchanges % CHECK_EVERY == 0
        self.last_fingerprint = fingerprint(shard) if is_compared and self.rows.count else None
        self.exchanges += 1
        # Readbacks are polled and never waited for: this runs in every step.
        arrived = [each for each in self.pending_comparisons if each.is_here]
        self.pending_comparisons = tuple(
            each for each in self.pending_comparisons if each not in arrived
        )
        if any(each.value for each in arrived):
            self._refuse()

    def _refuse_writes(self) -> None:
        """Raise ConfigError if the weight was written after its scales were exchanged.

        Writes through `.data` are detected too. On a GPU that check would wait for the device, so
        `exchange_ended` raises in a later step.
        """
        if self.exchanged_state != self._state() or (
            self.last_fingerprint is not None and not self.last_fingerprint.is_same()
        ):
            self._refuse()

    def _refuse(self) -> None:
        raise ConfigError(
            f"{self.name}: the weight was written since its scales were exchanged, or no forward pass of the whole model has exchanged "
            "them. Ranks exchange them in the first forward pass of a step: call the model that distribute was given (what "
            "torch.compile returned, if the whole model is compiled), and end the step with narrowgauge.advance(model) after "
            "weights are written.",
            code="weight-codes.stale-scales",
        )

    def _state(self) -> Any:
        """Return a value that changes when the weight is written or replaced."""
        shard = self.shard
        # An operator on a DTensor raises the DTensor's version only, not its local tensor's:
        # compare both.
        return None if self.parameter.is_inference() else self.parameter._version, validity(shard)

    def _count(self, sent: Tensor) -> None:
        if self.state is not None:
            self.state.count("weights", sent)

    # --- the layer's source of casts

    def lookup(self, operand: Operand) -> Casts | None:
        """Return the casts for the GEMM of this pass; nothing is cached."""
        # The layer's recipe was changed after `distribute`: gather the master weight for it.
        if not self.serves(operand.context.plan.recipe):
            operand.tensor = self._gather_original(operand.tensor)
            return None
        casts = Casts(amax=operand.casts.amax)
        operand.is_carrier = True
        recasts = self.recipe.backward != "straight-through"
        if operand.is_restored and not operand.needs[0] and recasts:
            return casts
        orientation = "cols" if operand.is_restored and self.coder.has_two_sets else "rows"
        use_history = operand.context.records
        # While tracing, `gathered_bytes` must enter the graph as an input, not as a constant.
        if is_compiling():
            data = codes_in_graphs.read(self, orientation, use_history, operand.after)
        else:
            data = self.bytes_of(orientation, use_history)[: self.rows.total]
        self.coder.fill(casts, operand, data)
        return casts

    def serves(self, recipe: Recipe | None) -> bool:
        return recipe is self.recipe

    @property
    def joins_graphs(self) -> bool:
        """True if compiled code can read the codes; otherwise the layer runs between two graphs."""
        return codes_in_graphs.SUPPORTED and self.gathered_bytes is not None

    def bytes_of(self, orientation: str, use_history: bool) -> Tensor:
        """Return uint8 [S * P, width]: the stored bytes if they fit, or gathered now."""
        gathered_bytes = self.gathered_bytes
        if (
            gathered_bytes is None
            or not self.has_codes(orientation, use_history)
            or _is_freed(gathered_bytes.data)
        ):
            found = gather(self._local_codes(orientation, use_history), self.group)
            self._count(found)
            return found.view(-1, self.coder.width)
        # Backward reads the codes of its own forward pass, even if the weight was written in
        # between.
        if not in_backward():
            self._refuse_writes()
        return gathered_bytes.data

    def has_codes(self, orientation: str, use_history: bool) -> bool:
        found = self.gathered_bytes
        if found is None or found.orientation != orientation:
            return False
        return not self.plan.is_delayed or found.use_history == use_history

    def original(self, weight: Tensor) -> Tensor:
        """Return the unquantized weight [N, K], for a layer without a recipe.

        Its gradient is passed on to `weight`.
        """
        found: Tensor = _Substitute.apply(weight, self._gather_original(weight))
        return found

    def _gather_original(self, weight: Tensor) -> Tensor:
        shard = self.shard.to(weight.dtype)
        own = shard.new_zeros(self.rows.padded, self.columns)
        own[: self.rows.count] = shard
        found = gather(own.view(torch.uint8), self.group)
        self._count(found)
        return found.view(weight.dtype).view(-1, self.columns)[: self.rows.total]


class _Substitute(torch.autograd.Function):
    """Return the values of one tensor and pass the gradient to another."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class WeightGathers:
    """Weights of one model that are gathered as codes.

    gathered  layer -> GatheredWeight
    reasons   layer -> reason for a 16-bit all-gather, for the other layers
    count     count(kind, tensor), called for each message
    """

    def __init__(
        self, gathered: dict[QLinear, GatheredWeight], reasons: dict[nn.Module, str], count: Any
    ) -> None:
        self.gathered, self.reasons, self.count = gathered, reasons, count

    @torch.no_grad()
    def before_forward(self, is_first: bool) -> None:
        """Exchange scales if needed; called before each forward pass of the whole model.

        is_first  first forward pass of an optimizer step, or of an evaluation
        """
        for weight in self.gathered.values():
            weight.attach()
        if is_first or not all(weight.is_fresh for weight in self.gathered.values()):
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the scales of the current weights; called by every rank."""
        groups: dict[dist.ProcessGroup, list[GatheredWeight]] = {}
        for weight in self.gathered.values():
            groups.setdefault(weight.group, []).append(weight)
        for group, weights in groups.items():
            found = [
                (statistic, each.shard) for each in weights for statistic in each.coder.statistics
            ]
            exchange(found, group, self.count)
        for weight in self.gathered.values():
            weight.exchange_ended()

    def traffic(self, layer: QLinear) -> WeightTraffic:
        """Return the message format of a layer's weight.

        fully_shard gathers it before forward, and again before backward if it reshards.
        """
        weight = self.gathered.get(layer)
        if weight is None:
            own = layer.weight
            size = own.numel() * own.element_size() if isinstance(own, DTensor) else 0
            form = f"{str(own.dtype).removeprefix('torch.')}, or as mp_policy says"
            return WeightTraffic(form, size, self.reasons.get(layer, "it is not distributed"))
        formats = dict.fromkeys(
            str(cast.format) for cast in (weight.plan.rows, weight.plan.cols) if cast is not None
        )
        sets = "two sets of codes" if weight.coder.has_two_sets else "codes"
        size = weight.rows.padded * weight.rows.world * weight.coder.width
        return WeightTraffic(f"{' and '.join(formats)} {sets}", size, "")


def install(model: nn.Module, topology: Topology, state: DistributedState) -> WeightGathers:
    """Gather weights of `model` as codes wherever fully_shard shards them and the recipe permits.

    Raises ConfigError for a mesh that reshards to fewer ranks than it gathers from, or if FSDP's
    buffers already have another size.
    """
    _check_resharding(topology)
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(f"{name}.{key}")
    gathered: dict[QLinear, GatheredWeight] = {}
    reasons: dict[nn.Module, str] = {}
    for layer, peers in state.layers.items():
        others = owners.get(id(layer._parameters.get("weight")), [])[1:]
        found = (
            f"its weight is also {others[0]!r}"
            if others
            else _gathered_weight(layer, peers.name, topology)
        )
        before = layer.state.gathered
        if isinstance(found, str):
            reasons[layer] = found
            if before is not None and before.was_gathered:
                raise ConfigError(
                    f"distribute: the weight of {peers.name!r} has travelled as codes, and now {found}. "
                    "Build the model anew, and distribute it once as it shall be.",
                    code="weight-codes.changed",
                )
            layer.state.gathered = None
            continue
        if before is not None and before.was_gathered and before.coder.width != found.coder.width:
            raise ConfigError(
                f"distribute: the weight of {peers.name!r} has travelled as {before.coder.width} bytes per row, and recipe "
                f"{found.recipe.name!r} needs {found.coder.width}. Build the model anew, and distribute it once as it shall be.",
                code="weight-codes.other-recipe",
            )
        found.was_gathered, found.state = before is not None and before.was_gathered, state
        layer.state.gathered = gathered[layer] = found
        found.attach()
    for module, layers in _by_owner(topology, gathered).items():
        # After FSDP's pre-hook: compiled code then sees the same strides in every step. Freed
        # elsewhere, strides differed between the first two steps and all blocks were recompiled.
        state.add_hook(module.register_forward_pre_hook(partial(_free_storage, layers)))

    state.weights = WeightGathers(gathered, reasons, state.count)
    return state.weights


def uninstall(state: DistributedState) -> None:
    """Return to torch's 16-bit all-gather. Raises ConfigError once codes have been sent."""
    for layer, peers in state.layers.items():
        if layer.state.gathered is None:
            continue
        if layer.state.gathered.was_gathered:
            raise ConfigError(
                f"distribute: the weight of {peers.name!r} has travelled as codes, which fully_shard goes on with. "
                'Take weights="codes", or build the model anew.',
                code="weight-codes.not-codes",
            )
        layer.state.gathered.detach()
        layer.state.gathered = None


def _by_owner(topology: Topology, layers: Iterable[QLinear]) -> dict[nn.Module, list[QLinear]]:
    """Return {module of fully_shard: layers whose weights it gathers}."""
    sharded: Any = topology.fsdp
    # Inner modules come later in the order of named_modules and overwrite outer ones.
    nearest = {each: module for module in sharded for each in module.modules()}
    found: dict[nn.Module, list[QLinear]] = {}
    for layer in layers:
        found.setdefault(nearest[layer], []).append(layer)
    return found


@_disable_dynamo
def _free_storage(layers: list[QLinear], *_: Any) -> None:
    """Forward pre-hook after FSDP's own: free the storage of the gathered parameters."""
    for layer in layers:
        if layer.state.gathered is not None:
            layer.state.gathered.free_storage(layer.weight)


def _gathered_weight(layer: QLinear, name: str, topology: Topology) -> GatheredWeight | str:
    """Return the GatheredWeight of a layer, or the reason against it; the same on all ranks."""
    if layer.is_expert:
        return "it is one matrix of a parameter that all experts share"
    weight, mesh = layer._parameters.get("weight"), topology.mesh
    if layer.state.gathered is not None:
        weight = layer.state.gathered.parameter
    if mesh is None or not isinstance(weight, DTensor):
        return "fully_shard does not shard it"
    if layer.recipe is None:
        return "it has no recipe"
    if layer.is_transposed:
        return "its weight is stored transposed"

    own = weight.device_mesh
    dim = own.ndim - 1
    # Tensor parallelism shards the weight too, so its mesh has more axes.
    if own.ndim != mesh.ndim:
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
    if reason := _reason_against_codes(layer):
        return reason

    rows = LocalRows(whole, dist.get_world_size(group), dist.get_rank(group))
    if local_tensor(weight).shape[0] != rows.count:
        raise ConfigError(
            f"distribute: rank {rows.rank} has {local_tensor(weight).shape[0]} rows of {name!r}, where {rows.count} of {whole} were "
            "expected. Shard it with fully_shard, along rows.",
            code="weight-codes.rows",
        )
    return GatheredWeight(layer, name, weight, group, rows)


def _reason_against_codes(layer: QLinear) -> str:
    """Return the property of the recipe that needs the master weight besides the codes, or ""."""
    recipe = layer.recipe
    assert recipe is not None
    rows, cols = recipe.roles()["w"]
    if rows is None or cols is None:
        product = "grad_input" if rows is not None else "output"
        return f"{product} takes it in 16 bits"
    casts = {"output": rows, "grad_input": cols}
    for product, cast in casts.items():
        if cast.rounding == "eden":
            return f"{product} corrects the scales of rotated blocks of the original"
        if cast.rounding != "nearest":
            return f"{product} rounds the original stochastically"
        if cast.scale.reads_elements:
            return f"{product} chooses the scales of tiles by the elements of the original"
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
                'False, or distribute with weights="16bit".',
                code="weight-codes.reshard",
            )


def _is_freed(data: Tensor) -> bool:
    return data.numel() > 0 and data.untyped_storage().size() == 0


class _Pickled:
    """Hooks of a pickled parameter; they raise, since the GatheredWeight was not saved."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise ConfigError(
            "This parameter was pickled while its weight travelled as codes. Save model.state_dict() instead, or call "
            'narrowgauge.distribute(model, weights="codes") again.',
            code="weight-codes.pickled",
        )

    fsdp_post_all_gather = fsdp_pre_all_gather

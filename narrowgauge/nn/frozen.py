"""A frozen weight stored as the codes and scales of its forward cast, without a 16-bit copy.

    output       reads the codes; bit-identical to the layer before freezing
    grad_input   reads the transposed codes where the cast of w.T equals the transposed cast of w
                 (one scale per tensor, square tiles): bit-identical too. Else dequantizes w for one
                 GEMM and casts it along the other axis

The weight now equals its dequantized codes. A cast along the other axis adds no error if scales are
powers of two (fp8-row, mxfp8). With float32 scales (int8) the weight in grad_input loses 2 to 3 dB.

Memory: 1 byte per weight, 1/2 for 4-bit formats, plus scales. Power-of-two scales take one byte
each (E8M0). The Parameter `weight` keeps its shape and dtype and dequantizes on read
(`coded_weight`). A state dict of the layer has

    weight          the dequantized weight in its own dtype, computed at the first read, so that
                    plain torch and transformers load it
    frozen.codes    the codes, uint8
    frozen.scale    scales of the tiles; frozen.global_scale: scale of the whole tensor, if any
    frozen.words    text of the cast that made the codes, uint8

A layer that is frozen as codes loads the codes bit for bit. If `weight` in the state dict was
changed since it was saved, the layer casts `weight` instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import ConfigError
from narrowgauge.nn import coded_weight
from narrowgauge.nn.amax_history import LayerState
from narrowgauge.nn.coded_weight import CodedWeight, codes_of
from narrowgauge.nn.linear_context import CastSources
from narrowgauge.nn.operands import Casts, Operand, find
from narrowgauge.nn.rotation import Rotation
from narrowgauge.ops.quantize import dequantize
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, Hadamard, LearnedStep, Recipe
from narrowgauge.scaling import from_exponents, to_exponents

if TYPE_CHECKING:
    from narrowgauge.nn.plan import OperandPlan

QLinear = Any  # importing nn.linear here would be a cycle


class FrozenWeight(LayerState):
    """Codes of one layer's weight [N, K], and a source of its casts.

    `distributed.weights` is the counterpart for sharded weights.

    codes         uint8, [N, K] or packed two to a byte
    scale         scales of the tiles: E8M0 exponents (uint8) for power-of-two scales, else float32
    global_scale  scale of the whole tensor for two-level formats, else None
    words         uint8 text of the cast
    """

    is_gathered, recasts, joins_graphs = True, False, False
    not_replayed = frozenset({"codes", "scale", "words", "global_scale"})
    codes: Tensor  # uint8
    scale: Tensor
    words: Tensor
    global_scale: Tensor | None

    def __init__(self, layer: QLinear, found: QTensor | None = None) -> None:
        """Cast the layer's weight. `refuse(layer)` must be ''. `hold` frees the weight later.

        found  codes of the layer's own cast, if they exist already
        """
        super().__init__()
        self.recipe: Recipe = layer.recipe
        found = cast_weight(layer, layer.weight) if found is None else found
        self.cast, self.inner, self.columns = found.cast, found.inner, layer.in_features
        self.rotate = self.recipe.output.rotate
        scale = to_exponents(found.scale) if self.cast.scale.power_of_two else found.scale
        self.register_buffer("codes", found.data.contiguous().view(torch.uint8))
        self.register_buffer("scale", scale.contiguous())
        self.register_buffer("global_scale", found.global_scale)
        self.register_buffer(
            "words", torch.tensor(list(str(self.cast).encode()), dtype=torch.uint8)
        )

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.buffers())

    @property
    def quantized(self) -> QTensor:
        scale = from_exponents(self.scale) if self.cast.scale.power_of_two else self.scale
        # Two codes to a byte are uint8, whatever holds one code.
        is_packed = self.codes.shape[1] < self.inner
        return QTensor(
            data=self.codes if is_packed else self.codes.view(self.cast.format.storage),
            scale=scale,
            cast=self.cast,
            inner=self.inner,
            global_scale=self.global_scale,
            checked=True,
        )

    def write(self, layer: QLinear, weight: Tensor) -> None:
        """Replace the codes by those for another weight, [N, K]."""
        found = cast_weight(layer, weight)
        self.codes.copy_(found.data.contiguous().view(torch.uint8))
        self.scale.copy_(to_exponents(found.scale) if self.cast.scale.power_of_two else found.scale)
        if self.global_scale is not None and found.global_scale is not None:
            self.global_scale.copy_(found.global_scale)

    def reset_parameters(self) -> None:
        """Zero the codes: after `to_empty` from the meta device their memory is undefined."""
        self.codes.zero_()
        self.scale.zero_()

    def differs_in_words(self, state_dict: dict[str, Any], prefix: str) -> bool:
        """True if a state dict has codes of another cast, which decode to other values."""
        given = state_dict.get(f"{prefix}words")
        return given is not None and bool(given.tolist() != self.words.tolist())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load as nn.Module does, but report codes of another cast as an error."""
        if self.differs_in_words(state_dict, prefix):
            given = state_dict[f"{prefix}words"]
            made_by = bytes(given.tolist()).decode()
            rest[-1].append(
                f"{prefix}codes were made by the cast '{made_by}', recipe {self.recipe.name!r} has '{self.cast}'. Convert to the recipe "
                "under which the weight was frozen, or save after narrowgauge.memory.thaw(model)."
            )
            # Load the own buffers in their place, so that the codes stay as they are.
            state_dict = {
                name: each for name, each in state_dict.items() if not name.startswith(prefix)
            } | {f"{prefix}{name}": each for name, each in self.named_buffers()}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Any, recurse: bool = True) -> LayerState:
        if any(each.is_meta for each in self.buffers()):
            raise ConfigError(
                "The codes of a frozen weight are on the meta device, without numbers. Load the weights first, and freeze then.",
                code="freeze.meta-device",
            )
        return super()._apply(fn, recurse)

    # --- as a source of casts, and as the layer's weight

    def serves(self, recipe: Recipe | None) -> bool:
        return recipe is self.recipe

    def invalidate(self) -> None:
        """Do nothing: the codes stay valid when the caches are cleared."""

    def hold(self, layer: QLinear) -> None:
        """Free the memory of the layer's weight and make it dequantize on read.

        Raises ConfigError if the weight requires a gradient.
        """
        weight: Any = layer._parameters["weight"]
        if type(weight) is CodedWeight:
            coded_weight.release(weight)
        self._refuse_training(weight)
        empty(weight, (self.codes.shape[0], self.columns))
        if type(weight) is nn.Parameter:  # not for fake parameters of a memory estimate
            coded_weight.hold(weight, self, (weakref.ref(layer), _take_over))

    @staticmethod
    def placeholder(weight: Tensor) -> Tensor:
        """Return the memory of the layer's weight: NaN, in its shape and dtype."""
        return coded_weight.plain(weight)

    def check(self, layer: QLinear) -> None:
        """Check the weight before a forward pass.

        A copy lent to a raw pointer is dropped. The codes are dropped if the weight was replaced.
        """
        weight = layer._parameters.get("weight")
        if type(weight) is not CodedWeight:
            is_held = weight is not None and not any(weight.stride())  # fake, in a memory estimate
        else:
            if weight._lent is not None:
                weight._lent = None
            self._refuse_training(weight)
            is_held = weight._codes is self
        if not is_held:
            self.drop(layer)

    def copied(self, layer: QLinear) -> dict[str, Any]:
        """Return the entries that replace the weight in the `__dict__` of a copied layer.

        The Parameter there has no elements. `hold` fills it in the copy.
        """
        self.check(layer)
        if layer.frozen is None:
            return {}
        own = self.placeholder(layer._parameters["weight"])
        empty = nn.Parameter(own.new_empty((0, 0)), requires_grad=own.requires_grad)
        return {"_parameters": layer._parameters | {"weight": empty}}

    def drop(self, layer: QLinear) -> None:
        """Detach the codes: the layer computes with its weight from now on."""
        layer.put_submodule("frozen", None)
        layer.empty_cache()

    def move(self, layer: QLinear, moving: Callable[[], object]) -> None:
        """Move the layer to another device or dtype. The codes decode in the new dtype."""
        self.check(layer)
        if layer.frozen is None:  # the weight was replaced, and moves like any other
            moving()
            return
        weight = layer._parameters["weight"]
        if type(weight) is CodedWeight:
            coded_weight.release(weight)
        try:
            moving()
        finally:
            self.hold(layer)

    def _refuse_training(self, weight: Tensor) -> None:
        refuse_training(weight, self.cast)

    def lookup(self, operand: Operand) -> Casts:
        """Return the cast that this pass reads, in forward or in backward. Nothing is cached."""
        plan = operand.plan
        if not operand.is_restored:
            operand.is_carrier = True
            found = self.quantized
            # Under delayed scaling the amax history recorded the weight before freezing. The scale
            # of the codes fixes the amax now.
            amax = (
                found.scale.amax().reshape(1, 1) * self.cast.format.max if plan.is_delayed else None
            )
            return Casts(rows=_expanded(found, plan.rows_expand), amax=amax)
        if not operand.needs[0]:
            return Casts()
        if self._turns(plan):
            operand.is_carrier = True
            found = self.quantized
            # Decoded values are read through a view, as without codes: BLAS may add in another
            # order where memory lies in another one.
            if plan.cols_expand is not None and not found.is_packed:
                return Casts(cols=found.expanded(plan.cols_expand).transposed())
            return Casts(cols=_expanded(_turned(found), plan.cols_expand))
        # The operand casts this copy along the other axis and frees it after the GEMM. A recipe that
        # casts decoded values in every backward pass takes them in float32.
        recasts = self.recipe.backward == "recast-codes"
        dtype = torch.float32 if recasts else operand.tensor.dtype
        operand.tensor, operand.is_decoded = self.decoded(dtype), True
        return Casts()

    def _turns(self, plan: OperandPlan) -> bool:
        is_same = plan.cols == self.cast and plan.rows_rotate is None and plan.cols_rotate is None
        return is_same and self.cast.is_symmetric and self.cast.rounding == "nearest"

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """[N, K], rounded to dtype; float32 for float16, where the largest codes may overflow."""
        values = unrotated(dequantize(self.quantized), self.rotate, self.columns)
        return values if dtype == torch.float16 else values.to(dtype)

    def original(self, weight: Tensor) -> Tensor:
        """[N, K], the weight that an ordinary Linear would have, in the dtype of `weight`."""
        self._refuse_training(weight)
        return self.decoded(weight.dtype).to(weight.dtype).contiguous()

    def beside(self, buffers: dict[str, Tensor | None]) -> FrozenWeight:
        """The codes of another matrix by the same cast. buffers: codes, scale, global_scale, words."""
        other = FrozenWeight.__new__(FrozenWeight)
        nn.Module.__init__(other)
        other.__dict__ |= {
            name: self.__dict__[name] for name in ("recipe", "cast", "inner", "columns", "rotate")
        }
        for name in ("codes", "scale", "global_scale", "words"):
            other.register_buffer(name, buffers.get(name))
        return other

    def encodes(self, weight: Tensor, state: dict[str, Any], prefix: str) -> bool:
        """True if the codes in a state dict decode to `weight`, False for codes of another form."""
        given = {name: state.get(f"{prefix}{name}") for name, _ in self.named_buffers()}
        for name, own in self.named_buffers():
            if (
                (found := given[name]) is None
                or found.shape != own.shape
                or found.dtype != own.dtype
            ):
                return False
        other = self.beside(given)
        return torch.equal(other.original(weight.new_empty(0)), weight)


def refuse_training(weight: Tensor, cast: Cast) -> None:
    """Raise ConfigError if a weight that is stored as codes of this cast requires a gradient."""
    if weight.requires_grad:
        raise ConfigError(
            f"A weight {list(weight.shape)} is to train, but was frozen as {cast.format} codes. Call requires_grad_(False), "
            "then narrowgauge.memory.thaw(model, patterns), which gives back what they decode to, and requires_grad_() then.",
            code="freeze.trains",
        )


def empty(weight: Tensor, shape: tuple[int, ...]) -> None:
    """Free the memory of a weight: one element of NaN remains, expanded to `shape`.

    A read that bypasses `__torch_function__` is visible so.
    """
    if any(weight.stride()) or weight.shape != shape:
        weight.data = weight.new_full([1] * len(shape), float("nan")).expand(shape)


def _take_over(layer: QLinear, written: CodedWeight, whole: Tensor) -> bool:
    """Give the layer a copy of its decoded weight that a user wrote to."""
    codes = written._codes
    # torch's pruning moves the Parameter to another name.
    if layer.frozen is not codes or codes_of(layer._parameters.get("weight")) is not codes:
        return False
    give_back(layer, whole)
    return True


def give_back(layer: QLinear, whole: Tensor) -> None:
    """Give the layer this 16-bit weight, [out_features, in_features], and drop its codes."""
    weight = layer._parameters["weight"]
    if type(weight) is CodedWeight:
        coded_weight.release(weight)
    weight.data = whole
    layer.frozen.drop(layer)


def refuse(layer: QLinear) -> str:
    """Return the reason why a layer's weight cannot be stored as codes, a clause, or ''."""
    recipe: Recipe | None = layer.recipe
    if recipe is None:
        return "no recipe casts it"
    # Of an expert's matrix ranks share the whole stack.
    held = layer.weight if layer.parameter is None else layer.parameter
    if layer.state.gathered is not None or type(held).__name__ == "DTensor":
        return "ranks share it"
    if recipe.backward == "straight-through":
        return f"{recipe.name} multiplies straight-through, which needs the weight in backward"
    if layer.is_transposed:
        return "it is stored transposed, and codes lie as the product reads them"
    cast = recipe.output.rhs
    if cast is None:
        return f"{recipe.name} takes it in 16 bits"
    if cast.rounding != "nearest" or isinstance(cast.calibrate, LearnedStep):
        return f"its cast {cast} is not the same at every step"
    if recipe.output.rotate is not None and recipe.output.rotate.signs == "random":
        return "a rotation with new signs at every product comes before its cast"
    if layer.weight.is_meta:
        return "it is on the meta device, without numbers"
    return ""


@torch.no_grad()
def codes(layer: QLinear) -> QTensor:
    """Return the codes of the weight [N, K] by which the layer multiplies in evaluation.

    The codes as which it was frozen, or the cast of its weight as it is now. Under delayed scaling
    evaluation scales a weight by its own amax, and nothing is recorded. `refuse(layer)` must be ''.
    Costs one cast.
    """
    if layer.frozen is not None:
        layer.frozen.check(layer)  # drops the codes if the weight was replaced
    if layer.frozen is not None:
        held: QTensor = layer.frozen.quantized
        return held
    was_training = layer.training
    layer.training = False  # `eval` would drop casts that a training loop still reads
    try:
        return cast_weight(layer, layer.weight)
    finally:
        layer.training = was_training


@torch.no_grad()
def forward_operand(layer: QLinear) -> Tensor:
    """Return the weight [N, K], float32, as the `output` GEMM multiplies by it in evaluation.

    An observer reads it in one forward pass of one row, by the layer's own plan and caches: a second
    source beside `codes`. A rotation is undone. Mode and observer are restored, and nothing is
    recorded; cached casts are dropped. Without a recipe the weight itself.
    """
    seen: list[QTensor | Tensor] = []

    def look(gemm: str, role: str, original: Tensor, operand: QTensor | Tensor) -> None:
        if (gemm, role) == ("output", "w"):
            seen.append(operand)

    state, weight, was_training = layer.state, layer.weight, layer.training
    observer, was_called = state.observer, state.was_called
    layer.eval()
    state.observer = look
    try:
        # `forward`, not a call: the user's hooks belong to the user's passes.
        layer.forward(torch.zeros(1, layer.in_features, dtype=weight.dtype, device=weight.device))
    finally:
        state.observer, state.was_called = observer, was_called
        layer.train(was_training)
    found = seen[0] if seen else weight.detach()
    if not isinstance(found, QTensor):
        return found.to(torch.float32)
    rotate = layer.recipe.output.rotate
    return unrotated(dequantize(found), rotate, layer.in_features)


def unrotated(values: Tensor, rotate: Hadamard | None, columns: int) -> Tensor:
    """Return values [N, n] before the rotation of their GEMM, [N, columns] float32."""
    if rotate is None:
        return values
    from narrowgauge.ops.hadamard import unrotate

    return unrotate(values, rotate, columns, Rotation.draw(rotate, values).signs)


@torch.no_grad()
def cast_weight(layer: QLinear, weight: Tensor) -> QTensor:
    """Quantize such a weight [N, K] as the layer's `output` GEMM would. It may be another's."""
    context = layer.context(weight)
    # Neither read nor fill the caches: the weight may be another than the layer's.
    context.sources = CastSources()
    operand = find("w", weight.detach(), context, (False, False), layer.amax_state("w"))
    found = operand.rows(Rotation.draw(context.plan.w.rows_rotate, weight))
    assert isinstance(found, QTensor)
    return found.compact()


def _expanded(found: QTensor, expand: torch.dtype | None) -> QTensor:
    return found if expand is None else found.expanded(expand)


def _turned(found: QTensor) -> QTensor:
    """Return the transposed tensor in row-major order, as a GEMM reads it."""
    codes = (
        found.cast.format.pack(found.one_to_a_byte().T.contiguous())
        if found.is_packed
        else found.data.T.contiguous()
    )
    return QTensor(
        data=codes, scale=found.scale.T, cast=found.cast, inner=found.shape[0], global_scale=found.global_scale, checked=True
    )  # fmt: skip

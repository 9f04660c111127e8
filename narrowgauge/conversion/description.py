"""describe: list each Linear of a model with its recipe, kernels and the reasons.

print(describe(model))               one screen (description_text.py); `describe(model)` is a list of rows
print(describe(model, batch=batch))  and the share of operations in low precision (`coverage`)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from narrowgauge.addresses import holds_numbers
from narrowgauge.conversion.attention_precision import attention_words
from narrowgauge.conversion.bypassed import is_read_by_owner
from narrowgauge.conversion.description_text import (
    Note,
    Row,
    lines_of_fusions,
    lines_of_layers,
    total,
    wrapped,
)
from narrowgauge.conversion.kept_layers import (
    LEFT_BY,
    output_head,
    reason_of_weight,
    reason_to_keep,
)
from narrowgauge.errors import Reason
from narrowgauge.fuse import Fusion, fusions
from narrowgauge.nn.embedding import QEmbedding
from narrowgauge.nn.float32_modules import kept_modules, summary
from narrowgauge.nn.foreign_modules import adapter, why_unknown
from narrowgauge.nn.leverage_score import UNREAD
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.hadamard import rotated_length
from narrowgauge.ops.mm import plan, why_emulated
from narrowgauge.ops.mm.cublas import ALIGNMENT
from narrowgauge.ops.triton.grids import free_multiprocessors, multiprocessors, why_no_grids
from narrowgauge.structure import features, is_linear, other_weights, require_module

if TYPE_CHECKING:
    from narrowgauge.conversion.coverage import Coverage
    from narrowgauge.recipe import Gemm, Recipe


class Description(list[Row]):
    """The rows of `describe`. Prints as a table in which equal layers share a line.

    fused    the fusions of `convert(fuse=True)`
    float32  modules of a 16-bit model that keep float32 weights and arithmetic
    coverage shares of the matrix-product operations, of `describe(model, batch=...)`; else None
    attention sentences on attention in FP8, and on what stays in 16 bits, of `attention="fp8"`
    """

    fused: tuple[Fusion, ...] = ()
    float32: tuple[str, ...] = ()
    coverage: Coverage | None = None
    attention: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [*lines_of_layers(self)]
        said = [*self.attention]
        if self.coverage is not None:
            said += [self.coverage.attention, str(self.coverage)]
        for words in filter(None, said):
            lines += wrapped(f"{words}.", 0)
        if self.float32:
            lines += wrapped(f"Weights and arithmetic in float32: {summary(self.float32)}", 0)
        lines += lines_of_fusions(self.fused)
        return "\n".join([*lines, *wrapped(total(self), 0)])


def describe(model: nn.Module, *, batch: Any = None) -> Description:
    """Return a row for every Linear, quantized embedding, and weight multiplied as a Linear.

    batch  arguments of the model's forward, as for `coverage`: counts the share of matrix-product
           operations in low precision, and names the kernels of attention. None: no count

    Linears with a forward of their own are included. Weights outside of Linears (see `structure`)
    have the recipe "none". Print the result for a table.
    """
    require_module(model, "describe")
    description, head = Description(), output_head(model)
    description.fused, description.float32 = tuple(fusions(model)), tuple(kept_modules(model))
    description.attention = tuple(attention_words(model))
    is_converted = any(isinstance(module, QLinear) for module in model.modules())
    of_stacks: dict[tuple[str, str], Note] = {}
    for name, module in model.named_modules():
        if isinstance(module, QLinear) and module.recipe is not None:
            description.append(_row(model, name, module, module.recipe, of_stacks))
        elif (foreign := adapter(module)) is not None:
            description.append(_foreign_row(name, foreign))
        elif is_linear(module):
            decision = module.decision if isinstance(module, QLinear) else None
            left_by = (
                module.reason if isinstance(module, QLinear) else module.__dict__.get(LEFT_BY, "")
            )
            why = (
                (str(decision) if decision else "")
                or left_by
                or reason_to_keep(name, module, [], head)
                or Reason("no-pattern", "no pattern named it")
            )
            why = why if is_converted else _of_unconverted(why)
            description.append(_wide_row(name, _shape(module), "ordinary Linear", why))
        elif isinstance(module, QEmbedding):
            description.append(_embedding_row(model, name, module))
        elif (unknown := why_unknown(module)) is not None:
            description.append(_wide_row(name, "not known", "by its own library", unknown))
        else:
            for weight, shape, reason in other_weights(name, module):
                why = reason_of_weight(module, reason)
                why = why if is_converted else _of_unconverted(why)
                description.append(_wide_row(weight, shape, "no nn.Linear", why))
    if batch is not None:
        from narrowgauge.conversion.coverage import coverage

        description.coverage = coverage(model, batch)
    return description


def _of_unconverted(reason: str) -> str:
    """The reason in a model in which no layer has a recipe, where no pattern was given at all."""
    is_unnamed = getattr(reason, "code", "") == "no-pattern"
    return Reason("not-converted", "the model is not converted") if is_unnamed else reason


def _shape(layer: nn.Module) -> str:
    return " -> ".join(map(str, features(layer)))


def _wide_row(name: str, shape: str, words: str, note: str) -> Row:
    return Row(
        name=name, shape=shape, recipe="none", output=words, grad_input=words, grad_weight=words,
        backend="torch", notes=(Note.of(note),),
    )  # fmt: skip


def _foreign_row(name: str, layer: Any) -> Row:
    """Row of a module of another library. The backend is that library."""
    recipe = layer.recipe
    # A weight of codes may have any shape; the features tell the matrix.
    is_plain = isinstance(layer.module, nn.Linear)
    matrices = [f"{each.shape[1]} -> {each.shape[0]}" for each in layer.matrices().values()]
    shape = _shape(layer.module) if is_plain else ", ".join(matrices)
    notes = [Note.of(layer.unobserved)] if layer.unobserved else []
    if layer.is_suspended:
        notes.append(Note("suspended", code="suspended"))
    return Row(
        name=name, shape=shape, recipe=recipe.name, output=str(recipe.output), grad_input=str(recipe.grad_input),
        grad_weight=str(recipe.grad_weight), backend=layer.library, notes=tuple(notes),
    )  # fmt: skip


def _embedding_row(model: nn.Module, name: str, layer: QEmbedding) -> Row:
    tied = [
        other
        for other, each in model.named_modules()
        if isinstance(each, nn.Linear) and each.weight is layer.weight
    ]
    notes = [f"{name!r} has the same weight and reads it without these codes" for name in tied[:1]]
    notes += ["suspended"] * layer.is_suspended
    return Row(
        name=name, shape=f"{layer.num_embeddings} rows of {layer.embedding_dim}", recipe=f"{layer.format} rows",
        output=f"{layer.format}, learned step, of the rows that are looked up", grad_input="none", grad_weight="where not clipped",
        backend="torch", notes=tuple(map(Note, notes)),
    )  # fmt: skip


def _row(
    model: nn.Module,
    name: str,
    layer: QLinear,
    recipe: Recipe,
    of_stacks: dict[tuple[str, str], Note],
) -> Row:
    kept = ", x kept as codes" if recipe.saves_codes else ""
    if kept and recipe.backward == "straight-through":
        kept += " and what was clipped"
    backends = {product: _backend(gemm, layer) for product, gemm in recipe.gemms().items()}
    backend = "; ".join(f"{product}: {words}" for product, words in backends.items())
    return Row(
        name=name,
        shape=_shape(layer),
        recipe=recipe.name,
        output=str(recipe.output),
        grad_input=str(recipe.grad_input),
        grad_weight=str(recipe.grad_weight) + kept,
        backend=backends["output"] if len(set(backends.values())) == 1 else backend,
        notes=(*_notes(model, name, layer, of_stacks), *_four_bit_notes(layer, recipe)),
        sends="" if layer.state.peers is None else layer.state.peers.describe_traffic(layer),
        emulated=any(why_emulated(gemm, layer.weight.device) for gemm in recipe.gemms().values()),
    )


def _backend(gemm: Gemm, layer: QLinear) -> str:
    """ "native" or "reference (native: reason)", with the kernel's name."""
    how = plan(gemm, layer.weight.device)
    if gemm.lhs is None or gemm.rhs is None:
        in_float32 = how.expand == torch.float32
        return "torch" + (
            " (multiplied in float32: this CPU has no bfloat16 instructions)" if in_float32 else ""
        )
    # `relevant` leaves out kernels that are made for other operands.
    reasons = "; ".join(f"{name}: {refusal}" for name, refusal in how.choice.relevant)
    if how.expand is None:
        kernel = how.choice.kernel
        units = "" if kernel.instructions is None else kernel.instructions()
        details = "; ".join(filter(None, (units, reasons)))
        return f"{kernel.name} ({details})" if details else kernel.name
    dtype = str(how.expand).removeprefix("torch.")
    return f"emulated exactly in {dtype} ({reasons or why_emulated(gemm, layer.weight.device)})"


def _of_experts(model: nn.Module, name: str, known: dict[tuple[str, str], Note]) -> Note:
    """How the stack of the expert "mlp.experts.3.down_proj" is multiplied on a GPU.

    known  notes of the stacks that were asked before, since each asks all of its experts
    """
    path, _, own = name.rpartition(".")
    stack = path.rpartition(".")[0]
    if (stack, own) not in known:
        module: Any = model.get_submodule(stack)
        found, code = module.kernel_of(own), "experts-grouped"
        words = f"all experts in one launch: {found}"
        if isinstance(found, Reason):
            words, code = f"experts are multiplied one after another: {found}", "experts-loop"
        known[stack, own] = Note(words, code=code)
    return known[stack, own]


def _of_grids(index: int | None) -> Note | None:
    """Note on casts with one scale per tensor or row and no history, which find maxima before they cast."""
    if words := why_no_grids(index):
        return Note(f"casts with current scales take two launches: {words}", code="no-grids")
    if free := free_multiprocessors(index):
        present = multiprocessors(index)
        return Note(
            f"casts with current scales leave {free} of {present} multiprocessors free",
            code="free-multiprocessors",
        )
    return None


def _notes(
    model: nn.Module, name: str, layer: QLinear, of_stacks: dict[tuple[str, str], Note]
) -> Iterator[Note]:
    if layer.reason:
        yield Note.of(layer.reason)
    if layer.frozen is not None:
        yield Note(
            f"frozen, kept as {layer.frozen.cast} codes without a 16-bit copy", code="frozen-codes"
        )
    if (decision := layer.decision) is not None:
        own = getattr(decision, "way", str(decision))  # of a schedule it is a sentence
        also = (getattr(decision, key, "") for key in ("times", "no_candidates"))
        yield from (Note(words, code="auto") for words in (own, *also) if words)
    if layer.is_expert and layer.weight.is_cuda:
        yield _of_experts(model, name, of_stacks)
    if layer.is_suspended:
        yield Note("suspended", code="suspended")
    if layer.weight.is_cuda and (note := _of_grids(layer.weight.device.index)):
        yield note
    operands = (
        [cast for gemm in layer.recipe.gemms().values() for cast in (gemm.lhs, gemm.rhs)]
        if layer.recipe
        else []
    )
    if None in operands and layer.weight.dtype == torch.float16:
        yield Note("16-bit operands are float16, as its weight", code="float16")
    if not layer.weight.requires_grad:
        yield Note("weight frozen: no grad_weight", code="frozen")
    if layer.in_features % ALIGNMENT or layer.out_features % ALIGNMENT:
        yield Note(f"filled up to multiples of {ALIGNMENT} inside native GEMMs", code="padded")
    if type(layer.weight).__name__ == "DTensor" and layer.recipe is not None:
        from narrowgauge.nn.sharded import cut_tiles

        if words := cut_tiles(layer.weight, layer.recipe):
            yield Note(words, code="cut-tiles")
    if layer.state.is_bypassed:
        yield Note(
            "its weight was multiplied without calling it in training: there the recipe takes no effect",
            code="bypassed",
        )
    if is_read_by_owner(model, name):
        owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
        yield Note(
            f"{owner}.forward multiplies by its weight without calling it: there the recipe takes no effect",
            code="read-by-owner",
        )


def _four_bit_notes(layer: QLinear, recipe: Recipe) -> Iterator[Note]:
    """Notes on padding by a rotation, on learned steps and on sampling."""
    rotation = recipe.output.rotate
    if rotation is not None and layer.in_features % rotation.block:
        filled = rotated_length(layer.in_features, rotation)
        yield Note(
            f"contracted axis filled up from {layer.in_features} to {filled} for the rotation",
            code="rotation",
        )
    if layer.steps is not None and layer.steps.is_cold:
        yield Note("steps from the data, learned later", code="learned-steps")
    elif layer.steps is not None:
        inner, output = layer.in_features, recipe.output
        steps, share = layer.steps, inner / rotated_length(inner, rotation)
        steps.note("w", layer.weight)
        for role, cast in (("x", output.lhs), ("w", output.rhs)):
            over = None
            if role in steps.settings and cast is not None:
                over = steps.over_best(role, cast.format.max, share)
            if over is not None:
                words = f"learned step of {role} ", " times the one with the least error"
                yield Note(*words, (over,), "learned-step")
    if layer.sampling is not None and holds_numbers(layer.sampling.variance):
        for product, variance in zip(
            layer.sampling.PRODUCTS, layer.sampling.variance.tolist(), strict=True
        ):
            if product in layer.sampling.settings:
                does = f"{product} {'samples its rows' if product in layer.sampling.active else 'keeps all rows'}"
                known = Note(
                    f"{does} (sampling adds ", " relative variance)", (variance,), "sampling"
                )
                # An average of models (EMA) may mix UNREAD with readings.
                yield (
                    known
                    if variance < UNREAD / 2**32
                    else Note(f"{does} so far", code="sampling-unread")
                )

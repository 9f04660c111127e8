"""Layers of an export: codes or 16 bits, with the reason for 16 bits.

    chosen(model, format)     name of each Linear, and of other weights that are multiplied -> WeightChoice
    made(layer, format, ...)  the QTensor that goes out
    change(layer, format)     distance of the format's own cast from them

A layer's codes go out as they are, or not at all: no step of the export rounds them again, unless
the caller asks for `requantize`.

vLLM and SGLang load q, k and v (gate and up) as one weight with one scheme. Either all layers
of a group become codes, or none. vLLM takes the largest of NVFP4's global scales in a group and
does not rescale the tiles (its issue 47515). Powers of two are rescaled here to the group's
largest, where e4m3 holds the tiles' scales exactly. Otherwise the group stays wide.

Source: vLLM 0.33, model_executor/models/llama.py and layers/quantization.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from narrowgauge.conversion.checkpoint_names import expert_names
from narrowgauge.conversion.description import describe
from narrowgauge.errors import ConfigError, Reason
from narrowgauge.export.file_formats import FORMATS, NVFP4, NVFP4_MODELOPT, ExportFormat
from narrowgauge.nn.frozen import codes, forward_operand
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.quantize import dequantize, quantize

if TYPE_CHECKING:
    from narrowgauge.qtensor import QTensor

# Last parts of the names of layers that servers load as one weight.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("query", "key", "value"),
)
LARGEST_NVFP4 = 448 * 6  # E4M3's largest number times E2M1's
CALIBRATED_TOKENS = 2_048  # of one forward pass: logits of all at once would be gigabytes
MEASURED = 8  # layers of which a refusal says how far the format's own cast is from the forward's


@dataclass(frozen=True, kw_only=True)
class WeightChoice:
    """Codes or 16 bits for one weight.

    reason         why it stays wide, a clause; '' for codes
    requantized    the codes are of the format's own cast, not of the forward pass
    global_scale   NVFP4: the power of two to which the tiles' scales are rescaled; None: its own
    input_scale    static scale of x, from a calibration pass; None: none
    """

    reason: str = ""
    requantized: bool = False
    global_scale: float | None = None
    input_scale: float | None = None

    @property
    def is_narrow(self) -> bool:
        return not self.reason


def chosen(
    model: nn.Module, form: ExportFormat, requantize: bool = False, fused: bool = True
) -> dict[str, WeightChoice]:
    """Choose for each Linear, and for other weights that are multiplied, by name.

    requantize  cast weights anew where the forward's codes do not fit
    fused       keep groups that servers load as one weight together
    """
    choices, notes = dict[str, WeightChoice](), dict[str, set[str]]()
    for row in describe(model):
        notes[row.name] = {note.code for note in row.notes}
        if row.recipe == "none":
            choices[row.name] = _wide(next(iter(notes[row.name]), ""), row.note)
        elif row.recipe.endswith(" rows"):  # an embedding as codes
            choices[row.name] = _wide(
                "embedding", f"its lookups round to {row.recipe}, which no format holds"
            )
    tied = _tied(model)
    for name, layer in model.named_modules():
        if isinstance(layer, QLinear) and hasattr(layer, "place"):
            continue  # a matrix of experts, see `_experts`
        if isinstance(layer, QLinear) and layer.recipe is not None:
            others = [
                each for each in tied.get(id(layer._parameters.get("weight")), ()) if each != name
            ]
            if others:
                choices[name] = _wide("tied", f"tied to {others[0]}")
            elif "read-by-owner" in notes[name]:
                choices[name] = _wide(
                    "read-by-owner", "its owner multiplies by its weight without calling it"
                )
            elif layer.is_transposed or hasattr(layer, "parameters_of_owner"):
                choices[name] = _wide(
                    "stored-otherwise",
                    "its weight is stored transposed, or as a part of another, and readers of codes expect one as nn.Linear's",
                )
            elif "suspended" in notes[name]:
                choices[name] = _wide("suspended", "its recipe is suspended")
            else:
                choices[name] = _choice(type(model).__name__, layer, form, requantize)
        elif isinstance(layer, nn.Linear):
            choices.setdefault(name, _wide("no-recipe", "no recipe casts it"))
    choices |= _experts(model, form, requantize)
    # Last: a group follows what was chosen for each of its layers.
    if fused and form.fused and form.cast is not None:
        for group in groups(choices):
            choices |= _together(model, {name: choices[name] for name in group}, form)
    return choices


def _experts(model: nn.Module, form: ExportFormat, requantize: bool) -> dict[str, WeightChoice]:
    """Choose for experts that share one parameter, all of a mixture alike.

    ->  name of each expert's matrix, as `experts.3.down_proj`, if all become codes; else the names
        of the parameters, as `experts.down_proj`
    """
    mixtures: dict[str, dict[str, Any]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, QLinear) and hasattr(layer, "place"):
            mixtures.setdefault(name.rsplit(".", 2)[0], {})[name] = layer
    found: dict[str, WeightChoice] = {}
    for owner, members in mixtures.items():
        stacks = {f"{owner}.{layer.place.weight}": layer for layer in members.values()}
        are_split = all(expert_names(model, stack) for stack in stacks)
        own = {name: _expert(layer, form, requantize) for name, layer in members.items()}
        wide = next((each for each in own.values() if not each.is_narrow), None)
        if form.cast is None or (form.experts and wide is not None):
            found |= dict.fromkeys(stacks, wide or _wide("16-bit-format", "the format has 16 bits"))
        elif not form.experts or not are_split:
            why = "experts that share one parameter: transformers does not read them in this format"
            found |= dict.fromkeys(stacks, _wide("experts", why))
        else:
            found |= own
    return found


def _expert(layer: Any, form: ExportFormat, requantize: bool) -> WeightChoice:
    if layer.recipe is None or layer.place.is_transposed:
        return _wide(
            "no-recipe", "experts that share one parameter, without a recipe or transposed"
        )
    choice = _choice("", layer, form, requantize)
    # Files have gate and up as two weights, each with the tiles of its own rows.
    why = ""
    if choice.is_narrow and "gate_up" in layer.place.weight and form.cast is not None:
        why = form.refuse(form.cast, layer.out_features // 2, layer.in_features)
    return WeightChoice(reason=why) if why else choice


def groups(names: Iterable[str]) -> Iterator[list[str]]:
    """Yield groups of layers that servers load as one weight, by name, each of two layers or more."""
    there = set(names)
    for parent in sorted({name.rpartition(".")[0] for name in there}):
        for parts in FUSED:
            group = [name for part in parts if (name := f"{parent}.{part}") in there]
            if len(group) > 1:
                yield group


def _tied(model: nn.Module) -> dict[int, list[str]]:
    """id of each parameter -> the names of the modules that hold it."""
    found: dict[int, list[str]] = {}
    for owner, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), []).append(owner)
    return found


def _wide(code: str, words: str) -> WeightChoice:
    return WeightChoice(reason=Reason(code, words))


def _choice(model: str, layer: QLinear, form: ExportFormat, requantize: bool) -> WeightChoice:
    """model: the name of its class."""
    assert layer.recipe is not None
    recipe, cast = layer.recipe, layer.recipe.output.rhs
    if form.cast is None:
        return _wide("16-bit-format", "the format has 16 bits")
    if cast is None:
        return _wide("16-bit", layer.reason or f"{recipe.name} takes it in 16 bits")
    rows, columns = layer.out_features, layer.in_features
    why = form.holds(cast, rows, columns)
    if recipe.output.rotate is not None:
        why = Reason(
            "rotated",
            f"{recipe.name} casts it after a rotation by {recipe.output.rotate}, which no reader turns back",
        )
    if not why and form.inputs and input_amax(layer) is None:
        why = Reason(
            "no-history", "its amax history of x is empty: train it first, or name a checkpoint"
        )
    if not why and form.limits is not None:
        why = form.limits(model, cast, lambda: codes(layer))
    if why and requantize and not form.inputs and not form.refuse(form.cast, rows, columns):
        found = WeightChoice(requantized=True)
        if form.limits is not None:
            why = form.limits(model, form.cast, lambda: made(layer, form, found))
            return WeightChoice(reason=why) if why else found
        return found
    return WeightChoice(reason=why)


def _together(
    model: nn.Module, group: dict[str, WeightChoice], form: ExportFormat
) -> dict[str, WeightChoice]:
    """The choices of a fused group, made equal."""
    # One scheme for a group: vLLM raises "different quantization schemes for the shards" otherwise.
    wide = next((name for name, each in group.items() if not each.is_narrow), "")
    if wide:
        because = f"servers load it with {wide}, which stays wide: {group[wide].reason}"
        return {
            name: _wide("fused", because) if each.is_narrow else each
            for name, each in group.items()
        }
    if form not in (NVFP4, NVFP4_MODELOPT):
        return group
    found = {name: made(model.get_submodule(name), form, each) for name, each in group.items()}
    scales = {float(q.global_scale) for q in found.values() if q.global_scale is not None}
    if len(scales) == 1:
        return group
    largest = max(scales)
    if all(rescaled(q, largest) is not None for q in found.values()):
        return {name: replace(each, global_scale=largest) for name, each in group.items()}
    first, *others = (name.rpartition(".")[2] for name in group)
    why = (
        f"{first} and {', '.join(others)} have global scales of their own ({min(scales):.4g} to {largest:.4g}), and servers "
        "that load them as one weight take the largest for all; --unfused writes them for readers that do not"
    )
    return dict.fromkeys(group, _wide("global-scales", why))


def rescaled(q: QTensor, global_scale: float) -> QTensor | None:
    """The same numbers under a larger global scale, or None if e4m3 does not hold the tiles' scales."""
    assert q.global_scale is not None
    # Both scales change by a power of two, so the product is the same to the bit. A tile's scale may
    # underflow in e4m3.
    ratio = float(q.global_scale) / global_scale
    scale = q.scale * ratio
    if torch.frexp(torch.tensor(ratio, device="cpu"))[0] != 0.5 or not torch.equal(
        scale.to(torch.float8_e4m3fn).to(torch.float32), scale
    ):
        return None
    return replace(q, scale=scale, global_scale=q.global_scale / ratio, checked=True)


# --- the codes of one layer, and the numbers that its forward pass multiplies by ------------------


@torch.no_grad()
def made(layer: Any, form: ExportFormat, choice: WeightChoice) -> QTensor:
    """Return the codes for the file: the forward's, or those of the format's own cast.

    Costs one cast.
    """
    if not choice.requantized:
        q = codes(layer)
        if choice.global_scale is None:
            return q
        found = rescaled(q, choice.global_scale)
        if found is None:
            raise ConfigError(
                "export: the global scales of a group changed while they were written. Export a model that nobody trains.",
                code="export.changed",
            )
        return found
    assert form.cast is not None
    return quantize(plain_weight(layer).to(torch.float32), form.cast).compact()


def plain_weight(layer: Any) -> Tensor:
    """[N, K]: the layer's weight, or what its codes decode to, in their own dtype."""
    if layer.frozen is not None:
        layer.frozen.check(layer)
    if layer.frozen is not None:
        decoded: Tensor = layer.frozen.decoded(layer.weight.dtype)
        return decoded
    weight: Tensor = layer.weight.detach()
    return weight


@torch.no_grad()
def calibrated(
    model: Any, choices: Mapping[str, WeightChoice], ids: Tensor
) -> dict[str, WeightChoice]:
    """The choices with a static scale of x for each narrow layer: amax over `ids` / (448 * 6).

    ids  [rows, positions], of real text: elements beyond the amax seen here saturate

    That is NVFP4's second scale, as modelopt takes it from its calibration. One forward pass for
    CALIBRATED_TOKENS ids, in whole rows.
    """
    _refuse_ids(ids, model.get_input_embeddings().weight.shape[0])
    largest: dict[str, float] = {}

    def looking(name: str) -> Any:
        def look(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            found = float(given[0].abs().amax())
            largest[name] = max(found, largest.get(name, 0.0))

        return look

    names = [name for name, each in choices.items() if each.is_narrow]
    hooks = [model.get_submodule(name).register_forward_pre_hook(looking(name)) for name in names]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        for rows in ids.split(max(1, CALIBRATED_TOKENS // ids.shape[1])):
            model(input_ids=rows.to(next(model.parameters()).device))
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    unseen = next((name for name in names if not 0 < largest.get(name, 0) < math.inf), None)
    if unseen is not None:
        raise ConfigError(
            f"calibration: the amax of x in {unseen!r} is {largest.get(unseen, 'missing')}. Pass ids of ordinary text.",
            code="export.calibration",
        )
    scales = {name: amax / LARGEST_NVFP4 for name, amax in largest.items()}
    return {
        name: replace(each, input_scale=scales[name]) if name in scales else each
        for name, each in choices.items()
    }


def _refuse_ids(ids: Any, rows: int) -> None:
    """rows: of the embedding."""
    if not isinstance(ids, Tensor):
        what = f"is a {type(ids).__name__}"
    elif ids.dtype not in (torch.int32, torch.int64) or ids.ndim != 2 or not ids.numel():
        what = f"is {str(ids.dtype).removeprefix('torch.')} of shape {list(ids.shape)}"
    elif int(ids.min()) < 0 or int(ids.max()) >= rows:
        what = f"holds ids from {int(ids.min())} to {int(ids.max())}, and the model knows {rows}"
    else:
        return
    raise ConfigError(
        f"calibration: {what}. Pass token ids [rows, positions] of ordinary text, int64, as the model's own tokenizer gives them.",
        code="export.calibration",
    )


def input_amax(layer: Any) -> Tensor | None:
    """The amax by which delayed scaling casts x in evaluation, 0-d float32; None without one."""
    state = layer.amax_state("x")
    return state[0] if state is not None and float(state[0]) > 0 else None


def refuse(model: nn.Module, form: ExportFormat, choices: Mapping[str, WeightChoice]) -> NoReturn:
    """Raise ConfigError: no layer's numbers are the format's. Says what its own cast would change."""
    narrow = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, QLinear) and layer.recipe is not None and layer.recipe.output.rhs
    }
    if not narrow:
        raise ConfigError(
            f"format = {form.name!r}: no recipe casts a weight of this model, so there are no codes. Convert it first, or export bf16.",
            code="export.no-codes",
        )
    others = [
        name
        for name, each in FORMATS.items()
        if any(choice.is_narrow for choice in chosen(model, each).values())
    ]
    instead = f"Formats that hold them: {', '.join(others)}." if others else "No format holds them."
    anew = chosen(model, form, requantize=True)
    found = [
        change(layer, form)
        for name, layer in list(narrow.items())[:MEASURED]
        if name in anew and anew[name].is_narrow
    ]
    if found:
        instead += (
            f" --requantize casts weights anew, by {min(found):.2g} to {max(found):.2g} of their norm from the forward's (of {len(found)} "
            "layers)."
        )
    name = next(name for name in narrow if name in choices)
    if getattr(choices[name].reason, "code", "") == "suspended":
        instead = "Export it outside of suspended(model)."
    elif not others and not found:
        instead += " bf16 writes the master weights."
    raise ConfigError(
        f"format = {form.name!r}: holds no layer's numbers as they are. Of {name!r}: {choices[name].reason}. {instead}",
        code="export.no-layer",
    )


def change(layer: QLinear, form: ExportFormat) -> float:
    """Relative distance, by the Frobenius norm, of the format's own cast from the forward's operand."""
    ours = forward_operand(layer)
    theirs = dequantize(made(layer, form, WeightChoice(requantized=True)))
    return relative(theirs, ours)


def relative(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|, by the Frobenius norm; 0 for equal tensors."""
    if torch.equal(found, expected):
        return 0.0
    norm = torch.linalg.vector_norm(expected.double())
    return float(torch.linalg.vector_norm(found.double() - expected.double()) / norm)

"""A pretrained model read shard by shard, with the weights of its Linears held as codes from the start.

    empty(config, kind)    the model of a folder; its matrices have no memory (device "meta")
    fill(model, where)     each tensor of each file: read, put in its place and dtype, cast to codes
                           where its layer's recipe allows, and freed
    digest(where)          SHA-256 of all weights of the folder, whatever files they are in

The model is converted between `empty` and `fill`, so that each layer knows its cast. Peak memory of
loading: the codes and 16-bit tensors so far, one shard as far as its pages have been touched, and
one tensor beside its codes. The model never exists in 16 bits as a whole.

Names in the files are those of the model, or those by which transformers saves the class, with or
without the prefix of its base model. Experts in one parameter are read expert by expert
(`coded_experts`). A weight that no file holds under such a name is refused.

A folder whose weights are FP8 already (quantization_config: fp8, blocks of 128 x 128, as DeepSeek's
and Qwen's) holds `weight` as E4M3 and `weight_scale_inv`, which multiplies. With power-of-two scales
these are the codes of `fp8-block` and are taken as they are. Other scales are no codes of a recipe,
so the weight is decoded and cast, one tensor at a time, and the report counts such weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from narrowgauge.errors import ConfigError
from narrowgauge.memory.freezing import code_refusal, store_as_codes
from narrowgauge.nn.experts import GroupedExperts, stacks
from narrowgauge.nn.frozen_experts import refuse_stack, store_stack_as_codes
from narrowgauge.nn.linear import QLinear
from narrowgauge.qtensor import QTensor
from narrowgauge.storage import reading
from narrowgauge.train import coded_experts
from narrowgauge.train.checkpoint.store import nonfinite
from narrowgauge.train.coded_experts import TIED, ExpertStack, Held
from narrowgauge.train.model_files import INDEX, OF_MODELS, file_of

if TYPE_CHECKING:
    from collections.abc import Callable

SINGLE = "model.safetensors"
SCALE = "_scale_inv"  # of a block-FP8 checkpoint: "layer.weight" has "layer.weight_scale_inv"
BLOCK = 128
CHUNK_BYTES = 2**24
OF_WEIGHTS = reading.Kind(
    most_bytes=2**62, step="Restore it, or load the model again.", follow_links=True
)
HEADER_BYTES = 2**27  # of a safetensors file; the library's own limit is 100 MB


@dataclass
class Filled:
    """Counts of `fill`.

    coded       weights held as codes, their elements and the bytes of codes and scales
    taken       of these, weights that were codes in the file
    recoded     of these, weights that were FP8 codes with scales of another cast
    wide_bytes  bytes of all other tensors
    kept        reason -> names of Linears that could not be held as codes
    """

    coded: int = 0
    elements: int = 0
    code_bytes: int = 0
    taken: int = 0
    recoded: int = 0
    wide_bytes: int = 0
    kept: dict[str, list[str]] | None = None

    def __str__(self) -> str:
        words = (
            f"{self.coded} frozen weights are held as codes, {self.code_bytes / max(1, self.elements):.3f} bytes each; "
            f"other weights take {self.wide_bytes / 2**20:,.1f} MiB."
        )
        if self.taken:
            words += f" {self.taken} were such codes in the files and are taken as they are."
        if self.recoded:
            words += f" {self.recoded} were FP8 with other scales, so they were decoded and cast."
        for reason, names in (self.kept or {}).items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            words += f" Kept wide: {names[0]}{more}, {reason}."
        return words


class _MatricesOnMeta(TorchFunctionMode):
    """Sends torch.empty, by which modules make matrices, to the meta device.

    What is computed (rotary frequencies, masks) and the ones and zeros of norms get memory. Under
    torch.device("meta") the former would be lost: no file holds them.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def empty(auto: Any, sizes: Any) -> Any:
    """The model of a configuration in float32, whose matrices are on the meta device.

    auto   Auto class of transformers
    sizes  configuration of the model
    """
    # What the files hold is read here, so transformers' own quantizers have nothing to do.
    if getattr(sizes, "quantization_config", None) is not None:
        del sizes.quantization_config
    with _MatricesOnMeta():
        model = auto.from_config(sizes, trust_remote_code=False, dtype=torch.float32)
    model.tie_weights()
    return model


@torch.no_grad()
def fill(model: nn.Module, where: str, device: torch.device) -> Filled:
    """Reads the weights of a folder or Hub model into an `empty` model, on `device`.

    Every parameter keeps its dtype and is frozen. Weights of converted Linears are held as codes
    where `code_refusal` has no reason against it. Raises ConfigError for a weight that no file
    holds, of another shape, that is not finite, or that is codes of another form than FP8 blocks.
    """
    report, files = Filled(kept={}), files_of(where)
    scales = _scales(files)
    places, tied = _places(model), _tied(model)
    keys, prefix = _keys(files, where), f"{model.base_model_prefix}."
    absent = [name for name in places if keys.isdisjoint(_names(name, prefix))]
    experts = coded_experts.stacks_of(model, {name: places[name] for name in absent}, tied)
    own = {name: name for name in places} | coded_experts.renamed(model, absent)
    filled: set[str] = set()
    for file in files:
        with reading.opened_tensors(file, OF_WEIGHTS) as opened:
            for key in opened.keys():  # noqa: SIM118  (no mapping)
                if key.endswith(SCALE):
                    continue
                given = _FileTensor(key, opened.get_tensor(key), scales.get(key), device, where)
                if (part := _found(key, prefix, experts)) is not None:
                    _put_part(experts[part], part, given, report)
                    filled.add(experts[part].name)
                elif (named := _found(key, prefix, own)) is not None:
                    name = own[named]
                    _put(model, places[name], name, given, name in tied, report)
                    filled.add(name)
    model.tie_weights()  # type: ignore[operator]
    coded_experts.refuse_incomplete(experts, where)
    _refuse_missing(model, where)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
        for name, parameter in module._parameters.items():
            if parameter is not None and name not in filled and parameter.device != device:
                parameter.data = parameter.data.to(device)
    return report


def _put(
    model: nn.Module, place: tuple[nn.Module, str], name: str, given: _FileTensor, is_tied: bool,
    report: Filled,
) -> None:  # fmt: skip
    """Puts one tensor of a file in its place, as codes where the layer's recipe allows."""
    module, key = place
    own = module._parameters.get(key)
    target = own if own is not None else module._buffers[key]
    assert target is not None
    value, codes = given.value(target, list(target.shape)), given.codes(module)
    if own is None:
        module._buffers[key] = value
        return
    module._parameters[key] = nn.Parameter(value, requires_grad=False)
    taken = _hold(model, module, name.rpartition(".")[0], key, is_tied, report, codes)
    report.taken += taken and codes is not None
    report.recoded += taken and given.scale is not None and codes is None


def _put_part(stack: ExpertStack, key: str, given: _FileTensor, report: Filled) -> None:
    """Puts one tensor of an expert in its place; holds the stack once it is whole."""
    stack.begin(given.device)
    value = given.value(stack.parameter, stack.shape)
    taken, cast = stack.put(key, value, given.codes(stack.first))
    report.taken += taken
    report.recoded += cast if given.scale is not None else 0
    if not stack.missing:
        elements = stack.parameter.numel()
        _count(report, stack.end(), stack.name, elements, len(stack.parts) // stack.count)


def _count(report: Filled, held: Held, name: str, elements: int, weights: int) -> None:
    if held.reason:
        report.wide_bytes += held.nbytes
        if report.kept is not None:
            report.kept.setdefault(held.reason, []).append(name)
    else:
        report.code_bytes += held.nbytes
        report.coded += weights
        report.elements += elements


def _hold(
    model: nn.Module, module: nn.Module, name: str, key: str, is_tied: bool, report: Filled,
    codes: QTensor | None = None,
) -> bool:  # fmt: skip
    """Holds one parameter of a module as codes, if it is a weight that can be; counts it."""
    parameter = module._parameters[key]
    assert parameter is not None
    elements, wide_bytes = parameter.numel(), parameter.nbytes
    is_stack = isinstance(module, GroupedExperts) and key in stacks(module)
    if not is_stack and not (isinstance(module, nn.Linear) and key == "weight"):
        report.wide_bytes += wide_bytes
        return False
    refusal = refuse_stack(module, key) if is_stack else code_refusal(model, module, name)
    if reason := TIED if is_tied else refusal:
        _count(report, Held(reason, wide_bytes), f"{name}.{key}" if is_stack else name, elements, 1)
        return False
    if isinstance(module, GroupedExperts):
        held, weights = store_stack_as_codes(module, key), parameter.shape[0]
    else:
        assert isinstance(module, QLinear)
        held, weights = store_as_codes(module, codes), 1
    _count(report, Held("", held), name, elements, weights)
    return True


class _FileTensor(NamedTuple):
    """A tensor of a file, as it lies there.

    key     its name there
    tensor  its elements: values, or FP8 codes
    scale   its block scales; None for values
    device  where it is to go
    where   the folder, for messages
    """

    key: str
    tensor: Tensor
    scale: Tensor | None
    device: torch.device
    where: str

    def value(self, target: Tensor, shape: list[int]) -> Tensor:
        """Its numbers, on the device, in the dtype of `target`.

        Raises ConfigError for another shape, for numbers that are not finite and for other codes.
        """
        if list(self.tensor.shape) != shape:
            raise ConfigError(
                f"model = {self.where!r}: {self.key} is {list(self.tensor.shape)} in its files, and {shape} in the model. Pass a whole "
                "model.",
                code="model.shapes",
            )
        if target.is_floating_point():
            _refuse_other_codes(self.key, self.tensor, self.scale, self.where)
        value = self.tensor if self.scale is None else _decoded(self.tensor, self.scale)
        # .to alone would keep the file mapped for as long as the model lives.
        value = value.to(device=self.device, dtype=target.dtype, copy=True)
        if count := nonfinite(value):
            raise ConfigError(
                f"model = {self.where!r}: weight {self.key!r} holds {count} values that are not finite, of {value.numel()}. "
                "Pass a model whose weights are whole.",
                code="weights.not-finite",
            )
        return value

    def codes(self, layer: nn.Module | None) -> QTensor | None:
        """Its codes as this layer's recipe would hold them; None if the file has values or others."""
        if self.scale is None or layer is None:
            return None
        return _as_codes(layer, self.tensor, self.scale)


def _refuse_other_codes(name: str, given: Tensor, scale: Tensor | None, where: str) -> None:
    """Raises ConfigError for codes whose scales are not those of blocks: 1 byte is no weight by itself."""
    kind = str(given.dtype).removeprefix("torch.")
    if scale is None:
        # Scales under another name (`weight_scale`) would be left out, and codes taken as weights.
        is_right = given.is_floating_point() and given.itemsize > 1
        words = f"is {kind} without {name}{SCALE}"
    elif given.dtype != torch.float8_e4m3fn:
        is_right, words = False, f"is {kind} with {name}{SCALE}, not float8_e4m3fn"
    else:
        blocks = [-(-size // BLOCK) for size in given.shape]
        is_right = len(blocks) == 2 and list(scale.shape) == blocks
        words = f"is {list(given.shape)} with scales {list(scale.shape)}, not {blocks}"
        if is_right and (not scale.is_floating_point() or bool((scale.float() <= 0).any())):
            is_right, words = False, f"has scales that are not above zero, {scale.dtype}"
    if not is_right:
        raise ConfigError(
            f"model = {where!r}: {name} {words}. Codes are read where each block of {BLOCK} x {BLOCK} has a scale. Name the folder of "
            "the weights in 16 bits.",
            code="model.quantized",
        )


def _decoded(given: Tensor, scale: Tensor) -> Tensor:
    """[N, K] float32 of E4M3 values with a scale for each block of 128 x 128, which multiplies."""
    rows, columns = given.shape
    wide = scale.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return given.float() * wide


def _as_codes(module: nn.Module, given: Tensor, scale: Tensor) -> QTensor | None:
    """The tensor as the layer's recipe would hold it, if its scales are of the same form."""
    recipe = module.recipe if isinstance(module, QLinear) else None
    cast = None if recipe is None else recipe.output.rhs
    if cast is None or given.dtype != torch.float8_e4m3fn or not cast.scale.power_of_two:
        return None
    if cast.format.storage != given.dtype or cast.tile != (BLOCK, BLOCK):
        return None
    values = scale.float()
    # As E8M0 holds them, from 2**-127 to 2**127.
    mantissa, exponent = torch.frexp(values)
    is_power = (mantissa == 0.5) & values.isfinite() & (exponent >= -126) & (exponent <= 128)
    if not bool(is_power.all()):
        return None
    return QTensor(data=given, scale=values, cast=cast, inner=given.shape[1], checked=True)


def _places(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Name -> (module, attribute) of each parameter and each buffer that files hold."""
    found = {}
    for prefix, module in model.named_modules():
        names = [*module._parameters, *(set(module._buffers) - module._non_persistent_buffers_set)]
        for name in names:
            found[f"{prefix}.{name}" if prefix else name] = (module, name)
    return found


def _tied(model: nn.Module) -> set[str]:
    """Names of parameters that have several."""
    names: dict[int, list[str]] = {}
    for name, each in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(each), []).append(name)
    return {name for several in names.values() if len(several) > 1 for name in several}


def _names(key: str, prefix: str) -> tuple[str, str, str]:
    """The names of a tensor with and without the prefix of a base model."""
    return key, prefix + key, key.removeprefix(prefix)


def _found(key: str, prefix: str, names: Mapping[str, Any]) -> str | None:
    """The name in `names` of a tensor of a file; None for one that is not there."""
    return next((each for each in _names(key, prefix) if each in names), None)


def _keys(files: list[Path], where: str) -> set[str]:
    """Names of all tensors. Raises ConfigError if two files hold one of them."""
    found: set[str] = set()
    for file in files:
        with reading.opened_tensors(file, OF_WEIGHTS) as opened:
            own = set(opened.keys())
        if twice := sorted(found & own):
            raise ConfigError(
                f"model = {where!r}: {twice[0]!r} is in {file.name} and in another file. Remove the files that are not of this model.",
                code="model.weights-twice",
            )
        found |= own
    return found


def _refuse_missing(model: nn.Module, where: str) -> None:
    missing = sorted({name for name, each in model.named_parameters() if each.is_meta})
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"model = {where!r}: no file holds {missing[0]!r}{more} of {type(model).__name__} under this name. Leave base out: "
            "transformers reads models whose files name weights otherwise, in 16 bits.",
            code="model.missing-weights",
        )


def files_of(where: str) -> list[Path]:
    """Files with the weights of a folder or Hub model, in order of their names.

    Raises ConfigError if there are none.
    """
    index = file_of(where, INDEX)
    listed = [SINGLE] if index is None else reading.json_of(index, OF_MODELS)["weight_map"].values()
    names = sorted(set(listed))
    found = [file_of(where, name) for name in names]
    if absent := [name for name, path in zip(names, found, strict=True) if path is None]:
        raise ConfigError(
            f"model = {where!r}: has no {absent[0]}. Pass a folder or hub name of a model whose weights are safetensors.",
            code="model.no-weights",
        )
    return [path for path in found if path is not None]


def _scales(files: list[Path]) -> dict[str, Tensor]:
    """Name of a weight -> its block scales, of all files: a scale may lie in another file."""
    found = {}
    for file in files:
        with reading.opened_tensors(file, OF_WEIGHTS) as opened:
            for key in opened.keys():  # noqa: SIM118
                if key.endswith(SCALE):
                    found[key.removesuffix(SCALE)] = opened.get_tensor(key).clone()
    return found


def digest(where: str) -> str:
    """SHA-256 over name, dtype, shape and bytes of every tensor of a folder or Hub model.

    It does not depend on the number of files. Reads every byte once, 16 MiB at a time.
    """
    lines = [line for file in files_of(where) for line in _lines(file)]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _lines(file: Path) -> Iterator[str]:
    """A line for each tensor of a safetensors file: name, dtype, shape, SHA-256 of its bytes."""
    with reading.opened(file, OF_WEIGHTS) as opened:
        size = int.from_bytes(opened.read(8), "little")
        try:
            if size > HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            header = reading.strict_json(opened.read(size))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                opened.seek(8 + size + begin)
                whole, left = hashlib.sha256(), end - begin
                while left > 0:
                    part = opened.read(min(left, CHUNK_BYTES))
                    if not part:
                        raise ValueError(f"it ends before {name}")
                    whole.update(part)
                    left -= len(part)
                yield f"{name} {entry['dtype']} {entry['shape']} {whole.hexdigest()}"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{file}: is no whole safetensors file: {error}. Restore it.", code="model.file"
            ) from error


@torch.no_grad()
def hold(model: nn.Module) -> Filled:
    """As `fill`, for a model whose weights are in memory: random ones, or a plan's fake ones."""
    report, tied = Filled(kept={}), _tied(model)
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                parameter.requires_grad_(False)
                _hold(model, module, name, key, f"{name}.{key}" in tied, report)
    return report

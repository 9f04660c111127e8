"""The files of an export: shards of weights, their index, config.json and a tokenizer's files.

Weights are written block by block (`model.layers.0`, ...), each layer by one cast, so memory holds
the codes of one shard and never the model's. Names and layouts are those of the class's
checkpoints: `revert_weight_conversion` of transformers splits experts that share one parameter. A
tensor with several names is written once, under its first name.

Other tensors get `dtype`. Modules that transformers keeps in float32 (`_keep_in_fp32_modules`)
stay so.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor, nn

from narrowgauge import addresses, manifest, storage
from narrowgauge.conversion.checkpoint_names import expert_names, reverted
from narrowgauge.errors import CheckpointError, NumericsError
from narrowgauge.export.layers import (
    WeightChoice,
    input_amax,
    made,
    plain_weight,
)
from narrowgauge.nn.amax_history import LayerState
from narrowgauge.storage import reading

if TYPE_CHECKING:
    from narrowgauge.export.file_formats import ExportFormat

# Files of a tokenizer or processor that a Hugging Face folder may hold.
TOKENIZER = re.compile(
    r"(tokenizer.*|special_tokens_map|added_tokens|vocab|preprocessor_config|processor_config|chat_template)\.json"
    r"|(vocab|merges)\.txt|.*\.model|chat_template\.jinja"
)
OF_TOKENIZERS = reading.Kind(
    most_bytes=reading.GIB, step="Name a folder of tokenizer files.", follow_links=True
)
# export.json says how large they are.
OF_FILES = reading.Kind(
    most_bytes=2**62, error=CheckpointError, step="Export the model again, to another folder."
)


@dataclass(eq=False, kw_only=True)
class WeightFiles:
    """Files of weights in a folder, written one after another.

    folder       an existing folder
    shard_bytes  a file is closed before it would have more
    entries      file name -> {"bytes", "sha256"}
    places       name of a tensor -> file name
    layers       name of a narrow layer -> for each part of its rows that has a name of its own
                 {last part of a tensor's name: the tensor's whole name}
    linears      name of a Linear in the model -> its name in the files
    experts      names of wide Linears that are in the files alone: experts that share one parameter
    """

    folder: Path
    shard_bytes: int = manifest.SHARD_BYTES
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    layers: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    linears: dict[str, str] = field(default_factory=dict)
    experts: list[str] = field(default_factory=list)
    total_bytes: int = 0
    _pending: dict[str, Tensor] = field(default_factory=dict)
    _taken: set[int] = field(default_factory=set)
    _size: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._pending and self._size + tensor.nbytes > self.shard_bytes:
            self._write()
        # safetensors refuses tensors that share a storage, as rows of one parameter do.
        self._pending[name] = addresses.own(tensor, self._taken)
        self._size += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def _write(self) -> None:
        # The number of files is known at the end alone, so they get their last names there.
        name = f"model-{len(self.entries) + 1:05}.safetensors"
        path = self.folder / name
        # save_file writes from the tensors' own memory, `save` copies the shard twice.
        with storage.library_errors(path):
            safetensors.torch.save_file(self._pending, path, metadata={"format": "pt"})
        # safetensors creates files with mode 0600, whatever the umask, and syncs nothing.
        path.chmod(self.folder.stat().st_mode & 0o666)
        storage.flush(path)
        self.entries[name] = hashed(path)
        self.places |= dict.fromkeys(self._pending, name)
        self._pending, self._taken, self._size = {}, set(), 0

    def close(self) -> None:
        """Write the last file, and give all the names that transformers knows."""
        if self._pending:
            self._write()
        count = len(self.entries)
        final = {
            name: "model.safetensors"
            if count == 1
            else f"model-{number:05}-of-{count:05}.safetensors"
            for number, name in enumerate(self.entries, 1)
        }
        for name, new in final.items():
            (self.folder / name).rename(self.folder / new)
        self.entries = {final[name]: entry for name, entry in self.entries.items()}
        self.places = {name: final[file] for name, file in self.places.items()}
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": self.places}
            add_file(self, "model.safetensors.index.json", json.dumps(index, indent=1))

    def configuration(self) -> dict[str, Any]:
        """config.json as the folder holds it now."""
        found: dict[str, Any] = reading.json_of(self.folder / "config.json", OF_FILES)
        return found

    def read(self, name: str) -> Tensor:
        """A tensor as the file holds it now."""
        with reading.opened_tensors(self.folder / self.places[name], OF_FILES) as file:
            found: Tensor = file.get_tensor(name)
        return found


def is_unchanged(path: Path, entry: Any) -> bool:
    """True if a file has the size and hash of `entry`. Another size is told without reading it."""
    with reading.opened(path, OF_FILES) as file:
        size = os.fstat(file.fileno()).st_size
    return isinstance(entry, dict) and size == entry.get("bytes") and hashed(path) == entry


def hashed(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, read in pieces."""
    digest, size = hashlib.sha256(), 0
    with reading.opened(path, OF_FILES) as file:
        while data := file.read(2**22):
            digest.update(data)
            size += len(data)
    return {"bytes": size, "sha256": digest.hexdigest()}


def add_file(files: WeightFiles, name: str, text: str) -> None:
    """Write a further file, and list its size and hash."""
    data = text.encode()
    storage.write_synced(files.folder / name, data)
    files.entries[name] = manifest.listed(data)


def write_weights(
    model: Any,
    form: ExportFormat,
    choices: Mapping[str, WeightChoice],
    dtype: torch.dtype,
    files: WeightFiles,
) -> None:
    """Write every tensor of the model: codes and scales by `choices`, the others in `dtype`."""
    for block in blocks(model):
        found: dict[str, Tensor] = {}
        sources: dict[int, tuple[str, str]] = {}  # id of a tensor -> (layer, part of its name)
        for name, module, parameters in block:
            choice = choices.get(name)
            for own, tensor in parameters:
                if choices.get(f"{name}.0.{own}") is not None:
                    for whole, each in _expert_tensors(
                        model, f"{name}.{own}", form, choices, files
                    ):
                        files.add(whole, each)
                    continue
                if own == "weight" and choice is not None and choice.is_narrow:
                    parts = layer_codes(name, module, form, choice)
                else:
                    parts = {own: wide_tensor(model, f"{name}.{own}", module, own, tensor, dtype)}
                for part, each in parts.items():
                    found[f"{name}.{part}" if name else part] = each
                    sources[id(each)] = name, part
        for new, tensor in reverted(model, found).items():
            files.add(new, tensor)
            name, part = sources.get(id(tensor), ("", ""))
            if not part and new.endswith(".weight"):  # a tensor that the conversion has made
                files.experts.append(new.removesuffix(".weight"))
            if name and (choice := choices.get(name)) is not None:
                if part == "weight" or part == "weight_packed":
                    files.linears[name] = new.removesuffix(f".{part}")
                if choice.is_narrow:
                    files.layers.setdefault(name, [{}])[0][part] = new
    files.close()


Members = list[tuple[str, nn.Module, list[tuple[str, Tensor]]]]


def blocks(model: nn.Module) -> Iterator[Members]:
    """Modules with their own tensors, of one block at a time, or one module outside of blocks."""
    found: dict[str, Members] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, LayerState):  # what a recipe added: it means nothing to readers
            continue
        own: list[tuple[str, Tensor]] = []
        # Buffers that are not persistent, as inverse frequencies, are computed by the class.
        buffers = (
            each for each in module._buffers.items() if each[0] not in module._non_persistent_buffers_set
        )  # fmt: skip
        for part, tensor in (*module._parameters.items(), *buffers):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                own.append((part, tensor))
        if own:
            # One block at a time: a conversion of names may need all tensors of its block at once.
            number = re.match(r".*?\.\d+(?=\.)", f"{name}.")
            found.setdefault(number[0] if number else name, []).append((name, module, own))
    yield from found.values()


def layer_codes(
    name: str, layer: Any, form: ExportFormat, choice: WeightChoice
) -> dict[str, Tensor]:
    q = made(layer, form, choice)
    # A value that is not finite makes the scale of its tile NaN (narrowgauge.scaling).
    if not all(bool(each.isfinite().all()) for each in (q.scale, q.full_scale())):
        raise NumericsError(
            f"export: weight {name!r} holds values that are not finite. Export an earlier checkpoint.",
            code="weights.not-finite",
        )
    found = {part: each.contiguous() for part, each in form.tensors(q).items()}
    if form.inputs:
        amax = input_amax(layer)
        assert amax is not None and layer.recipe.output.lhs is not None
        lhs = layer.recipe.output.lhs
        found["input_scale"] = lhs.scale(amax, lhs.format).reshape(1).to(torch.float32)
    if choice.input_scale is not None:
        found["input_scale"] = torch.tensor(choice.input_scale)
    return found


def wide_tensor(
    model: nn.Module, name: str, module: nn.Module, own: str, tensor: Tensor, dtype: torch.dtype
) -> Tensor:
    if own == "weight" and getattr(module, "frozen", None) is not None:
        tensor = plain_weight(module)
    if not tensor.is_floating_point():
        return tensor.detach().clone()
    kept = [
        *(getattr(model, "_keep_in_fp32_modules", None) or ()),
        *(getattr(model, "_keep_in_fp32_modules_strict", None) or ()),
    ]
    is_kept = tensor.dtype == torch.float32 and not set(kept).isdisjoint(name.split("."))
    found = tensor.detach().to(torch.float32 if is_kept else dtype)
    # Parameters alone: a mask in a buffer may be infinite.
    if own in module._parameters and not bool(found.isfinite().all()):
        is_own = not bool(tensor.isfinite().all())
        step = "Export an earlier checkpoint." if is_own else "Pass dtype=torch.bfloat16."
        raise NumericsError(
            f"export: weight {name!r} holds values that are not finite{'' if is_own else f' in {found.dtype}'}. {step}",
            code="weights.not-finite",
        )
    # A copy: the address of a tensor tells below whose it is.
    return found.clone() if found is tensor else found


def _expert_tensors(
    model: Any,
    stack: str,
    form: ExportFormat,
    choices: Mapping[str, WeightChoice],
    files: WeightFiles,
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of experts that share the parameter `stack`, one expert at a time."""
    owner, _, own = stack.rpartition(".")
    names = {place: name for name, place in expert_names(model, stack).items()}
    parts = 1 + max(part for _, part in names)
    for expert in range(len(names) // parts):
        layer = f"{owner}.{expert}.{own}"
        made = layer_codes(layer, model.get_submodule(layer), form, choices[layer])
        for part in range(parts):
            found = {}
            for kind, tensor in made.items():
                # Rows of gate and up; a number of the whole matrix belongs to both.
                each = tensor.chunk(parts)[part] if tensor.ndim == 2 else tensor
                found[kind] = f"{names[expert, part].removesuffix('weight')}{kind}"
                yield found[kind], each
            files.layers.setdefault(layer, []).append(found)


def write_config(
    model: Any,
    form: ExportFormat,
    choices: Mapping[str, WeightChoice],
    dtype: torch.dtype,
    files: WeightFiles,
) -> None:
    """Write config.json, and generation_config.json for a class that generates."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(dtype).removeprefix("torch.")
    # A model that was loaded from quantized weights brings the configuration of these.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    ignored = [
        files.linears.get(name, name)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name in choices and not choices[name].is_narrow
    ]
    ignored += files.experts
    if form.cast is not None:
        is_calibrated = any(each.input_scale is not None for each in choices.values())
        made = form.calibrated if is_calibrated and form.calibrated else form.config
        config.quantization_config = made(ignored)
        if form.calibrated is not None:
            add_file(files, "hf_quant_config.json", _modelopt(config.quantization_config))
    # By this text and not by save_pretrained, which also writes to the Hub's caches and syncs nothing.
    add_file(files, "config.json", config.to_json_string())
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        add_file(files, "generation_config.json", model.generation_config.to_json_string())


def _modelopt(config: Mapping[str, Any]) -> str:
    """modelopt's own file, which older readers look for: the same under its own names."""
    quantization = {
        "quant_algo": config["quant_algo"],
        "kv_cache_quant_algo": None,
        "group_size": config["group_size"],
        "exclude_modules": config["ignore"],
    }
    producer = {"name": "narrowgauge", "version": version("narrowgauge")}
    return json.dumps({"producer": producer, "quantization": quantization}, indent=1)


def write_tokenizer(tokenizer: Any, files: WeightFiles) -> None:
    """Write a tokenizer's or processor's files, of an object or from a folder; None: none."""
    if tokenizer is None:
        return
    # transformers chooses the names of a tokenizer's files, so new files are looked for.
    before = {path.name for path in files.folder.iterdir()}
    if isinstance(tokenizer, str | Path):
        reading.refuse_special_files(Path(tokenizer), OF_TOKENIZERS)
        for path in sorted(Path(tokenizer).iterdir()):
            if TOKENIZER.fullmatch(path.name) and path.is_file():
                shutil.copyfile(path, files.folder / path.name)
    else:
        tokenizer.save_pretrained(files.folder)
    for path in sorted(files.folder.iterdir()):
        if path.name not in before and path.is_file():
            files.entries[path.name] = hashed(path)

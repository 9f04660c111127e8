"""GGUF, the file of llama.cpp: names, order of rows, metadata, and tensors one after another.

    OUTPUT/model.gguf    metadata, tokenizer, codes and scales by `file_tensors.gguf_tensors`
           README.md, export.json

llama.cpp's `llama` rotates neighbouring rows of q and k, transformers a row and the one half a head
away. So rows of q and k go out in another order: of a head with d rows, 0, d/2, 1, d/2 + 1, ...
A row's codes and scales move together, which changes no number. `qwen2` and `qwen3` rotate as
transformers does.

The package `gguf`, llama.cpp's own, writes the container, names the tensors, and decodes the codes
for the comparison with the forward pass (`GgufFile.read`), without code of ours.
It decodes a negative zero of 4 bits as 0.
All sizes stand before the tensors, so they are known before the first cast: memory is one layer.

Vectors are float32, as llama.cpp asks. A tied head is left out: llama.cpp takes the embedding.

Source: llama.cpp, docs of GGUF and conversion/llama.py; gguf 0.19.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge import storage
from narrowgauge.errors import ConfigError
from narrowgauge.export import gguf_tokenizer
from narrowgauge.export.file_tensors import gguf_type
from narrowgauge.export.writing import WeightFiles, blocks, hashed, layer_codes, wide_tensor

if TYPE_CHECKING:
    from narrowgauge.export.file_formats import ExportFormat
    from narrowgauge.export.layers import WeightChoice

NAME = "model.gguf"
# Class of transformers -> (architecture of llama.cpp, True if rows of q and k are reordered).
ARCHITECTURES = {
    "LlamaForCausalLM": ("LLAMA", True),
    "Qwen2ForCausalLM": ("QWEN2", False),
    "Qwen3ForCausalLM": ("QWEN3", False),
}
WIDE_TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
# general.file_type, which readers show: the type of most tensors (llama.cpp, enum llama_ftype).
FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0",
              "MXFP4": "MOSTLY_MXFP4_MOE", "NVFP4": "MOSTLY_NVFP4"}  # fmt: skip
BLOCKS = {"Q8_0": (32, 34), "MXFP4": (32, 17), "NVFP4": (64, 36)}  # elements, bytes


@dataclass(eq=False, kw_only=True)
class GgufFile(WeightFiles):
    """The file model.gguf in a folder; see WeightFiles.

    heads  name of a tensor in the file -> heads, if its rows were reordered
    """

    heads: dict[str, int] = field(default_factory=dict)
    _tensors: dict[str, Any] | None = None

    def read(self, name: str) -> Tensor:
        """A tensor as the file holds it now, float32, decoded by gguf, rows in the model's order."""
        import gguf
        import numpy

        if self._tensors is None:
            self._tensors = {
                each.name: each for each in gguf.GGUFReader(self.folder / NAME).tensors
            }
        each = self._tensors[name]
        # From the file: pages of gguf's own map would stay in memory, in the end the whole file.
        data = numpy.fromfile(
            self.folder / NAME, each.data.dtype, each.data.size, offset=each.data_offset
        )
        decoded = gguf.dequantize(data.reshape(each.data.shape), each.tensor_type)
        found = torch.from_numpy(decoded.copy())
        heads = self.heads.get(name)
        return found if heads is None else in_halves(found, heads)


def in_neighbours(rows: Tensor, heads: int) -> Tensor:
    """Rows 0, d/2, 1, d/2 + 1, ... of each head with d rows."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def in_halves(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `in_neighbours`."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def refuse(model: Any, tokenizer: Any) -> None:
    """Raise ConfigError if the model or its tokenizer cannot go out as GGUF. Writes nothing."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            "format = 'gguf': the package gguf is not installed, which writes the file. Run pip install 'narrowgauge[gguf]'.",
            code="export.gguf-missing",
        )
    kind, config = type(model).__name__, model.config
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"format = 'gguf': of llama.cpp's architectures {', '.join(ARCHITECTURES)} are known here, not {kind}. Export bf16, which "
            "llama.cpp's convert_hf_to_gguf.py takes.",
            code="export.gguf-model",
        )
    if getattr(config, "hidden_act", "silu") != "silu":
        _refuse(f"its activation is {config.hidden_act!r}, and llama.cpp computes silu")
    if getattr(config, "use_sliding_window", False):
        _refuse("its attention has a sliding window, which llama.cpp does not know for this class")
    _frequency_factors(model)
    gguf_tokenizer.metadata(tokenizer, config, model.get_input_embeddings().weight.shape[0])


def _refuse(why: str) -> None:
    raise ConfigError(f"format = 'gguf': {why}. Export another format.", code="export.gguf-model")


def _frequency_factors(model: Any) -> Tensor | None:
    """Divisors of the rotary frequencies [head_dim / 2], or None if all are 1. Llama 3.1 has some."""
    rotary = model.model.rotary_emb
    held = rotary.inv_freq.detach().cpu()
    found = held.float()
    base = _theta(model.config) ** -(torch.arange(len(found)) / len(found))
    if 2 * len(found) != _head_dim(model.config):
        _refuse("its heads are rotated in part")
    if getattr(rotary, "rope_type", "default") not in ("default", "linear", "llama3"):
        _refuse(f"its rotary embedding is {rotary.rope_type!r}, which is not known here")
    # model.bfloat16() rounds this buffer too, and every reader computes it anew.
    if torch.allclose(found, base, rtol=max(1e-5, torch.finfo(held.dtype).eps), atol=0):
        return None
    if not ARCHITECTURES[type(model).__name__][1]:
        _refuse("llama.cpp has scaled rotary frequencies for Llama alone")
    return base / found


def _theta(config: Any) -> float:
    # transformers 5 has it in a dictionary, 4 beside the other sizes.
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)


def _head_dim(config: Any) -> int:
    found = getattr(config, "head_dim", None)
    return int(found or config.hidden_size // config.num_attention_heads)


# --- tensors -------------------------------------------------------------------------------------


Info = tuple[str, tuple[int, ...], str, int]


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """Tensors of the file that are made together.

    infos  name, shape in elements, type and bytes of each
    made   their bytes, in the same order
    """

    infos: list[Info]
    made: Callable[[], list[Tensor]]


def write(
    model: Any,
    form: ExportFormat,
    choices: Mapping[str, WeightChoice],
    dtype: torch.dtype,
    files: GgufFile,
    tokenizer: Any,
) -> None:
    """Write model.gguf: codes by `choices`, other matrices in `dtype`, vectors in float32."""
    import gguf

    kind = ARCHITECTURES[type(model).__name__][0]
    path = files.folder / NAME
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[kind]])
    groups = list(_groups(model, form, choices, dtype, files))
    infos = [info for group in groups for info in group.infos]
    for name, shape, type_name, size in infos:
        # float32 stands for any dtype: the type is given, and the shape counts elements.
        type_of = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor_info(name, shape, torch.empty(0).numpy().dtype, size, raw_dtype=type_of)
    _add_metadata(writer, gguf, model, infos)
    for key, value in gguf_tokenizer.metadata(
        tokenizer, model.config, model.get_input_embeddings().weight.shape[0]
    ).items():
        _add(writer, key, value)
    try:
        with storage.library_errors(path):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for group in groups:
                for info, tensor in zip(group.infos, group.made(), strict=True):
                    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
                    assert data.numel() == info[3], info
                    writer.write_tensor_data(data.numpy())
    finally:
        writer.close()
    storage.flush(path)
    files.entries[NAME] = hashed(path)


def _groups(
    model: Any,
    form: ExportFormat,
    choices: Mapping[str, WeightChoice],
    dtype: torch.dtype,
    files: GgufFile,
) -> Iterator[TensorGroup]:
    import gguf

    kind, is_reordered = ARCHITECTURES[type(model).__name__]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind], model.config.num_hidden_layers)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    if (factors := _frequency_factors(model)) is not None:
        info = ("rope_freqs.weight", tuple(factors.shape), "F32", factors.nbytes)
        yield TensorGroup(infos=[info], made=lambda: [factors])
    for block in blocks(model):
        for name, module, parameters in block:
            for own, tensor in parameters:
                whole = f"{name}.{own}"
                new = names.get_name(whole, try_suffixes=(".weight", ".bias"))
                if new is None:
                    _refuse(f"its weight {whole!r} has no name there")
                of_heads = heads.get(name.rpartition(".")[2]) if is_reordered else None
                if of_heads is not None:
                    files.heads[new] = of_heads
                choice = choices.get(name)
                if own == "weight" and choice is not None and choice.is_narrow:
                    yield _narrow(name, module, new, form, choice, files)
                else:
                    yield _wide(model, whole, module, own, tensor, new, dtype, files)


def _narrow(
    name: str, layer: Any, new: str, form: ExportFormat, choice: WeightChoice, files: GgufFile
) -> TensorGroup:
    cast = form.cast if choice.requantized else layer.recipe.output.rhs
    assert cast is not None
    kind = gguf_type(cast)
    elements, size = BLOCKS[kind]
    shape = (layer.out_features, layer.in_features)
    infos: list[Info] = [(new, shape, kind, shape[0] * shape[1] // elements * size)]
    parts = {"weight": new}
    if kind == "NVFP4":
        parts["scale"] = f"{new.removesuffix('.weight')}.scale"
        infos.append((parts["scale"], (1,), "F32", 4))
    files.layers[name] = [parts]

    def made() -> list[Tensor]:
        found = layer_codes(name, layer, form, choice)
        if new in files.heads:
            found["weight"] = in_neighbours(found["weight"], files.heads[new])
        return [found[part] for part in parts]

    return TensorGroup(infos=infos, made=made)


def _wide(
    model: nn.Module, whole: str, module: nn.Module, own: str, tensor: Tensor, new: str,
    dtype: torch.dtype, files: GgufFile,
) -> TensorGroup:  # fmt: skip
    dtype = torch.float32 if tensor.ndim < 2 else dtype
    size = tensor.numel() * dtype.itemsize
    info = (new, tuple(tensor.shape), WIDE_TYPES[dtype], size)

    def made() -> list[Tensor]:
        found = wide_tensor(model, whole, module, own, tensor, dtype).to(dtype)
        heads = files.heads.get(new)
        return [found if heads is None else in_neighbours(found, heads)]

    return TensorGroup(infos=[info], made=made)


# --- metadata ------------------------------------------------------------------------------------


def _add_metadata(writer: Any, gguf: Any, model: Any, infos: list[Info]) -> None:
    config, head = model.config, _head_dim(model.config)
    sizes: dict[str, int] = {}
    for _, _, kind, size in infos:
        sizes[kind] = sizes.get(kind, 0) + size
    narrow = [kind for kind in sizes if kind in BLOCKS]
    most = max(narrow or sizes, key=lambda kind: sizes[kind])
    writer.add_type("model")
    writer.add_name(type(model).__name__)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    # An older package does not know all types, and the entry is for display alone.
    file_type = getattr(gguf.LlamaFileType, FILE_TYPES[most], gguf.LlamaFileType.GUESSED)
    writer.add_file_type(file_type)
    writer.add_vocab_size(model.get_input_embeddings().weight.shape[0])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(_theta(config))
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)

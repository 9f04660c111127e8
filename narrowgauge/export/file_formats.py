"""Formats of an exported weight: the casts that a format holds exactly, its tensors, its configuration.

W is the weight [N, K] of a Linear, Q its QTensor as the forward pass multiplies by it.

    format        tensors beside `weight`, by the last part of their names              W is
    bf16          -                                                                     weight
    fp8-block     weight_scale_inv f32 [N/128, K/128]                                   weight * scale
    fp8-block-ct  weight_scale     f32 [N/128, K/128]                                   weight * scale
    fp8-channel   weight_scale     f32 [N, 1]                                           weight * scale
    fp8-static    the same, and input_scale f32 [1], the scale of x                     weight * scale
    int8          weight_scale     f32 [N, 1]                                           weight * scale
    mxfp8         weight_scale     u8 [N, K/32], an exponent                            weight * 2^(s - 127)
    mxfp4         weight_packed u8 [N, K/2], weight_scale u8 [N, K/32]                  the same
    nvfp4         weight_packed, weight_scale e4m3 [N, K/16], weight_global_scale [1]   codes * scale / global
    nvfp4-modelopt  weight u8 [N, K/2], weight_scale e4m3 [N, K/16], weight_scale_2 f32  codes * scale * scale_2
    gguf          blocks of scale and codes; of NVFP4 also scale f32 [1]                codes * scale (* scale)
    gguf-bf16     -                                                                     weight

Two codes share a byte, the first one in the low nibble. `fp8-block` is the format of DeepSeek's and
Qwen's FP8 checkpoints, which transformers calls `fp8`. All others are formats of the package
compressed-tensors, which vLLM and SGLang read too; `gguf` is llama.cpp's (`gguf_file`), where each
tensor has a type of its own: Q8_0, MXFP4 or NVFP4.

`weight_global_scale` is a divisor, so the float32 of the recipe is inverted twice. For one number in
twelve that gives its neighbour, and a reader's weight is then off by 2^-23 of itself; the neighbours
of the divisor are no better. A power of two comes back to the bit.

Left out: formats with two schemes in one model. transformers 5.23 decodes all layers by the first
scheme (`get_dense_scheme` in integrations/compressed_tensors.py), silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge import recipes
from narrowgauge.errors import ConfigError, Reason, closest
from narrowgauge.export.file_tensors import (
    MX,
    NV,
    NV_BLOCK,
    Q8,
    fp8,
    gguf_decode,
    gguf_tensors,
    gguf_type,
    modelopt_decode,
    modelopt_tensors,
    mx_decode,
    mx_tensors,
    nv_decode,
    nv_tensors,
    row_scales,
    times,
)
from narrowgauge.recipe import WHOLE, Cast, DelayedScaling, LearnedStep

if TYPE_CHECKING:
    from narrowgauge.qtensor import QTensor

BLOCK = 128  # rows and columns of a block


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportFormat:
    """A layout of weights in files that other software reads.

    name     name on the command line
    summary  one line for lists
    cast     the cast by which `requantize` makes codes; None: the format is 16 bits wide
    refuse   refuse(cast, N, K) -> why the file cannot hold such codes as they are, a clause, or ''
    tensors  tensors(Q) -> {last part of the name: tensor}
    decode   tensors of a layer -> [N, K] float32, by the readers' conventions. It shares no code
             with `tensors`, so it checks them
    config   config(names of all Linears that stay wide) -> `quantization_config` of config.json
    inputs   True: x has a static scale, from an amax history
    calibrated  `config` where x has a static scale, from a calibration pass; None: the format has none
    experts  True: transformers reads experts of a mixture in it too
    fused    True: servers load q, k and v, or gate and up, as one weight with one scheme
    limits   limits(class of the model, cast, function that makes Q) -> why these scales do not fit,
             a clause, or ''. Asked where `refuse` has nothing against the cast
    is_gguf  True: one file of llama.cpp's format, not a Hugging Face folder
    readers  programs that read the format
    """

    name: str
    summary: str
    cast: Cast | None
    refuse: Callable[[Cast, int, int], str]
    tensors: Callable[[QTensor], dict[str, Tensor]]
    decode: Callable[[Mapping[str, Tensor]], Tensor]
    config: Callable[[Sequence[str]], dict[str, Any]]
    readers: str
    inputs: bool = False
    experts: bool = False
    fused: bool = True
    limits: Callable[[str, Cast, Callable[[], QTensor]], str] | None = None
    is_gguf: bool = False
    calibrated: Callable[[Sequence[str]], dict[str, Any]] | None = None

    def holds(self, cast: Cast, rows: int, columns: int) -> str:
        """Return why the codes of such a cast on [rows, columns] do not fit, a clause, or ''."""
        if cast.rounding != "nearest":
            return Reason("stochastic", f"its cast {cast} draws random numbers at every step")
        if isinstance(cast.calibrate, LearnedStep):
            return Reason(
                "learned-step", f"its cast {cast} has a learned step, which is not in these codes"
            )
        return self.refuse(cast, rows, columns)


# --- what a cast must be -------------------------------------------------------------------------


def _is(element: str) -> Callable[[Cast], str]:
    def refuse(cast: Cast) -> str:
        if cast.format.name == element:
            return ""
        return Reason("other-element", f"its codes are {cast.format}")

    return refuse


def _per_row(element: str) -> Callable[[Cast, int, int], str]:
    """One scale for a row of W at least: a scale per tensor is repeated for each row."""

    def refuse(cast: Cast, rows: int, columns: int) -> str:
        # A tile at least as long as the row is one scale for the row, such as 1x128 of 96 columns.
        whole_row = cast.tile[1] == WHOLE or cast.tile[1] >= columns
        if (why := _is(element)(cast)) or (whole_row and not cast.scale.two_level):
            return why
        return Reason("other-tile", f"its cast {cast} has several scales per row")

    return refuse


def _blocks(cast: Cast, rows: int, columns: int) -> str:
    if why := _is("e4m3")(cast):
        return why
    if cast.tile != (BLOCK, BLOCK) or cast.has_global_scale:
        return Reason("other-tile", f"its cast {cast} is not in tiles of {BLOCK}x{BLOCK}")
    if rows % BLOCK or columns % BLOCK:
        # transformers derives the block as rows // scale rows, and decodes such a layer wrongly
        # without an error. vLLM refuses it.
        return Reason(
            "ragged",
            f"{rows}x{columns} is no multiple of {BLOCK}, and readers misread such blocks",
        )
    return ""


def _mx(element: str) -> Callable[[Cast, int, int], str]:
    def refuse(cast: Cast, rows: int, columns: int) -> str:
        if why := _is(element)(cast):
            return why
        if cast.tile != (1, MX) or not cast.scale.power_of_two or cast.has_global_scale:
            return Reason(
                "other-tile", f"its cast {cast} is not in tiles of 1x{MX} with powers of two"
            )
        return _multiple(columns, MX)

    return refuse


def _nv(cast: Cast, rows: int, columns: int) -> str:
    if why := _is("e2m1")(cast):
        return why
    if cast.tile not in ((1, NV), (NV, NV)) or not cast.scale.two_level:
        return Reason("other-tile", f"its cast {cast} is not in tiles of {NV} with e4m3 scales")
    return _multiple(columns, NV)


def _gguf(cast: Cast, rows: int, columns: int) -> str:
    if cast.format.name == "int8":
        return _q8(cast, columns)
    if cast.format.name != "e2m1":
        words = "while GGUF has types for int8 (Q8_0) and e2m1 (MXFP4, NVFP4)"
        return Reason("other-element", f"its codes are {cast.format}, {words}")
    if cast.scale.two_level:
        return _nv(cast, rows, columns) or _multiple(columns, NV_BLOCK)
    return _mx("e2m1")(cast, rows, columns)


def _q8(cast: Cast, columns: int) -> str:
    if cast.tile[1] != WHOLE and cast.tile[1] < columns and cast.tile[1] % Q8:
        return Reason("other-tile", f"its cast {cast} is not in tiles of whole blocks of {Q8}")
    if not cast.scale.power_of_two or cast.has_global_scale:
        words = "the recipe int8+shared-scales trains with powers of two"
        return Reason(
            "wide-scales", f"its cast {cast} has scales of 32 bits, and Q8_0 has 16; {words}"
        )
    return _multiple(columns, Q8)


# llama.cpp's architecture leaves out NVFP4's second scale in its feed-forward layers: every logit
# was NaN (src/models/qwen2.cpp; xllamacpp 2026.10).
UNSCALED = ("Qwen2ForCausalLM",)


def _gguf_limits(model: str, cast: Cast, codes: Callable[[], QTensor]) -> str:
    if gguf_type(cast) == "NVFP4" and model in UNSCALED:
        return Reason("unscaled", f"llama.cpp ignores NVFP4's second scale in {model}")
    if gguf_type(cast) != "Q8_0":
        return ""
    # Powers of two outside of float16, as of a row whose weights are all below 2^-17.
    scale = codes().full_scale()
    if torch.equal(scale.to(torch.float16).float(), scale):
        return ""
    low, high = float(scale.min()), float(scale.max())
    return Reason(
        "scale-range", f"its scales reach from {low:.1e} to {high:.1e}, beyond Q8_0's float16"
    )


def _multiple(columns: int, tile: int) -> str:
    if columns % tile == 0:
        return ""
    return Reason("ragged", f"{columns} columns are no multiple of {tile}")


def _delayed(cast: Cast, rows: int, columns: int) -> str:
    if not isinstance(cast.calibrate, DelayedScaling):
        return Reason(
            "no-history",
            f"its cast {cast} keeps no amax history, from which a static scale of x comes",
        )
    return _per_row("e4m3")(cast, rows, columns)


def _nothing(cast: Cast, rows: int, columns: int) -> str:
    return Reason("16-bit-format", "the format is 16 bits wide")


# --- configurations ------------------------------------------------------------------------------


def _hf_block(ignored: Sequence[str]) -> dict[str, Any]:
    # transformers' FineGrainedFP8Config. "inv" in the name of the scale is history: it multiplies.
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(ignored),
    }


def _args(**given: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False} | given


def _compressed(
    kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> Callable[[Sequence[str]], dict[str, Any]]:
    def config(ignored: Sequence[str]) -> dict[str, Any]:
        # Of vLLM's names of a target only a class stands for all layers but the ignored ones.
        group = {
            "targets": ["Linear"],
            "format": kind,
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": kind,
            "quantization_status": "compressed",
            "ignore": list(ignored),
            "config_groups": {"group_0": group},
        }

    return config


_TOKEN = _args(strategy="token", dynamic=True)
_CHANNEL = _args(strategy="channel")
_MX8 = {"strategy": "group", "group_size": MX, "scale_dtype": "torch.uint8"}
_NV4 = {"strategy": "tensor_group", "group_size": NV, "scale_dtype": "torch.float8_e4m3fn"}
# modelopt's own numbers for both operands of NVFP4.
_NV4_INPUTS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NV}


def _modelopt(inputs: dict[str, Any] | None) -> Callable[[Sequence[str]], dict[str, Any]]:
    """inputs: of x; None for weights alone, which modelopt calls W4A16_NVFP4."""

    def config(ignored: Sequence[str]) -> dict[str, Any]:
        group = {"targets": ["Linear"], "weights": _NV4_INPUTS, "input_activations": inputs}
        return {
            "quant_method": "modelopt",
            "quant_algo": "W4A16_NVFP4" if inputs is None else "NVFP4",
            "config_groups": {"group_0": group},
            "group_size": NV,
            "ignore": list(ignored),
        }

    return config


# NVFP4 and MXFP4: weights alone. The scale of x that vLLM asks for is not in the trained state.
_SERVERS = "transformers with compressed-tensors, vLLM, SGLang"


def _channel(
    name: str, summary: str, refuse: Callable[[Cast, int, int], str], inputs: dict[str, Any], is_static: bool = False
) -> ExportFormat:  # fmt: skip
    return ExportFormat(
        name=name,
        summary=summary,
        cast=recipes.FP8_ROW.output.rhs,
        refuse=refuse,
        tensors=lambda q: {"weight": fp8(q), "weight_scale": row_scales(q)},
        decode=times("weight_scale"),
        config=_compressed("float-quantized", _CHANNEL, inputs),
        readers=_SERVERS,
        inputs=is_static,
        experts=not is_static,
    )


BF16 = ExportFormat(
    name="bf16",
    summary="16-bit weights: the master weights, without the recipe's casts",
    cast=None,
    refuse=_nothing,
    tensors=lambda q: {},
    decode=lambda tensors: tensors["weight"].to(torch.float32),
    config=lambda ignored: {},
    readers="every reader of Hugging Face folders; llama.cpp by its convert_hf_to_gguf.py",
)
FP8_BLOCK = ExportFormat(
    name="fp8-block",
    summary="E4M3 in 128x128 tiles, as DeepSeek's and Qwen's FP8 checkpoints",
    cast=recipes.FP8_BLOCK.output.rhs,
    refuse=_blocks,
    tensors=lambda q: {"weight": fp8(q), "weight_scale_inv": q.scale},
    decode=times("weight_scale_inv"),
    config=_hf_block,
    readers="transformers with accelerate, vLLM, SGLang",
    experts=True,
)
FP8_BLOCK_CT = ExportFormat(
    name="fp8-block-ct",
    summary="the same in the format of compressed-tensors",
    cast=recipes.FP8_BLOCK.output.rhs,
    refuse=_blocks,
    tensors=lambda q: {"weight": fp8(q), "weight_scale": q.scale},
    decode=times("weight_scale"),
    config=_compressed(
        "float-quantized",
        _args(strategy="block", block_structure=[BLOCK, BLOCK]),
        _args(strategy="group", group_size=BLOCK, dynamic=True),
    ),
    readers=_SERVERS,
)
FP8_CHANNEL = _channel(
    "fp8-channel",
    "E4M3 with a scale per output channel; a scale per tensor is repeated",
    _per_row("e4m3"),
    _TOKEN,
)
FP8_STATIC = _channel(
    "fp8-static",
    "the same, x by the static scale that delayed scaling has recorded",
    _delayed,
    _args(strategy="tensor"),
    is_static=True,
)
INT8 = ExportFormat(
    name="int8",
    summary="8-bit integers with a scale per output channel",
    cast=recipes.INT8_ROW.output.rhs,
    refuse=_per_row("int8"),
    tensors=lambda q: {"weight": q.data, "weight_scale": row_scales(q)},
    decode=times("weight_scale"),
    config=_compressed(
        "int-quantized",
        _args(type="int", strategy="channel"),
        _args(type="int", strategy="token", dynamic=True),
    ),
    readers=f"{_SERVERS}; vLLM computes it natively on a CPU too",
)
MXFP8 = ExportFormat(
    name="mxfp8",
    summary="E4M3 in 1x32 tiles with 8-bit exponents",
    cast=recipes.MXFP8.output.rhs,
    refuse=_mx("e4m3"),
    tensors=mx_tensors("weight"),
    decode=mx_decode,
    config=_compressed("mxfp8-quantized", _args(**_MX8), _args(dynamic=True, **_MX8)),
    readers=_SERVERS,
)
MXFP4 = ExportFormat(
    name="mxfp4",
    summary="E2M1 in 1x32 tiles with 8-bit exponents, activations in 16 bits",
    cast=recipes.MXFP4.output.rhs,
    refuse=_mx("e2m1"),
    tensors=mx_tensors("weight_packed"),
    decode=mx_decode,
    config=_compressed("mxfp4-pack-quantized", _args(num_bits=4, **_MX8), None),
    readers=_SERVERS,
)
NVFP4 = ExportFormat(
    name="nvfp4",
    summary="E2M1 in tiles of 16 with e4m3 scales, activations in 16 bits",
    cast=recipes.NVFP4.output.rhs,
    refuse=_nv,
    tensors=nv_tensors,
    decode=nv_decode,
    config=_compressed("nvfp4-pack-quantized", _args(num_bits=4, **_NV4), None),
    readers=_SERVERS,
)
NVFP4_MODELOPT = ExportFormat(
    name="nvfp4-modelopt",
    summary="the same in the format of NVIDIA's modelopt",
    cast=recipes.NVFP4.output.rhs,
    refuse=_nv,
    tensors=modelopt_tensors,
    decode=modelopt_decode,
    config=_modelopt(None),
    readers="vLLM, SGLang, TensorRT-LLM",
    calibrated=_modelopt(_NV4_INPUTS),
)
_INT8 = recipes.INT8_ROW.with_shared_scales().output.rhs
assert _INT8 is not None
# GGUF: one file for llama.cpp, which multiplies q, k and v one by one, each by its own type.
GGUF = ExportFormat(
    name="gguf",
    summary="one file for llama.cpp: Q8_0, MXFP4 or NVFP4, by each layer's codes",
    # Q8_0, with a power of two for each block.
    cast=replace(_INT8, tile=(1, Q8)),
    refuse=_gguf,
    tensors=gguf_tensors,
    decode=gguf_decode,
    config=lambda ignored: {},
    readers="llama.cpp and what is built on it; transformers, but for NVFP4",
    fused=False,
    limits=_gguf_limits,
    is_gguf=True,
)
GGUF_BF16 = ExportFormat(
    name="gguf-bf16",
    summary="one file for llama.cpp: the master weights in 16 bits, without the recipe's casts",
    cast=None,
    refuse=_nothing,
    tensors=lambda q: {},
    decode=gguf_decode,
    config=lambda ignored: {},
    readers="llama.cpp and what is built on it, transformers",
    fused=False,
    is_gguf=True,
)

FORMATS: dict[str, ExportFormat] = {
    each.name: each
    for each in (
        BF16,
        FP8_BLOCK,
        FP8_BLOCK_CT,
        FP8_CHANNEL,
        FP8_STATIC,
        INT8,
        MXFP8,
        MXFP4,
        NVFP4,
        NVFP4_MODELOPT,
        GGUF,
        GGUF_BF16,
    )
}


def get(name: str) -> ExportFormat:
    """The format called `name`. Raises ConfigError with the closest names."""
    if name in FORMATS:
        return FORMATS[name]
    near = closest(str(name), FORMATS)
    raise ConfigError(
        f"format = {name!r}: is no format of export. {f'Closest: {near}. ' if near else ''}Choose one of {', '.join(FORMATS)}.",
        code="export.format",
    )

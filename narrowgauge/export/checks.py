"""Checks of an export before it gets its name: bits of every tensor, transformers' own loader, logits.

    bits     each narrow weight, read back from the files and decoded by the format's own reader
             (`ExportFormat.decode`), beside the operand that an observer saw in the forward pass;
             each other tensor beside the model's, rounded to the files' dtype
    loading  `from_pretrained` with dequantization: no key missing or left over, and each Linear's
             weight beside the decoded one, rounded as the reader rounds it
    logits   the loaded model's beside the given model's, on drawn inputs

transformers multiplies NVFP4's scales in bfloat16, so 99.2 % of such weights are equal to the bit,
and the rest to a rounding of bfloat16.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import ConfigError
from narrowgauge.export.file_formats import NVFP4, ExportFormat
from narrowgauge.export.gguf_file import NAME as GGUF
from narrowgauge.export.layers import WeightChoice, relative
from narrowgauge.nn.converted_model import suspended
from narrowgauge.nn.frozen import forward_operand
from narrowgauge.snapshot.block_storage import free_host_bytes

if TYPE_CHECKING:
    from narrowgauge.export.writing import WeightFiles

# NVFP4's second scale is inverted by a reader, or multiplied last (GGUF): at most one unit in the
# last place of float32, unless it is a power of two.
ONE_UNIT = 2.0**-23
IDS, SEED = (2, 32), 0  # drawn inputs: rows and positions; the seed
PACKAGES = {"compressed-tensors": "compressed_tensors", "fp8": "accelerate", "gguf": "gguf"}


def bits(
    model: nn.Module, form: ExportFormat, choices: Mapping[str, WeightChoice], files: WeightFiles
) -> dict[str, Any]:
    """Compare every narrow weight with the forward's operand. One forward of one row a layer.

    ->  {"layers": narrow ones, "equal": to the bit, "largest_difference": relative,
         "requantized": {layer: relative difference}}

    Raises ConfigError if a layer's numbers in the files are not the forward's.
    """
    equal, largest, anew = 0, 0.0, dict[str, float]()
    for name, parts in files.layers.items():
        layer: Any = model.get_submodule(name)
        found = decoded(form, files, parts)
        expected = forward_operand(layer).cpu()
        difference = relative(found, expected)
        # These are not the forward's numbers, on request: their distance is reported instead.
        if choices[name].requantized:
            anew[name] = difference
            continue
        scale = layer.recipe.output.rhs.scale
        rounds = scale.two_level and not scale.power_of_two_whole
        if difference > (ONE_UNIT if rounds else 0.0):
            raise ConfigError(
                f"export: the forward pass of {name!r} multiplies by other numbers than its weight has now, by {difference:.2g} of their "
                "norm: the weight changed since its cast was made. Call advance(model), or stop the training, and export again.",
                code="export.changed",
            )
        equal += difference == 0
        largest = max(largest, difference)
    return {
        "layers": len(files.layers),
        "equal": equal,
        "largest_difference": largest,
        "requantized": anew,
    }


def decoded(form: ExportFormat, files: WeightFiles, parts: list[dict[str, str]]) -> Tensor:
    """[N, K] float32 of a layer, from the files. parts: see `WeightFiles.layers`."""
    rows = [
        form.decode({kind: files.read(whole) for kind, whole in each.items()}) for each in parts
    ]
    return torch.cat(rows)


def _weight(model: nn.Module, loaded: nn.Module, name: str) -> Tensor:
    """[N, K] of the loaded model, for a layer of the given one."""
    layer: Any = model.get_submodule(name)
    if not hasattr(layer, "place"):
        return loaded.get_submodule(name).weight.detach().cpu()  # type: ignore[operator]
    # The loaded model has no slices of the experts' parameter, but the same parameter.
    stack = loaded.get_parameter(f"{name.rsplit('.', 2)[0]}.{layer.place.weight}")
    return stack[layer.place.index].detach().cpu()


def missing_package(form: ExportFormat) -> str:
    """The package that transformers needs to load the format and that is not installed, or ''."""
    method = "gguf" if form.is_gguf else form.config([]).get("quant_method", "")
    package = PACKAGES.get(method, "")
    return method if package and importlib.util.find_spec(package) is None else ""


@torch.no_grad()
def loading(
    model: Any, form: ExportFormat, files: WeightFiles, dtype: torch.dtype
) -> dict[str, Any]:
    """Load the folder by transformers, and compare weights and logits with the model at hand.

    ->  {"checked": False, "why": a sentence} or {"checked": True, "weights": compared,
         "equal": to the bit, "equal_elements": share, "logits": {...} or None}

    Memory: the whole model, in `dtype`. Raises ConfigError if transformers reads other numbers.
    """
    if package := missing_package(form):
        words = "accelerate" if package == "fp8" else package
        return {
            "checked": False,
            "why": f"transformers was not asked to load it: {words} is not installed (pip install {words}).",
        }
    if form.is_gguf and any("scale" in part for each in files.layers.values() for part in each):
        return {
            "checked": False,
            "why": "transformers was not asked to load it: it knows no NVFP4 of GGUF.",
        }
    if form.calibrated is not None:
        return {
            "checked": False,
            "why": "transformers was not asked to load it: it knows no format of modelopt.",
        }
    # A fifth more than the weights: activations, and one weight while it is decoded.
    need, free = 1.2 * _wide_bytes(model, dtype), _free_bytes()
    if need > free:
        return {
            "checked": False,
            "why": f"transformers was not asked to load it: that takes {need / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free.",
        }
    try:
        with _quiet(), contextlib.redirect_stderr(io.StringIO() if form.is_gguf else sys.stderr):
            loaded, info = type(model).from_pretrained(
                files.folder,
                dtype=dtype,
                output_loading_info=True,
                local_files_only=True,
                **_dequantizing(form, files),
            )
    # Its progress bar for GGUF has no switch, so stderr is redirected.
    # transformers raises many exception types. Its 5.23 fails where experts stay wide beside formats
    # of compressed-tensors that are not FP8.
    except Exception as error:
        words = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"format = {form.name!r}: transformers cannot load what was written, so nothing was kept: {type(error).__name__}: {words}. "
            "Choose another format, or pass --no-load if the folder is for another reader.",
            code="export.unreadable",
        ) from error
    # A name that transformers does not find gets random numbers, with a warning alone.
    # A decoded model casts no x, so it has no place for the static scales of x.
    scales = {parts.get("input_scale") for each in files.layers.values() for parts in each}
    unknown = set(info["unexpected_keys"]) - scales
    if wrong := sorted({*info["missing_keys"], *info["mismatched_keys"], *unknown}):
        raise ConfigError(
            f"export: transformers does not find {wrong[0]!r} in the files, or does not know it ({len(wrong)} such names). "
            "Report this model; bf16 goes out by save_pretrained.",
            code="export.unreadable",
        )
    equal, elements, same, worst = 0, 0, 0, ("", 0.0)
    for name, parts in files.layers.items():
        expected = decoded(form, files, parts).to(dtype)
        found = _weight(model, loaded, name)
        here = int((found == expected).sum())
        equal, elements, same = (
            equal + (here == expected.numel()),
            elements + expected.numel(),
            same + here,
        )
        worst = max(
            worst, (name, relative(found.float(), expected.float())), key=lambda each: each[1]
        )
    if worst[1] > (2.0**-8 if form is NVFP4 else 0.0):
        raise ConfigError(
            f"export: transformers decodes {worst[0]!r} to other numbers, by {worst[1]:.2g} of their norm. Choose another format, and "
            "report this one.",
            code="export.unreadable",
        )
    return {
        "checked": True,
        "weights": len(files.layers),
        "equal": equal,
        "equal_elements": same / elements if elements else 1.0,
        "logits": _logits(model, loaded.eval()),
    }


def _dequantizing(form: ExportFormat, files: WeightFiles) -> dict[str, Any]:
    """Arguments of `from_pretrained` that decode the weights, without a GPU and its kernels."""
    if form.is_gguf:
        return {"gguf_file": GGUF}
    given: dict[str, Any] = {"use_safetensors": True}
    method = form.config([]).get("quant_method", "")
    if method == "fp8":
        from transformers import FineGrainedFP8Config

        # An attribute that is not given would replace the one in config.json.
        config = files.configuration()
        ignored = config["quantization_config"]["modules_to_not_convert"]
        return given | {
            "quantization_config": FineGrainedFP8Config(
                dequantize=True, modules_to_not_convert=ignored
            )
        }
    if method:
        from transformers import CompressedTensorsConfig

        return given | {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    return given


def _logits(model: Any, loaded: Any) -> dict[str, Any] | None:
    """Relative distances of logits, or of hidden states, on drawn ids; None without ids as inputs.

    loaded     of the loaded model from the training forward: the weights are equal, and the reader
               leaves activations in 16 bits
    wide       of the given model without its recipe from the training forward, for comparison
    """
    if getattr(model, "main_input_name", "") != "input_ids":
        return None
    device = next(model.parameters()).device
    longest = getattr(model.config, "max_position_embeddings", None) or IDS[1]
    # Ids up to the table's last row: a model of a run has more rows than its tokenizer has ids.
    rows = model.get_input_embeddings().weight.shape[0]
    drawn = torch.Generator().manual_seed(SEED)
    ids = torch.randint(rows, (IDS[0], min(IDS[1], longest)), generator=drawn)
    inputs = {"input_ids": ids}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids

    def output(of: Any, place: torch.device) -> Tensor:
        given = {name: each.to(place) for name, each in inputs.items()}
        result = of(**given)
        found: Tensor = result.logits if hasattr(result, "logits") else result[0]
        return found.detach().float().cpu()

    # `train(True)` on the whole model would switch on what its owner has put into evaluation mode.
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        own = output(model, device)
        with suspended(model):
            wide = output(model, device)
    finally:
        for module, mode in modes.items():
            module.training = mode
    # On the CPU in any case: a GPU would compute FP8 formats by kernels of its own.
    found = output(loaded, torch.device("cpu"))
    return {"loaded": relative(found, own), "wide": relative(wide, own)}


def _wide_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    return sum(each.numel() for each in model.parameters()) * dtype.itemsize


def _free_bytes() -> float:
    free = free_host_bytes()
    return math.inf if free is None else free


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and tables: what is wrong becomes an error above."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            # The attributes that _dequantizing gives are meant to replace those of config.json.
            warnings.filterwarnings("ignore", message="You passed `quantization_config`")
            yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()

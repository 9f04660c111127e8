"""A converted model in a folder of transformers that others read, with the state of its recipes beside it.

    narrowgauge.save_pretrained(model, folder)    weights; and narrowgauge.safetensors
    model = AutoModel.from_pretrained(folder)     an ordinary model; nothing is missing or unexpected
    narrowgauge.convert(model, "fp8-delayed")     takes the state up again

The state is what `nn.state_loading` lists: amax histories, learned steps, readings of samplers. A
weight that is frozen as codes goes out as what its codes decode to. `convert` takes the state up
where the model came from such a folder, was not converted before, and a layer has the recipe and the
weight that it was saved with. A layer with other weights starts without a history, and a warning
says so.

Why a function, and no hook on `model.save_pretrained` or `_keys_to_ignore_on_save`: transformers'
Trainer writes its checkpoints by that method and resumes from the tensors of that file alone, by
`load_state_dict`. State that a hook had moved to another file would be lost at every resumption.
The Trainer's checkpoints therefore keep all entries, and the folder for others is a line of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import ConfigError, warn
from narrowgauge.nn.converted_model import quantized_linears
from narrowgauge.nn.state_loading import added
from narrowgauge.storage import reading
from narrowgauge.structure import is_weight, require_module

FILE = "narrowgauge.safetensors"
OF_STATES = reading.Kind(
    most_bytes=64 * reading.GIB,
    step="Remove it, to convert without it, or restore the folder.",
    follow_links=True,  # snapshots of the Hub consist of links
)
FORMAT = "1"
SAMPLE = 4096  # elements of a weight that tell it from another


def save_pretrained(model: Any, folder: str | Path, **options: Any) -> None:
    """Save a converted model of transformers, and the state of its recipes in a file beside it.

    folder   as for `model.save_pretrained`
    options  further arguments of `model.save_pretrained`, such as max_shard_size

    Raises ConfigError if the model has no `save_pretrained`, or if the folder cannot be written.
    """
    require_module(model, "save_pretrained")
    if not hasattr(model, "save_pretrained"):
        raise ConfigError(
            f"save_pretrained: {type(model).__name__} is no model of transformers. Save model.state_dict() with torch.save, which has "
            "everything.",
            code="save.not-transformers",
        )
    given = options.pop("state_dict", None)
    state: dict[str, Tensor] = model.state_dict() if given is None else given
    path = Path(folder) / FILE
    # An older one would belong to other weights, should this save fail half-way.
    # transformers logs an error and returns if the folder is a file, so nothing would be saved.
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"save_pretrained: cannot write to '{folder}': {error.strerror}. Name a folder.",
            code="save.folder",
        ) from error
    # Codes of a frozen weight stand beside the weight that they decode to.
    weights = {
        name: each for name, each in state.items() if is_weight(name) and ".frozen." not in name
    }
    model.save_pretrained(folder, state_dict=weights, **options)
    layers = dict(quantized_linears(model, "save_pretrained"))
    own = {
        f"{name}.{key}": each.detach().cpu().contiguous().clone()
        for name, layer in layers.items()
        for key, each in added(layer).items()
    }
    if own:
        from safetensors.torch import save_file

        recipes = {name: layer.recipe.name for name, layer in layers.items() if layer.recipe}
        samples = {name: _sample(layer.weight) for name, layer in layers.items()}
        facts = {"format": FORMAT, "recipes": json.dumps(recipes), "samples": json.dumps(samples)}
        save_file(own, path, metadata=facts)


def take_up(model: nn.Module) -> int:
    """Load the state that `save_pretrained` wrote, into a model that was just converted.

    Returns the number of layers that got theirs: 0 for a model from elsewhere. Raises ConfigError
    for a damaged file.
    """
    path = Path(str(getattr(model, "name_or_path", "") or "")) / FILE
    if not os.path.lexists(path) or path == Path(FILE):
        return 0
    tensors, recipes, samples = _read(path)
    taken, others = 0, list[str]()
    for name, layer in quantized_linears(model, "convert"):
        own = added(layer)
        known = {key: tensors.get(f"{name}.{key}") for key in own}
        recipe = layer.recipe.name if layer.recipe else ""
        fits = own and recipes.get(name) == recipe and all(
            found is not None and found.shape == own[key].shape for key, found in known.items()
        )  # fmt: skip
        if not fits:
            continue
        if samples.get(name) != _sample(layer.weight):
            others.append(name)
            continue
        with torch.no_grad():
            for key, found in known.items():
                assert found is not None
                own[key].copy_(found)
        taken += 1
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        warn(
            f"convert: {path} holds the state of recipes for other weights than {others[0]}{more} have now. These layers start without it, "
            "as newly converted ones do. Load the folder again, or remove the file.",
            code="load.other-weights",
            stacklevel=3,
        )
    return taken


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str], dict[str, str]]:
    """(tensors by name, layer -> recipe, layer -> sample of its weight)."""
    with reading.opened_tensors(path, OF_STATES) as opened:
        facts = opened.metadata() or {}
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    try:
        if facts["format"] != FORMAT:
            raise ValueError(f"its format is {facts['format']!r}")
        recipes, samples = (reading.strict_json(facts[name]) for name in ("recipes", "samples"))
        return tensors, dict(recipes), dict(samples)
    except (ValueError, KeyError, TypeError) as error:
        raise OF_STATES.refusal(
            path, f"cannot be read as the state of recipes: {error}", "load.recipe-state-file"
        ) from error


def _sample(weight: Tensor) -> str:
    """Hash of the first elements of a weight in bfloat16, the same in float32 that holds bfloat16."""
    first = weight.detach().reshape(-1)[:SAMPLE].to("cpu", torch.bfloat16)
    data = first.contiguous().view(torch.int16).numpy().tobytes()
    return hashlib.sha256(f"{list(weight.shape)}".encode() + data).hexdigest()[:16]

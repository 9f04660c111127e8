"""Everything that a resumed run needs to go on as if it had never stopped, as named tensors and JSON.

    group       holds
    weights     the model's parameters and buffers
    scaling     what recipes add to layers: amax windows of delayed scaling, learned steps, readings of samplers
    optimizer   moments, step counters, master weights, the generator of stochastic rounding
    rng         torch's, CUDA's, numpy's and Python's generators

The position in the data is the step number (see `data.batches`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from narrowgauge.errors import CheckpointError, NarrowgaugeError
from narrowgauge.train.checkpoint import state_checks
from narrowgauge.train.checkpoint.store import Tensors

Generators = tuple[dict[str, Tensor], Any]
SCALING = re.compile(r"(^|\.)(scaling\..*|steps\.(x|w|cold_left)|sampling\.variance)$")  # names that recipes add


def seed_all(seed: int) -> None:
    """Starts every generator that a checkpoint holds; numpy's and Python's would else start from the operating system's noise."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def collect(model: nn.Module, optimizer: Any, scaler: Any) -> tuple[Tensors, dict[str, Any]]:
    """The state as groups of tensors, and the rest of it as JSON."""
    weights, scaling = split_scaling(model.state_dict())
    optimizer_tensors, optimizer_rest = flatten(optimizer.state_dict())
    rng_tensors, rng_rest = generators()
    tensors = {"weights": weights, "scaling": scaling, "optimizer": optimizer_tensors, "rng": rng_tensors}
    rest = {"optimizer": optimizer_rest, "rng": rng_rest, "scaler": scaler.state_dict() if scaler else None}
    return tensors, rest


def restore(model: nn.Module, optimizer: Any, scaler: Any, tensors: Tensors, rest: dict[str, Any], where: str) -> None:
    """Puts `collect`'s result back. Before anything changes: CheckpointError if it belongs to another model or cannot be a run's."""
    saved = tensors.get("weights", {}) | tensors.get("scaling", {})
    _refuse_other_model(model.state_dict(), saved, where)
    with unusable(where):
        moments, rng = (unflatten(rest[name], tensors[name]) for name in ("optimizer", "rng"))
        problems = [
            *state_checks.impossible_tensors(tensors.get("scaling", {})),
            *state_checks.impossible_tensors(tensors["optimizer"]),
            *state_checks.impossible_optimizer(optimizer, moments),
            *(state_checks.impossible_scaler(scaler.state_dict(), rest["scaler"]) if scaler else ()),
            *state_checks.impossible_generators(rng),
        ]
        if problems:
            raise ValueError(_few(problems))
        model.load_state_dict(saved)
        optimizer.load_state_dict(moments)
        if scaler:
            scaler.load_state_dict(rest["scaler"])
        set_generators((tensors["rng"], rest["rng"]))


@contextmanager
def unusable(where: str) -> Iterator[None]:
    """Turns what reading a damaged state raises into a CheckpointError that names it."""
    try:
        yield
    except torch.OutOfMemoryError:  # a RuntimeError, and not the checkpoint's fault
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, NarrowgaugeError) as error:
        words = f"{type(error).__name__} {error}" if isinstance(error, KeyError | AttributeError) else str(error)
        raise CheckpointError(
            f"{where}: holds a state that no run writes: {words.rstrip('.')}. "
            "Restore the checkpoint, or remove it to go on from an older one."
        ) from error


def split_scaling(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A state dict as (what an unconverted model has, what its recipes have added)."""
    plain = {name: tensor for name, tensor in state.items() if not SCALING.search(name)}
    return plain, {name: tensor for name, tensor in state.items() if SCALING.search(name)}


def flatten(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Nested dicts, lists and tuples -> (tensors by path, the same tree as JSON with their paths in place of them)."""
    tensors: dict[str, Tensor] = {}

    def walk(tree: Any, path: str) -> Any:
        if isinstance(tree, Tensor):
            tensors[path] = tree
            return {"tensor": path}
        if isinstance(tree, dict):
            return {"items": [[key, walk(value, f"{path}.{key}".lstrip("."))] for key, value in tree.items()]}
        if isinstance(tree, list | tuple):
            parts = [walk(value, f"{path}.{index}".lstrip(".")) for index, value in enumerate(tree)]
            return {"tuple" if isinstance(tree, tuple) else "list": parts}
        return {"value": tree}

    rest = walk(tree, "")
    return tensors, rest


def unflatten(rest: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `flatten`; ValueError unless every tensor is where `flatten` took it from."""

    def walk(rest: Any) -> Any:
        [(kind, content)] = rest.items()
        if kind == "tensor":
            return tensors[content]
        if kind == "items":
            return {key: walk(value) for key, value in content}
        if kind in ("tuple", "list"):
            parts = map(walk, content)
            return tuple(parts) if kind == "tuple" else list(parts)
        if kind != "value":
            raise ValueError(f"{kind!r} is not one of 'tensor', 'items', 'tuple', 'list' and 'value'")
        return content

    tree = walk(rest)
    found, _ = flatten(tree)
    astray = [name for name in tensors.keys() | found.keys() if found.get(name) is not tensors.get(name)]
    if astray:
        raise ValueError(f"tensor {min(astray)!r} is not in its place")
    return tree


def _refuse_other_model(own: dict[str, Tensor], saved: dict[str, Tensor], where: str) -> None:
    differences = [f"{name} is missing" for name in own if name not in saved]
    differences += [f"{name} is not part of this model" for name in saved if name not in own]
    differences += [
        f"{name} is {_form(saved[name])}, here {_form(own[name])}"
        for name in own
        if name in saved and _form(saved[name]) != _form(own[name])
    ]
    if differences:
        raise CheckpointError(
            f"{where}: a checkpoint of another model or recipe: {_few(differences)}. Resume with the settings that wrote it."
        )


def _few(clauses: list[str]) -> str:
    return "; ".join(clauses[:3]) + (f"; and {len(clauses) - 3} more" if len(clauses) > 3 else "")


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def generators() -> Generators:
    """The state of torch's, CUDA's, numpy's and Python's generators."""
    numpy_name, numpy_key, *numpy_rest = np.random.get_state()
    tree = {
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
        "numpy_key": torch.from_numpy(np.asarray(numpy_key).astype(np.int64)),
        "numpy": [numpy_name, *[value.item() if hasattr(value, "item") else value for value in numpy_rest]],
        "python": random.getstate(),
    }
    return flatten(tree)


def set_generators(saved: Generators) -> None:
    """Puts back what `generators` gave."""
    tensors, rest = saved
    tree = unflatten(rest, tensors)
    torch.set_rng_state(tree["torch"])
    if torch.cuda.is_available() and len(tree["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(tree["cuda"])
    name, *numpy_rest = tree["numpy"]
    np.random.set_state((name, tree["numpy_key"].numpy().astype(np.uint32), *numpy_rest))
    random.setstate(tree["python"])

"""State of a run as named tensors and JSON. A run that resumes from it is bit-identical.

    group       contents
    weights     parameters and buffers of the unconverted model; of adapters, without their base
    scaling     state of recipes: amax histories of delayed scaling, learned steps, sampler
                statistics
    optimizer   moments, step counters, master weights, generator of stochastic rounding
    rng         generators of torch, CUDA, numpy and Python

The position in the data is not saved: it follows from the step number (see `data.batches`) and the
fact `position` of the checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.diagnose import forms
from narrowgauge.diagnose.forms import Form, number, one_of, record, shown, text
from narrowgauge.distributed.all_ranks import is_lost
from narrowgauge.errors import CheckpointError, NarrowgaugeError
from narrowgauge.ops.rng import cpu_state_bytes, generators, set_generators
from narrowgauge.optim import shards
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.structure import is_weight
from narrowgauge.train.adapter_state import adapters_of, trained
from narrowgauge.train.checkpoint.store import Tensors, nonfinite


def collect(model: nn.Module, optimizer: Any, scaler: Any) -> tuple[Tensors, dict[str, Any]]:
    """Returns (groups of named tensors, the rest of the state as JSON)."""
    weights, scaling = split_scaling(saved_state(model))
    optimizer_tensors, optimizer_rest = flatten(optimizer.state_dict())
    rng_tensors, rng_rest = flatten(generators())
    tensors = {
        "weights": weights,
        "scaling": scaling,
        "optimizer": optimizer_tensors,
        "rng": rng_tensors,
    }
    rest = {
        "optimizer": optimizer_rest,
        "rng": rng_rest,
        "scaler": scaler.state_dict() if scaler else None,
    }
    return tensors, rest


def restore(
    model: nn.Module,
    optimizer: Any,
    scaler: Any,
    tensors: Tensors,
    rest: dict[str, Any],
    where: str,
) -> None:
    """Loads the result of `collect` into a run.

    Raises CheckpointError before anything changes, if the state belongs to another model or if no
    run can have written it.
    """
    saved = tensors.get("weights", {}) | tensors.get("scaling", {})
    refuse_other_model(saved_state(model), saved, where)
    with unusable(where):
        moments, rng = (unflatten(rest[name], tensors[name]) for name in ("optimizer", "rng"))
        problems = [
            *_impossible_tensors(tensors.get("scaling", {})),
            *_impossible_tensors(tensors["optimizer"]),
            *_impossible_optimizer(optimizer, moments),
            *(_impossible_scaler(scaler.state_dict(), rest["scaler"]) if scaler else ()),
            *_impossible_generators(rng),
        ]
        if problems:
            raise ValueError(_few(problems))
        load_state(model, saved)
        optimizer.load_state_dict(moments)
        if scaler:
            scaler.load_state_dict(rest["scaler"])
        set_generators(rng)


def room(model: nn.Module, optimizer: Any, saved: Tensors, where: str) -> Tensors:
    """Tensors to read a sharded checkpoint into.

    saved  dtypes and shapes of the checkpoint's tensors
    ->     the model's own tensors, and new ones for the optimizer's state, sharded like their
           parameters

    Raises CheckpointError if the checkpoint belongs to another model.
    """
    own = model.state_dict()
    refuse_other_model(own, saved.get("weights", {}) | saved.get("scaling", {}), where)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def of_optimizer(name: str, form: Tensor) -> Tensor:
        kind, number, *_ = name.split(".")
        # Step counts stay on the CPU until the optimizer loads them
        if kind != "state" or form.ndim == 0:
            return torch.empty(form.shape, dtype=form.dtype)
        return shards.room(form, parameters[int(number)])

    weights, scaling = split_scaling(own)
    with unusable(where):
        moments = {
            name: of_optimizer(name, form) for name, form in saved.get("optimizer", {}).items()
        }
    return {"weights": weights, "scaling": scaling, "optimizer": moments}


def saved_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model without the base of its adapters.

    All of the model if it has no adapters. State of recipes (amax histories) is a part.
    """
    if adapters_of(model) is None:
        return model.state_dict()
    own = trained(model)
    return {
        name: each
        for name, each in model.state_dict().items()
        if name in own or not (is_weight(name) or ".frozen." in name)
    }


def load_state(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Loads what `saved_state` returned; names were compared before."""
    model.load_state_dict(dict(saved), strict=adapters_of(model) is None)


def base_facts(model: nn.Module) -> dict[str, Any]:
    """Facts of a checkpoint about the base of a model; {} without adapters."""
    found = adapters_of(model)
    return {} if found is None else {"base": asdict(found.base)}


def refuse_other_base(model: nn.Module, facts: Mapping[str, Any], where: str) -> None:
    """Raises CheckpointError if a checkpoint's adapters were trained over another base."""
    found, there = adapters_of(model), facts.get("base")
    # Best weights have no facts: those of the checkpoints beside them were compared.
    if found is None or there is None or there.get("sha256") == found.base.sha256:
        return
    raise CheckpointError(
        f"{where}: its adapters were trained over weights with the SHA-256 {str(there.get('sha256'))[:12]} ({there.get('model')!r}), and "
        f"those of {found.base.model!r} have {found.base.sha256[:12]}. Restore the base, or name the folder that holds it.",
        code="adapter.other-base",
    )


def adapter_weights(model: nn.Module) -> dict[str, Tensor] | None:
    """The weights of a model's adapters; None for a model without any."""
    return None if adapters_of(model) is None else split_scaling(saved_state(model))[0]


def adapter_notes(model: nn.Module) -> list[str]:
    """Sentences about a model's adapters and their base; [] without any."""
    found = adapters_of(model)
    return [] if found is None else found.notes


@contextmanager
def unusable(where: str) -> Iterator[None]:
    """Converts errors of reading a damaged state into a CheckpointError that names `where`."""
    try:
        yield
    except torch.OutOfMemoryError:  # a subclass of RuntimeError, and not the checkpoint's fault
        raise
    except NarrowgaugeError as error:
        raise CheckpointError(
            f"{where}: does not fit this run: {str(error).rstrip('.')}. Narrow states of matrices that tp cuts go on with that tp alone: "
            "resume with the parallel and states that wrote it, or branch with others: --from RUN@STEP --optimizer.states fp32. If "
            "nothing was "
            "changed, it is damaged: restore it, or remove it to go on from an older one.",
            code="checkpoint.unfit",
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        if is_lost(error):
            raise  # another rank died: not the checkpoint's fault
        words = (
            f"{type(error).__name__} {error}"
            if isinstance(error, KeyError | AttributeError)
            else str(error)
        )
        raise CheckpointError(
            f"{where}: holds a state that no run writes: {words.rstrip('.')}. "
            "Restore the checkpoint, or remove it to go on from an older one.",
            code="checkpoint.state",
        ) from error


def split_scaling(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Splits a state dict into (entries of the unconverted model, entries added by recipes)."""
    scaling = {name: tensor for name, tensor in state.items() if not is_weight(name)}
    return {name: tensor for name, tensor in state.items() if name not in scaling}, scaling


def flatten(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Flattens nested dicts, lists and tuples to (tensors by path, the tree as JSON).

    The JSON tree holds the path in place of each tensor.
    """
    tensors: dict[str, Tensor] = {}

    def walk(tree: Any, path: str) -> Any:
        if isinstance(tree, Tensor):
            tensors[path] = tree
            return {"tensor": path}
        if isinstance(tree, dict):
            return {
                "items": [
                    [key, walk(value, f"{path}.{key}".lstrip("."))] for key, value in tree.items()
                ]
            }
        if isinstance(tree, list | tuple):
            parts = [walk(value, f"{path}.{index}".lstrip(".")) for index, value in enumerate(tree)]
            return {"tuple" if isinstance(tree, tuple) else "list": parts}
        return {"value": tree}

    rest = walk(tree, "")
    return tensors, rest


def unflatten(rest: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverts `flatten`. Raises ValueError unless every tensor returns to its original path."""

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
            raise ValueError(
                f"{kind!r} is not one of 'tensor', 'items', 'tuple', 'list' and 'value'"
            )
        return content

    tree = walk(rest)
    # A damaged JSON tree may still parse. Flatten it again and require every tensor at its own
    # path.
    found, _ = flatten(tree)
    astray = [
        name for name in tensors.keys() | found.keys() if found.get(name) is not tensors.get(name)
    ]
    if astray:
        raise ValueError(f"tensor {min(astray)!r} is not in its place")
    return tree


def refuse_other_model(own: dict[str, Tensor], saved: dict[str, Tensor], where: str) -> None:
    """Raises CheckpointError if names, dtypes or shapes of two state dicts differ."""
    here, there = (
        {name: shown(tensor) for name, tensor in state.items()} for state in (own, saved)
    )
    differences = [f"{name} is missing" for name in here if name not in there]
    differences += [f"{name} is not part of this model" for name in there if name not in here]
    differences += [
        f"{name} is {there[name]}, here {form}"
        for name, form in here.items()
        if there.get(name, form) != form
    ]
    if differences:
        raise CheckpointError(
            f"{where}: a checkpoint of another model or recipe: {_few(differences)}. Resume with the settings that wrote it.",
            code="checkpoint.other-model",
        )


def _few(clauses: list[str]) -> str:
    return "; ".join(clauses[:3]) + (f"; and {len(clauses) - 3} more" if len(clauses) > 3 else "")


# Checks for states that no run writes, made before anything is changed. Each function yields one
# clause per problem. Integer codes may have any value.

COUNT = number(0, whole=True)
ANY_TABLE = forms.table(forms.anything)
TEXTS = forms.table(text)
NOTHING = one_of(None)
STATE = record(
    {"optimizer": ANY_TABLE, "rng": ANY_TABLE, "scaler": forms.either(ANY_TABLE, NOTHING)}
)
BEST = record(
    {"step": number(1, 10**8 - 1, whole=True), "value": number()},
    {"loss": forms.either(number(), NOTHING)},
)
FACTS = record(
    {"state": STATE, "trained_s": number(0), "skipped_steps": COUNT, "tokenizer": text, "content_hash": text},
    {
        **dict.fromkeys(("recipe", "precision", "optimizer", "states", "master"), text),
        "parent": ANY_TABLE,
        "agreement": record({"seed": COUNT, "step": COUNT}, {"gradients": ANY_TABLE}),
        "recipes": TEXTS, "auto": TEXTS, "switched": forms.listed(text), "position": ANY_TABLE, "best": forms.either(BEST, NOTHING),
    },
)  # fmt: skip

# Optimizer options that may change when a run resumes: execution, and values that each step sets.
# The optimizer itself checks `form`. All others must be equal: load_state_dict would silently
# replace this run's weight_decay or betas.
FREE = frozenset(
    {
        "lr",
        "previous_lr",
        "capturable",
        "fused",
        "foreach",
        "why",
        "form",
        "norm_before",
        "dampening",
    }
)
NOT_NEGATIVE = re.compile(
    r"(^|[._])(history|live|nonfinite|cold_left|variance|step|exp_avg_sq|scale)$"
)
# Infinite in earlier versions; NaN after a non-finite gradient
NOT_FINITE = re.compile(r"(^|\.)sampling\.variance$")
LEARNED = re.compile(r"(^|\.)steps\.[xw]$")
LARGEST_LEARNED = (
    100 * math.log(2) / 64 + 1e-6
)  # log of 2^100 / RATE, see narrowgauge/nn/learned_step.py
WORDS = 624  # state words of a Mersenne twister


def _impossible_tensors(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Checks the groups scaling and optimizer for impossible values.

    Amax histories, moments, scales and counters must be finite and not negative. Learned steps are
    bounded.
    """
    for name, tensor in tensors.items():
        tensor = shards.local(tensor)  # each rank checks its own shard
        if (count := nonfinite(tensor)) and not NOT_FINITE.search(name):
            yield f"{name} holds {count} values that are not finite, of {tensor.numel()}"
        elif tensor.numel() and NOT_NEGATIVE.search(name) and (least := _least(tensor)) < 0:
            yield f"{name} holds {least:g}, and is never negative"
        elif (
            tensor.numel()
            and LEARNED.search(name)
            and (most := float(tensor.abs().max())) > LARGEST_LEARNED
        ):
            yield f"{name} holds {most:g}, and is never above {LARGEST_LEARNED:.4f}"


def _least(tensor: Tensor) -> float:
    # torch has no min() for 8-bit floats
    return float((tensor if tensor.itemsize > 1 else tensor.float()).min())


def _impossible_optimizer(optimizer: torch.optim.Optimizer, saved: Any) -> Iterator[str]:
    """Compares `saved` with the optimizer that is to load it."""
    own = optimizer.state_dict()
    if words := forms.refuse(
        saved, record({"param_groups": forms.listed(ANY_TABLE), "state": forms.table(ANY_TABLE)})
    ):
        yield f"the optimizer's {words}"
        return
    if len(saved["param_groups"]) != len(own["param_groups"]):
        yield f"the optimizer had {len(saved['param_groups'])} groups of parameters, here {len(own['param_groups'])}"
        return
    for place, (ours, theirs) in enumerate(
        zip(own["param_groups"], saved["param_groups"], strict=True)
    ):
        if "params" not in theirs:
            yield f"group {place} of the optimizer has no 'params'"
        for key in sorted((ours.keys() & theirs.keys()) - FREE):
            if type(ours[key]) is not type(theirs[key]) or ours[key] != theirs[key]:
                yield f"{key} of group {place} of the optimizer is {shown(theirs[key])}, here {shown(ours[key])}"
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, state in saved["state"].items():
        if isinstance(place, bool) or place not in range(len(parameters)):
            yield f"the optimizer has a state of parameter {shown(place)}, and {len(parameters)} parameters"
        # torch's optimizers load any shape; narrowgauge's check shapes themselves
        elif not isinstance(optimizer, LowPrecisionOptimizer):
            for name, value in state.items():
                shape, here = list(value.shape), list(parameters[place].shape)
                if value.ndim and shape != here:
                    yield f"{name} of parameter {place} is {shape}, here {here}"


def _impossible_scaler(own: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[str]:
    """Checks a saved loss scaler.

    own  state_dict() of the torch.amp.GradScaler that is to load `saved`
    """
    options: dict[str, Form] = {key: one_of(value) for key, value in own.items()}
    numbers = {"scale": number(2.0**-149, 2.0**127), "_growth_tracker": COUNT}
    if words := forms.refuse(saved, record(options | numbers)):
        yield f"the loss scaler's {words}"


def _impossible_generators(tree: Any) -> Iterator[str]:
    """Checks saved generators: values of another length or range are loaded silently, or crash."""
    word, place = number(0, 2**32 - 1, whole=True), number(0, WORDS, whole=True)
    form = record({
        "torch": _bytes, "cuda": forms.listed(_bytes), "numpy_key": _key,
        "numpy": _items(one_of("MT19937"), place, one_of(0, 1), number()),
        "python": _items(one_of(3), _items(*[word] * WORDS, place), forms.either(number(), NOTHING)),
    })  # fmt: skip
    if found := forms.refuse(tree, form):
        yield f"the generators' {found}"
        return
    for name, key in (("numpy", tree["numpy_key"].tolist()), ("Python", tree["python"][1][:-1])):
        if not any(key):
            yield f"the key of {name}'s generator is all zeros, which gives zeros for ever"


def _bytes(value: Any) -> str:
    size = cpu_state_bytes()
    is_right = (
        isinstance(value, Tensor)
        and value.dtype == torch.uint8
        and value.ndim == 1
        and len(value) in (16, size)
    )
    return (
        ""
        if is_right
        else f" = {shown(value)} is not the state of a generator, uint8 [{size}], or [16] on CUDA"
    )


def _key(value: Any) -> str:
    if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.shape != (WORDS,):
        return f" = {shown(value)} is not int64 [{WORDS}]"
    low, high = int(value.min()), int(value.max())
    return (
        ""
        if low >= 0 and high < 2**32
        else f" has words from {low} to {high}, which are not of 32 bits"
    )


def _items(*items: Form) -> Form:
    """A form for a list or tuple of that many items."""

    def check(value: Any) -> str:
        if not isinstance(value, list | tuple) or len(value) != len(items):
            return f" = {shown(value)} is not a list of {len(items)}"
        found = (
            f"[{place}]{words}" for place, item in enumerate(items) if (words := item(value[place]))
        )
        return next(found, "")

    return check

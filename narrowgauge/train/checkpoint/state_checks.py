"""Finds values in a checkpoint's state that no run writes, before anything is changed.

    facts.json  has the keys of a run, each with a possible value
    scaling     amax windows are finite and not negative, learned steps within their bounds, counters not negative
    optimizer   its options are those of this run; steps, second moments and scales are not negative; all of it is finite
    scaler      a positive scale, and the options of this run
    rng         states of the right length, with words in range: others are taken up without a word, or crash

Each function yields a clause per problem. Codes (integers) may hold anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.diagnose import forms
from narrowgauge.diagnose.forms import Form, number, one_of, record, shown, text
from narrowgauge.optim.base import NarrowOptimizer
from narrowgauge.train.checkpoint.store import nonfinite

COUNT = number(0, whole=True)
ANY_TABLE = forms.table(forms.anything)
TEXTS = forms.table(text)
NOTHING = one_of(None)
STATE = record({"optimizer": ANY_TABLE, "rng": ANY_TABLE, "scaler": forms.either(ANY_TABLE, NOTHING)})
BEST = record({"step": number(1, 10**8 - 1, whole=True), "value": number()}, {"loss": forms.either(number(), NOTHING)})
FACTS = record(
    {"state": STATE, "trained_s": number(0), "skipped_steps": COUNT, "tokenizer": text, "content_hash": text},
    {
        **dict.fromkeys(("recipe", "precision", "optimizer", "states", "master"), text),
        "recipes": TEXTS, "auto": TEXTS, "switched": forms.listed(text), "position": ANY_TABLE, "best": forms.either(BEST, NOTHING),
    },
)  # fmt: skip

# What may differ between the optimizer of a run and that of its continuation: where it runs, and what each step sets.
FREE = frozenset({"lr", "capturable", "fused", "foreach", "why", "form"})  # of `form` the optimizer itself decides
NOT_NEGATIVE = re.compile(r"(^|[._])(history|live|nonfinite|cold_left|variance|step|exp_avg_sq|scale)$")
NOT_FINITE = re.compile(r"(^|\.)sampling\.variance$")  # infinite in earlier versions, NaN after a poisoned gradient
LEARNED = re.compile(r"(^|\.)steps\.[xw]$")
LARGEST_LEARNED = 100 * math.log(2) / 64 + 1e-6  # log of 2^100 / RATE, see narrowgauge/nn/learned_step.py
WORDS = 624  # of a Mersenne twister


def impossible_tensors(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """tensors: of the group scaling or optimizer."""
    for name, tensor in tensors.items():
        if (count := nonfinite(tensor)) and not NOT_FINITE.search(name):
            yield f"{name} holds {count} values that are not finite, of {tensor.numel()}"
        elif tensor.numel() and NOT_NEGATIVE.search(name) and (least := float(tensor.to(torch.float64).min())) < 0:
            yield f"{name} holds {least:g}, and is never negative"
        elif tensor.numel() and LEARNED.search(name) and (most := float(tensor.abs().max())) > LARGEST_LEARNED:
            yield f"{name} holds {most:g}, and is never above {LARGEST_LEARNED:.4f}"


def impossible_optimizer(optimizer: torch.optim.Optimizer, saved: Any) -> Iterator[str]:
    """optimizer: what is to take up `saved`."""
    own = optimizer.state_dict()
    if words := forms.refuse(saved, record({"param_groups": forms.listed(ANY_TABLE), "state": forms.table(ANY_TABLE)})):
        yield f"the optimizer's {words}"
        return
    if len(saved["param_groups"]) != len(own["param_groups"]):
        yield f"the optimizer had {len(saved['param_groups'])} groups of parameters, here {len(own['param_groups'])}"
        return
    for place, (ours, theirs) in enumerate(zip(own["param_groups"], saved["param_groups"], strict=True)):
        if "params" not in theirs:
            yield f"group {place} of the optimizer has no 'params'"
        for key in sorted((ours.keys() & theirs.keys()) - FREE):
            if type(ours[key]) is not type(theirs[key]) or ours[key] != theirs[key]:
                yield f"{key} of group {place} of the optimizer is {shown(theirs[key])}, here {shown(ours[key])}"
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, state in saved["state"].items():
        if isinstance(place, bool) or place not in range(len(parameters)):
            yield f"the optimizer has a state of parameter {shown(place)}, and {len(parameters)} parameters"
        elif not isinstance(optimizer, NarrowOptimizer):  # torch's take up any shape; narrowgauge's look for themselves
            for name, value in state.items():
                shape, here = list(value.shape), list(parameters[place].shape)
                if value.ndim and shape != here:
                    yield f"{name} of parameter {place} is {shape}, here {here}"


def impossible_scaler(own: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[str]:
    """own: state_dict() of the torch.amp.GradScaler that is to take up `saved`."""
    options: dict[str, Form] = {key: one_of(value) for key, value in own.items()}
    numbers = {"scale": number(2.0**-149, 2.0**127), "_growth_tracker": COUNT}
    if words := forms.refuse(saved, record(options | numbers)):
        yield f"the loss scaler's {words}"


def impossible_generators(tree: Any) -> Iterator[str]:
    """tree: what `state.generators` flattened."""
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
    size = torch.get_rng_state().numel()
    is_right = isinstance(value, Tensor) and value.dtype == torch.uint8 and value.ndim == 1 and len(value) in (16, size)
    return "" if is_right else f" = {shown(value)} is not the state of a generator, uint8 [{size}], or [16] on CUDA"


def _key(value: Any) -> str:
    if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.shape != (WORDS,):
        return f" = {shown(value)} is not int64 [{WORDS}]"
    low, high = int(value.min()), int(value.max())
    return "" if low >= 0 and high < 2**32 else f" has words from {low} to {high}, which are not of 32 bits"


def _items(*items: Form) -> Form:
    """A list or tuple of that many items."""

    def check(value: Any) -> str:
        if not isinstance(value, list | tuple) or len(value) != len(items):
            return f" = {shown(value)} is not a list of {len(items)}"
        found = (f"[{place}]{words}" for place, item in enumerate(items) if (words := item(value[place])))
        return next(found, "")

    return check

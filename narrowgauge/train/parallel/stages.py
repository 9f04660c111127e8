"""Cuts a causal language model into pipeline stages at its blocks.

    stages: embedding, first blocks | blocks | last blocks, norm, head
    stage(h) = the model itself, called with inputs_embeds = h; modules of other stages are replaced
               by `Absent`, which returns its input

Each stage computes rotary embeddings and masks with the model's own code. Its modules keep the
names of the whole model. Parameters, recipe patterns, random numbers and checkpoints therefore
match a run of one process. Nothing is traced.

With L blocks and S stages, stage s gets blocks ceil(s L / S) to ceil((s + 1) L / S) - 1. The last
stage also has the head, and this rounding never gives it more blocks than another stage.

Before the cut, the stages are run on a few tokens and compared with the whole model. Models that do
more than a lookup with their embeddings are refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import ConfigError
from narrowgauge.memory.blocks import find_blocks
from narrowgauge.nn.converted_model import suspended
from narrowgauge.ops import rng
from narrowgauge.train.loss import NO_CACHE

PROBE = 8  # tokens of the test batch


class Absent(nn.Module):
    """Placeholder for another stage's module: returns its first input.

    It copies the original's str and int attributes. Models read some attributes from their blocks,
    such as the type of attention.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(
            {name: value for name, value in vars(original).items() if isinstance(value, str | int)}
        )

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        return x


class AbsentTable(nn.Module):
    """Placeholder for an embedding that an earlier stage has added already: returns zeros."""

    def __init__(self, original: nn.Embedding) -> None:
        super().__init__()
        self.width, self.dtype = original.embedding_dim, original.weight.dtype

    def forward(self, ids: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros((*ids.shape, self.width), dtype=self.dtype, device=ids.device)


@dataclass(frozen=True)
class Cut:
    """Assignment of modules to stages, by dotted module name.

    first   modules of the first stage, besides blocks
    blocks  all blocks, in order
    last    modules of the last stage, besides blocks
    count   number of stages
    """

    first: tuple[str, ...]
    blocks: tuple[str, ...]
    last: tuple[str, ...]
    count: int

    @classmethod
    def of(cls, model: Any, count: int) -> Cut:
        """Plans a cut into `count` stages.

        Raises ConfigError, naming the model, if it cannot be cut.
        """
        kind = type(model).__name__
        if (
            not hasattr(model, "base_model")
            or model.base_model is model
            or model.get_output_embeddings() is None
        ):
            raise _refusal(
                kind,
                "is no causal language model of transformers with a part below its output head",
            )
        blocks = tuple(find_blocks(model, verb="parallel"))
        stack = blocks[0].rpartition(".")[0]
        if model.config.is_encoder_decoder or any(
            name.rpartition(".")[0] != stack for name in blocks
        ):
            raise _refusal(kind, "has more than one stack of blocks")
        if len(blocks) < count:
            raise ConfigError(
                f"parallel: {len(blocks)} blocks are fewer than {count} stages. Take a smaller pp, or a schedule with one stage per rank.",
                code="pipeline.blocks",
            )
        first, last = _around(model, stack)
        found = cls(first, blocks, last, count)
        found._refuse_shared(model)
        return found

    def blocks_of(self, number: int) -> tuple[str, ...]:
        """Names of the blocks of stage `number`."""
        first, end = (-(-place * len(self.blocks) // self.count) for place in (number, number + 1))
        return self.blocks[first:end]

    def absent(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """Modules that belong to none of the stages `numbers`."""
        own = set(numbers)
        kept = {name for number in own for name in self.blocks_of(number)}
        missing = [name for name in self.blocks if name not in kept]
        return (
            *(() if 0 in own else self.first),
            *missing,
            *(() if self.count - 1 in own else self.last),
        )

    def _refuse_shared(self, model: nn.Module) -> None:
        """Raises ConfigError if a parameter belongs to several stages.

        Each stage would train its own copy.
        """
        stages: dict[int, tuple[int, str]] = {}
        for number in range(self.count):
            # The trailing dot keeps `layers.1` from matching `layers.10`.
            absent = tuple(f"{name}." for name in self.absent([number]))
            for name, parameter in model.named_parameters(remove_duplicate=False):
                if name.startswith(absent):
                    continue
                other, known = stages.setdefault(id(parameter), (number, name))
                if other == number:
                    continue
                if name == known:
                    raise _refusal(
                        type(model).__name__,
                        f"has the parameter {name!r} outside of blocks, embedding and head",
                    )
                raise ConfigError(
                    f"parallel: {known!r} of stage {other} and {name!r} of stage {number} are one tensor (tied weights), which each stage "
                    "would train apart. Untie them (tie_word_embeddings = false in config.json, and weights of its own for the head), or "
                    "take pp=1.",
                    code="pipeline.tied-weights",
                )

    def refuse_other_numbers(self, model: Any, context: AbstractContextManager[Any]) -> torch.dtype:
        """Raises ConfigError unless the chained stages give the model's logits bit for bit.

        context  autocast context of the run's precision

        Returns the dtype of the activations between stages. Random generators are restored.
        """
        table = model.get_input_embeddings().weight
        ids = torch.arange(PROBE, device=table.device)[None] % table.shape[0]
        kind = type(model).__name__
        try:
            with (
                context,
                suspended(model),
                torch.no_grad(),
                rng.preserved([table.device] if table.is_cuda else []),
            ):
                # Same seed for both passes, so that dropout draws the same masks.
                torch.manual_seed(0)
                whole = model(input_ids=ids, **NO_CACHE).logits
                torch.manual_seed(0)
                found = (
                    view(model, self.absent([0]))
                    .base_model(input_ids=ids, **NO_CACHE)
                    .last_hidden_state
                )
                travels: torch.dtype = found.dtype
                for number in range(1, self.count - 1):
                    stage = view(model, self.absent([number])).base_model
                    found = stage(inputs_embeds=found, **NO_CACHE).last_hidden_state
                logits = view(model, self.absent([self.count - 1]))(
                    inputs_embeds=found, **NO_CACHE
                ).logits
        except (TypeError, AttributeError, ValueError, KeyError, IndexError, RuntimeError) as error:
            # A RuntimeError, but no sign of an unsuitable model.
            if isinstance(error, torch.OutOfMemoryError):
                raise
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise _refusal(kind, f"cannot be called in stages ({first})") from error
        if not torch.equal(whole, logits):
            raise _refusal(kind, "computes other numbers in stages than as a whole")
        return travels


def _refusal(kind: str, words: str) -> ConfigError:
    return ConfigError(
        f"parallel: {kind} {words}, so it cannot be cut at its blocks. Cut models that can, as those of Llama, Mistral and Qwen; "
        "for this one take fsdp.",
        code="pipeline.uncuttable",
    )


def _around(model: nn.Module, stack: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(module names before the blocks, module names after them), in registration order.

    Modules without parameters, such as rotary embeddings, stay on every stage; dropout of the
    embeddings is the exception.
    """
    before, after = list[str](), list[str]()
    path = stack.split(".")
    for depth, step in enumerate(path):
        parent, prefix, seen = (
            model.get_submodule(".".join(path[:depth])),
            "".join(f"{name}." for name in path[:depth]),
            False,
        )
        for name, child in parent.named_children():
            if name == step:
                seen = True
            # Embedding dropout on every stage would drop activations again at each stage's input.
            elif next(child.parameters(), None) is not None or (
                isinstance(child, nn.Dropout) and not seen
            ):
                (after if seen else before).append(prefix + name)
    return tuple(before), tuple(after)


def view(model: Any, absent: Iterable[str]) -> Any:
    """Shallow copy of the model with placeholders for modules `absent`; the rest is shared."""
    below: dict[str, list[str]] = {}
    for name in absent:
        child, _, rest = name.partition(".")
        below.setdefault(child, []).append(rest)
    found = copy.copy(model)
    # copy.copy shares the dict of children, which must not change in the original.
    found.__dict__["_modules"] = dict(model._modules)
    for name, rests in below.items():
        child = model._modules[name]
        found._modules[name] = _placeholder(child) if "" in rests else view(child, rests)
    return found


def remove(model: nn.Module, absent: Iterable[str]) -> None:
    """Replaces modules of the model by placeholders in place, which frees their memory."""
    for name in absent:
        parent, _, last = name.rpartition(".")
        modules: Mapping[str, Any] = model.get_submodule(parent)._modules
        modules[last] = _placeholder(modules[last])  # type: ignore[index]


def _placeholder(module: nn.Module) -> nn.Module:
    return AbsentTable(module) if isinstance(module, nn.Embedding) else Absent(module)

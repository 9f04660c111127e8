"""Activation checkpointing: save few activations per block and recompute the others in backward.

    policy           saved, for n blocks                        recomputed block forwards
    None, "none"     everything (checkpointing off)             0
    "selective"      block inputs, outputs of matmuls and       n, without matmuls and attention
                     attention
    "full"           block inputs                               n
    "every-N"        inputs of every N-th block                 n + n (N - 1) / N
    "sqrt"           inputs of at most about sqrt(2 n) blocks   2 n - sqrt(2 n)
    "budget:512MiB"  "full" in as few blocks as needed to meet the budget, from the first on;
                     "sqrt" if "full" in all blocks is not enough
    "auto"           the cheapest other policy whose peak fits (see `cheapest`)

"every-N" and "sqrt" group blocks into segments (see `segments`); every-N is Megatron's uniform
method with N layers. At the end of forward every-4 has saved half as much as every-2. In backward a
segment's N inputs are recomputed, so the peak falls with N up to about sqrt(n).

Recomputation restores torch's generators, so dropout and stochastic rounding draw the same numbers.
Delayed scaling only records maxima, so a repeated amax changes nothing.

The last block is not recomputed by default. Backward begins with it, so its activations would exist
at that moment anyway. Skipping it costs memory only if something large is alive between the last
block and backward, such as the full logits.
"""

from __future__ import annotations

import inspect
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from narrowgauge.errors import ConfigError, Reason
from narrowgauge.memory.blocks import find_blocks, set_technique
from narrowgauge.memory.measure import saved_bytes
from narrowgauge.memory.recomputation import checkpointed
from narrowgauge.memory.segments import SegmentMember, equal_lengths, most_inputs, sqrt_lengths
from narrowgauge.memory.selective import selective_checkpoint

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_POLICY = re.compile(
    r"none|full|selective|sqrt|every-([1-9]\d{0,3})|budget:(\d+(?:\.\d+)?) ?(B|[KMG]iB)?"
)
CACHES = ("past_key_values", "past_key_value", "layer_past")

# (block, forward, args, kwargs) -> output; backward can recompute the saved activations.
Run = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, kw_only=True)
class CheckpointReport:
    """Result of `checkpoint`; `print` it.

    policy          the policy, after "auto" was resolved
    recomputed      names of the recomputed blocks
    not_recomputed  names of the other blocks
    segments        lengths of the segments of recomputed blocks; () if each block saves its input
    measured_bytes  measured bytes saved for backward, with a budget; else None
    notes           other effects, as sentences
    """

    policy: str
    recomputed: tuple[str, ...]
    not_recomputed: tuple[str, ...]
    segments: tuple[int, ...]
    measured_bytes: int | None
    notes: tuple[str, ...]

    @property
    def extra_forwards(self) -> int:
        """Additional block forwards per step, compared with no checkpointing."""
        return len(self.recomputed) + sum(self.segments) - len(self.segments)

    def __str__(self) -> str:
        blocks = len(self.recomputed) + len(self.not_recomputed)
        head = f"checkpointing {self.policy}: {len(self.recomputed)} of {blocks} blocks are computed again in backward"
        if self.segments:
            lengths = ", ".join(map(str, self.segments))
            twice = self.extra_forwards - len(self.recomputed)
            head += f", {twice} of them twice, in {len(self.segments)} segments of {lengths} blocks"
        size = (
            ""
            if self.measured_bytes is None
            else f"; {self.measured_bytes / 2**20:.1f} MiB are kept for it"
        )
        return "\n".join([head + size, *self.notes])


def _recomputed(
    run: Run,
    block: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a block's forward so that backward recomputes it, if anything requires gradients."""
    # Without this test, frozen lower blocks would be checkpointed although they have no backward.
    # The non-reentrant checkpoint needs no input that requires gradients, so no embedding hook
    # either.
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not any(tensor.requires_grad for tensor in (*tensors, *block.parameters())):
        return forward(*args, **kwargs)
    for name in CACHES:
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"checkpoint: a block was given {name}; computing it again would append its keys and values a second "
                "time. Call the model with use_cache=False, or take checkpointing off with checkpoint(model, None).",
                code="checkpointing.cache-argument",
            )
    return run(block, forward, args, kwargs)


def _full_checkpoint(
    block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Save only the block's inputs."""
    return checkpointed(forward, args, kwargs)


def _without_cache(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of the model: disable the KV cache while gradients are enabled."""
    if not torch.is_grad_enabled():
        return None
    if kwargs.get("use_cache"):
        raise ConfigError(
            "checkpoint: use_cache=True, but recomputation would fill the KV cache twice. Pass use_cache=False, "
            "or take checkpointing off with checkpoint(model, None).",
            code="checkpointing.use-cache",
        )
    return args, {**kwargs, "use_cache": False}


# Ordered by recomputation per step: nothing; everything but matmuls and attention; each block once;
# three halves of the blocks; nearly each block twice.
BY_COST = ("none", "selective", "full", "every-2", "sqrt")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Result of `cheapest`.

    policy       the chosen policy
    limit_bytes  the limit it had to fit
    peaks        policy -> peak bytes, for the policies tried, in order of cost; the last one is the
                 choice
    """

    policy: str
    limit_bytes: int
    peaks: dict[str, int]

    def __str__(self) -> str:
        found = ", ".join(f"{policy} {_gib(peak)}" for policy, peak in self.peaks.items())
        return f"auto: {self.policy} is the cheapest whose step fits into {_gib(self.limit_bytes)} (counted: {found})"


def cheapest(peak_bytes: Callable[[str], int], limit_bytes: int) -> Choice:
    """Return the policy with the least recomputation whose peak fits.

    peak_bytes   policy name -> peak bytes at any moment of a step under it; called once per policy,
                 up to the first that fits
    limit_bytes  the available memory

    Raises ConfigError with the smallest peak if none fits.
    """
    peaks: dict[str, int] = {}
    for policy in BY_COST:
        peaks[policy] = peak_bytes(policy)
        if peaks[policy] <= limit_bytes:
            return Choice(policy=policy, limit_bytes=limit_bytes, peaks=peaks)
    least = min(peaks, key=lambda policy: peaks[policy])
    raise ConfigError(
        f"checkpoint: no policy fits into {_gib(limit_bytes)} ({limit_bytes:,} bytes); the least is {peaks[least]:,} bytes, with "
        f"{least!r}. Make the batch smaller (or micro_batches larger), or keep the optimizer's states in 8 bits.",
        code="checkpointing.nothing-fits",
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def checkpoint(
    model: nn.Module,
    policy: str | None,
    *,
    blocks: str | Iterable[str] | None = None,
    keep_last: bool = True,
    batch: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
    peak_bytes: Callable[[str], int] | None = None,
    limit_bytes: int | None = None,
) -> CheckpointReport:
    """Set the checkpointing policy of a model's blocks, in place; replaces an earlier policy.

    policy                   see the module docstring
    blocks                   patterns of the modules to use as blocks; None finds them by structure
                             (`find_blocks`)
    keep_last                do not recompute the last block, unless a budget requires it
    batch, loss              sample inputs and loss function for a budget, as in `saved_bytes`
    peak_bytes, limit_bytes  arguments of `cheapest`, for "auto"

    Parameter names, state dicts, copies and pickles are unchanged.

    Raises ConfigError for an unknown policy, and for a budget without a batch or below the
    reachable minimum. A model that already uses transformers' gradient_checkpointing is refused
    too.
    """
    policy, reason = policy or "none", ""
    if policy == "auto":
        if peak_bytes is None or limit_bytes is None:
            raise ConfigError(
                "checkpoint: 'auto' needs peak_bytes=, a function of a policy's name that counts the peak of a step "
                "(narrowgauge.plan.count), and limit_bytes=, what it must fit into.",
                code="checkpointing.auto-arguments",
            )
        choice = cheapest(peak_bytes, limit_bytes)
        policy, reason = choice.policy, str(choice)
    parsed = _POLICY.fullmatch(policy) if isinstance(policy, str) else None
    if not parsed:
        raise ConfigError(
            f"checkpoint: no policy {policy!r}. Choose 'none', 'selective', 'full', 'every-N' (as 'every-2'), 'sqrt', 'auto', "
            "or 'budget:512MiB'.",
            code="checkpointing.policy",
        )

    found = find_blocks(model, blocks, "checkpoint")
    for name, block in found.items():
        if getattr(block, "gradient_checkpointing", False):
            raise ConfigError(
                f"checkpoint: {name} checkpoints already, by transformers' own switch, and would be computed three times. "
                "Call model.gradient_checkpointing_disable() first.",
                code="checkpointing.twice",
            )
    names = list(found)
    below = _without_backward(model, names)
    last = len(names) - 1 if keep_last and len(names) > 1 else len(names)
    chosen, measured_bytes = names[:last], None
    if policy == "none":
        chosen = []
    elif parsed[2]:
        budget_bytes = float(parsed[2]) * UNITS[parsed[3] or ""]
        chosen, lengths, measured_bytes = _within(model, found, below, budget_bytes, batch, loss)
    if parsed[2] is None:
        lengths = _lengths(policy, [name for name in chosen if name not in below], parsed[1])

    cache_is_off = _apply(model, found, _runs(policy, chosen, below, lengths))
    notes = [reason, _describe_below([name for name in below if name in chosen])]
    if cache_is_off:
        notes.append(
            Reason(
                "checkpointing.cache-off",
                "KV cache: off while gradients are on, since computing a block again would fill it twice",
            )
        )
    return CheckpointReport(
        policy=policy,
        recomputed=tuple(chosen),
        not_recomputed=tuple(name for name in names if name not in chosen),
        segments=tuple(lengths),
        measured_bytes=measured_bytes,
        notes=tuple(note for note in notes if note),
    )


def _lengths(policy: str, names: list[str], every: str | None = None) -> list[int]:
    """Return the segment lengths for these blocks; [] if each block saves its input.

    A segment never spans two stacks of blocks.
    """
    if policy != "sqrt" and int(every or 1) == 1:
        return []
    found: list[int] = []
    for _, stack in groupby(names, key=_stack_of):
        number = len(list(stack))
        found += (
            sqrt_lengths(number) if policy == "sqrt" else equal_lengths(number, int(every or 1))
        )
    return found


def _stack_of(name: str) -> str:
    """Return the container of a numbered block; "" for other names."""
    container, _, last = name.rpartition(".")
    return container if last.isdecimal() else ""


def _runs(policy: str, chosen: list[str], below: list[str], lengths: list[int]) -> dict[str, Run]:
    """Return {block name: how to run its forward}.

    Blocks in `below` need no backward and belong to no segment.
    """
    runs: dict[str, Run] = dict.fromkeys(
        chosen, selective_checkpoint if policy == "selective" else _full_checkpoint
    )
    names = iter(name for name in chosen if name not in below)
    for length in lengths:
        previous = None
        for _ in range(length):
            name = next(names)
            # Each member refers to the one before it in its segment; the first refers to None.
            runs[name] = previous = SegmentMember(name, previous)
    return runs


def _apply(model: nn.Module, found: dict[str, nn.Module], runs: Mapping[str, Run]) -> bool:
    """Set recomputation for exactly these blocks, and the hook that disables the KV cache.

    Returns True if the hook was set.
    """
    for name, block in found.items():
        set_technique(
            block, "recompute", partial(_recomputed, runs[name]) if name in runs else None
        )
    # By identity and not by handle: copies and pickles of the model have the hook but no handle.
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _without_cache:
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)
    has_cache = "use_cache" in inspect.signature(model.forward).parameters
    if runs and has_cache:
        model.register_forward_pre_hook(_without_cache, with_kwargs=True)
    return bool(runs) and has_cache


def _within(
    model: nn.Module, found: dict[str, nn.Module], below: list[str], budget_bytes: float, batch: Any,
    loss: Callable[[Any], Tensor] | None,
) -> tuple[list[str], list[int], int]:  # fmt: skip
    """Return (blocks to recompute, segment lengths, measured bytes) for a budget."""
    if batch is None:
        raise ConfigError(
            "checkpoint: a budget needs a sample batch to measure. Pass batch=, as the model will see it.",
            code="checkpointing.no-batch",
        )
    names = list(found)

    @cache
    def saved_with(count: int) -> int:
        """Bytes with the first `count` blocks recomputed; decreases with count."""
        _apply(model, found, _runs("full", names[:count], below, []))
        return saved_bytes(model, batch, loss).total

    def saved_in_segments() -> int:
        """Bytes of "sqrt": saved by forward, plus the inputs that a segment recomputes in backward."""
        runs = _runs("sqrt", names, below, lengths)
        _apply(model, found, runs)
        total = saved_bytes(model, batch, loss).total
        largest = max(
            (run.output_bytes for run in runs.values() if isinstance(run, SegmentMember)), default=0
        )
        return total + (most_inputs(lengths) - len(lengths)) * largest

    lengths = _lengths("sqrt", [name for name in names if name not in below])
    try:
        if (least := saved_with(len(names))) <= budget_bytes:
            # Bisection: a measurement is one forward pass, and bytes decrease with the number of
            # blocks.
            count = bisect_left(
                range(len(names)), True, key=lambda count: saved_with(count) <= budget_bytes
            )
            return names[:count], [], saved_with(count)
        if (in_segments := saved_in_segments()) <= budget_bytes:
            return names, lengths, in_segments
    finally:
        # Measuring set policies on the blocks. The caller sets the final one; an error leaves none.
        _apply(model, found, {})
    least = min(least, in_segments)
    raise ConfigError(
        f"checkpoint: with every block computed again {least:,} bytes are kept, above the budget of "
        f"{int(budget_bytes):,}. Raise the budget to {-(-least // 2**20)}MiB, or make the batch smaller.",
        code="checkpointing.budget",
    )


def _without_backward(model: nn.Module, names: list[str]) -> list[str]:
    """Return the blocks below the lowest trainable parameter, in the model's order."""
    parameters = [(name, parameter.requires_grad) for name, parameter in model.named_parameters()]
    lowest = next(
        (index for index, (_, trains) in enumerate(parameters) if trains), len(parameters)
    )
    return [
        name
        for name in names
        if not any(each.startswith(f"{name}.") for each, _ in parameters[lowest:])
    ]


def _describe_below(below: list[str]) -> str:
    if not below:
        return ""
    return Reason(
        "checkpointing.below",
        f"{len(below)} of them, {below[0]} to {below[-1]}, lie below all that trains and need no backward: not computed again",
    )

"""Fused loss of a causal language model on a CPU, in the place of transformers' `loss_function`.

transformers computes `cross_entropy(logits.float(), ...)`. `ops.cross_entropy` reads the 16-bit
logits as they are, in float32 arithmetic. Losses agree within 1e-6.

The replacement is the attribute by which transformers lets a model have a loss function of its own.
It calls the original function for what the kernel does not compute: on other devices, under
torch.compile or functional transforms, in a suspended model, and for labels out of range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.addresses import in_memory, type_of
from narrowgauge.fuse.forward import Fusion
from narrowgauge.nn import transforms
from narrowgauge.nn.autograd_rules import no_double_backward
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.cross_entropy import BACKWARD, FORWARD, CrossEntropySpec
from narrowgauge.ops.registry import device_facts

ATTRIBUTE = (
    "_loss_function"  # of transformers' PreTrainedModel, set by its property `loss_function`
)
NAME = "ForCausalLMLoss"
IGNORED = -100


@dataclass(eq=False)
class FusedLoss:
    """Callable in the place of `own`, transformers' ForCausalLMLoss.

    layer   a converted layer; the original function computes while it is suspended
    before  the model's own attribute, or None if it had none
    """

    own: Callable[..., Tensor]
    layer: QLinear
    before: Any = None

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        # On a GPU, labels that are shifted for nothing would be two launches.
        is_here = type_of(logits.device) == "cpu"
        targets = shift_labels if is_here else None
        if is_here and targets is None and labels is not None:
            # Tokens before n predict token n.
            targets = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        losses = None if targets is None else self._losses(logits, targets, ignore_index)
        if losses is None:
            return self.own(
                logits=logits, labels=labels, vocab_size=vocab_size, num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index, shift_labels=shift_labels, **options,
            )  # fmt: skip
        # The mean is taken outside of the kernel: gradient accumulation divides by items of all batches.
        total, count = losses[0].sum(), num_items_in_batch
        if count is None:
            count = losses[1]
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)

    def _losses(
        self, logits: Tensor, targets: Tensor, ignore_index: int
    ) -> tuple[Tensor, Tensor] | None:
        """Return (losses [T], number of rows with a loss), or None if no kernel computes them."""
        if (
            torch.compiler.is_compiling()
            or targets.device != logits.device
            or targets.dtype != torch.int64
            or self.layer.recipe is None
            or self.layer.is_suspended
            or transforms.is_active(logits, targets)
        ):
            return None
        # A copy of the targets, of the tokens' size: shifted ones are no view of whole rows.
        rows, flat = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
        if len(rows) != len(flat):
            return None
        spec = CrossEntropySpec.of(rows, flat)
        if FORWARD.choose(spec).kernel.by_torch:
            return None
        counts = flat != ignore_index
        # The original function raises for a label out of range.
        if bool((((flat < 0) | (flat >= rows.shape[1])) & counts).any()):
            return None
        # `ignore_index` may be the number of a class: the kernel knows a row without a loss by its sign.
        flat = torch.where(counts, flat, -1)
        losses: Tensor = _CrossEntropy.apply(rows, flat, spec)
        return losses, counts.sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, spec: CrossEntropySpec) -> Tensor:
        losses, sums = FORWARD.choose(spec).kernel.run(logits, labels)
        ctx.spec = spec
        ctx.save_for_backward(logits, labels, sums)
        found: Tensor = losses
        return found

    @staticmethod
    @no_double_backward("a fused loss", "Compute inside `with narrowgauge.suspended(model):`.")
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, sums = ctx.saved_tensors
        run = BACKWARD.choose(ctx.spec).kernel.run
        return run(logits, labels, sums, in_memory(gradients)), None, None


def fuse_loss(model: nn.Module) -> None:
    """Replace transformers' loss of a causal language model, if the model has it."""
    own: Any = getattr(model, "loss_function", None)
    if getattr(own, "__name__", "") != NAME or not isinstance(
        getattr(type(model), "loss_function", None), property
    ):
        return
    layer = next((each for each in model.modules() if isinstance(each, QLinear)), None)
    if layer is None or not _is_known(own):
        return
    # Not by nn.Module's own assignment, which would enter the property's setter.
    model.__dict__[ATTRIBUTE] = FusedLoss(own, layer, model.__dict__.get(ATTRIBUTE))


def unfuse_loss(model: nn.Module) -> None:
    """Give the model its own loss function again."""
    fused = model.__dict__.get(ATTRIBUTE)
    if isinstance(fused, FusedLoss):
        del model.__dict__[ATTRIBUTE]
        if fused.before is not None:
            model.__dict__[ATTRIBUTE] = fused.before


def loss_fusions(model: nn.Module) -> list[Fusion]:
    """Return the report about the loss; [] where its own code runs."""
    fused = model.__dict__.get(ATTRIBUTE)
    if not isinstance(fused, FusedLoss) or fused.layer.recipe is None:
        return []
    weight = fused.layer.weight
    if type_of(weight.device) != "cpu":
        return []
    kernel = FORWARD.choose(CrossEntropySpec(device_facts("cpu", None), weight.dtype)).kernel
    if kernel.by_torch:
        return []
    return [
        Fusion(
            name="loss_function",
            readers=(),
            function="cross-entropy",
            backend=kernel.name,
            saved="keeps the logits",
        )
    ]


@torch.no_grad()
def _is_known(own: Any) -> bool:
    """Return True if `own` is the mean cross-entropy of the next token."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator)
    labels = torch.tensor([[1, 2, IGNORED, 6, 0], [IGNORED, 3, 4, 5, 1]])
    expected = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
    )
    try:
        found = own(logits=logits, labels=labels, vocab_size=7)
    except Exception:
        return False
    return isinstance(found, Tensor) and bool((found - expected).abs() <= 1e-5)

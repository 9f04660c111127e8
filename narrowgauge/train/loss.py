"""Loss of an optimizer step: nats per valid target token, over all micro-batches of the step.

    loss = sum over valid targets of -log p(target) / number of valid targets in the step

Each micro-batch divides by the count of the whole step, so the gradient does not depend on the
split into micro-batches.

The output head and the loss are computed together over chunks of tokens
(`memory.chunked_cross_entropy`). This requires that the head is an ordinary Linear and that the
logits are its output. `Objective.of` tests both on a few tokens and records the reason otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from narrowgauge.addresses import holds_numbers, identity
from narrowgauge.data import IGNORED, valid_targets
from narrowgauge.errors import ConfigError, DataError, Reason
from narrowgauge.memory.loss import chunked_cross_entropy
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops import rng
from narrowgauge.recipe import Gemm

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig

# Labels are aligned with the logits: logits[t] predict labels[t], without a shift
Batch = dict[str, Tensor]
NO_CACHE = {"use_cache": False}


def targets_of_step(batches: list[Batch], step: int) -> int:
    """Number of valid targets of a step.

    Raises DataError if there are none, since a mean over nothing is NaN.
    """
    total = sum(valid_targets(batch) for batch in batches)
    if total == 0:
        raise DataError(
            f"step {step}: the batch has no valid target, every label is {IGNORED}. Look at the data.",
            code="targets.none-valid",
        )
    return total


def inputs_of(batch: Batch, device: torch.device, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the model: the batch without labels, on the device.

    Without labels, the model computes no loss itself.
    """
    moved = {name: on_device(value, device) for name, value in batch.items() if name != "labels"}
    return moved | dict(options)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to the device.

    On a GPU through pinned memory, so that the host does not wait.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def check_labels(labels: Tensor, classes: int) -> bool:
    """Checks the range of labels in host memory.

    Returns False for labels on a GPU, which are not checked.

    Raises DataError if a label is out of range.
    """
    if labels.is_cuda:
        return False
    counted = labels[labels != IGNORED]
    low, high = (int(each) for each in counted.aminmax()) if counted.numel() else (0, 0)
    if low < 0 or high >= classes:
        raise DataError(
            f"target {low if low < 0 else high} is outside the {classes} classes (0 ... {classes - 1}). "
            f"Use the tokenizer that the model was made for, or {IGNORED} for tokens that do not count.",
            code="chunked-loss.class",
        )
    return True


def aligned_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log p(target), with logits and targets at the same positions."""
    # float32: a 16-bit log-softmax loses the small probabilities. reduction="sum": the caller
    # divides by the targets of the whole step.
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(),
        targets.reshape(-1),
        ignore_index=IGNORED,
        reduction="sum",
    )


def whole_logits(output: Any, batch: Batch) -> Tensor:
    """The model's logits, one row per label."""
    # transformers.Trainer hands its losses a plain dict where a model returns one.
    logits: Tensor = output["logits"] if isinstance(output, Mapping) else output.logits
    return logits


@dataclass(frozen=True)
class Objective:
    """Loss of one model; called with a micro-batch."""

    # The model without its head, or the whole model if head is None. Compiled if the run is.
    forward: Callable[..., Any]
    options: Mapping[str, Any]  # arguments of the model besides the batch
    description: str = ""  # how the loss is computed, with the reason if not in chunks
    # Head of the chunked loss. None: the whole logits are computed, plus a float32 copy.
    head: nn.Linear | None = None
    softcap: float | None = None  # softcap of the logits
    slices: bool = False  # backward recomputes the logits over slices of the vocabulary
    # If head is None: f(output, batch) -> scores to compare with the labels, and f(scores, labels)
    # -> summed loss.
    scores: Callable[[Any, Batch], Tensor] = whole_logits
    criterion: Callable[[Tensor, Tensor], Tensor] = aligned_loss

    @classmethod
    def of(cls, model: Any, computes_in: torch.dtype, config: TrainConfig) -> Self:
        """Objective of a language model.

        Tests the chunked head on a few tokens, without advancing generators.

        Raises ConfigError if training.loss = 'slices' and the model needs the whole logits.
        """
        slices = config.loss == "slices"
        reason, softcap = (
            ("as asked for", None) if config.loss == "whole" else _refuse_chunks(model, computes_in)
        )
        if slices and reason:
            raise ConfigError(
                f"training.loss = 'slices': needs the whole logits: {reason}. Remove loss, or take training.loss = 'whole'.",
                code="loss.slices",
            )
        part, head = (model, None) if reason else (model.base_model, model.get_output_embeddings())
        description = (
            f"whole logits: {reason}" if reason else "in chunks of tokens, never the whole logits"
        )
        if slices:
            description += "; in backward again, over slices of the vocabulary"
        return cls(
            torch.compile(part) if config.compile else part,
            NO_CACHE,
            description,
            head,
            softcap,
            slices,
        )

    def __call__(self, batch: Batch, device: torch.device, *, checked: bool = False) -> Tensor:
        """Sum of -log p over the valid targets of a micro-batch, a float32 scalar.

        checked  `check_labels` has validated the labels
        """
        return self.scored(batch, device, checked=checked)[0]

    def scored(
        self, batch: Batch, device: torch.device, *, checked: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (loss, logits); logits are None if the loss is chunked."""
        if self.head is None:
            output = self.forward(**inputs_of(batch, device, self.options))
            logits = self.scores(output, batch)
            return self.criterion(logits, on_device(batch["labels"], device)), logits
        # On a GPU, check labels on the host before the copy: a check on the device would wait
        # twice. On a CPU, the chunked loss drops ignored tokens, which is faster.
        checked = checked or (
            device.type == "cuda" and check_labels(batch["labels"], self.head.weight.shape[0])
        )
        hidden = _beside(
            self.forward(**inputs_of(batch, device, self.options)).last_hidden_state,
            self.head.weight,
        )
        loss, _ = chunked_cross_entropy(
            hidden, self.head.weight, on_device(batch["labels"], device),
            bias=self.head.bias, ignore_index=IGNORED, softcap=self.softcap, checked=checked, slices=self.slices,
        )  # fmt: skip
        return loss, None


def _beside(hidden: Tensor, weight: Tensor) -> Tensor:
    """Wraps replicated hidden states as a DTensor if the head's vocabulary is split over ranks."""
    if type(weight).__name__ != "DTensor":
        return hidden
    from torch.distributed.tensor import DTensor, Replicate

    mesh = weight.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(hidden, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _refuse_chunks(model: Any, computes_in: torch.dtype) -> tuple[str, float | None]:
    """Returns (reason why the loss needs the whole logits or '', softcap of the logits or None)."""
    head = model.get_output_embeddings()
    if type(head) not in (nn.Linear, QLinear):
        return f"the output head is a {type(head).__name__}, not an nn.Linear", None
    recipe = head.recipe if isinstance(head, QLinear) else None
    if recipe is not None and (
        any(gemm != Gemm() for gemm in recipe.gemms().values())
        or computes_in not in (torch.bfloat16, torch.float16)
    ):
        return f"the output head follows the recipe {recipe.name!r}", None
    if model.base_model is model:
        return f"{type(model).__name__} has no part below its output head", None
    softcap = getattr(model.config, "final_logit_softcapping", None)
    modes = [(module, module.training) for module in model.modules()]
    ids = torch.arange(8, device=head.weight.device)[None] % head.weight.shape[0]
    inputs = {"input_ids": ids, **NO_CACHE}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    devices = [head.weight.device] if head.weight.is_cuda else []
    proof = _proved_by_numbers if holds_numbers(head.weight) else _proved_by_storages
    try:
        model.eval()
        with torch.no_grad(), rng.preserved(devices):
            is_product, cap = proof(model, head, inputs, softcap)
    except (TypeError, AttributeError) as error:
        return f"{type(model).__name__} cannot be called below its output head ({error})", None
    finally:
        for module, mode in modes:
            module.training = mode
    if is_product:
        return "", cap
    return Reason(
        "loss.other-logits",
        "the logits are not the product of the output head with the last hidden state",
    ), None


def _proved_by_numbers(
    model: Any, head: nn.Module, inputs: dict[str, Any], softcap: float | None
) -> tuple[bool, float | None]:
    """Compares the logits with the head applied to the last hidden state.

    Returns (equal, softcap used).
    """
    logits = model(**inputs).logits
    product = head(model.base_model(**inputs).last_hidden_state)
    # Marian adds a float32 buffer to 16-bit logits, which makes the logits float32
    product = product.to(logits.dtype)
    for cap in dict.fromkeys((None, softcap)):
        if torch.allclose(
            logits, torch.tanh(product / cap) * cap if cap else product, rtol=1e-5, atol=1e-6
        ):
            return True, cap
    return False, None


def _proved_by_storages(
    model: Any, head: nn.Module, inputs: dict[str, Any], softcap: float | None
) -> tuple[bool, float | None]:
    """The same test for fake tensors of a memory plan, which have no values.

    It compares storages instead: the head must read the last hidden state, and its output must be
    the logits. With a softcap in the configuration, the logits may be a capped copy.
    """
    read, written = list[Tensor](), list[Tensor]()
    hooks = [
        head.register_forward_pre_hook(lambda module, given: read.append(given[0])),
        head.register_forward_hook(lambda module, given, output: written.append(output)),
        model.base_model.register_forward_hook(
            lambda module, given, output: written.append(output.last_hidden_state)
        ),
    ]
    try:
        logits = model(**inputs).logits
    finally:
        for hook in hooks:
            hook.remove()
    if len(read) != 1 or len(written) != 2:
        return False, None
    hidden, product = written
    is_read = identity(read[0]) == identity(hidden)
    return is_read and (softcap is not None or identity(product) == identity(logits)), softcap

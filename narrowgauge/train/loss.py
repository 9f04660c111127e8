"""The loss of an optimizer step: nats per valid target token, over all of its micro-batches together.

    loss = sum over valid targets of -log p(target) / number of valid targets in the step

Each micro-batch divides by the step's count, not by its own, so the gradient does not depend on how a batch is cut.

The output head and the loss are computed together, over chunks of tokens (`memory.chunked_cross_entropy`), wherever the head is an
ordinary Linear and the model's logits are its product; `Objective.of` tests that on a few tokens and keeps the reason if not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from narrowgauge.addresses import holds_numbers, identity
from narrowgauge.data import IGNORED, valid_targets
from narrowgauge.data.targets import aligned_loss
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.memory import chunked_cross_entropy
from narrowgauge.nn.linear import QLinear
from narrowgauge.recipe import Gemm
from narrowgauge.train.config.settings import TrainConfig

Batch = dict[str, Tensor]  # labels are aligned with the logits: labels[t] is what logits[t] are compared with
NO_CACHE = {"use_cache": False}


def targets_of_step(batches: list[Batch], step: int) -> int:
    """Valid targets of a step. Raises DataError if there are none: a mean over nothing is NaN."""
    total = sum(valid_targets(batch) for batch in batches)
    if total == 0:
        raise DataError(f"step {step}: the batch has no valid target, every label is {IGNORED}. Look at the data.")
    return total


def inputs_of(batch: Batch, device: torch.device, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the model is called with: all of a batch but its labels, so that it computes no loss of its own."""
    moved = {name: on_device(value, device) for name, value in batch.items() if name != "labels"}
    return moved | dict(options)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies through pinned memory, so that the host does not wait for a GPU."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def check_labels(labels: Tensor, classes: int) -> bool:
    """Checks labels in host memory; returns False for labels on a GPU. DataError if one is out of range."""
    if labels.is_cuda:
        return False
    counted = labels[labels != IGNORED]
    low, high = (int(each) for each in counted.aminmax()) if counted.numel() else (0, 0)
    if low < 0 or high >= classes:
        raise DataError(
            f"target {low if low < 0 else high} is outside the {classes} classes (0 ... {classes - 1}). "
            f"Use the tokenizer that the model was made for, or {IGNORED} for tokens that do not count."
        )
    return True


def whole_logits(output: Any, batch: Batch) -> Tensor:
    """One row of logits for each label."""
    logits: Tensor = output.logits
    return logits


@dataclass(frozen=True)
class Objective:
    """The loss of one model; called with a micro-batch."""

    # The model below its head, or the whole model where head is None; compiled if the run is.
    forward: Callable[..., Any]
    options: Mapping[str, Any]  # that it is called with besides the batch
    description: str = ""  # how the loss is computed, and why not in chunks
    # Its product and the loss are taken in chunks; None: float32 logits are held once more.
    head: nn.Linear | None = None
    softcap: float | None = None  # of the logits
    slices: bool = False  # backward computes the logits again, over slices of the vocabulary
    # Where head is None: what of the model's output, of a batch, its labels are compared with, and the sum of the losses of both.
    scores: Callable[[Any, Batch], Tensor] = whole_logits
    criterion: Callable[[Tensor, Tensor], Tensor] = aligned_loss

    @classmethod
    def of(cls, model: Any, computes_in: torch.dtype, config: TrainConfig) -> Self:
        """For a language model: tries the chunked head on a few tokens; generators stay as they are.

        Raises ConfigError if slices are asked for and the head is not to be had apart.
        """
        slices = config.loss == "slices"
        reason, softcap = ("as asked for", None) if config.loss == "whole" else _refuse_chunks(model, computes_in)
        if slices and reason:
            raise ConfigError(
                f"loss = 'slices': needs the whole logits: {reason}. Remove loss, or take loss = 'whole'."
            )
        part, head = (model, None) if reason else (model.base_model, model.get_output_embeddings())
        description = f"whole logits: {reason}" if reason else "in chunks of tokens, never the whole logits"
        if slices:
            description += "; in backward again, over slices of the vocabulary"
        return cls(torch.compile(part) if config.compile else part, NO_CACHE, description, head, softcap, slices)

    def __call__(self, batch: Batch, device: torch.device, *, checked: bool = False) -> Tensor:
        """Sum of -log p over the valid targets of a micro-batch, float32 scalar. checked: `check_labels` has seen its labels."""
        return self.scored(batch, device, checked=checked)[0]

    def scored(self, batch: Batch, device: torch.device, *, checked: bool = False) -> tuple[Tensor, Tensor | None]:
        """The loss, and the logits that it was taken of where they are whole."""
        if self.head is None:
            output = self.forward(**inputs_of(batch, device, self.options))
            logits = self.scores(output, batch)
            return self.criterion(logits, on_device(batch["labels"], device)), logits
        # On a GPU the labels are looked at before they go there; on a CPU tokens that do not count are left out, which is faster.
        checked = checked or (device.type == "cuda" and check_labels(batch["labels"], self.head.weight.shape[0]))
        hidden = _beside(self.forward(**inputs_of(batch, device, self.options)).last_hidden_state, self.head.weight)
        loss, _ = chunked_cross_entropy(
            hidden, self.head.weight, on_device(batch["labels"], device),
            bias=self.head.bias, ignore_index=IGNORED, softcap=self.softcap, checked=checked, slices=self.slices,
        )  # fmt: skip
        return loss, None


def _beside(hidden: Tensor, weight: Tensor) -> Tensor:
    """Hidden states that all ranks have alike, where the words of the head are cut among them: on the mesh of its weight."""
    if type(weight).__name__ != "DTensor":
        return hidden
    from torch.distributed.tensor import DTensor, Replicate

    mesh = weight.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(hidden, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _refuse_chunks(model: Any, computes_in: torch.dtype) -> tuple[str, float | None]:
    """Why the loss needs the whole logits, or ''; and the softcap of the logits if the model has one."""
    head = model.get_output_embeddings()
    if type(head) not in (nn.Linear, QLinear):
        return f"the output head is a {type(head).__name__}, not an nn.Linear", None
    recipe = head.recipe if isinstance(head, QLinear) else None
    if recipe is not None and (
        any(gemm != Gemm() for gemm in recipe.gemms().values()) or computes_in not in (torch.bfloat16, torch.float16)
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
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            is_product, cap = proof(model, head, inputs, softcap)
    except (TypeError, AttributeError) as error:
        return f"{type(model).__name__} cannot be called below its output head ({error})", None
    finally:
        for module, mode in modes:
            module.training = mode
    if is_product:
        return "", cap
    return "the logits are not the product of the output head with the last hidden state", None


def _proved_by_numbers(
    model: Any, head: nn.Module, inputs: dict[str, Any], softcap: float | None
) -> tuple[bool, float | None]:
    """Whether the logits are the head's product with the last hidden state; and the cap with which they are."""
    logits = model(**inputs).logits
    product = head(model.base_model(**inputs).last_hidden_state)
    product = product.to(logits.dtype)  # a float32 buffer added to 16-bit logits, as Marian has, widens them
    for cap in dict.fromkeys((None, softcap)):
        if torch.allclose(logits, torch.tanh(product / cap) * cap if cap else product, rtol=1e-5, atol=1e-6):
            return True, cap
    return False, None


def _proved_by_storages(
    model: Any, head: nn.Module, inputs: dict[str, Any], softcap: float | None
) -> tuple[bool, float | None]:
    """The same of a model without numbers, whose run is planned: the head reads the last hidden state, and what it writes are the logits.

    With a cap in the configuration they may be others, capped.
    """
    read, written = list[Tensor](), list[Tensor]()
    hooks = [
        head.register_forward_pre_hook(lambda module, given: read.append(given[0])),
        head.register_forward_hook(lambda module, given, output: written.append(output)),
        model.base_model.register_forward_hook(lambda module, given, output: written.append(output.last_hidden_state)),
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


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up over warmup_steps, then a half cosine; step counts from 1.

    It would reach min_learning_rate in the step after the last: at the last one, a rate of 0 would make an update of nothing.
    """
    peak, lowest, warmup_steps = config.learning_rate, config.min_learning_rate, config.warmup_steps
    if step <= warmup_steps:
        return peak * step / warmup_steps
    done = (step - warmup_steps) / (config.steps + 1 - warmup_steps)
    cosine = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * done, dtype=torch.float64)).item())
    return lowest + (peak - lowest) * cosine

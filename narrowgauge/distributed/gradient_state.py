"""Shared state of one model's gradient messages: format, links, byte counts, "fp8-lm" scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.distributed import messages, shared_scale
from narrowgauge.distributed.messages import Link
from narrowgauge.distributed.shared_scale import BufferLayout, Controller
from narrowgauge.errors import CheckpointError, ConfigError

GradientFormat = Literal["16bit", "fp8", "fp8-lm"]
Reduce = Literal["mean", "sum"]


@dataclass
class Gradients:
    """Gradient messages of one model, set up by `gradients.install`.

    format, reduce       the message format and reduction asked for
    descriptions         sentences about the messages, for `describe`
    bytes_per_element    bytes that a rank sends per gradient element and reduction; for "16bit" in
                         the parameters' dtype
    bytes_between_nodes  additional bytes per element sent to other nodes, if a node mesh was given
    names                names of tensors that may have an "fp8-lm" scale
    was_reduced          DistributedDataParallel has summed gradients since the last optimizer step
    """

    format: GradientFormat
    reduce: Reduce
    descriptions: list[str] = field(default_factory=list)
    bytes_per_element: float = 0.0
    bytes_between_nodes: float = 0.0
    names: tuple[str, ...] = ()
    was_reduced: bool = False
    _links: dict[str, Link] = field(default_factory=dict)
    _controller: Controller = field(default_factory=Controller)

    def link(self, group: dist.ProcessGroup) -> Link:
        """Return the Link of a group, created on first use.

        Two groups of the same ranks are two links, since their messages may overtake each other.
        """
        return self._links.setdefault(group.group_name, Link(group))

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes given to collectives so far, by kind (see `messages.Link`).

        torch's own messages ("16bit") are not counted.
        """
        kinds = {kind for link in self._links.values() for kind in link.bytes_sent}
        return {
            kind: sum(link.bytes_sent[kind] for link in self._links.values())
            for kind in sorted(kinds)
        }

    def reduce_scatter(
        self, rows: Tensor, layout: BufferLayout, link: Link, other_links: Sequence[Link]
    ) -> Tensor:
        """Return the sum over ranks of their row for this rank, float32; see messages.reduce_scatter."""
        if self.format == "fp8-lm":
            return shared_scale.reduce_scatter(rows, layout, link, self._controller, other_links)
        return messages.reduce_scatter(rows, link)

    def bytes_to_sum(self, parameter: Tensor) -> float:
        """Bytes per element of a reduce-scatter message."""
        return {
            "16bit": float(parameter.element_size()),
            "fp8": messages.BYTES_PER_ELEMENT,
            "fp8-lm": 1.0,
        }[self.format]

    def bytes_of_sum(self, parameter: Tensor) -> float:
        """Bytes per element of a message that carries sums: all-gather, or all-reduce across nodes."""
        return (
            float(parameter.element_size())
            if self.format == "16bit"
            else messages.BYTES_PER_ELEMENT
        )

    def refuse_double_reduction(self, model: nn.Module) -> None:
        """Raise ConfigError before a forward pass whose backward would double-count gradients.

        DDP reduces the accumulated `.grad`, which includes earlier backward passes of the step.
        With a mean that leaves earlier, already reduced parts unchanged; with a sum it multiplies
        them again.
        """
        if (
            self.reduce != "sum"
            or not self.was_reduced
            or not getattr(model, "require_backward_grad_sync", False)
        ):
            return
        # Reading the norm synchronizes with the GPU, but only after DDP has summed in this step.
        # Measured without this check: a gradient norm of 1.3565 instead of 0.84846 on two
        # micro-batches.
        present = [each.grad for each in model.parameters() if each.grad is not None]
        # Checked once per reduction by DDP. A loop that cleared its gradients passes.
        self.was_reduced = False
        if present and bool(torch.stack(torch._foreach_norm(present)).any()):
            raise ConfigError(
                'distribute: reduce="sum", and a second backward pass in one step would sum the gradients of the first once more. Put all '
                'micro-batches of a step but the last into model.no_sync(), or empty the gradients, or take reduce="mean".',
                code="gradient-messages.second-backward",
            )

    def describe_format(self) -> str:
        return {
            "16bit": "torch's messages in their own dtype",
            "fp8": f"E4M3, tiles of 1 x {messages.TILE} with powers of two, summed in float32",
            "fp8-lm": "E4M3, one adaptive scale per tensor that all ranks share, summed in float32",
        }[self.format]

    def describe_traffic(self, layer: nn.Linear) -> str:
        """Describe the message of a layer's weight gradient, for `describe`."""
        weight = layer.weight
        if not weight.requires_grad:
            return ""
        reason = ' (gradients="16bit" was asked for)' if self.format == "16bit" else ""
        count = round(self.bytes_per_element * weight.numel())
        return f"gradient as {self.describe_format()}: {count:,} bytes a reduction{reason}"

    def state_dict(self) -> dict[str, Any]:
        """Return mu of each tensor for "fp8-lm", else {}; identical on ranks with the same tensors."""
        return {"mu": self._controller.state_dict()} if self.format == "fp8-lm" else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict` of any number of ranks; ignored unless messages are "fp8-lm"."""
        if unknown := sorted(set(state) - {"mu"}):
            raise CheckpointError(
                f"gradient messages: the state has {unknown}, but 'mu' is all it may have. Load what state_dict gave.",
                code="gradient-messages.state",
            )
        if self.format == "fp8-lm":
            self._controller.load_state_dict(state.get("mu", {}), self.names)

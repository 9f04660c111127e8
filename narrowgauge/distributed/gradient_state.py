"""What the gradients of one model share: the numbers they travel in, the links they take, what was sent, and the state of "fp8-lm"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.distributed import messages, shared_scale
from narrowgauge.distributed.messages import Link
from narrowgauge.distributed.shared_scale import Controller, Pieces
from narrowgauge.errors import CheckpointError, ConfigError

Numbers = Literal["16bit", "fp8", "fp8-lm"]
Reduce = Literal["mean", "sum"]


@dataclass
class Gradients:
    """What `gradients.install` has set up.

    numbers, reduce      as asked for
    words                sentences on what travels, for `describe`
    bytes_per_number     what a rank sends per number of a gradient in one reduction; of "16bit" in the dtype of the parameters
    bytes_between_nodes  besides, to other nodes, where `install` was given a mesh of them
    names                of tensors that "fp8-lm" may have a scale for
    is_summed            a DistributedDataParallel has summed gradients since the last step
    """

    numbers: Numbers
    reduce: Reduce
    words: list[str] = field(default_factory=list)
    bytes_per_number: float = 0.0
    bytes_between_nodes: float = 0.0
    names: tuple[str, ...] = ()
    is_summed: bool = False
    _links: dict[str, Link] = field(default_factory=dict)
    _controller: Controller = field(default_factory=Controller)

    def link(self, group: dist.ProcessGroup) -> Link:
        """The one of this group; two groups of the same ranks are two links, since their messages may pass each other."""
        return self._links.setdefault(group.group_name, Link(group))

    @property
    def sent(self) -> dict[str, int]:
        """Bytes given to collectives so far, by kind; see `messages.Link`. Of torch's own messages ("16bit") nothing is known."""
        kinds = {kind for link in self._links.values() for kind in link.sent}
        return {kind: sum(link.sent[kind] for link in self._links.values()) for kind in sorted(kinds)}

    def reduce_scatter(self, rows: Tensor, pieces: Pieces, link: Link, elsewhere: Sequence[Link]) -> Tensor:
        """The sum of every rank's row for this one, float32."""
        if self.numbers == "fp8-lm":
            return shared_scale.reduce_scatter(rows, pieces, link, self._controller, elsewhere)
        return messages.reduce_scatter(rows, link)

    def bytes_to_sum(self, parameter: Tensor) -> float:
        """Of a number on its way into a reduce-scatter."""
        return {"16bit": float(parameter.element_size()), "fp8": messages.BYTES, "fp8-lm": 1.0}[self.numbers]

    def bytes_of_sum(self, parameter: Tensor) -> float:
        """Of a number of a sum on its way to all, and of one between nodes."""
        return float(parameter.element_size()) if self.numbers == "16bit" else messages.BYTES

    def refuse_a_second_sum(self, model: nn.Module) -> None:
        """Before a forward pass: ConfigError where its backward pass would sum once more what DDP has summed before.

        DDP reduces what a gradient has become, with what an earlier backward pass left in it: of that a mean is what it was, a sum is not.
        """
        if self.reduce != "sum" or not self.is_summed or not getattr(model, "require_backward_grad_sync", False):
            return
        left = [each.grad for each in model.parameters() if each.grad is not None]
        self.is_summed = False
        if left and bool(torch.stack(torch._foreach_norm(left)).any()):
            raise ConfigError(
                'distribute: reduce="sum", and a second backward pass in one step would sum the gradients of the first once more. Put all '
                'micro-batches of a step but the last into model.no_sync(), or empty the gradients, or take reduce="mean".'
            )

    def format_words(self) -> str:
        return {
            "16bit": "torch's messages in their own dtype",
            "fp8": f"E4M3, tiles of 1 x {messages.TILE} with powers of two, summed in float32",
            "fp8-lm": "E4M3, one adaptive scale per tensor that all ranks share, summed in float32",
        }[self.numbers]

    def sends(self, layer: nn.Linear) -> str:
        """How the gradient of a layer's weight travels, in words."""
        weight = layer.weight
        if not weight.requires_grad:
            return ""
        reason = ' (gradients="16bit" was asked for)' if self.numbers == "16bit" else ""
        count = round(self.bytes_per_number * weight.numel())
        return f"gradient as {self.format_words()}: {count:,} bytes a reduction{reason}"

    def state_dict(self) -> dict[str, Any]:
        """Of "fp8-lm": mu of each tensor. Plain numbers, the same on all ranks that hold the same tensors."""
        return {"mu": self._controller.state_dict()} if self.numbers == "fp8-lm" else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave, on any number of ranks; nothing of it is kept where messages are not "fp8-lm"."""
        if unknown := sorted(set(state) - {"mu"}):
            raise CheckpointError(
                f"gradient messages: the state has {unknown}, but 'mu' is all it may have. Load what state_dict gave."
            )
        if self.numbers == "fp8-lm":
            self._controller.load_state_dict(state.get("mu", {}), self.names)

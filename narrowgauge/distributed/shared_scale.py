"""FP8-LM gradient messages (arXiv 2310.18313, section 2.1): shared scales with an adaptive factor.

    amax            max |gradient| of the tensor over all ranks (one small MAX all-reduce per
                    message)
    scale           amax / (448 mu), float32, the same on every rank
    codes           E4M3 of gradient / scale, saturating
    sum    of the decoded codes in float32, in rank order, times scale
    mu              starts at 1, at most 2; per tensor

After each message mu is halved if more than 0.001 % of the elements saturated. Otherwise it is
multiplied by 2 ** (1/1000), so it doubles in 1,000 steps. It is unchanged if the gradient was all
zero or not finite.

The paper sums codes in FP8, which loses 10 to 30 dB. It lets mu grow "to 2", here a hard limit.
Without a limit, a sparse tensor with fewer than 0.001 % nonzero elements would be clipped to
nothing.

Each rank appends to every row that it sends the number of its saturated elements, so all ranks
update mu identically without another collective. Bytes of a message: columns codes, 8 per tensor
for the counts, and 8 per tensor for the MAX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.errors import CheckpointError, closest
from narrowgauge.formats import E4M3
from narrowgauge.scaling import FP32

if TYPE_CHECKING:
    from narrowgauge.distributed.messages import Link

OVERFLOW_SHARE = 1e-5
DOUBLING_STEPS = 1000
LARGEST_MU = 2.0
# The quotient of the largest element may round to just above 448; that is not saturation.
_SATURATES = E4M3.max * (1 + 2**-22)


@dataclass(frozen=True)
class BufferLayout:
    """Layout of tensors in a buffer: the sequence of `lengths` elements, repeated `repeats` times.

    No length is zero.
    """

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    repeats: int = 1

    @property
    def numel(self) -> int:
        return self.repeats * sum(self.lengths)


@dataclass
class Controller:
    """The factor mu of each tensor, by name; identical on all ranks of the links that reduce it."""

    _mu: dict[str, Tensor] = field(default_factory=dict)
    _lengths: dict[tuple[tuple[int, ...], torch.device], Tensor] = field(default_factory=dict)

    def mu(self, names: Sequence[str], device: torch.device) -> Tensor:
        """Return mu of the named tensors, float32 [names]."""
        return torch.stack([self._mu.get(name, torch.ones(())).to(device) for name in names])

    def update(
        self, names: Sequence[str], overflowed: Tensor, elements: Tensor, is_valid: Tensor
    ) -> None:
        """Update mu after a message.

        names       of the tensors
        overflowed  [names] saturated elements, summed over ranks
        elements    [names] elements in total
        is_valid    [names] bool, False for tensors that leave mu unchanged
        """
        mu = self.mu(names, overflowed.device)
        grown = (mu * 2 ** (1 / DOUBLING_STEPS)).clamp(max=LARGEST_MU)
        after = torch.where(overflowed > OVERFLOW_SHARE * elements, mu / 2, grown)
        self._mu.update(zip(names, torch.where(is_valid, after, mu).unbind(), strict=True))

    def lengths(self, layout: BufferLayout, device: torch.device) -> Tensor:
        key = layout.lengths, device
        if key not in self._lengths:
            self._lengths[key] = torch.tensor(layout.lengths, device=device)
        return self._lengths[key]

    def state_dict(self) -> dict[str, float]:
        """Return {name: mu} of the tensors that have been sent."""
        return {name: float(mu) for name, mu in sorted(self._mu.items())}

    def load_state_dict(self, state: Mapping[str, float], known_names: Sequence[str]) -> None:
        """Load a `state_dict`; CheckpointError for names outside `known_names` or invalid values."""
        for name, mu in state.items():
            if name not in known_names:
                near = closest(name, known_names)
                raise CheckpointError(
                    f"gradient messages: the checkpoint has mu of {name!r}, which this model does not have"
                    f"{f'; closest: {near}' if near else ''}. Load the state of the same model, or begin with none.",
                    code="gradient-messages.unknown-name",
                )
            if not (isinstance(mu, int | float) and 0 < mu < math.inf):
                raise CheckpointError(
                    f"gradient messages: mu of {name!r} is {mu!r}; it must be a positive number. Take an older checkpoint.",
                    code="gradient-messages.mu",
                )
        self._mu = {name: torch.tensor(float(mu)) for name, mu in state.items()}


def reduce_scatter(
    rows: Tensor,
    layout: BufferLayout,
    link: Link,
    controller: Controller,
    other_links: Sequence[Link] = (),
) -> Tensor:
    """Return the sum over ranks of their row for this rank, float32 [columns].

    rows         [ranks, columns], the same shape on every rank
    layout       the tensors in `rows`, read row after row; their elements add up to rows.numel()
    controller   has mu of each tensor, and is updated
    other_links  links to ranks that reduce other shards or replicas of the same tensors at the same
                 time; they share mu, not the scale
    """
    ranks, columns = rows.shape
    if link.size == 1 or rows.numel() == 0:
        return rows[link.rank].to(torch.float32)
    tensors = rows.to(torch.float32).reshape(layout.repeats, -1)
    amax = _shared_amax(tensors, layout, link)
    # mu < 1 leaves headroom above amax, mu > 1 clips the largest elements.
    scale = FP32(amax / controller.mu(layout.names, rows.device), E4M3)
    each = torch.repeat_interleave(
        scale, controller.lengths(layout, rows.device), output_size=tensors.shape[1]
    )
    quotients = tensors / each

    codes = E4M3.pack(E4M3.encode(quotients)).view(ranks, columns)
    overflowed = torch.stack(
        [(part.abs() > _SATURATES).sum() for part in quotients.split(layout.lengths, 1)]
    )
    received = link.all_to_all(
        torch.cat((codes, overflowed.view(torch.uint8).expand(ranks, -1)), dim=1)
    )
    overflowed = received[:, columns:].contiguous().view(torch.int64).sum(0)
    _update_mu(controller, layout, overflowed, amax, ranks, other_links)

    # Codes are added before the scale: it is the same on all ranks, so one multiplication is
    # enough.
    sum = torch.zeros(columns, dtype=torch.float32, device=rows.device)
    for row in received[:, :columns]:
        sum += E4M3.decode(E4M3.unpack(row, columns))
    return sum * (each if layout.repeats == ranks else each.view(ranks, columns)[link.rank])


def _shared_amax(tensors: Tensor, layout: BufferLayout, link: Link) -> Tensor:
    """Return the amax of each tensor over the link's ranks, float32 [tensors]; inf if not finite."""
    amax = torch.stack([part.abs().amax() for part in tensors.split(layout.lengths, 1)])
    finite = amax.isfinite()
    # Finite maxima and flags in one message: NaN is lost in a MAX on some backends.
    found = link.all_reduce_max(
        torch.stack((torch.where(finite, amax, 0.0), (~finite).to(torch.float32)))
    )
    return torch.where(found[1] > 0, math.inf, found[0])


def _update_mu(
    controller: Controller,
    layout: BufferLayout,
    overflowed: Tensor,
    amax: Tensor,
    ranks: int,
    other_links: Sequence[Link],
) -> None:
    elements = controller.lengths(layout, amax.device) * (layout.repeats * ranks)
    counts = torch.stack(
        (overflowed, elements, (amax > 0).to(torch.int64), amax.isinf().to(torch.int64))
    )
    # Ranks with other shards or replicas add their counts, so that all update mu alike.
    for link in other_links:
        link.all_reduce_sum(counts)
    overflowed, elements, nonzero, nonfinite = counts.unbind()
    controller.update(layout.names, overflowed, elements, (nonzero > 0) & (nonfinite == 0))

"""OsciReset (TetraJet-v2, arXiv 2510.27527): weights that oscillate between two codes are set to the value of their code.

The published settings, of a run of 12,505 steps: from step 8,000 on, the lengths of the paths of each weight and of its cast are added up
for 50 steps of every 200. Where the cast went 8 times as far as the weight, the weight becomes the cast's value.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from narrowgauge.ops.quantize import dequantize, quantize
from narrowgauge.recipe import Cast

FIRST, PERIOD, TRACKED, RATIO = 8000 / 12505, 200, 50, 8.0


class OscillationReset:
    """A hook after each optimizer step of one run of `steps` steps; `resets` has the share of weights reset, by step."""

    def __init__(self, cast: Cast, steps: int) -> None:
        self.cast, self.first = cast, int(FIRST * steps)
        self.step = 0
        self.resets: dict[int, float] = {}
        self.weights: list[torch.Tensor] = []
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.paths: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def __call__(self, optimizer: Any, arguments: Any, named: Any) -> None:
        self.step += 1
        phase = (self.step - self.first) % PERIOD
        if self.step < self.first or phase > TRACKED:
            return
        now = [(weight.clone(), self._value(weight)) for weight in self._weights()]
        if phase == 0:
            self.paths = [
                (torch.zeros_like(weight), torch.zeros_like(value)) for weight, value in now
            ]
        else:
            for lengths, last, current in zip(self.paths, self.before, now, strict=True):
                for length, one, other in zip(lengths, last, current, strict=True):
                    length += (other - one).abs()
        self.before = now
        if phase == TRACKED:
            self._reset()

    def _reset(self) -> None:
        changed = 0
        for weight, (_, value), (length, length_of_value) in zip(
            self._weights(), self.before, self.paths, strict=True
        ):
            oscillates = (length > 0) & (length_of_value >= RATIO * length)
            weight.copy_(torch.where(oscillates, value, weight))
            changed += int(oscillates.sum())
        self.resets[self.step] = changed / sum(weight.numel() for weight in self._weights())

    def _value(self, weight: torch.Tensor) -> torch.Tensor:
        return dequantize(quantize(weight.detach(), self.cast)).to(weight.dtype)

    def _weights(self) -> list[torch.Tensor]:
        from narrowgauge.nn.linear import QLinear

        if not self.weights:
            layers = [each for each in gc.get_objects() if isinstance(each, QLinear)]
            self.weights = [
                layer.weight for layer in layers if layer.recipe.output.rhs == self.cast
            ]
        return self.weights

"""Learning-rate schedules: the learning rate of each optimizer step of a run.

    t        step, counted from 1          T    steps of the run
    W        warmup_steps                  D    decay steps, of warmup-stable-decay alone
    peak     learning_rate                 low  min_learning_rate

    t <= W   peak t / W, in every schedule
    t > W    low + (peak - low) f(t), with

    cosine                f = (1 + cos(pi u)) / 2             u = (t - W) / (T + 1 - W)
    linear                f = 1 - u                           the same u
    constant              f = 1
    warmup-stable-decay   f = 1 up to t = T - D, then 1 - v   v = (t - (T - D)) / (D + 1)

f would reach 0 one step after the end: with a rate of 0 the last update would change nothing.

The rate is a function of settings and step alone, so a resumed run has the rates of one that was
not interrupted. A run that resumes with more steps has other rates from there on. The rates of
constant, and of warmup-stable-decay before T - D, do not depend on T: a run in that phase can be
extended, or branched into a decay, without a jump.

Sources: cosine, Loshchilov and Hutter 2017 (arXiv 1608.03983); warmup-stable-decay, Hu et al. 2024
(MiniCPM, arXiv 2404.06395), with a decay of a tenth of the run. The decay here is linear, one of
the two shapes of Hagele et al. 2024 (arXiv 2405.18392).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from narrowgauge.train.config.optimizer_settings import WARMUP_STABLE_DECAY

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig

DECAY_SHARE = 0.1  # of the run, where decay_steps is 0: section 4.2 of MiniCPM


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of a step, counted from 1. See the module docstring."""
    peak, lowest, warmup_steps = config.learning_rate, config.min_learning_rate, config.warmup_steps
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if config.rate_schedule == "constant":
        return peak
    if config.rate_schedule == WARMUP_STABLE_DECAY:
        stable_until = config.steps - decay_steps(config)
        if step <= stable_until:
            return peak
        return lowest + (peak - lowest) * (1 - _done(step, stable_until, config.steps))
    done = _done(step, warmup_steps, config.steps)
    if config.rate_schedule == "linear":
        return lowest + (peak - lowest) * (1 - done)
    # torch's cosine, as in earlier versions: math.cos may differ in the last digit.
    cosine = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * done, dtype=torch.float64)).item())
    return lowest + (peak - lowest) * cosine


def decay_steps(config: TrainConfig) -> int:
    """Steps of the decay of warmup-stable-decay, at least 1; it begins after the warm-up."""
    asked = config.decay_steps or math.ceil(DECAY_SHARE * config.steps)
    return max(1, min(asked, config.steps - config.warmup_steps))


def _done(step: int, after: int, steps: int) -> float:
    """Share of the way from step `after` to one step beyond the last."""
    return (step - after) / (steps + 1 - after)

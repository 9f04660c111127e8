"""Optimizers with low-precision states and 16-bit weights, and the precisions of a training run."""

from narrowgauge.optim.checks import refuse_silent_failures, silent_failures
from narrowgauge.optim.clipping import clip_gradients
from narrowgauge.optim.held_gradients import float16_weights, hold_gradients
from narrowgauge.optim.masters import round_to_bfloat16
from narrowgauge.optim.optimizers import SGD, AdamW, Lion
from narrowgauge.optim.param_groups import groups
from narrowgauge.optim.precision import PRECISIONS, Precision
from narrowgauge.optim.size import state_bytes
from narrowgauge.optim.state_dict import full_state_dict
from narrowgauge.optim.step_in_backward import in_backward
from narrowgauge.optim.zero_sharding import ZeroBalance, zero, zero_balance

__all__ = [
    "PRECISIONS",
    "SGD",
    "AdamW",
    "Lion",
    "Precision",
    "ZeroBalance",
    "clip_gradients",
    "float16_weights",
    "full_state_dict",
    "groups",
    "hold_gradients",
    "in_backward",
    "refuse_silent_failures",
    "round_to_bfloat16",
    "silent_failures",
    "state_bytes",
    "zero",
    "zero_balance",
]

"""Tables `[training]` and `[optimizer]`: length, update rule and its states. Imports no torch."""

from dataclasses import dataclass
from functools import partial

from narrowgauge.optim.rules import RULES
from narrowgauge.train.config.data_settings import GENERATING
from narrowgauge.train.config.rules import (
    COUNT,
    COUNT_OR_ZERO,
    NUMBERS,
    OneOf,
    OneOrPair,
    Range,
    TwoNumbers,
    setting,
)

MAX_INT = 2**63 - 1  # largest integer that TOML guarantees and torch accepts as a seed
WARMUP_STABLE_DECAY = "warmup-stable-decay"
UNSET, AS_THE_RULE = -1.0, "-1: as the rule of the updates has it in a run."
# Numbers of rules without such an option. They are written to config.toml and have no effect.
WITHOUT_OPTION = {"betas": (0.9, 0.95), "momentum": 0.9, "eps": 1e-8}
TRAINING, OPTIMIZER = (partial(setting, name) for name in ("training", "optimizer"))


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Table `[training]`: length, seed and loss."""

    # fmt: off
    steps: int = TRAINING(300, "Optimizer steps.", COUNT)
    epochs: int = TRAINING(0, "Passes over the data, instead of steps; 0: steps.", COUNT_OR_ZERO)
    seed: int = TRAINING(0, "Decides weights, order of the data and stochastic rounding.", Range(0, MAX_INT))
    loss: str = TRAINING("chunks",
        "Logits of the loss: chunks of tokens; slices of the vocabulary too, again in backward; or whole.",
        OneOf(("chunks", "slices", "whole")), tasks=GENERATING)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Table `[optimizer]`: learning rate, update rule and states."""

    # fmt: off
    optimizer: str = OPTIMIZER("adamw", "Rule of the updates.", OneOf(tuple(RULES)), key="name", short=True)
    learning_rate: float = OPTIMIZER(1e-3, "Peak learning rate.", Range(0, 1, open_low=True))
    min_learning_rate: float = OPTIMIZER(0.0, "Learning rate after the last step.", Range(0, 1))
    rate_schedule: str = OPTIMIZER("cosine", "How the learning rate falls after the warm-up.",
        OneOf(("cosine", "linear", "constant", WARMUP_STABLE_DECAY)), key="schedule")
    warmup_steps: int = OPTIMIZER(20, "Steps over which the learning rate rises.", COUNT_OR_ZERO)
    decay_steps: int = OPTIMIZER(0, "warmup-stable-decay: steps over which the learning rate falls, the last; 0: a tenth of the run.",
        COUNT_OR_ZERO)
    weight_decay: float = OPTIMIZER(0.1, "Weight decay of matrices, as the rule of the updates has it.", Range(0, 1))
    betas: NUMBERS = OPTIMIZER((UNSET, UNSET),  # noqa: RUF009 (it returns a dataclasses.field)
        f"Both betas, as 0.9,0.95; the first is also the momentum; {AS_THE_RULE}",
        TwoNumbers(Range(0, 1, open_high=True, unset=UNSET)))
    epsilon: float = OPTIMIZER(UNSET, f"Guard against division by zero; {AS_THE_RULE}", Range(0, 1, open_low=True, unset=UNSET))
    clip: float = OPTIMIZER(1.0, "Largest norm of the gradient; 0: not clipped.", Range(0, 1e6))
    clip_by: str = OPTIMIZER("",
        "What a step in backward is clipped by: the norm of the step before, of a first forward and backward pass, "
        "or each parameter's own.",
        OneOf(("", "previous", "two-pass", "parameter")))
    states: str = OPTIMIZER("fp32", "Numbers of the optimizer's moments; 'first/second': of each.",
        OneOrPair(("fp32", "8bit", "fp8", "fp8-lm", "4bit"), ("fp32", "fp16", "8bit", "fp8", "e4m3", "4bit")))
    embedding_states: str = OPTIMIZER("fp32", "Moments of embeddings: float32, or the same as all.", OneOf(("fp32", "same")))
    master: str = OPTIMIZER("", "What keeps the low bits of 16-bit weights; empty: as the precision says.",
        OneOf(("", "fp32", "fp16-scaled", "bf16-remainder", "stochastic")))
    held_gradients: str = OPTIMIZER("16bit",
        "How gradients wait for the step: as they are; of matrices in FP8; or none waits, since each parameter steps in backward as soon "
        "as its gradient is whole (sums of several micro-batches are held in FP8).",
        OneOf(("16bit", "fp8", "none")))
    # fmt: on

    @property
    def step_in_backward(self) -> bool:
        """True if each parameter steps inside the backward pass."""
        return self.held_gradients == "none"

"""Settings without a table, `[evaluation]`, `[checkpoint]`, `[log]` and `[guard]`. Imports no torch.

All of these settings may change when a run resumes.
"""

from dataclasses import dataclass
from functools import partial

from narrowgauge.diagnose import guard_settings
from narrowgauge.train.config.data_settings import GENERATING
from narrowgauge.train.config.rules import (
    COUNT,
    COUNT_OR_ZERO,
    NOT_EMPTY,
    Matching,
    OneOf,
    Range,
    setting,
)

ROOT, EVALUATION, CHECKPOINT, LOG, GUARD = (
    partial(setting, name) for name in ("", "evaluation", "checkpoint", "log", "guard")
)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings at the top of a file: the run folder and its origin."""

    # fmt: off
    output: str = ROOT("runs/latest", "Run folder. Left out: runs/1, runs/2, ...; runs/latest links to the newest.", NOT_EMPTY, free=True)
    resume: bool = ROOT(False, "Continue the run in the run folder from its newest checkpoint.", free=True)
    parent: str = ROOT("",
        "Start a branch: go on from another run's checkpoint, with its settings but for those given here. RUN, RUN@STEP "
        "or RUN@best.",
        key="from", free=True)
    compare: str = ROOT("", "Recipe of a second run on the same data, as bf16; none: plain torch; empty: no second run.", free=True)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Table `[evaluation]`."""

    # fmt: off
    eval_every: int = EVALUATION(50, "Steps between evaluations; 0: only after the last step.", COUNT_OR_ZERO, key="every",
        free=True)
    eval_wide: bool = EVALUATION(True,
        "Score a second time with the products of Linears in 16 bits, where the recipe has them narrow.", key="wide", free=True)
    eval_tokens: int = EVALUATION(32768, "Validation tokens of an evaluation, at most.", COUNT, key="tokens", free=True)
    sample_tokens: int = EVALUATION(64, "Tokens of the sample written at each evaluation; 0: none.", Range(0, 2**20),
        free=True, tasks=GENERATING)
    prompt: str = EVALUATION("", "Text that the sample continues.", free=True, tasks=GENERATING)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Table `[checkpoint]`."""

    # fmt: off
    checkpoint_every: int = CHECKPOINT(100, "Steps between checkpoints; 0: only after the last step.", COUNT_OR_ZERO,
        key="every", free=True)
    keep: int = CHECKPOINT(2, "Checkpoints kept, the newest.", COUNT, free=True)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Table `[log]`."""

    # fmt: off
    log_every: int = LOG(10, "Steps between lines on the console.", COUNT, key="every", free=True)
    tensor_every: int = LOG(50, "Steps between tensor statistics; 0: none.", COUNT_OR_ZERO, free=True)
    launches_at: int = LOG(30, "Step whose idle time on a GPU is measured, or the next if its tensors are read; 0: none.",
        COUNT_OR_ZERO, free=True)
    tensorboard: bool = LOG(False, "Write TensorBoard events to the run folder too.", free=True)
    log_to: str = LOG("", "Send the curves to trackers too: wandb, mlflow or trackio, or several with commas.",
        Matching(r"|(wandb|mlflow|trackio)( ?, ?(wandb|mlflow|trackio))*", "wandb, mlflow or trackio, or several of these with commas"),
        key="to", also="log-to", free=True)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class GuardTable:
    """Table `[guard]`: checks against BF16 during the run."""

    # fmt: off
    guard: str = GUARD("",
        "Checks against short stretches in BF16 from the run's own state, as every=2000,steps=100,margin=0.25%,then=stay; "
        "empty: none.",
        key="checks", short=True, free=True, parts=guard_settings.KEYS)
    on_spike: str = GUARD("",
        "A spike of the loss: warn says whether data or format are to blame; skip also leaves the batch of data out.",
        OneOf(("", "warn", "skip")), free=True)
    # fmt: on

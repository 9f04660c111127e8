"""Exceptions that users meet, and the exit code of the command line for each.

A message is a complete sentence with the values in it, and ends in the next step:

    ConfigError: convert: pattern 'layers.*.up' matched no Linear. Closest: 'layers.0.mlp.up_proj'.

Each error has a `code` for programs and tests: a subject and a cause, such as "cast.tile" or
"formats.unknown". Codes stay when sentences are reworded. One code stands for one cause, and places
that refuse the same thing share it. Warnings have a code too, and so do notes and reasons that are
stored or printed (`Reason`).

Exit codes:

    0   ok                      7    output folder busy
    2   configuration           8    storage
    3   data or tokenizer       9    memory
    4   checkpoint              10   ranks hold different numbers
    5   numerics                11   study, compare: runs have learnt too little to judge recipes
    6   another rank lost       75   SIGTERM, after a checkpoint was saved
                                130  Ctrl-C, after a checkpoint was saved
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterable

EXIT_INTERRUPTED = 130  # Ctrl-C: the step was finished and a checkpoint saved
EXIT_CANNOT_TELL = 11  # study, compare: the runs have learnt too little to compare recipes
EXIT_PREEMPTED = 75  # SIGTERM, after the same; EX_TEMPFAIL of sysexits.h, "try again later"


class NarrowgaugeError(Exception):
    """Base of every error that narrowgauge raises on purpose."""

    exit_code = 1
    told = False  # True once the other ranks of the run have been notified

    def __init__(self, *args: object, code: str = "") -> None:
        super().__init__(*args)
        self.code = code


class ConfigError(NarrowgaugeError):
    """A setting, name or combination that cannot work."""

    exit_code = 2


class OptionError(ConfigError, ValueError):
    """An option whose value is out of range or unknown.

    Also a ValueError, which torch.optim raises.
    """


class ShapeError(ConfigError):
    """Shapes that do not fit each other or their tiles."""


class BackendError(ConfigError):
    """A kernel that was asked for by name refuses the call.

    refusal  code of the kernel's refusal (`ops.registry.Refusal`); '' for other causes
    """

    def __init__(self, *args: object, code: str = "", refusal: str = "") -> None:
        super().__init__(*args, code=code)
        self.refusal = refusal


class TransformError(ConfigError, NotImplementedError):
    """A PyTorch transform for which a layer has no rule.

    PyTorch raises NotImplementedError for these.
    """


class DataError(NarrowgaugeError):
    """Missing, empty or malformed data, or a tokenizer that does not fit it."""

    exit_code = 3


class CheckpointError(NarrowgaugeError):
    """No valid checkpoint, or one that belongs to another run."""

    exit_code = 4


class NumericsError(NarrowgaugeError):
    """A non-finite loss, gradient or weight."""

    exit_code = 5


class PeerError(NarrowgaugeError):
    """Another rank of the run died or does not answer."""

    exit_code = 6


class BusyError(NarrowgaugeError):
    """Another run uses the output folder."""

    exit_code = 7


class StorageError(NarrowgaugeError):
    """The file system refused a write: full, read-only, or not permitted."""

    exit_code = 8


class OutOfMemoryError(NarrowgaugeError):
    """Host or device memory is too small."""

    exit_code = 9


class DriftError(NarrowgaugeError):
    """Ranks hold different numbers although they must be identical."""

    exit_code = 10


class NarrowgaugeWarning(Warning):
    """Base of every warning that narrowgauge issues."""

    def __init__(self, *args: object, code: str = "") -> None:
        super().__init__(*args)
        self.code = code


class UsageWarning(NarrowgaugeWarning, UserWarning):
    """The model, the data or the training loop most likely does not do what was meant."""


class SlowerWarning(NarrowgaugeWarning, RuntimeWarning):
    """Numbers are right, but the computation is slower or takes more memory than it could."""


def warn(
    text: str,
    *,
    code: str,
    stacklevel: int,
    category: type[NarrowgaugeWarning] = UsageWarning,
) -> None:
    """As warnings.warn, with a code. stacklevel  1: the line that calls this function"""
    warnings.warn(category(text, code=code), stacklevel=stacklevel + 1)


class Reason(str):
    """A clause or sentence with the code of its cause: a note, or the reason of a decision.

    It is the text wherever text is needed, as in JSON. Joined or formatted text has no code.
    """

    code: str

    def __new__(cls, code: str, text: str) -> Reason:
        reason = super().__new__(cls, text)
        reason.code = code
        return reason

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # str's own takes one
        return self.code, str(self)


MODULES = {"PIL": "pillow", "yaml": "pyyaml"}  # modules whose package has another name


def missing_package(error: ModuleNotFoundError) -> str:
    """Sentence that names the package to install, or narrowgauge's extra that requires it."""
    from importlib import metadata

    module = (error.name or "").partition(".")[0]
    package = MODULES.get(module, module.replace("_", "-"))
    try:
        asked = metadata.requires("narrowgauge") or []
    except metadata.PackageNotFoundError:  # imported from a source checkout that is not installed
        asked = []
    extras = [
        extra[1]
        for line in asked
        # The lookahead keeps "torch" from matching "torchao".
        if re.match(rf"{re.escape(package)}(?![A-Za-z0-9._-])", line, re.IGNORECASE)
        and (extra := re.search(r"extra == ['\"]([a-z]+)['\"]", line))
    ]
    users = [extra for extra in ("train", "evaluate", "tensorboard", "adapt") if extra in extras]
    wanted = f"'narrowgauge[{users[0]}]'" if users else package
    return f"needs the package {package!r}. Run: pip install {wanted}."


def no_memory(error: MemoryError) -> str:
    """Message for a failed allocation; Python's own MemoryError has no text."""
    return f"out of memory: {str(error) or 'no details'}. Lower batch_size."


def closest(name: str, candidates: Iterable[str], limit: int = 3) -> str:
    """Candidates most similar to `name`, quoted, for an error message; '' if none is near."""
    near = difflib.get_close_matches(name, list(dict.fromkeys(candidates)), n=limit, cutoff=0.5)
    return ", ".join(repr(candidate) for candidate in near)

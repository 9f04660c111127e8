"""The errors that users meet, and the exit code that each one gives the command line.

An error is a complete sentence with the values in it, and ends in the next step:

    ConfigError: convert: pattern 'layers.*.up' matched no Linear. Closest: 'layers.0.mlp.up_proj'.

Each error has a `code`, for programs and tests: the subject and the cause, such as "cast.tile" or "formats.unknown". Codes stay
when sentences are reworded. One code stands for one cause; places that refuse the same thing share it.

Exit codes (also 130 for Ctrl-C and 75 for SIGTERM, both after a checkpoint was saved): 0 ok, 2 configuration,
3 data or tokenizer, 4 checkpoint, 5 numerics, 6 another rank lost, 7 output folder busy, 8 storage, 9 memory, 10 ranks drifted
apart.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

EXIT_INTERRUPTED = 130  # Ctrl-C: the step was finished and a checkpoint saved
EXIT_CANNOT_TELL = 11  # study, compare: the runs have not learnt enough to tell recipes apart
EXIT_PREEMPTED = 75  # SIGTERM: likewise; EX_TEMPFAIL, "try again later"


class NarrowgaugeError(Exception):
    """Base of every error that narrowgauge raises on purpose."""

    exit_code = 1
    told = False  # whether the other ranks of a run know of it

    def __init__(self, *args: object, code: str = "") -> None:
        super().__init__(*args)
        self.code = code


class ConfigError(NarrowgaugeError):
    """A setting, name or combination that cannot work."""

    exit_code = 2


class OptionError(ConfigError, ValueError):
    """A value of an option that is out of range or unknown; a ValueError too, as torch.optim raises it."""


class ShapeError(ConfigError):
    """Shapes that do not fit each other or their tiles."""


class BackendError(ConfigError):
    """A kernel that was asked for by name refuses the call."""


class TransformError(ConfigError, NotImplementedError):
    """A transform of PyTorch for which a layer has no rule; torch raises NotImplementedError there."""


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
    """Another rank of the run died, or does not answer."""

    exit_code = 6


class BusyError(NarrowgaugeError):
    """Another run holds the output folder."""

    exit_code = 7


class StorageError(NarrowgaugeError):
    """The file system refused: full, read-only, not permitted."""

    exit_code = 8


class OutOfMemoryError(NarrowgaugeError):
    """Host or device memory does not suffice."""

    exit_code = 9


class DriftError(NarrowgaugeError):
    """Ranks hold different numbers where they must hold the same."""

    exit_code = 10


MODULES = {"PIL": "pillow", "yaml": "pyyaml"}  # whose package has another name


def missing_package(error: ModuleNotFoundError) -> str:
    """Which package to install: the extra of narrowgauge that asks for it, else the package itself."""
    from importlib import metadata

    module = (error.name or "").partition(".")[0]
    package = MODULES.get(module, module.replace("_", "-"))
    try:
        asked = metadata.requires("narrowgauge") or []
    except metadata.PackageNotFoundError:  # a checkout on the path
        asked = []
    extras = [
        extra[1]
        for line in asked
        if re.match(rf"{re.escape(package)}(?![A-Za-z0-9._-])", line, re.IGNORECASE)
        and (extra := re.search(r"extra == ['\"]([a-z]+)['\"]", line))
    ]
    users = [extra for extra in ("train", "evaluate", "tensorboard") if extra in extras]
    wanted = f"'narrowgauge[{users[0]}]'" if users else package
    return f"needs the package {package!r}. Run: pip install {wanted}."


def no_memory(error: MemoryError) -> str:
    """The words on an allocation that failed; Python's own MemoryError has none."""
    return f"out of memory: {str(error) or 'no details'}. Lower batch_size."


def closest(name: str, candidates: Iterable[str], limit: int = 3) -> str:
    """The candidates most like `name`, quoted and comma-separated, ready for an error message; '' if none is near."""
    near = difflib.get_close_matches(name, list(dict.fromkeys(candidates)), n=limit, cutoff=0.5)
    return ", ".join(repr(candidate) for candidate in near)

"""The command line.

Each verb is a module with a function of the same name, imported when it is called.

This module needs the standard library alone, so `narrowgauge --help` imports neither cyclopts, rich
nor torch (docs/dependencies.md). `main` turns errors, Ctrl-C and a closed pipe into exit codes
(errors.py).
"""

import contextlib
import errno
import importlib
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from narrowgauge.diagnose.former_settings import FORMER
from narrowgauge.errors import (
    EXIT_INTERRUPTED,
    ConfigError,
    NarrowgaugeError,
    OutOfMemoryError,
    StorageError,
    closest,
    missing_package,
    no_memory,
)

VERBS = {
    "train": "Train a Transformer on narrow numbers, from a TOML file, flags or both.",
    "plan": "Say what a run will need, and whether it fits a card, before it runs.",
    "study": "Train several recipes with several seeds, and say what holds of each recipe.",
    "evaluate": "Score what a run has saved, narrow and in 16 bits, by its own data or tasks of lm-eval.",
    "export": "Write a trained model in the codes of its training, for vLLM, SGLang and transformers.",
    "generate": "Let a trained model write, by narrow or by wide products.",
    "compare": "Say whether runs and their branches have the same curve.",
    "blame": "Say which product of which layer is inaccurate, and whether that hurts.",
    "debug": "Repeat a stretch of a run under one change after another, and say which mends it.",
    "report": "Write the page that shows how a run went, or several.",
    "card-report": "Try and time the kernels of this machine's GPU, into one file to send back.",
    "info": "Say what this machine computes natively, and what is emulated.",
    "recipes": "List the recipes: which number format each matrix product uses.",
    "completion": "Print a script that completes verbs and flags in bash, zsh or fish.",
}
OF_SETTINGS = ("train", "plan", "study")  # verbs that have a flag for every setting
STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, the code that a shell reports


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Expected errors print one line on standard error, without a traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        _never_fail_to_encode(stream)
    try:
        code = _dispatch(list(sys.argv[1:] if arguments is None else arguments))
        # Flushed here, so that a full disk or a closed pipe raises inside this try and not at exit.
        if sys.stdout:
            sys.stdout.flush()
        return code
    except NarrowgaugeError as error:
        words = as_typed(str(error), sys.argv[1:] if arguments is None else arguments)
        return error.exit_code if _another_rank_says(error) else _fail(words, error.exit_code)
    except ModuleNotFoundError as error:
        # A missing module of narrowgauge itself is a bug, not a missing extra: show the traceback.
        if (error.name or "narrowgauge").partition(".")[0] == "narrowgauge":
            raise
        return _fail(missing_package(error), ConfigError.exit_code)
    except MemoryError as error:
        return _fail(no_memory(error), OutOfMemoryError.exit_code)
    except KeyboardInterrupt:
        return _fail("stopped by Ctrl-C.", EXIT_INTERRUPTED)
    except BrokenPipeError:
        _forget_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in STORAGE_ERRORS:
            raise
        _forget_output()
        return _fail(f"cannot write: {error}. Free or unlock the disk.", StorageError.exit_code)


def as_typed(message: str, arguments: Sequence[str]) -> str:
    """Name settings by their flags in a message "key = value: ...", if they were typed as flags.

    Errors name a setting by its key in a TOML file. Only the command line knows which settings were
    flags. Of a verb with a flag for every setting, all settings are flags if no file was named.
    """
    flags = sys.modules.get(f"{__name__}.flags")  # imported by the verbs that have such flags
    if flags is not None and arguments and arguments[0] in OF_SETTINGS:
        message = str(flags.with_flags(message, arguments[1:]))  # then the verb's own flags
    typed = {
        _path(found[1].replace("-", "_")): found[0]
        for each in arguments
        if (found := re.match(r"--([a-z0-9][a-z0-9.-]*)", each))
    }
    # The message may start with a rank, and name several settings before its colon.
    where = re.match(
        r"(?s)((?:rank \d+: )?)((?:[a-z_0-9.]+ = (?:'[^']*'|\"[^\"]*\"|[^:;,]*)[,;]? ?(?:and )?)+)(:.*)",
        message,
    )
    if where is None:
        return message
    named = re.sub(r"\b([a-z][a-z_0-9.]*) = ", lambda key: _flag_or_key(key[1], typed), where[2])
    return f"{where[1]}{named}{where[3]}"


def _flag_or_key(key: str, typed: Mapping[str, str]) -> str:
    return f"{typed[_path(key)]} " if _path(key) in typed else f"{key} = "


def _path(key: str) -> str:
    """Full name of a setting, from a full, short or former name."""
    return FORMER.get(key, key)


def _dispatch(arguments: list[str]) -> int:
    verb, *rest = arguments or ["--help"]
    if verb in ("--help", "-h", "help"):
        print(_help())
        return 0
    if verb in ("--version", "-V"):
        from importlib.metadata import version

        print(version("narrowgauge"))
        return 0
    if verb not in VERBS:
        near = closest(verb, VERBS, limit=1)
        raise ConfigError(
            f"{verb!r} is not a command. {f'Closest: {near}.' if near else 'See narrowgauge --help.'}",
            code="cli.command",
        )
    return _call(function_of(verb), verb, rest)


def function_of(verb: str) -> Callable[..., int]:
    """Import the module of one verb: importing all that verbs call, such as torch, takes seconds."""
    name = verb.replace("-", "_")
    function: Callable[..., int] = getattr(importlib.import_module(f"narrowgauge.cli.{name}"), name)
    return function


def _call(function: Callable[..., int], verb: str, arguments: list[str]) -> int:
    """Call a verb with its arguments, or print its help.

    The function's signature defines the flags, its docstring the help text.
    """
    from inspect import signature

    from cyclopts import App, CycloptsError, Group, Parameter, convert

    def strictly(type_: Any, tokens: Sequence[Any]) -> Any:
        """cyclopts' own conversion, but refuses 5.5 for an int, which cyclopts would round."""
        texts = [token.value for token in tokens]
        if type_ is int and not all(re.fullmatch(r"[-+]?\d{1,40}", text) for text in texts):
            raise ValueError(f"{' '.join(texts)!r} is not a whole number")
        return convert(type_, texts)

    app = App(
        name=f"narrowgauge {verb}", help_format="plaintext", version_flags=[], result_action="return_value",
        default_parameter=Parameter(converter=strictly),
    )  # fmt: skip
    app["--help"].group = Group("hidden", show=False)
    app.default(function)
    try:
        command, bound, _ = _parsed(app, verb, arguments, signature(function).parameters)
    except CycloptsError as error:
        # cyclopts breaks its messages into lines; an error is one line.
        words = " ".join(str(error).split())
        # It names a parameter of a dataclass by its name in capitals: TEMPERATURE.
        for typed in (each.partition("=")[0] for each in arguments if each.startswith("--")):
            words = words.replace(f"for {typed[2:].upper()}:", f"for {typed}:")
        stop = "" if words.endswith((".", "?")) else "."
        raise ConfigError(
            f"{verb}: {words}{stop} See narrowgauge {verb} --help.", code="cli.arguments"
        ) from None
    return int(command(*bound.args, **bound.kwargs) or 0)  # printing the help returns None


def _parsed(app: Any, verb: str, arguments: list[str], known: Collection[str]) -> Any:
    """Parse the arguments. Flags of other trainers that mean the same become ours, with a line.

    Raises ConfigError, which says what to type, for flags of other trainers that mean something
    else. Raises CycloptsError for other unknown flags.
    """
    from cyclopts import UnknownOptionError

    def parse(given: list[str]) -> Any:
        return app.parse_args(given, print_error=False, exit_on_error=False, verbose=False)

    try:
        return parse(arguments)
    except UnknownOptionError:
        if verb not in OF_SETTINGS:
            raise
        from narrowgauge.cli.flags import of_others

        ours, told = of_others(verb, arguments, known)
        if not told:
            raise
    # Before an error of the parser, which names the flags that were read.
    if os.environ.get("RANK", "0") == "0":  # torchrun's name of the rank
        print(f"narrowgauge: read as its own flags: {', '.join(told)}.", file=sys.stderr)
    return parse(ours)


def _help() -> str:
    verbs = "\n".join(f"  {verb:13}{words}" for verb, words in VERBS.items())
    return (
        f"Usage: narrowgauge COMMAND [OPTIONS]\n\nTrain Transformers on narrow numbers.\n\nCommands:\n{verbs}\n\n"
        "narrowgauge COMMAND --help says more. --version prints the version."
    )


def _never_fail_to_encode(stream: object) -> None:
    """Print unencodable characters as escapes, for a C locale or a file name that is not UTF-8."""
    reconfigure = getattr(
        stream, "reconfigure", None
    )  # absent under pytest's capture and in notebooks
    if reconfigure:
        reconfigure(errors="backslashreplace")


def _another_rank_says(error: NarrowgaugeError) -> bool:
    """True if this is a rank of torchrun and another rank has already printed an error.

    All ranks find the same wrong setting; one message is enough.
    """
    if error.told or "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    from narrowgauge.train import liveness

    return liveness.failed_before(error)


def _fail(message: object, code: int) -> int:
    with contextlib.suppress(OSError):  # standard error may be closed
        print(f"narrowgauge: {message}", file=sys.stderr, flush=True)
    return code


def _forget_output() -> None:
    """Redirect standard output to /dev/null.

    The interpreter's last flush into a closed pipe or a full disk would otherwise print a
    traceback.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

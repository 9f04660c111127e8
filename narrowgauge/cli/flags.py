"""A verb's own flags, read by cyclopts: strictly, with the closest name for an unknown one, and quickly.

A verb is a function; its signature are the flags, its docstring the help.
What it gives, and why not tyro or jsonargparse: docs/dependencies.md.
"""

from collections.abc import Callable, Sequence
from inspect import BoundArguments
from typing import Any

from cyclopts import App, CycloptsError, Group

from narrowgauge.errors import ConfigError

HIDDEN = Group("hidden", show=False)


def read(verb: Callable[..., Any], name: str, arguments: Sequence[str]) -> BoundArguments | None:
    """The arguments that were given for `verb`, only those; None if help was asked for, and printed."""
    app = App(name=f"narrowgauge {name}", help_format="plaintext", version_flags=[], result_action="return_value")
    app["--help"].group = HIDDEN  # it need not explain itself
    app.default(verb)
    try:
        command, bound, _ = app.parse_args(arguments, print_error=False, exit_on_error=False, verbose=False)
    except CycloptsError as error:
        raise ConfigError(f"{name}: {_sentence(error)} See narrowgauge {name} --help.") from None
    if command is not verb:
        command(*bound.args, **bound.kwargs)
        return None
    return bound


def run(verb: Callable[..., int], name: str, arguments: Sequence[str]) -> int:
    """Calls `verb` with what was given."""
    bound = read(verb, name, arguments)
    return verb(*bound.args, **bound.kwargs) if bound else 0


def _sentence(error: CycloptsError) -> str:
    text = " ".join(str(error).split())
    return text if text.endswith((".", "?")) else text + "."

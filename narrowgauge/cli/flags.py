"""Parses the flags of a verb with cyclopts: its signature defines the flags, its docstring the help.

Why cyclopts, and not tyro or jsonargparse: docs/dependencies.md.
"""

from collections.abc import Callable, Sequence

from cyclopts import App, CycloptsError, Group

from narrowgauge.errors import ConfigError

HIDDEN = Group("hidden", show=False)


def run(verb: Callable[..., int], name: str, arguments: Sequence[str]) -> int:
    """Calls `verb` with the given arguments alone, or prints its help."""
    app = App(name=f"narrowgauge {name}", help_format="plaintext", version_flags=[], result_action="return_value")
    app["--help"].group = HIDDEN
    app.default(verb)
    try:
        command, bound, _ = app.parse_args(arguments, print_error=False, exit_on_error=False, verbose=False)
    except CycloptsError as error:
        words = " ".join(str(error).split())
        stop = "" if words.endswith((".", "?")) else "."
        raise ConfigError(f"{name}: {words}{stop} See narrowgauge {name} --help.") from None
    return int(command(*bound.args, **bound.kwargs) or 0)  # the help returns nothing

"""A verb's own flags, read by cyclopts: strictly, with the closest name for an unknown one, and quickly.

A verb is a function; its signature are the flags, its docstring the help.
What it gives, and why not tyro or jsonargparse: docs/dependencies.md.
"""

from collections.abc import Callable, Sequence

from cyclopts import App, CycloptsError, Group

from narrowgauge.errors import ConfigError

HIDDEN = Group("hidden", show=False)


def run(verb: Callable[..., int], name: str, arguments: Sequence[str]) -> int:
    """Calls `verb` with the arguments that were given, and only those; or prints its help if that was asked for."""
    app = App(name=f"narrowgauge {name}", help_format="plaintext", version_flags=[], result_action="return_value")
    app["--help"].group = HIDDEN  # it need not explain itself
    app.default(verb)
    try:
        command, bound, _ = app.parse_args(arguments, print_error=False, exit_on_error=False, verbose=False)
    except CycloptsError as error:
        words = " ".join(str(error).split())
        stop = "" if words.endswith((".", "?")) else "."
        raise ConfigError(f"{name}: {words}{stop} See narrowgauge {name} --help.") from None
    return int(command(*bound.args, **bound.kwargs) or 0)  # the help returns nothing

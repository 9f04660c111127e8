"""`narrowgauge completion SHELL`: print a script that completes verbs and flags in a shell."""

from typing import Any

from narrowgauge.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")


def completion(shell: str, /) -> int:
    """Print a script by which a shell completes verbs, flags and file names.

    bash: eval "$(narrowgauge completion bash)", in ~/.bashrc.
    zsh: the same with zsh, in ~/.zshrc after compinit.
    fish: narrowgauge completion fish > ~/.config/fish/completions/narrowgauge.fish.

    Parameters
    ----------
    shell
        bash, zsh or fish.
    """
    if shell not in SHELLS:
        raise ConfigError(
            f"{shell!r} is no shell with completions. Name bash, zsh or fish.",
            code="cli.shell",
        )
    print(script(shell))
    return 0


def script(shell: str) -> str:
    """The script, without torch: 0.4 s. Hidden flags, such as former ones, are not offered."""
    from cyclopts import App

    from narrowgauge.cli import VERBS, function_of

    app: Any = App(name="narrowgauge", help_format="plaintext", version_flags=[])
    for verb in VERBS:
        app.command(function_of(verb), name=verb)
    text: str = app.generate_completion(prog_name="narrowgauge", shell=shell)
    # zsh reads the line "#compdef" only in a file of its own. After eval, compdef registers the function.
    return f"{text}\ncompdef _narrowgauge narrowgauge" if shell == "zsh" else text

"""`narrowgauge completion`: what bash offers after the script is read (exact)."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from narrowgauge import cli
from narrowgauge.cli import completion
from narrowgauge.errors import ConfigError
from tests.raising import cli_raises


def offered(script: str, *words: str) -> set[str]:
    """What bash would offer for the last word."""
    line = " ".join(map(shlex.quote, words))
    asked = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _narrowgauge\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", asked], capture_output=True, encoding="utf-8", check=True)
    return set(done.stdout.split())


@pytest.mark.slow  # makes the script of all verbs, and starts bash
def test_bash_offers_verbs_and_their_visible_flags():
    script = completion.script("bash")
    assert offered(script, "narrowgauge", "") == set(cli.VERBS)
    assert offered(script, "narrowgauge", "exp") == {"export"}
    assert offered(script, "narrowgauge", "train", "--model.hid") == {"--model.hidden-size"}
    flags = offered(script, "narrowgauge", "train", "--")
    assert {"--recipe", "--optimizer.learning-rate", "--resume"} <= flags
    assert not {"--hidden-size", "--version"} & flags  # a former flag, and one that no verb has


@pytest.mark.slow
@pytest.mark.parametrize("shell", completion.SHELLS)
def test_each_shell_gets_every_verb(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert all(verb in printed for verb in cli.VERBS)


def test_another_shell_is_refused():
    cli_raises(["completion", "tcsh"], ConfigError, "cli.shell", "tcsh", *completion.SHELLS)

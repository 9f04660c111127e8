"""`narrowgauge info`: what this machine computes natively, and what is emulated."""

from collections.abc import Sequence

from narrowgauge.cli import flags


def main(arguments: Sequence[str]) -> int:
    return flags.run(info, "info", arguments)


def info() -> int:
    """Say what this machine computes natively, and what is emulated."""
    from narrowgauge.diagnose import machine

    print(machine.info())
    return 0

"""`narrowgauge info`: what this machine computes natively, and what is emulated."""


def info() -> int:
    """Say what this machine computes natively, and what is emulated."""
    from narrowgauge.diagnose import machine

    print(machine.info())
    return 0

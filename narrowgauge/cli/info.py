"""`narrowgauge info`: list the operations that this machine computes natively or emulates."""


def info() -> int:
    """List the operations that this machine computes natively, and those that it emulates."""
    from narrowgauge.diagnose import machine

    print(machine.info())
    return 0

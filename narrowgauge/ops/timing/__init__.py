"""How long an operation takes on a card: what `narrowgauge plan` and `recipe="auto"` predict with.

cards  GPUs and their rates          work  what an operation multiplies, reads and writes          rates  seconds of it
"""

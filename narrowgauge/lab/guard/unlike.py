"""Alarms of the audit in words: GEMMs of a step whose numbers do not follow their recipe.

Unlike = {"layers.1.up_proj:output": (kind, detail)}       by layer and GEMM

stale    weight codes that are not a cast of the current weight
uncast   codes of x or gy that are not its cast: another scale, another factor, missing rows
kernel   a result further from the product of its own codes than rounding explains
stuck    stochastic rounding repeats the random numbers of the previous step

Imports no torch, as `evidence`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from narrowgauge.diagnose.format_text import plural

STALE, UNCAST, KERNEL, STUCK = "stale", "uncast", "kernel", "stuck"
NAMED = 3  # layers in a sentence

Unlike = Mapping[str, Sequence[str]]

_SAID = {
    STALE: "the weight codes in use are not a cast of the weights as they are",
    UNCAST: "the codes of an input or a gradient are not a cast of it",
    KERNEL: "the kernel's result is not the product of its own operands",
    STUCK: "stochastic rounding has the same random numbers at every step",
}
_REMEDY = {
    STALE: "Call narrowgauge.advance(model) after each optimizer step, and write weights with torch's in-place operations, not through "
    ".data.",
    UNCAST: "`narrowgauge info` checks the casts on this machine, narrowgauge.lab.blame those of the model.",
    KERNEL: "`narrowgauge info` checks the kernels on this machine, narrowgauge.lab.blame those of the model.",
    STUCK: "Remove the call that seeds torch's generator, or sets its state, at each step.",
}


def sentence(unlike: Unlike) -> str:
    """Sentences for each kind with its layers and the next step; '' for none."""
    said = []
    for kind, words in _SAID.items():
        own = {name: detail for name, (each, detail) in unlike.items() if each == kind}
        if not own:
            continue
        named = "; ".join(
            f"{name}, {detail}" if detail else name for name, detail in list(own.items())[:NAMED]
        )
        more = f"; and {len(own) - NAMED} more" if len(own) > NAMED else ""
        said.append(f"In {plural(len(own), 'product')} {words} ({named}{more}). {_REMEDY[kind]}")
    return " ".join(said)

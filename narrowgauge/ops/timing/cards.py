"""GPUs, as far as a prediction needs them: what they hold, what of it a run can have, and how fast they read and multiply.

Memory is what the driver reports as the total ("has a total capacity of ..." in torch's messages; the lowest of the figures found for a
card, which differ by a hundredth), so the smaller L4 and A100 with error correction. A run can have that less CONTEXT.
Rates are the makers' dense peaks at boost clock: no kernel reaches them. `reached` is what share large products in bfloat16 were seen to
reach (benchmarks/published.py has the figures and their sources).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from narrowgauge.errors import ConfigError, closest
from narrowgauge.ops.registry import Device

GiB = 2**30
# CUDA's context: 426 MiB when it is made (torch 2.10, CUDA 13.0, RTX 6000 Ada, github.com/unslothai/unsloth-zoo/pull/1053), and the
# kernels that are loaded when they are first used, of cuBLAS, torch and Triton: some 200 MiB [estimate].
CONTEXT = 640 * 2**20
REACHED = 0.80  # of cards of which no figure was found [assumed]
CUDA = (12, 9)  # what torch is taken to be built for on the machine with the card


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU.

    memory     bytes that the driver reports as the total
    usable     bytes of it that torch's allocator can reserve
    bandwidth  bytes/s of its memory
    processors multiprocessors, and clock their boost clock in Hz
    reached    share of the peak that large products in bfloat16 reach
    peak       FLOP/s of dense products by the type of their operands: "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4", "int4"; sums in
               float32, of int8 in int32. A type that is missing is one it cannot multiply
    device     what kernels are chosen by; None: narrowgauge has no kernels for it, and only memory is counted
    """

    name: str
    memory: int
    usable: int
    bandwidth: float
    peak: Mapping[str, float]
    device: Device | None
    processors: int = 0
    clock: float = 0.0
    reached: float = REACHED


def _card(
    name: str, gib: float, bandwidth: float, capability: tuple[int, int] | None, processors: int, giga_hertz: float,
    reached: float = REACHED, **tera: float,
) -> tuple[str, Card]:  # fmt: skip
    memory = int(gib * GiB)
    return name.lower().replace(" ", "-"), Card(
        name=name, memory=memory, usable=memory - CONTEXT, bandwidth=bandwidth,
        peak=MappingProxyType({kind: rate * 1e12 for kind, rate in tera.items()}),
        device=None if capability is None else Device("cuda", capability, cuda=CUDA),
        processors=processors, clock=giga_hertz * 1e9, reached=reached,
    )  # fmt: skip


_HOPPER = {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9, "int8": 1978.9}
_AMPERE = {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312, "int8": 624, "int4": 1248}

# Sources of rates and bandwidths, without sparsity: NVIDIA's datasheets of A100, H100 (SXM, PCIe), H200, HGX B200 (an eighth of it), L40S,
# L4; its whitepapers of GA102 (3090), Ada (4090) and RTX Blackwell (5090), whose rows "with FP32 accumulate" are taken; AMD's of MI300X.
CARDS: Mapping[str, Card] = MappingProxyType(
    dict(
        [
            _card("A100-40", 39.39, 1555e9, (8, 0), 108, 1.41, 0.92, **_AMPERE),
            _card("A100-80", 79.14, 2039e9, (8, 0), 108, 1.41, 0.92, **_AMPERE),
            _card("H100", 79.10, 3350e9, (9, 0), 132, 1.83, 0.878, **_HOPPER),
            _card("H100 PCIe", 79.10, 2039e9, (9, 0), 114, 1.755, fp32=51, tf32=378, bf16=756, fp16=756, fp8=1513, int8=1513),
            _card("H200", 139.72, 4800e9, (9, 0), 132, 1.83, 0.878, **_HOPPER),
            _card("B200", 178.35, 7700e9, (10, 0), 148, 1.85, 0.69, fp32=75, tf32=1125, bf16=2250, fp16=2250, fp8=4500, int8=4500,
                  fp4=9000),
            _card("MI300X", 191.69, 5300e9, None, 304, 2.1),
            _card("RTX 3090", 23.68, 936e9, (8, 6), 82, 1.695, fp32=35.6, tf32=35.6, bf16=71, fp16=71, int8=284, int4=568),
            _card("RTX 4090", 23.64, 1008e9, (8, 9), 128, 2.52, 1.02, fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3,
                  int8=660.6, int4=1321.2),
            _card("RTX 5090", 31.34, 1792e9, (12, 0), 170, 2.407, fp32=104.8, tf32=104.8, bf16=209.5, fp16=209.5, fp8=419, int8=838,
                  fp4=1676),
            _card("L40S", 44.40, 864e9, (8, 9), 142, 2.52, fp32=91.6, tf32=183, bf16=362, fp16=362, fp8=733, int8=733, int4=1466),
            _card("L4", 22.03, 300e9, (8, 9), 58, 2.04, fp32=30.3, tf32=60, bf16=121, fp16=121, fp8=242.5, int8=242.5, int4=485),
        ]
    )
)  # fmt: skip
_OTHER_NAMES = {"h100-sxm": "h100", "a100": "a100-80", "3090": "rtx-3090", "4090": "rtx-4090", "5090": "rtx-5090"}

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b)?\s*", re.IGNORECASE)
_UNITS = {f"{unit}{i}b": base ** (1 + "kmgt".index(unit)) for unit in "kmgt" for i, base in (("", 1000), ("i", 1024))}


def card(name: str) -> Card:
    """The card of that name: `h100`, `H100 PCIe`, `rtx-4090`, `4090`. ConfigError, with names like it, for one that is not known."""
    key = "-".join(re.split(r"[\s_-]+", name.strip().lower()))
    found = CARDS.get(_OTHER_NAMES.get(key, key))
    if found is None:
        near = closest(key, [*CARDS, *_OTHER_NAMES])
        raise ConfigError(
            f"card = {name!r} is not known{f'; closest: {near}' if near else ''}. "
            f"Choose one of {', '.join(CARDS)}, or say how much memory yours has: --memory 24GiB."
        )
    return found


def of_device(name: str) -> Card | None:
    """The card that a driver calls so, "NVIDIA H100 80GB HBM3"; None if it is not in the table. H800 and GH200 compute as an H100 does."""
    plain = name.lower().replace("h800", "h100").replace("gh200", "h100")
    named = {each.name.lower(): each for each in CARDS.values()}
    named["a100"] = CARDS["a100-40" if "40gb" in plain else "a100-80"]
    by_length = sorted(named, key=len, reverse=True)
    return next((named[each] for each in by_length if re.search(rf"\b{each}\b", plain)), None)


def of_memory(size: str, like: Card | None = None) -> Card:
    """A card with so much memory ("24GiB", "80GB"), in everything else `like` another; without one its rates are not known.

    Kernels are then chosen as on Hopper.
    """
    memory = _bytes_of(size)
    if memory <= CONTEXT:
        raise ConfigError(
            f"memory = {size!r}: CUDA's own context takes {CONTEXT // 2**20} MiB, nothing is left of {memory} bytes. "
            "Say how much memory the card has, as in --memory 24GiB."
        )
    name = size.strip()
    if like is None:
        device = CARDS["h100"].device
        return Card(name=name, memory=memory, usable=memory - CONTEXT, bandwidth=0.0, peak={}, device=device)
    return replace(like, name=f"{like.name} of {name}", memory=memory, usable=memory - CONTEXT)


def _bytes_of(size: str) -> int:
    found = _SIZE.fullmatch(size)
    unit = (found[2] or "b").lower() if found else ""
    if found is None or (unit != "b" and unit not in _UNITS):
        raise ConfigError(f"memory = {size!r} is no size. Write a number and its unit, as in --memory 24GiB.")
    return int(float(found[1]) * _UNITS.get(unit, 1))

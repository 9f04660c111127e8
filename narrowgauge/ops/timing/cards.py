"""GPUs: memory, bandwidth and peak rates, as far as predictions need them.

Memory is the total that the driver reports ("has a total capacity of ..." in torch's messages).
Reports for one card differ by a hundredth; the table has the lowest one, and for L4 and A100 the
smaller figure with error correction. A run can use that total minus CONTEXT.

Rates are the makers' dense peaks at boost clock, which no kernel reaches. `reached` is the share of
the peak that large bfloat16 GEMMs were measured to reach; benchmarks/published.py has the figures
and their sources.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from narrowgauge.errors import ConfigError, closest
from narrowgauge.ops.registry import Device

GiB = 2**30
# CUDA's context takes 426 MiB when it is created (torch 2.10, CUDA 13.0, RTX 6000 Ada,
# github.com/unslothai/unsloth-zoo/pull/1053). The kernels of cuBLAS, torch and Triton that are
# loaded at first use take about 200 MiB more [estimate].
CONTEXT = 640 * 2**20
REACHED = 0.80  # for cards without a published figure [assumed]
CUDA = (12, 9)  # assumed CUDA version of torch on the machine with the card


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU.

    memory      bytes that the driver reports as the total
    usable      bytes that torch's allocator can reserve
    bandwidth   bytes/s of the memory
    processors  multiprocessors
    clock       boost clock in Hz
    reached     share of the peak that large bfloat16 GEMMs reach
    peak        FLOP/s of dense GEMMs by operand type: "fp32", "tf32", "bf16", "fp16", "fp8",
                "int8", "fp4", "int4". Sums are float32, or int32 for int8. A missing type has no
                unit on this card
    device      Device by which kernels are chosen; None: narrowgauge has no kernels for it, only
                memory is predicted
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

# Sources, without sparsity: NVIDIA's datasheets for A100, H100 (SXM, PCIe), H200, HGX B200 (divided
# by eight), L40S and L4. NVIDIA's whitepapers for GA102 (3090), Ada (4090) and RTX Blackwell
# (5090), rows "with FP32 accumulate". AMD's for MI300X.
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
_OTHER_NAMES = {
    "h100-sxm": "h100",
    "a100": "a100-80",
    "3090": "rtx-3090",
    "4090": "rtx-4090",
    "5090": "rtx-5090",
}

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b)?\s*", re.IGNORECASE)
_UNITS = {
    f"{unit}{i}b": base ** (1 + "kmgt".index(unit))
    for unit in "kmgt"
    for i, base in (("", 1000), ("i", 1024))
}


def card(name: str) -> Card:
    """Return the card with this name: `h100`, `H100 PCIe`, `rtx-4090`, `rtx4090`, `4090`.

    Makers, sockets and the own memory may stand in it: `nvidia-a100-40gb`, `H100 SXM5 80GB`. Raises
    ConfigError with similar names if the name is unknown, or if the memory is another card's.
    """
    key = re.sub(r"[\s_-]+", "-", name.strip().lower())
    joined = {each.replace("-", ""): each for each in (*CARDS, *_OTHER_NAMES)}
    size = re.search(r"(\d+)-?gi?b$", key)
    plain = re.sub(r"-?(nvidia|geforce|amd|sxm\d?|hbm\d\w?|\d+-?gi?b)(?=-|$)", "", key).strip("-")
    if size and plain == "a100":
        plain = f"a100-{size[1]}"
    plain = re.sub(r"^(nvidia|geforce)", "", plain)
    known = joined.get(key.replace("-", "")) or joined.get(plain.replace("-", ""), "")
    found = CARDS.get(_OTHER_NAMES.get(known, known))
    # Makers count in GB what a driver has in GiB, and part of it is the driver's own.
    if found and size and not 1 <= int(size[1]) * GiB / found.memory < 1.1:
        found = None
    if found is None:
        near = closest(key, [*CARDS, *_OTHER_NAMES])
        raise ConfigError(
            f"card = {name!r}: not known{f'; closest: {near}' if near else ''}. "
            f"Choose one of {', '.join(CARDS)}, or say how much memory yours has: --memory 24GiB.",
            code="card.unknown",
        )
    return found


def of_device(name: str) -> Card | None:
    """Return the card for a driver's device name, or None if the table lacks it.

    An example of a name is "NVIDIA H100 80GB HBM3".

    H800 and GH200 have the compute rates of an H100.
    """
    plain = name.lower().replace("h800", "h100").replace("gh200", "h100")
    named = {each.name.lower(): each for each in CARDS.values()}
    named["a100"] = CARDS["a100-40" if "40gb" in plain else "a100-80"]
    # Longest names first: "h100 pcie" contains "h100".
    by_length = sorted(named, key=len, reverse=True)
    return next((named[each] for each in by_length if re.search(rf"\b{each}\b", plain)), None)


def of_memory(size: str, like: Card | None = None) -> Card:
    """Return a card with this much memory ("24GiB", "80GB").

    All other properties are copied from `like`. Without `like` the rates are unknown, and kernels
    are chosen as on Hopper.
    """
    memory = _bytes_of(size)
    if memory <= CONTEXT:
        raise ConfigError(
            f"memory = {size!r}: CUDA's own context takes {CONTEXT // 2**20} MiB, nothing is left of {memory} bytes. "
            "Say how much memory the card has, as in --memory 24GiB.",
            code="card.memory-too-small",
        )
    name = size.strip()
    if like is None:
        device = CARDS["h100"].device
        return Card(
            name=name, memory=memory, usable=memory - CONTEXT, bandwidth=0.0, peak={}, device=device
        )
    return replace(like, name=f"{like.name} of {name}", memory=memory, usable=memory - CONTEXT)


def _bytes_of(size: str) -> int:
    found = _SIZE.fullmatch(size)
    unit = (found[2] or "b").lower() if found else ""
    if found is None or (unit != "b" and unit not in _UNITS):
        raise ConfigError(
            f"memory = {size!r}: no size. Write a number and its unit, as in --memory 24GiB.",
            code="card.memory",
        )
    return int(float(found[1]) * _UNITS.get(unit, 1))

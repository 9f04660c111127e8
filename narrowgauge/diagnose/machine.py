"""Text of `narrowgauge info`: native and emulated GEMMs, kernels of other operators, and why."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import sys

import torch

from narrowgauge import __version__, recipes
from narrowgauge.conversion.measure import (
    FLOAT32,
    PLAIN_TORCH,
    LinearWorkload,
    measured_rounds,
    processor_name,
)
from narrowgauge.diagnose.kernels import families
from narrowgauge.ops.cpp import build
from narrowgauge.ops.mm import plan, why_emulated
from narrowgauge.ops.mm.spec import OTHER_GPUS, gpu_without_kernels
from narrowgauge.ops.registry import device_facts
from narrowgauge.ops.selfcheck import RESULTS
from narrowgauge.recipe import Gemm, Recipe


def info() -> str:
    """Describe the machine: for each device and recipe, native and emulated GEMMs with reasons."""
    lines = [
        f"narrowgauge {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "",
    ]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    width = max(map(len, recipes.names()))
    for device in [*(torch.device("cuda", index) for index in range(count)), torch.device("cpu")]:
        lines += [_headline(device), ""]
        lines += [f"  {recipe.name:<{width}}  {_verdict(recipe, device)}" for recipe in recipes.ALL]
        lines += ["", *_families(device), *_selfcheck_summary(device), ""]
    if (other := gpu_without_kernels()) in OTHER_GPUS:  # an AMD GPU is a device "cuda" above
        lines += [
            f"{other}: {OTHER_GPUS[other]}. Low precision is emulated there, no faster than 16 bits.",
            "",
        ]
    lines += [*_rates_of_cpu(), ""]
    found = cpp_compiler()
    without = "none. --device.compile on the CPU needs one."
    lines += [
        f"C++ compiler: {f'{found}. --device.compile works on the CPU.' if found else without}",
        f"C++ kernels of the CPU: {build.origin_of_kernels(found)}",
    ]
    return "\n".join(lines)


def cpp_compiler() -> str | None:
    """C++ compiler that torch.compile uses on the CPU: $CXX, or g++ (clang++ on a Mac).

    None if absent.
    """
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return name if shutil.which(name) else None


def c_compiler() -> str | None:
    """C compiler that Triton uses for its launchers: $CC, gcc or clang; None if there is none."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    return next((name for name in names if shutil.which(name)), None)


def _headline(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        kind = f"compute capability {major}.{minor}" if torch.version.hip is None else "an AMD GPU"
        return f"{device}: {torch.cuda.get_device_name(device)}, {kind}, {total:.0f} GiB"
    facts = device_facts("cpu", None)
    has = [
        name
        for name, there in (("bfloat16", facts.bf16_gemm), ("int8 (VNNI)", facts.int8_gemm))
        if there
    ]
    units = f"fast {' and '.join(has)} GEMM" if has else "no fast bfloat16 or int8 GEMM"
    return f"cpu: {processor_name()}, {threads_words()}, {torch.backends.cpu.get_cpu_capability()}, {units}"


def _families(device: torch.device) -> list[str]:
    """Return a line for each family of operators beside matrix products."""
    found = families(device)
    width = max(map(len, found))
    return [f"  {name:<{width}}  {words}" for name, words in found.items()]


# Of the Linear that is timed: large enough for full rates, and a fraction of a second in all.
TOKENS, WIDTH = 512, 1024


def _rates_of_cpu() -> list[str]:
    """Rates of the CPU's units, measured now, and the recipes that are faster than plain torch.

    Plain torch is the faster of bf16 autocast and float32. A CPU without bfloat16 instructions
    emulates bf16 slowly, so there float32 alone is measured. Recipes are compared round by round.
    """
    cpu = torch.device("cpu")
    plain = PLAIN_TORCH if device_facts("cpu", None).bf16_gemm else (FLOAT32,)
    narrow = [
        name
        for name in ("int8", "int4-hq-bs")
        if not any(why_emulated(gemm, cpu) for gemm in recipes.get(name).gemms().values())
    ]
    workload = LinearWorkload(tokens=TOKENS, inputs=WIDTH, outputs=WIDTH, dtype=torch.float32)
    load = _load()  # before the measurement adds to it
    rounds, _ = measured_rounds(workload, [*plain, *narrow], cpu)
    seconds = {name: statistics.median(each) for name, each in rounds.items()}
    operations = 3 * 2 * TOKENS * WIDTH * WIDTH
    times = ", ".join(
        f"{name} {s * 1e3:,.{0 if s >= 0.1 else 1}f} ms ({operations / s / 1e9:.0f} G{'FLOP' if name in plain else 'OP'}/s)"
        for name, s in seconds.items()
    )
    rival = min(plain, key=lambda name: seconds[name])
    ratios = {
        name: sorted(theirs / own for theirs, own in zip(rounds[rival], rounds[name], strict=True))
        for name in narrow
        if name in rounds
    }
    # A recipe that wins some rounds and loses others is not called faster.
    faster = [
        f"{name} ({statistics.median(each):.2f} times; {each[0]:.2f} to {each[-1]:.2f} over {len(each)} rounds)"
        for name, each in ratios.items()
        if each[0] > 1
    ]
    spread = max((each[-1] / each[0] - 1 for each in ratios.values()), default=0.0)
    busy = _busy(load, spread)
    of = (
        f"{rival}, the faster of torch's own two here"
        if len(plain) > 1
        else f"{rival} (bf16 is emulated here)"
    )
    if busy and not faster:
        verdict = f"Whether a narrow recipe is faster than {of}, {UNKNOWN}."
    else:
        verdict = f"Faster than {of}: {', '.join(faster) or NO_RECIPE_IS_FASTER}."
    return [
        f"  Measured now on {threads_words()}: a Linear of {WIDTH:,} x {WIDTH:,} on {TOKENS} tokens, forward and backward, with casts:",
        f"  {times}.",
        f"  {verdict}",
        *busy,
    ]


NO_RECIPE_IS_FASTER, UNKNOWN = "no narrow recipe", "could not be told"
# Above either, two calls of `info` may disagree on which recipe is faster.
MOST_LOAD = 0.5  # processes that run or wait, per processor
MOST_SPREAD = 0.25  # of a ratio over the rounds


def _busy(load: float, spread: float) -> list[str]:
    """A line that asks for a repetition if other programs ran or the rounds disagree; else []."""
    if load <= MOST_LOAD and spread <= MOST_SPREAD:
        return []
    words = f"a load of {load:.1f} per processor, ratios that vary by {100 * spread:.0f} %"
    return [f"  The machine is busy ({words}): repeat when it is quiet."]


def _load() -> float:
    """Load average of the last minute per processor; 0 where the system does not tell."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):  # Windows
        return 0.0


def threads_words() -> str:
    """ "1 thread" or "2 threads", for this process."""
    count = torch.get_num_threads()
    return f"{count} thread" + ("s" if count != 1 else "")


def _selfcheck_summary(device: torch.device) -> list[str]:
    """Results of the kernels' self-checks on this device so far.

    Planning the GEMMs for the lines above has already run the checks of the matrix kernels.
    """
    # The last part of a key is the index of the device; None on the CPU.
    own = {key: result for key, result in RESULTS.items() if key[-1] == device.index}
    found = [*own.values()]
    if not found:
        return []
    ops = ", ".join(sorted({key[0] for key in own}))
    right = [result for result in found if result.reason is None]
    worst = max((result.worst for result in right), default=0.0)
    took = sum(result.elapsed_s for result in found)
    return [
        "",
        f"  Checked here against the definition, of the ops {ops} alone: {len(right)} of {len(found)} kernels are right (largest error "
        f"{worst:.0%} of what is allowed), in {took:.1f} s. Each other kernel is checked before its first use.",
    ]


def _verdict(recipe: Recipe, device: torch.device) -> str:
    parts: dict[str, list[str]] = {}
    for name, gemm in recipe.gemms().items():
        how = plan(gemm, device)
        # bf16 GEMMs without fast bf16 units run in float32 on rounded operands, which are the same
        # numbers.
        if gemm == Gemm() and how.expand == torch.float32:
            words = "rounded to bfloat16, multiplied in float32 (faster on this CPU)"
        elif gemm == Gemm() or how.expand is None:
            words = "Triton" if how.choice.kernel.name == "triton" else "native"
        else:
            reasons = why_emulated(gemm, device) or "an operand has 16 bits"
            words = f"emulated exactly in {str(how.expand).removeprefix('torch.')}: {reasons}"
        parts.setdefault(words, []).append(name)
    if len(parts) == 1:
        return next(iter(parts))
    return "; ".join(f"{', '.join(names)}: {words}" for words, names in parts.items())

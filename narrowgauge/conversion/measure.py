"""Measure forward and backward of one Linear for several recipes, interleaved.

The candidates alternate in rounds, so a falling clock slows all candidates. Each result is the
median of the rounds. Three sets of random inputs alternate, so no cache holds them and no
multiplier reads zeros. Weights are quantized again in each step, as after an optimizer step. Times
are CUDA events. Random state, gradients and autocast are restored. Cost: 0.1 s per candidate and
shape after the first calls, and three times the layer's tensors in memory.

$XDG_CACHE_HOME/narrowgauge/auto.json (~/.cache/narrowgauge) stores the measurements:

    {"format": 1, "measured": {"device=... tokens=8192 ...": {"bf16": 0.0019, "fp8-row": 0.0012}}}

The file affects speed only: a run's folder stores its decisions.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import statistics
import types
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import recipes
from narrowgauge.errors import StorageError, warn
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops import rng
from narrowgauge.ops.cpp.build import cache_folder
from narrowgauge.ops.registry import device_facts
from narrowgauge.storage import publish, reading, temporary, write_synced

ROUNDS = 5
SLICE_S = 0.02  # seconds for one candidate in one round
WARM_UPS = 3
INPUT_SETS = 3
# Contenders that are no recipes: an ordinary nn.Linear as torch trains it.
AUTOCAST, FLOAT32 = "bf16 autocast", "float32"
PLAIN_TORCH = (AUTOCAST, FLOAT32)
FORMAT = 1  # version of the cache file
MEASURED = reading.Kind(
    most_bytes=64 * reading.MIB, error=StorageError, step="Remove it.", only_own=True
)

Step = Callable[[int], None]  # one forward and backward on the n-th set of inputs
Clock = Callable[[Step, int], float]  # (step, n) -> seconds of n steps


@dataclass(frozen=True, kw_only=True)
class LinearWorkload:
    """The facts that the time of a Linear depends on.

    tokens     rows of x
    inputs     in_features
    outputs    out_features
    dtype      dtype of the weight; float32 computes under bfloat16 autocast
    biased     True if the layer has a bias
    trains     True if the weight has a gradient
    compiled   True if the run uses torch.compile: candidates are then compiled too, seconds to tens
               of seconds each
    """

    tokens: int
    inputs: int
    outputs: int
    dtype: torch.dtype
    biased: bool = False
    trains: bool = True
    compiled: bool = False


def key(workload: LinearWorkload, names: Sequence[str], device: torch.device) -> str:
    """The cache key of a measurement: device, versions, kernel sources, sizes, candidates."""
    # Everything that may change the order of the candidates.
    facts = {
        **(_of_processor() if device.type == "cpu" else _of_card(device)),
        "torch": torch.__version__, "cuda": torch.version.cuda,
        "kernels": _kernels(), **asdict(workload), "candidates": ",".join(names),
    }  # fmt: skip
    if not has_bf16(device):
        facts["bf16"] = "multiplied in float32"
    return " ".join(f"{name}={value}" for name, value in facts.items())


def _of_card(device: torch.device) -> dict[str, object]:
    found = torch.cuda.get_device_properties(device)
    return {
        "device": found.name,
        "capability": f"{found.major}.{found.minor}",
        "processors": found.multi_processor_count,
    }


def processor_name() -> str:
    """Name of the CPU as the kernel reports it, e.g. "AMD EPYC"."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _of_processor() -> dict[str, object]:
    return {
        "device": processor_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processors": torch.get_num_threads(),
    }


@cache
def _kernels() -> str:
    """Digest of the sources of all kernels, so that changed kernels are measured again."""
    folder = Path(str(resources.files("narrowgauge.ops")))
    sources = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


def measured(
    workload: LinearWorkload, names: Sequence[str], device: torch.device
) -> tuple[dict[str, float], dict[str, str]]:
    """Measure all candidates.

    ->  (candidate -> median seconds, candidate -> why it failed)

    Raises OutOfMemoryError, and any error of "bf16".
    """
    found, failed = measured_rounds(workload, names, device)
    return {name: statistics.median(each) for name, each in found.items()}, failed


def measured_rounds(
    workload: LinearWorkload, names: Sequence[str], device: torch.device
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Like `measured`, with the seconds of each round: ROUNDS values per candidate."""
    index = (
        torch.cuda.current_device()
        if device.type == "cuda" and device.index is None
        else device.index
    )
    # The caller may be inside no_grad, and its random state must not change with a measurement.
    with rng.preserved([index] if device.type == "cuda" else []), torch.enable_grad():
        sets = [inputs(workload, device) for _ in range(INPUT_SETS)]
        steps: dict[str, Step] = {}
        failed: dict[str, str] = {}
        for name in names:
            try:
                steps[name] = step(workload, name, sets, device)
                for turn in range(WARM_UPS):
                    steps[name](turn)
            except torch.OutOfMemoryError:
                raise  # `decide` predicts instead
            except Exception as error:  # a kernel or compiler can raise anything
                if name == "bf16":
                    raise
                steps.pop(name, None)
                first_line = str(error).partition("\n")[0]
                failed[name] = f"failed when it was measured: {type(error).__name__}: {first_line}"
        clock = cuda_clock(device) if device.type == "cuda" else wall_clock
        return interleaved_rounds(steps, clock), failed


def step(
    workload: LinearWorkload, name: str, sets: Sequence[tuple[Tensor, Tensor]], device: torch.device
) -> Step:
    """Return a function that runs forward and backward of a new layer once.

    name  recipe; "bf16" is an ordinary nn.Linear, but on a CPU without bfloat16 instructions, where
          `convert` multiplies the rounded operands in float32. Or AUTOCAST or FLOAT32: an ordinary
          nn.Linear under bf16 autocast, or in float32
    """
    if name == FLOAT32:
        workload = replace(workload, dtype=torch.float32)
        sets = [(x.detach().float().requires_grad_(), gy.float()) for x, gy in sets]
    layer: nn.Linear = nn.Linear(
        workload.inputs, workload.outputs, workload.biased, device, workload.dtype
    )
    layer.weight.requires_grad_(workload.trains)
    is_plain = name in PLAIN_TORCH or (name == "bf16" and has_bf16(device))
    if not is_plain:
        layer = QLinear.adopt(layer, recipes.get(name))
    return step_of(layer, workload, sets, device, autocasts=name != FLOAT32)


def has_bf16(device: torch.device) -> bool:
    """False for a CPU without bfloat16 instructions."""
    return device_facts(device.type, device.index).bf16_gemm


def step_of(
    layer: nn.Module, workload: LinearWorkload, sets: Sequence[tuple[Tensor, Tensor]], device: torch.device,
    autocasts: bool = True,
) -> Step:  # fmt: skip
    """The same of a layer that is given: any module from x to y with a `weight`."""
    forward: Any = compiled_alone(layer) if workload.compiled else layer
    autocast = autocasts and workload.dtype == torch.float32

    def run(turn: int) -> None:
        x, gy = sets[turn % len(sets)]
        if isinstance(layer, QLinear):
            layer.empty_cache(keep=True)  # as `advance` does: each step casts the weight
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            y = forward(x)
        y.backward(gy)
        layer.weight.grad = x.grad = None

    return run


def compiled_alone(module: nn.Module) -> Any:
    """torch.compile of the module in a code object of its own."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    # Dynamo counts recompilations per code object and falls back to eager mode at eight, without an
    # error. Layers of one class share their code, so a benchmark would time eager code.
    own = types.FunctionType(
        call.__code__.replace(), call.__globals__, "call", None, call.__closure__
    )
    return torch.compile(own)


def inputs(workload: LinearWorkload, device: torch.device) -> tuple[Tensor, Tensor]:
    # Activations are bfloat16 for every weight dtype: a float32 weight computes under autocast.
    x = torch.randn(
        workload.tokens, workload.inputs, device=device, dtype=torch.bfloat16, requires_grad=True
    )
    return x, torch.randn(workload.tokens, workload.outputs, device=device, dtype=torch.bfloat16)


def interleaved(
    steps: dict[str, Step], clock: Clock, rounds: int = ROUNDS, slice_s: float = SLICE_S
) -> dict[str, float]:
    """Candidate -> median seconds per step."""
    found = interleaved_rounds(steps, clock, rounds, slice_s)
    return {name: statistics.median(each) for name, each in found.items()}


def interleaved_rounds(
    steps: dict[str, Step], clock: Clock, rounds: int = ROUNDS, slice_s: float = SLICE_S
) -> dict[str, list[float]]:
    """Candidate -> seconds per step in each round."""
    counts = {
        name: max(3, min(1000, round(slice_s / max(clock(run, 3) / 3, 1e-6))))
        for name, run in steps.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        # Alternate the direction, so that no candidate always runs after the same one.
        for name in list(steps) if number % 2 == 0 else reversed(list(steps)):
            samples[name].append(clock(steps[name], counts[name]) / counts[name])
    return samples


def cuda_clock(device: torch.device) -> Clock:
    """Seconds between two events on the device's current stream."""

    def clock(run: Step, count: int) -> float:
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(device):
            started.record()
            for turn in range(count):
                run(turn)
            ended.record()
            ended.synchronize()
        return started.elapsed_time(ended) / 1e3

    return clock


def wall_clock(run: Step, count: int) -> float:
    """Seconds on the host, for a CPU, where calls are synchronous."""
    started_at_s = perf_counter()
    for turn in range(count):
        run(turn)
    return perf_counter() - started_at_s


# --- The cache file ---


def user_cache() -> Path:
    return cache_folder() / "auto.json"


def cached(path: Path) -> dict[str, dict[str, float]]:
    """Key -> candidate -> seconds; {} if the file is missing, or damaged (with a warning)."""
    try:
        if not os.path.lexists(path):  # a dangling link is damage, not a missing file
            return {}
        content = reading.json_of(path, MEASURED)
        if content["format"] != FORMAT:
            raise ValueError("another format")
        found: dict[str, dict[str, float]] = {
            key: dict(each) for key, each in content["measured"].items()
        }
        if not all(math.isfinite(s) and s > 0 for each in found.values() for s in each.values()):
            raise ValueError("not a number of seconds")
    except (StorageError, ValueError, KeyError, TypeError, AttributeError) as error:
        warn(
            f"{path}: is damaged ({type(error).__name__}) and was ignored; recipe 'auto' measures anew and replaces it.",
            code="auto.damaged",
            stacklevel=2,
        )
        return {}
    return found


def keep(path: Path, key: str, seconds: dict[str, float]) -> None:
    """Adds a measurement to the file, atomically. Warns if the folder is not writable."""
    # No lock: if two processes write at once, one loses its entry and measures it again later.
    # Readers find a complete file at any time, since `publish` renames it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `decide` has warned of a damaged file already
        content = {"format": FORMAT, "measured": cached(path) | {key: seconds}}
    draft = temporary(path)
    try:
        write_synced(draft, json.dumps(content, indent=1).encode())
        draft.chmod(0o600)  # whatever the umask: `cached` refuses a file that others may write
        publish(draft, path)
    except OSError as error:
        warn(
            f"{path}: measurements of recipe 'auto' are not kept: {error.strerror}.",
            code="auto.not-kept",
            stacklevel=2,
        )
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)

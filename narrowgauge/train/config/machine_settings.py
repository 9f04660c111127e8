"""Tables `[memory]`, `[device]` and `[parallel]`: how a step runs on a machine. Imports no torch."""

from dataclasses import dataclass
from functools import partial

from narrowgauge.train.config import parallel_syntax
from narrowgauge.train.config.rules import COUNT_OR_ZERO, Matching, OneOf, Range, setting

MEMORY, DEVICE, PARALLEL = (partial(setting, name) for name in ("memory", "device", "parallel"))


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Table `[memory]`: activations and the planner."""

    # fmt: off
    checkpointing: str = MEMORY("none",
        "What backward computes again: none, selective, full, every-N, sqrt, budget:512MiB, or auto.",
        Matching(r"none|full|selective|sqrt|auto|every-[1-9]\d{0,3}|budget:\d+(\.\d+)? ?(B|[KMG]iB)?",
                 "one of 'none', 'selective', 'full', 'every-N' (as 'every-2'), 'sqrt', 'auto' or 'budget:512MiB'"))
    compress_activations: bool = MEMORY(False, "Keep what blocks save for backward in E4M3.")
    keep_freed: bool = MEMORY(True, "On a CPU, memory that a step frees is kept for the next, where the C library is glibc.")
    plan: str = MEMORY("auto", "Whether memory is planned before the first step: auto, on a GPU.",
        OneOf(("auto", "always", "never")), free=True)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """Table `[device]`: device, threads and compilation."""

    # fmt: off
    device: str = DEVICE("auto", "auto, cpu, cuda or cuda:N.",
        Matching(r"auto|cpu|cuda(:\d{1,3})?", "one of 'auto', 'cpu', 'cuda' or 'cuda:N'"), key="name", short=True)
    threads: int = DEVICE(0, "Threads of the CPU; 0: as torch decides.", Range(0, 4096))
    free_multiprocessors: int = DEVICE(0, "Multiprocessors of the GPU that cooperative grids of casts leave free; 0: none.",
        Range(0, 4096), free=True)
    compile: bool = DEVICE(False, "Compile the model with torch.compile.")
    cuda_graph: bool = DEVICE(False, "Launch steps as CUDA graphs, on a GPU.")
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """Table `[parallel]`: layout of the ranks, and formats of their messages."""

    # fmt: off
    parallel: str = PARALLEL("",
        "How ranks of torchrun share a run, as fsdp=4, tp=2,sp or fsdp=2,pp=2; empty: dp, a copy on each.", key="layout", short=True,
        parts=parallel_syntax.AXES)
    schedule: str = PARALLEL("1F1B", "Order of work in the stages of a pipeline (pp), as torch calls it.",
        OneOf(("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")))
    gradients: str = PARALLEL("16bit", "How gradients travel between ranks.", OneOf(("16bit", "fp8", "fp8-lm")))
    weights: str = PARALLEL("16bit", "What ranks with shards gather of weights: as they are, or codes.",
        OneOf(("16bit", "codes")))
    activations: str = PARALLEL("16bit", "How activations and their gradients travel, of pp and sp.", OneOf(("16bit", "fp8")))
    digest_every: int = PARALLEL(100, "Steps between comparisons of what all ranks hold alike; 0: none.", COUNT_OR_ZERO,
        free=True)
    timeout_s: float = PARALLEL(600.0, "Seconds that a rank waits for the others before it takes one for dead.",
        Range(1, 86400), free=True)
    # fmt: on

"""From what was recorded to the numbers that are committed: of a case, and of each kernel of ours in it.

launches, launches_of_triton          kernels and products; of them Triton's, Inductor's among those
read_gb, written_gb, conditional_gb   of Triton's kernels (`hooks` says how)
spanned_gb                            their tensor arguments, each once and whole
torch_gb                              of torch's own operators, products left out (eager cases; `operator_bytes`)
host_to_device, device_to_host, device_to_device, copied_mb, memsets, waits
peak_gib                              of tensors, as torch's allocator counts them
registers, spilled, instructions, instructions_per_element, programs   of a kernel: the worst of its binaries
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from tests.gpu_dry_run import binaries, log
from tests.gpu_dry_run.log import Kernel, Summary

Numbers = dict[str, float]
Case = Callable[[], tuple[Summary, Numbers]]  # what was recorded, and numbers beside it
LESS_IS_WORSE = ("programs",)


def of(seen: Summary) -> Numbers:
    """The numbers of a case."""
    copies = {kind: count for kind, (count, _) in seen.memcpys.items()}
    found: Numbers = {
        "launches": seen.launches,
        "launches_of_triton": sum(kernel.launches for kernel in seen.kernels.values() if kernel.is_compiled),
        **{f"{what}_gb": round(seen.total(what) / 1e9, 3) for what in ("read", "written", "conditional", "spanned")},
        **{kind.replace(" ", "_"): copies.get(kind, 0) for kind in ("host to device", "device to host", "device to device")},
        "copied_mb": round(sum(size for _, size in seen.memcpys.values()) / 1e6, 3),
        "memsets": seen.memsets,
        "waits": sum(seen.waits.values()),
        "unsized": sum(count for remark, count in seen.remarks.items() if remark.startswith("bytes of")),
    }  # fmt: skip
    return found


def of_kernels(seen: Summary) -> dict[str, Numbers]:
    """Of Triton's kernels that narrowgauge wrote; Inductor's change their names with what is around them."""
    own = {
        name: each
        for name, each in seen.kernels.items()
        if each.is_compiled and not name.startswith("triton_")
    }
    return {name: _worst(kernel) for name, kernel in sorted(own.items())}


def _worst(kernel: Kernel) -> Numbers:
    each: dict[str, list[float]] = {}
    folder = log.path().parent / "cubins"
    for binary in kernel.binaries:
        used = binaries.usage(folder / binary.cubin)
        numbers: Numbers = {
            "registers": used.registers,
            "spilled": used.spilled,
            "instructions": used.instructions,
            "programs": binaries.programs(used.registers, binary.threads, binary.shared_bytes),
        }
        if binary.piece:
            numbers["instructions_per_element"] = round(
                used.instructions * binary.threads / binary.piece, 1
            )
        for name, value in numbers.items():
            each.setdefault(name, []).append(value)
    return {
        name: min(values) if name in LESS_IS_WORSE else max(values) for name, values in each.items()
    }


def told(cases: dict[str, Case]) -> None:
    """Runs the cases that the command line names, or all; a line of JSON for each, on the output."""
    unknown = [name for name in sys.argv[1:] if name not in cases]
    if unknown:
        raise SystemExit(
            f"No case {', '.join(map(repr, unknown))}. There are: {', '.join(map(repr, cases))}."
        )
    for name in sys.argv[1:] or cases:
        seen, beside = cases[name]()
        numbers = {key: value for key, value in (of(seen) | beside).items() if value}
        found = {
            "case": name,
            "numbers": numbers,
            "kernels": of_kernels(seen),
            "products": seen.products,
        }
        found["remarks"] = seen.remarks
        print(json.dumps(found), flush=True)

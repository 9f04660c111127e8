"""Are the C++ kernels that a wheel carries as fast as those of a checkout, and do they give the same bits?

    make wheel
    python -m benchmarks.wheel_kernels dist/narrowgauge-*.whl

A wheel's kernels are compiled for a level of processors, a checkout's for this one. Each round is a new process of each kind in
turn: one imports the unpacked wheel, names a compiler that does not exist and has an empty cache, so that nothing can be built.
It prints a hash of every result, and the processor time of a call (least of seven). Ratios are taken round by round.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
CASTS = ("fp8-current", "fp8-row", "fp8-block", "mxfp8", "int8", "nvfp4", "nvfp4-46", "int4-hq-bs")


def cases() -> Iterator[tuple[str, Callable[[], list[torch.Tensor]]]]:
    """Calls of every library: casts and 4-bit products by a Linear, optimizer steps and their norm, dropout, fingerprint."""
    import narrowgauge as ng
    from narrowgauge.ops.fingerprint import sums

    x = torch.randn(512, 768, generator=torch.Generator().manual_seed(0))
    for recipe in CASTS:
        torch.manual_seed(0)
        layer = ng.convert(torch.nn.Sequential(torch.nn.Linear(768, 512, bias=False)), recipe)

        def step(layer=layer) -> list[torch.Tensor]:
            torch.manual_seed(1)
            layer.zero_grad()
            given = x.clone().requires_grad_()
            out = layer(given)
            out.sum().backward()
            return [out.detach(), given.grad, layer[0].weight.grad]

        yield f"linear, {recipe}", step
    for states in ("8bit", "fp8", "4bit"):

        def update(states=states) -> list[torch.Tensor]:
            weight = torch.nn.Parameter(x.clone())
            optimizer = ng.optim.AdamW([weight], lr=1e-3, states=states)
            for seed in range(3):
                weight.grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
                optimizer.step()
            return [weight.detach()]

        yield f"three steps of AdamW, {states}", update
    large = torch.randn(1 << 21, generator=torch.Generator().manual_seed(2))
    yield "fingerprint", lambda: [torch.tensor([each >> 8 for each in sums(large)])]


def child() -> None:
    """Print {case: [processor seconds of a call, hash of its results]}."""
    import narrowgauge
    from narrowgauge.ops.cpp import build

    torch.set_num_threads(1)
    found = {}
    for name, call in cases():
        results, took = call(), []
        text = hashlib.sha256(b"".join(each.contiguous().numpy().tobytes() for each in results))
        for _ in range(7):
            start = time.process_time()
            call()
            took.append(time.process_time() - start)
        found[name] = [min(took), text.hexdigest()[:16]]
    has_compiler = bool(shutil.which(build.compiler_name()))
    print(json.dumps({"package": narrowgauge.__file__, "compiler": has_compiler, "cases": found}))


def main() -> None:
    from benchmarks.harness import RESULTS, Spread, record  # not beside the unpacked wheel

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--rounds", type=int, default=6, help="even")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(given.wheel) as wheel:
            wheel.extractall(folder)
        command = [sys.executable, "-c", "from wheel_kernels import child; child()"]
        plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        # Alone in a folder, so that neither kind finds the checkout beside it.
        scripts = Path(folder, "scripts")
        scripts.mkdir()
        shutil.copy(__file__, scripts)
        kinds = {
            "checkout": {"PYTHONPATH": f"{ROOT}:{scripts}"},
            "wheel": {
                "PYTHONPATH": f"{folder}:{scripts}",
                "CXX": "no-such-compiler",
                "XDG_CACHE_HOME": str(Path(folder, "cache")),
            },
        }
        rounds = []
        for number in range(given.rounds):
            order = list(kinds) if number % 2 else list(reversed(kinds))
            taken = {}
            for kind in order:
                done = subprocess.run(
                    command, env=plain | kinds[kind], check=True, capture_output=True, cwd=folder
                )
                taken[kind] = json.loads(done.stdout.splitlines()[-1])
            inside = Path(taken["wheel"]["package"]).is_relative_to(folder)
            assert inside and not taken["wheel"]["compiler"] and taken["checkout"]["compiler"]
            rounds.append({kind: found["cases"] for kind, found in taken.items()})
    lines = []
    for name in rounds[0]["wheel"]:
        ratio = Spread.of([each["wheel"][name][0] / each["checkout"][name][0] for each in rounds])
        hashes = {each[kind][name][1] for each in rounds for kind in kinds}
        seconds = statistics.median(each["wheel"][name][0] for each in rounds)
        lines.append(
            {
                "case": name,
                "wheel_s": seconds,
                "ratio": ratio.median,
                "ratio_q1": ratio.q1,
                "ratio_q3": ratio.q3,
                "bits_equal": len(hashes) == 1,
            }
        )
        print(
            f"{name:36} {ratio.median:.2f} ({ratio.q1:.2f} to {ratio.q3:.2f}), bits equal: {len(hashes) == 1}"
        )
    record("wheel-kernels", lines, RESULTS / "wheel_kernels.jsonl")


if __name__ == "__main__":
    main()

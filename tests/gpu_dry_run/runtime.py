"""A process over the empty CUDA runtime: the stand-ins for CUDA's libraries are built, and found before the real ones.

    command(["script.py"], log=folder) -> what to run, environment(...) -> by which variables

The log is FOLDER/events-PID.jsonl, one file per process, with the binaries that were loaded beside it in `cubins`. Compiled kernels are
cached apart from those of real runs: what Inductor and Triton find by timing is worthless here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SOURCES = HERE / "stand_in"
LIBRARY = "libempty_cuda.so"
# Preloaded, since torch's libraries have an RPATH, which goes before LD_LIBRARY_PATH; found there again by dlopen.
STAND_INS = [
    f"{name}.so.{major}" for name in ("libcudart", "libcublas", "libcublasLt") for major in (12, 13)
]
DRIVER = ["libcuda.so.1", "libnvidia-ml.so.1"]
FLAGS = ["-O2", "-fPIC", "-std=gnu11", "-Wall", "-Wno-unused-parameter"]


GPUS = ("h100", "h200", "b200", "rtx5090")  # `the_device` of stand_in/core.c


def played() -> str:
    """The GPU that this process sees."""
    return os.environ.get("EMPTY_CUDA_GPU", GPUS[0])


def refusal() -> str:
    """Why nothing can be counted here, or ''."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"the empty CUDA runtime is for Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is no CUDA build; `make dry-run` installs one, apart (gigabytes)"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; `make dry-run` installs it, apart, with torch's CUDA build"
    if shutil.which("gcc") is None:
        return "no gcc, which builds the stand-ins for CUDA's libraries. Install it: apt-get install gcc"
    return ""


def built() -> Path:
    """The folder of the stand-ins, built in two seconds where these sources are not yet."""
    sources = sorted(SOURCES.iterdir())
    made_of = hashlib.sha256(
        b"".join(source.read_bytes() for source in sources) + Path(__file__).read_bytes()
    ).hexdigest()
    folder = cache() / f"stand-ins-{made_of[:16]}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            made = Path(name) / "lib"
            made.mkdir()
            _build(made)
            shutil.rmtree(made / "parts")
            try:
                made.rename(folder)
            except OSError:  # another process was faster
                if not folder.exists():
                    raise
    return folder


def cache() -> Path:
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "narrowgauge"
        / "gpu_dry_run"
    )


def _build(folder: Path) -> None:
    """One library with everything, and an empty one for each name under which CUDA's are looked for."""
    parts = folder / "parts"
    parts.mkdir()
    # What nothing here defines: success, and a line in the log. Weak, so that a real definition wins.
    names = (SOURCES / "names.txt").read_text(encoding="utf-8").split()
    weak = [
        f'__attribute__((weak)) long {name}(void) {{ return unknown("{name}"); }}' for name in names
    ]
    (parts / "unknown.c").write_text(
        "\n".join(["long unknown(const char *);", *weak]), encoding="utf-8"
    )
    _gcc(
        "-w",
        "-shared",
        "-o",
        folder / LIBRARY,
        *sorted(SOURCES.glob("*.c")),
        parts / "unknown.c",
        "-ldl",
        "-lpthread",
    )
    (parts / "name.c").write_text("int empty_cuda_stands_in;\n", encoding="utf-8")
    for name in STAND_INS + DRIVER:
        options: list[str | Path] = []
        if name in STAND_INS:  # whose symbols torch's libraries ask for by version
            (parts / "versions").write_text(
                f"{name} {{ empty_cuda_stands_in; }};\n", encoding="utf-8"
            )
            options = [f"-Wl,--version-script={parts / 'versions'}"]
        linked = [
            "-Wl,--no-as-needed",
            f"-L{folder}",
            "-lempty_cuda",
            "-Wl,-rpath,$ORIGIN",
            f"-Wl,-soname,{name}",
        ]
        _gcc("-shared", "-o", folder / name, parts / "name.c", *options, *linked)


def _gcc(*arguments: str | Path) -> None:
    command = ["gcc", *FLAGS, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def environment(log: Path | None = None, gpu: str = "h100") -> dict[str, str]:
    """The variables of a process over the runtime. log: None to time what the host does; gpu: whose data sheet is played, of GPUS."""
    libraries = built()
    kept = cache() / f"kernels-{torch.__version__}"
    variables = (
        os.environ
        | {
            "EMPTY_CUDA_GPU": gpu,
            "LD_PRELOAD": _before(
                ":".join(str(libraries / name) for name in STAND_INS + DRIVER), "LD_PRELOAD"
            ),
            "LD_LIBRARY_PATH": _before(str(libraries), "LD_LIBRARY_PATH"),
            "PYTHONPATH": f"{HERE / 'inside'}:{_before(str(ROOT), 'PYTHONPATH')}",  # sitecustomize.py
            "TRITON_LIBCUDA_PATH": str(libraries),
            "TRITON_CACHE_DIR": str(kept / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(kept / "inductor"),
            "TORCHINDUCTOR_BENCHMARK_KERNEL": "1",  # Inductor then writes into each kernel how many bytes it moves
            "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "1"),
            "CUDA_MODULE_LOADING": "LAZY",
        }
    )
    variables.pop("EMPTY_CUDA_LOG", None)
    if log is not None:
        log.mkdir(parents=True, exist_ok=True)
        for old in log.glob("events-*.jsonl"):
            old.unlink()
        variables["EMPTY_CUDA_LOG"] = str(log.resolve())
    return variables


def _before(first: str, variable: str) -> str:
    rest = os.environ.get(variable)
    return f"{first}:{rest}" if rest else first


def python(
    arguments: list[str], log: Path | None = None, gpu: str = "h100"
) -> subprocess.CompletedProcess[str]:
    """This Python with these arguments, over the runtime; its output as text."""
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment(log, gpu), capture_output=True, encoding="utf-8"
    )

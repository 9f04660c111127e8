"""C++ libraries that a wheel carries, so that a machine without a compiler has the same kernels.

A wheel for Linux holds each library once per level of the processor, in a folder beside its source:

    ops/cpp/cast.cpp
    ops/cpp/prebuilt/cast-x86-64-v3-KEY-DIGEST.so

KEY is a hash of the sources and the flags, so that a library of other sources is never loaded.
DIGEST is a hash of the library's bytes, so that a damaged one is never loaded. `build` compiles
what is not here, as in a checkout, which has no such folder.

The levels are those of the x86-64 psABI, which compilers accept as -march: v3 has AVX2, v4 has
AVX-512. The sources distinguish no finer. Loading a library above the processor's level would end the
process, so `levels` asks the kernel which instructions are usable.

Imports the standard library alone: `scripts/wheel.py` loads this file where torch is not installed.
"""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

# Neither contraction into fused multiply-adds nor -ffast-math: results must be bit-identical to the
# definition. Square roots vectorize only without errno and floating-point traps.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
# Instructions of each level beyond the one before, by their names in /proc/cpuinfo. Best first.
_X86 = {
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "x86-64-v3": ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"),
    "x86-64": (),
}
_ARM: dict[str, tuple[str, ...]] = {"armv8-a": ()}
LEVELS = {"x86_64": _X86, "aarch64": _ARM}
FOLDER = "prebuilt"
_INCLUDE = re.compile(r'^#include "([\w.]+)"', re.MULTILINE)


def levels(machine: str | None = None, cpuinfo: str | None = None) -> tuple[str, ...]:
    """Levels that this processor has, best first; empty where no wheel carries libraries.

    machine  as platform.machine(), e.g. "x86_64"
    cpuinfo  text of /proc/cpuinfo
    """
    table = LEVELS.get(platform.machine() if machine is None else machine, {})
    if cpuinfo is None:
        place = Path("/proc/cpuinfo")
        cpuinfo = place.read_text(encoding="utf-8", errors="replace") if place.exists() else ""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    if line is None:  # not Linux
        return ()
    has, found = set(line[1].split()), list[str]()
    for level, instructions in reversed(table.items()):
        if not has.issuperset(instructions):
            break
        found.insert(0, level)
    return tuple(found)


def library_key(texts: Mapping[str, str], level: str) -> str:
    """Hash of the sources {file name: text} and of everything else that decides their code."""
    parts = [part for name in sorted(texts) for part in (name, texts[name])]
    return hashlib.sha256("\0".join((*parts, *FLAGS, level)).encode()).hexdigest()[:16]


def digest(data: bytes) -> str:
    """Hash of a library's bytes, the last part of its name."""
    return hashlib.sha256(data).hexdigest()[:16]


def candidates(folder: Path, source: str, texts: Mapping[str, str]) -> list[Path]:
    """Libraries of `source` that this processor can run, best first. Their bytes are unchecked."""
    name = source.removesuffix(".cpp")
    return [
        path
        for level in levels()
        for path in sorted(
            (folder / FOLDER).glob(f"{name}-{level}-{library_key(texts, level)}-*.so")
        )
    ]


def carried_level() -> str | None:
    """The level of the kernels that this installation carries for this processor, or None."""
    folder = Path(__file__).parent
    source = folder / "cast.cpp"
    found = candidates(folder, source.name, sources_of(source))
    return found[0].name.removeprefix("cast-").rsplit("-", 2)[0] if found else None


# --- When a wheel is made ---


def sources_of(source: Path) -> dict[str, str]:
    """Text of a source and of the headers that it includes, by file name."""
    found: dict[str, str] = {}
    waiting = [source.name]
    while waiting:
        if (name := waiting.pop()) not in found:
            found[name] = source.with_name(name).read_text(encoding="utf-8")
            waiting += _INCLUDE.findall(found[name])
    return found


def compile_all(package: Path, compiler: str, machine: str) -> list[Path]:
    """Compile every C++ source under `package` for every level of `machine`.

    compiler  path of g++ or clang++ that makes code for `machine`

    Raises subprocess.CalledProcessError, with the compiler's words, if it fails.
    """
    made = []
    for source in sorted(package.rglob("*.cpp")):
        texts, target = sources_of(source), source.parent / FOLDER
        target.mkdir(exist_ok=True)
        for level in LEVELS[machine]:
            built = target / "kernel.so"
            command = [compiler, *FLAGS, f"-march={level}", str(source), "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
            name = f"{source.stem}-{level}-{library_key(texts, level)}-{digest(built.read_bytes())}"
            made.append(built.rename(target / f"{name}.so"))
    return made


def glibc_needed(libraries: list[Path]) -> tuple[int, int]:
    """The newest version of glibc whose symbols the libraries import, at least 2.17.

    Versions of imported symbols stand in the string table of an ELF file as GLIBC_2.17.
    """
    found = [(2, 17)]
    for library in libraries:
        for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes()):
            found.append((int(major), int(minor)))
    return max(found)

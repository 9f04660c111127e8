"""What Triton and Inductor compiled, made without a card and carried to one: there, nothing is compiled again.

    python -m benchmarks.gpu.caches warm FOLDER -- -m benchmarks.gpu --only layer    this command over the empty CUDA runtime, into FOLDER
    python -m benchmarks.gpu.caches pack FOLDER FILE.tar.xz                          refused above 64 MiB
    python -m benchmarks.gpu.caches prove FILE.tar.xz -- -m benchmarks.gpu ...       unpacked elsewhere, run again: 0 new entries, else 1
    python -m benchmarks.gpu.first_hour truth --caches FILE.tar.xz                   on the card

An entry is a file that a compilation left; locks, temporary files and what was found by timing count as none, and the last is not packed
either: over the runtime nothing takes time. Inductor keeps a graph by the card's properties as well, so warm with the one that is
coming (`--gpu h200`) and with its versions of torch and Triton.
"""

from __future__ import annotations

import argparse
import lzma
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from benchmarks.environment import ROOT

MOST_BYTES = 64 * 2**20
TIMED = (".best_config", ".autotune.json", ".autotune_results")
NONE = (*TIMED, ".lock", ".tmp")


def variables(folder: Path) -> dict[str, str]:
    """By which a process keeps what it compiles in a folder."""
    return {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def entries(folder: Path) -> set[str]:
    """Paths of what compilations left."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder))
        for path in found
        if not path.name.endswith(NONE) and ".tmp" not in path.name and "locks" not in path.parts
    }


def warm(folder: Path, command: list[str], gpu: str = "h100") -> int:
    """Runs `python COMMAND` over the empty CUDA runtime; its exit code."""
    from tests.gpu_dry_run import runtime

    if reason := runtime.refusal():
        raise SystemExit(f"caches: {reason}.")
    environment = runtime.environment(gpu=gpu) | variables(folder)
    environment.pop("TORCHINDUCTOR_BENCHMARK_KERNEL")  # which writes other kernels than a real run
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment).returncode


def pack(folder: Path, file: Path) -> tuple[int, int]:
    """(entries, bytes of the file). SystemExit where there is nothing, or more than can be carried."""
    names = sorted(entries(folder))
    if not names:
        raise SystemExit(
            f"caches: {folder} holds no compiled code. Run: python -m benchmarks.gpu.caches warm {folder} -- COMMAND."
        )
    with (
        lzma.open(file, "wb", preset=6) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name in names:
            archive.add(folder / name, arcname=name)
    size = file.stat().st_size
    if size > MOST_BYTES:
        file.unlink()
        raise SystemExit(
            f"caches: {size / 2**20:.1f} MiB packed, and {MOST_BYTES // 2**20} can be carried. Warm fewer commands."
        )
    return len(names), size


def unpack(file: Path, folder: Path) -> None:
    with tarfile.open(file, "r:xz") as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
            return
        for member in archive.getmembers():  # Python before 3.11.4
            if (
                not (member.isfile() or member.isdir())
                or Path(member.name).is_absolute()
                or ".." in Path(member.name).parts
            ):
                raise SystemExit(
                    f"caches: {file} holds {member.name!r}, which is no file below its folder. Pack it anew."
                )
        archive.extractall(folder)


def prove(file: Path, command: list[str], gpu: str = "h100") -> tuple[int, set[str]]:
    """(exit code, entries that the command added to what the file holds), in a folder of another name."""
    with tempfile.TemporaryDirectory(prefix="elsewhere-") as name:
        folder = Path(name)
        unpack(file, folder)
        before = entries(folder)
        code = warm(folder, command, gpu)
        return code, entries(folder) - before


def main(arguments: list[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = given[given.index("--") + 1 :] if "--" in given else []
    given = given[: given.index("--")] if "--" in given else given
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.caches",
        description="Compiled code that is carried to a card.",
    )
    parser.add_argument("do", choices=["warm", "pack", "prove"])
    parser.add_argument("paths", nargs="+", type=Path, help="FOLDER; FOLDER FILE; FILE")
    parser.add_argument("--gpu", default="h100", choices=["h100", "h200"])
    options = parser.parse_args(given)
    if len(options.paths) != 1 + (options.do == "pack") or (options.do != "pack") != bool(command):
        parser.error("warm FOLDER -- COMMAND, pack FOLDER FILE, or prove FILE -- COMMAND")
    if options.do == "warm":
        code = warm(options.paths[0].absolute(), command, options.gpu)
        print(f"{len(entries(options.paths[0]))} entries in {options.paths[0]}")
        return code
    if options.do == "pack":
        count, size = pack(*options.paths)
        print(f"{count} entries, {size / 2**20:.1f} MiB: {options.paths[1]}")
        return 0
    code, new = prove(options.paths[0], command, options.gpu)
    print(f"{len(new)} new entries{': ' + ', '.join(sorted(new)[:5]) if new else ''}")
    return code or int(bool(new))


if __name__ == "__main__":
    sys.exit(main())

"""The committed counts, counts/torch-X.Y.json: what rose since, and writing them anew.

    {"versions": {"torch": "2.13.0", ...}, "linear": {case: {number: value}}, ..., "kernels": {"linear: case: kernel": {number: value}}}

A number that rose is a loss, but for `tally.LESS_IS_WORSE`; one that is not there is 0. So is a case or kernel that the file does not have.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tests.gpu_dry_run import runtime
from tests.gpu_dry_run.tally import LESS_IS_WORSE, Numbers

FOLDER = Path(__file__).resolve().parent / "counts"
PARTS = (
    "linear",
    "layer",
    "experts",
    "optimizer",
    "trainer",
    "b200",
    "rtx5090",
)  # the last two: Linears there
PACKAGES = ("torch", "triton", "transformers", "torchao")
UPDATE = "python -m tests.gpu_dry_run --update"

Counts = dict[str, dict[str, Numbers]]  # part, or "kernels" -> case -> numbers


def path() -> Path:
    """Of this torch's counts."""
    return FOLDER / f"torch-{'.'.join(torch.__version__.split('.')[:2])}.json"


def versions() -> dict[str, str]:
    return {name: metadata.version(name).partition("+")[0] for name in PACKAGES}


def refusal() -> str:
    """Why what is counted here cannot be compared with what is committed, or ''."""
    if reason := runtime.refusal():
        return reason
    missing = [name for name in PACKAGES if not _installed(name)]
    if missing:
        return f"{', '.join(missing)} not installed; `make dry-run` installs what the committed counts were made with, apart"
    if not path().exists():
        return f"no counts are committed for torch {torch.__version__} ({path().name})"
    made_with = json.loads(path().read_text(encoding="utf-8"))["versions"]
    if other := [
        f"{name} {versions()[name]}, not {made_with[name]}"
        for name in PACKAGES
        if versions()[name] != made_with[name]
    ]:
        return f"the committed counts are of other versions: {'; '.join(other)}"
    return ""


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def measured(part: str, log: Path, cases: list[str] | None = None) -> Counts:
    """What is counted now, in a process over the empty runtime. cases: of this part; None: all."""
    module, gpu = ("linear", part) if part in runtime.GPUS else (part, runtime.GPUS[0])
    done = runtime.python(["-m", f"tests.gpu_dry_run.{module}", *(cases or ())], log, gpu)
    if done.returncode:
        raise RuntimeError(
            f"tests.gpu_dry_run.{part} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    found: Counts = {part: {}, "kernels": {}}
    for line in filter(lambda line: line.startswith('{"case"'), done.stdout.splitlines()):
        told = json.loads(line)
        found[part][told["case"]] = told["numbers"]
        for name, numbers in told["kernels"].items():
            found["kernels"][f"{part}: {told['case']}: {name}"] = numbers
    return found


def committed() -> dict[str, Any]:
    if not path().exists():
        return {"kernels": {}}
    return json.loads(path().read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def differences(old: dict[str, Any], new: Counts) -> dict[str, list[str]]:
    """ "rose", "fell", "new" -> lines: numbers that are worse or better than committed; cases and kernels that are not committed.

    A kernel that a counted case no longer launches fell.
    """
    found: dict[str, list[str]] = {"rose": [], "fell": [], "new": []}
    for part, cases in new.items():
        for case, numbers in cases.items():
            before = old.get(part, {}).get(case)
            if before is None:
                found["new"].append(f"{part}: {case}")
                continue
            for name in dict.fromkeys((*before, *numbers)):
                was, value = before.get(name, 0), numbers.get(name, 0)
                if value != was:
                    is_worse = (value > was) != (name in LESS_IS_WORSE)
                    found["rose" if is_worse else "fell"].append(
                        f"{part}: {case}: {name} {was} -> {value}"
                    )
    gone = [
        kernel
        for kernel in old.get("kernels", {})
        if kernel not in new["kernels"] and kernel.startswith(_counted(new))
    ]
    found["fell"] += [f"kernels: {kernel}: gone" for kernel in gone]
    return found


def _counted(new: Counts) -> tuple[str, ...]:
    """How the names of kernels begin that were looked at."""
    return tuple(
        f"{part}: {case}: " for part, cases in new.items() for case in cases if part != "kernels"
    )


def update(new: Counts) -> None:
    """Writes what was counted, in place of what the file has of the same cases."""
    kept: dict[str, Any] = committed()
    kernels = {
        name: each for name, each in kept["kernels"].items() if not name.startswith(_counted(new))
    }
    found = {"versions": versions()} | {
        part: kept.get(part, {}) | new.get(part, {}) for part in PARTS
    }
    found["kernels"] = dict(sorted((kernels | new["kernels"]).items()))
    FOLDER.mkdir(exist_ok=True)
    path().write_text(_text(found), encoding="utf-8")


def _text(counts: dict[str, Any]) -> str:
    """One case to a line: differences read well."""
    parts = []
    for part, cases in counts.items():
        lines = ",\n".join(
            f"    {json.dumps(case)}: {json.dumps(numbers)}" for case, numbers in cases.items()
        )
        parts.append(f"  {json.dumps(part)}: {{\n{lines}\n  }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"

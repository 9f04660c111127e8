"""Would the suite notice? Seeded one-line faults, one at a time.

    make mutations                                  fifty of them, results appended to benchmarks/results/mutations.jsonl
    make mutations ARGS="--areas product"           fifty others, in what runs, plans, converts and reports
    python -m benchmarks.mutations --list           what would be changed, without running anything
    python -m benchmarks.mutations --only 3 17      some of the fifty
    python -m benchmarks.mutations --equivalent 17 "why no test can see it"

Kinds of faults, found in the syntax tree, so that moving or renaming a module changes nothing here:

    sign          + for -, - for +, and -x without its minus
    off by one    a whole number that is one more, < for <= and the like
    swapped axes  .T and .mT left out, the other of dimensions 0 and 1 (and -1 and -2), shape[0] for shape[1]
    dropped cast  .to(...), .float(), .double() and .type(...) left out

What a message, an annotation or a refusal says is left alone, and whole numbers where a figure is drawn. There are two sets of
areas, each with its own seed: `core` is numerics, optimizer, checkpoint and data code, `product` the folders train (without its
checkpoints, which are core), memory, conversion, diagnose, report and cli.

A fault is applied in a copy of the tree and the tests of `make test` run there: those named after its module or folder, then those
that import it, then all others; the first that fails has caught it. Of a product fault these are the tests named after the module,
those that import it, those in the folder of the same name, and then not all others but those of PRODUCT_TESTS alone.
A test counts only if it passes in the tree without the fault. A fault that survives is named; whether it is equivalent (no input
gives another result) is for a person to argue, with --equivalent, which adds a line to the results.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Queue
from typing import Any

from benchmarks.environment import ROOT, environment

PACKAGE = "narrowgauge"
RESULTS = ROOT / "benchmarks" / "results" / "mutations.jsonl"
# Set of areas -> how many of the fifty each area gets. A product area has the name of its folder, and a share of its code's size.
SHARES = {
    "core": {"numerics": 20, "optimizer": 12, "checkpoint": 8, "data": 10},
    "product": {"train": 22, "memory": 6, "conversion": 5, "diagnose": 7, "report": 6, "cli": 4},
}
SEEDS = {"core": 0, "product": 1}
# Where a fault of product code that its nearest tests pass by could be noticed.
PRODUCT_TESTS = (
    *SHARES["product"],
    "lab",
    "compatibility",
    "project",
)
KINDS = ("sign", "off by one", "swapped axes", "dropped cast")
FOLDERS = {"optim": "optimizer", "data": "data"}
CHECKPOINT = re.compile(r"train/checkpoint/|manifest\.py|storage\.py")
# In no area: text, choices that are measured, and what only reads a model's structure.
LEFT_OUT = re.compile(
    r"__main__|errors|structure|fuse/(patterns|probe)|cuda_graphs|registry|selfcheck"
)
# Calls whose whole numbers are lengths, places and ticks of a figure.
DRAWS = re.compile(r"((axes|beside|figure)\b.*|canvas|note|row|MaxNLocator|Figure)$")
SILENT_FUNCTIONS = re.compile(r"__(repr|str)__|extra_repr|_?refuse|_?describe|summary|words")
PYTEST = (
    "-x",
    "-q",
    "-m",
    "not slow",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "--no-header",
    "-rfE",
    # Of a plugin of pytest that `forked_pytest` imports with transformers.
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)
HUNG = ["the suite hung"]
LAST = ("all", "folder", "product")  # stages that --near leaves out
LIMIT_S = 3600  # of one call of pytest; a fault that makes it hang has been noticed
COMPARISONS = {
    ast.Lt: (b"<", b"<="),
    ast.LtE: (b"<=", b"<"),
    ast.Gt: (b">", b">="),
    ast.GtE: (b">=", b">"),
}
OTHER = {"0": "1", "1": "0", "-1": "-2", "-2": "-1"}  # dimension -> the one it is mistaken for
REDUCTIONS = (
    "amax",
    "amin",
    "sum",
    "mean",
    "cumsum",
    "any",
    "all",
    "norm",
    "unsqueeze",
    "squeeze",
    "argmax",
)


# (tree, tests) -> pytest's exit code and what failed
Stage = tuple[str, Sequence[str]]  # its name and its tests
Run = Callable[[Path, Sequence[str]], tuple[int, list[str]]]


@dataclass(frozen=True)
class Fault:
    """One change: bytes from `start` to `end` of line `line` (from 1) become `new`."""

    kind: str
    file: str
    line: int
    start: int
    end: int
    new: str
    function: str = ""  # that it lies in: the same line may stand in several

    def apply(self, source: str) -> str:
        lines = source.splitlines(keepends=True)
        data = lines[self.line - 1].encode()
        lines[self.line - 1] = (data[: self.start] + self.new.encode() + data[self.end :]).decode()
        return "".join(lines)


# --- where faults can be --------------------------------------------------------------------------------------------------


def area_of(file: str) -> str | None:
    """The area of a module, by its path below the package."""
    if CHECKPOINT.match(file):
        return "checkpoint"
    folder = file.partition("/")[0]
    if folder in SHARES["product"]:
        return folder
    if LEFT_OUT.search(file) or (file.endswith("__init__.py") and "/" not in file):
        return None
    return FOLDERS.get(folder, "numerics")


def candidates(root: Path, areas: str) -> dict[tuple[str, str], list[Fault]]:
    """(area, kind) -> every fault that could be made, in the order of files and lines."""
    found: dict[tuple[str, str], list[Fault]] = {
        (area, kind): [] for area in SHARES[areas] for kind in KINDS
    }
    package = root / PACKAGE
    for path in sorted(package.rglob("*.py")):
        area = area_of(path.relative_to(package).as_posix())
        if area in SHARES[areas]:
            source = path.read_bytes()
            for kind, node, function in places(ast.parse(source)):
                fault = fault_at(node, kind, source.splitlines(), path.relative_to(root).as_posix())
                if fault is not None:
                    found[area, kind].append(replace(fault, function=function))
    return found


def places(
    tree: ast.AST, scope: str = "", within: bool = False, drawn: bool = False
) -> Iterator[tuple[str, ast.AST, str]]:
    """(kind, node, function) wherever a fault can be inside a function.

    Messages, annotations and refusals are passed by. `drawn`: inside a call that draws, where whole
    numbers are passed by too.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if not SILENT_FUNCTIONS.fullmatch(node.name):
                yield from places(
                    ast.Module(node.body, []), f"{scope}.{node.name}".lstrip("."), True
                )
            continue
        if isinstance(node, ast.AnnAssign):
            node = ast.Module([ast.Expr(node.value)] if node.value else [], [])
        elif within and (kind := kind_of(node)) and not (drawn and isinstance(node, ast.Constant)):
            yield kind, node, scope
        inner = f"{scope}.{node.name}".lstrip(".") if isinstance(node, ast.ClassDef) else scope
        yield from places(node, inner, within, drawn or _draws(node))


def kind_of(node: ast.AST) -> str | None:
    match node:
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            return None if _has_text(node) else "sign"
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            return "sign"
        case ast.Compare(ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE()]):
            return "off by one"
        case ast.Attribute(attr="T" | "mT"):
            return "swapped axes"
        case ast.Call() if _dimension(node):
            return "swapped axes"
        case ast.Call(func=ast.Attribute(attr="to" | "float" | "double" | "type"), args=args) if (
            not _is_device(args)
        ):
            return "dropped cast"
        case ast.Subscript(value=value, slice=slice_) if ast.unparse(
            slice_
        ) in OTHER and "shape" in ast.unparse(value):
            return "swapped axes"
        case ast.Constant(value=value) if type(value) is int and abs(value) < 2**16:
            return "off by one"
    return None


def _draws(node: ast.AST) -> bool:
    """A call that draws, or a dict of what one is called with."""
    if isinstance(node, ast.Call):
        return DRAWS.match(ast.unparse(node.func)) is not None
    return isinstance(node, ast.Dict) and any(
        isinstance(key, ast.Constant) and key.value in ("fontsize", "linewidth", "markersize")
        for key in node.keys
    )


def _has_text(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.JoinedStr)
        or (isinstance(each, ast.Constant) and isinstance(each.value, str))
        for each in ast.walk(node)
    )


def _is_device(arguments: Sequence[ast.AST]) -> bool:
    return any(
        "device" in ast.unparse(each) or isinstance(each, ast.Constant) for each in arguments
    )


def _dimension(call: ast.Call) -> ast.expr | None:
    """Where a call names one of the first two or the last two dimensions: dim=-1, or alone, as in amax(-1)."""
    named = [each.value for each in call.keywords if each.arg == "dim"]
    alone = (
        call.args
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in REDUCTIONS
        and len(call.args) == 1
        else []
    )
    return next((each for each in [*named, *alone] if ast.unparse(each) in OTHER), None)


def fault_at(node: ast.AST, kind: str, source: list[bytes], file: str) -> Fault | None:
    """None where the change would span lines."""
    match node:
        case ast.BinOp(left=left, right=right, op=op):
            between, new = (left, right), (b"+", b"-") if isinstance(op, ast.Add) else (b"-", b"+")
        case ast.Compare(left=left, comparators=[right], ops=[op]):
            between, new = (left, right), COMPARISONS[type(op)]
        case ast.UnaryOp():
            return Fault(kind, file, node.lineno, node.col_offset, node.col_offset + 1, "")
        case ast.Constant(value=value):
            return Fault(
                kind, file, node.lineno, node.col_offset, node.end_col_offset, str(value + 1)
            )
        case ast.Subscript(slice=place):
            return Fault(
                kind,
                file,
                place.lineno,
                place.col_offset,
                place.end_col_offset,
                OTHER[ast.unparse(place)],
            )
        case ast.Call() if kind == "swapped axes":
            place = _dimension(node)
            return Fault(
                kind,
                file,
                place.lineno,
                place.col_offset,
                place.end_col_offset,
                OTHER[ast.unparse(place)],
            )
        case ast.Attribute() | ast.Call():  # from the dot on; brackets before it stay
            name: Any = node.func if isinstance(node, ast.Call) else node
            start = name.end_col_offset - len(name.attr) - 1
            same_line = (
                name.end_lineno == node.end_lineno
                and source[name.end_lineno - 1][start : start + 1] == b"."
            )
            return (
                Fault(kind, file, name.end_lineno, start, node.end_col_offset, "")
                if same_line
                else None
            )
        case _:
            return None
    if between[0].end_lineno != between[1].lineno:
        return None
    start, end = between[0].end_col_offset, between[1].col_offset
    words = source[between[1].lineno - 1][start:end]
    return Fault(kind, file, between[1].lineno, start, end, words.replace(*new, 1).decode())


def draw(root: Path, areas: str, seed: int) -> list[tuple[str, Fault]]:
    """Fifty faults with their areas: kinds in turn, one module at most once for each kind as long as there are others."""
    random_ = random.Random(seed)
    found, chosen = candidates(root, areas), []
    for area, count in SHARES[areas].items():
        for kind in KINDS:
            random_.shuffle(found[area, kind])
        for number in range(count):
            kinds = [kind for kind in KINDS[number % len(KINDS) :] + KINDS if found[area, kind]]
            pool, taken = (
                found[area, kinds[0]],
                {fault.file for _, fault in chosen if fault.kind == kinds[0]},
            )
            fault = next((each for each in pool if each.file not in taken), pool[0])
            pool.remove(fault)
            chosen.append((area, fault))
    return chosen


# --- what the suite says --------------------------------------------------------------------------------------------------


def stages(root: Path, file: str) -> Iterator[tuple[str, list[str]]]:
    """Tests in the order in which they are likely to see a fault in `file`, each file once."""
    parts = Path(file).relative_to(PACKAGE).with_suffix("").parts
    tests = [
        path.relative_to(root).as_posix() for path in sorted((root / "tests").rglob("test_*.py"))
    ]
    names = {part for part in parts if part != "__init__"}
    module = ".".join((PACKAGE, *parts)).removesuffix(".__init__")
    parents = {module, module.rpartition(".")[0]} - {PACKAGE}

    def mirrors(test: str) -> bool:
        stem = Path(test).stem.removeprefix("test_")
        return any(stem == name or stem.startswith(f"{name}_") for name in names)

    def imports(test: str) -> bool:
        text = (root / test).read_text(encoding="utf-8")
        return any(re.search(rf"\b{re.escape(name)}\b", text) for name in parents)

    words = {*parts[:-1], *parts[-1].split("_")}
    near = [test for test in tests if mirrors(test)]
    if parts[0] in SHARES["product"] and not CHECKPOINT.match("/".join(parts)):
        yield from _product_stages(root, parts, tests)
        return
    yield "mirror", near
    users = [
        test
        for test in tests
        if test not in near and (imports(test) or words & set(Path(test).parts[1:-1]))
    ]
    yield "importers", users
    yield "all", [test for test in tests if test not in near and test not in users]


def _product_stages(
    root: Path, parts: Sequence[str], tests: Sequence[str]
) -> Iterator[tuple[str, list[str]]]:
    """`stages` of a module in a product area.

    Runs use most of these modules, so the tests that only mention the folder are most of the suite.
    """
    folder, name = parts[:-1], parts[-1]
    if name == "__init__":
        folder, name = folder[:-1], folder[-1]
    whole = re.escape(".".join((PACKAGE, *folder)))
    named = re.compile(rf"\b{whole}\.{name}\b|from {whole} import (\([^)]*\b{name}\b|.*\b{name}\b)")

    def mirrors(test: str) -> bool:
        """memory/test_loss tells of loss.py and loss_slices.py; memory/test_loss_x of loss.py."""
        stem = Path(test).stem.removeprefix("test_")
        if Path(test).parts[1] != parts[0]:
            return stem == name
        short, long = sorted((name, stem), key=len)
        return long == short or long.startswith(f"{short}_")

    left = list(tests)
    for stage, belongs in (
        ("mirror", mirrors),
        ("importers", lambda test: named.search((root / test).read_text(encoding="utf-8"))),
        ("folder", lambda test: Path(test).parts[1:-1] == tuple(parts[:-1])),
        ("product", lambda test: Path(test).parts[1] in PRODUCT_TESTS),
    ):
        found = [test for test in left if belongs(test)]
        left = [test for test in left if test not in found]
        found.sort(key=lambda test: Path(test).parts[1] != parts[0])  # its own folder first
        yield stage, found


class Forks:
    """Calls of pytest, one after the other, in forks of a process of `forked_pytest`."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "output.txt"
        # Byte code is kept, whatever the shell says: each call would compile the package again.
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
        variables.pop("PYTHONPATH", None)
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("forked_pytest.py")], cwd=folder, env=variables,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8",
        )  # fmt: skip

    def __call__(self, tree: Path, tests: Sequence[str]) -> tuple[int, list[str]]:
        """pytest's exit code in that tree, and what failed; a run that hangs counts as failed."""
        job = {"tree": str(tree), "arguments": [*PYTEST, *tests], "output": str(self.output)}
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps({**job, "limit_s": LIMIT_S}), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline().strip()
        if answer == "hung":
            return 1, HUNG
        said = self.output.read_text(encoding="utf-8", errors="replace")
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*)?(?: - .*)?$", said, re.MULTILINE)
        return int(answer), failed or said.strip().splitlines()[-1:]

    def close(self) -> None:
        self.process.communicate()


def copied(root: Path, folder: Path) -> Path:
    """The files of the checkout, uncommitted changes included."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        encoding="utf-8",
        check=True,
    ).stdout.splitlines()
    for name in listing:
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)
    return folder


def examine(
    fault: Fault, tree: Path, clean: Path, stages: Iterable[Stage], run: Run
) -> dict[str, object]:
    """Applies the fault in `tree`, runs the tests stage by stage until one fails that passes in `clean`, and takes it back."""
    target = tree / fault.file
    source = target.read_text(encoding="utf-8")
    target.write_text(fault.apply(source), encoding="utf-8")
    last = ""
    try:
        for name, tests in stages:
            if not tests:
                continue
            code, failed = run(tree, tests)
            last = name
            if code in (0, 5):
                continue
            # Nothing was run: the fault's doing, if the same tests can be collected without it.
            again = ["--collect-only", *tests] if code in (2, 3, 4) else failed
            if failed == HUNG or run(clean, again)[0] == 0:
                return {
                    "verdict": "caught",
                    "stage": name,
                    "by": failed[0] if failed else f"exit code {code}",
                }
            return {
                "verdict": "unclear",
                "stage": name,
                "by": f"{failed} fails without the fault too",
            }
        return {"verdict": "survived", "stage": last}
    finally:
        target.write_text(source, encoding="utf-8")


def described(number: int, area: str, fault: Fault, root: Path) -> dict[str, object]:
    before = (root / fault.file).read_text(encoding="utf-8")
    after = fault.apply(before)
    ast.parse(after)
    lines = before.splitlines()[fault.line - 1].strip(), after.splitlines()[fault.line - 1].strip()
    return {"number": number, "area": area, **asdict(fault), "before": lines[0], "after": lines[1]}


def append(row: dict[str, object], results: Path) -> None:
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def summary(results: Path, areas: str) -> str:
    """The last line of each fault in these areas counts; their numbers change with the tree."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in map(json.loads, results.read_text(encoding="utf-8").splitlines()):
        if row["area"] not in SHARES[areas]:
            continue
        change = row["file"], row["before"], row["after"]
        rows.pop((*change, ""), None)  # earlier lines do not name the function
        rows[*change, row.get("function", "")] = row
    verdicts = [row["verdict"] for row in rows.values()]
    caught, equivalent = verdicts.count("caught"), verdicts.count("equivalent")
    lines = [
        f"{caught} of {len(rows)} faults caught, {equivalent} more change nothing that could be seen."
    ]
    for row in rows.values():
        if row["verdict"] != "caught":
            lines.append(
                f"{row['number']}: {row['file']}:{row['line']}: {row['before']}  ->  {row['after']}: {row['verdict']}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Does the suite notice one-line faults?")
    parser.add_argument("--areas", choices=SHARES, default="core")
    parser.add_argument("--seed", type=int, help="of the draw; 0 for core, 1 for product")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="these of the fifty")
    parser.add_argument(
        "--jobs", type=int, default=2, help="copies of the tree that are tested at a time"
    )
    parser.add_argument(
        "--near",
        action="store_true",
        help="leave out the tests that have no visible connection with the module",
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        metavar="TEST",
        help="run these tests of `make test` alone; a fault that they pass by is not recorded",
    )
    parser.add_argument("--list", action="store_true", help="say what would be changed, and end")
    parser.add_argument(
        "--equivalent",
        nargs=2,
        metavar=("NUMBER", "WHY"),
        help="record that a fault changes nothing",
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = SEEDS[options.areas]

    faults = list(enumerate(draw(ROOT, options.areas, options.seed), 1))
    rows = {number: described(number, area, fault, ROOT) for number, (area, fault) in faults}
    if options.list:
        for row in rows.values():
            print(
                f"{row['number']:3} {row['area']:10} {row['kind']:12} {row['file']}:{row['line']}: {row['before']}  ->  {row['after']}"
            )
        return 0
    if options.equivalent:
        number, why = int(options.equivalent[0]), options.equivalent[1]
        append(
            {**rows[number], "seed": options.seed, "verdict": "equivalent", "argument": why},
            options.results,
        )
        print(summary(options.results, options.areas))
        return 0
    chosen = [
        (number, fault)
        for number, (_, fault) in faults
        if not options.only or number in options.only
    ]
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        clean = copied(ROOT, Path(folder, "clean"))
        trees: Queue[tuple[Path, Forks]] = Queue()
        for job in range(options.jobs):
            tree = copied(ROOT, Path(folder, f"copy{job}", "tree"))
            trees.put((tree, Forks(tree.parent)))

        def judge(number: int, fault: Fault) -> None:
            tree, forks = trees.get()
            asked: Iterable[Stage] = [("named", options.tests or ())]
            if not options.tests:
                asked = (
                    stage
                    for stage in stages(tree, fault.file)
                    if not (options.near and stage[0] in LAST)
                )
            found = examine(fault, tree, clean, asked, forks)
            trees.put((tree, forks))
            if found["verdict"] == "caught" or not options.tests:
                row = {**environment(), **rows[number], "seed": options.seed, **found}
                append(row, options.results)
            print(
                f"{number:3} {found['verdict']:9} {fault.file}:{fault.line} {fault.kind}: {found.get('by', '')}",
                flush=True,
            )

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda each: judge(*each), chosen))
        while not trees.empty():
            trees.get()[1].close()
    print(summary(options.results, options.areas))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The faults of the mutation check: what is changed, what is left alone, and that each of the fifty is one line of Python (exact)."""

from __future__ import annotations

import ast
import json

import pytest

from benchmarks import mutations
from benchmarks.environment import ROOT

pytestmark = [pytest.mark.benchmark, pytest.mark.slow]

SOURCE = '''"""Not 1 + 1."""
LIMIT = 3 - 1


def f(x: "1 + 1", n=4):
    if n < x.shape[0]:
        raise ValueError(f"{n - 1} is more than {n + 1}")
    y = (x - -n).float().T
    return ("a" + "é") and y.sum(-1), x.to(y.dtype) + (n - 2)


def refuse(x):
    return x + 1
'''


def faults_of(source: str) -> dict[str, set[str]]:
    """Kind -> the line that each fault makes."""
    found: dict[str, set[str]] = {}
    for kind, node, function in mutations.places(ast.parse(source)):
        fault = mutations.fault_at(node, kind, source.encode().splitlines(), "m.py")
        changed = fault.apply(source)
        ast.parse(changed)
        assert function == "f"
        found.setdefault(kind, set()).add(changed.splitlines()[fault.line - 1].strip())
    return found


def test_each_kind_changes_what_it_says_and_nothing_in_messages():
    last = 'return ("a" + "é") and y.sum(-1), x.to(y.dtype) + (n - 2)'
    assert faults_of(SOURCE) == {
        "sign": {
            "y = (x + -n).float().T", "y = (x - n).float().T", last.replace(") + (", ") - ("), last.replace("n - 2", "n + 2"),
        },
        "off by one": {"if n <= x.shape[0]:", "if n < x.shape[1]:", last.replace("n - 2", "n - 3"), last.replace("sum(-1)", "sum(-2)")},
        "swapped axes": {"if n < x.shape[1]:", "y = (x - -n).float()", last.replace("sum(-1)", "sum(-2)")},
        "dropped cast": {"y = (x - -n).T", last.replace("x.to(y.dtype)", "x")},
    }  # fmt: skip


def test_whole_numbers_of_a_figure_are_left_alone_and_what_it_shows_is_not():
    source = """
def f(axes, x):
    style = {"fontsize": 11}
    axes.plot(x[0], x - 1, zorder=3, **style)
    return x[2]
"""
    assert faults_of(source) == {
        "sign": {"axes.plot(x[0], x + 1, zorder=3, **style)"}, "off by one": {"return x[3]"}
    }  # fmt: skip


@pytest.mark.parametrize("areas", mutations.SHARES)
def test_fifty_are_drawn_alike_for_the_same_seed_and_each_changes_one_line(areas):
    drawn = mutations.draw(ROOT, areas, 0)
    assert drawn == mutations.draw(ROOT, areas, 0) != mutations.draw(ROOT, areas, 1)
    shares = mutations.SHARES[areas]
    assert {area: sum(each == area for each, _ in drawn) for area in shares} == shares
    assert len(drawn) == 50
    for number, (area, fault) in enumerate(drawn):
        row = mutations.described(number, area, fault, ROOT)
        assert row["before"] != row["after"]


def test_tests_named_after_the_module_come_first_and_each_once():
    found = dict(mutations.stages(ROOT, "narrowgauge/formats.py"))
    assert "tests/test_formats.py" in found["mirror"]
    everything = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(test for tests in found.values() for test in tests) == sorted(everything)


def test_tests_of_a_product_module_are_its_own_then_its_users_then_its_folders():
    found = dict(mutations.stages(ROOT, "narrowgauge/train/tasks/question_answering.py"))
    assert "tests/data/test_questions.py" in found["importers"]
    assert "tests/train/tasks/test_runs.py" in found["folder"]
    assert "tests/train/test_loop.py" in found["product"]
    slices = dict(mutations.stages(ROOT, "narrowgauge/memory/loss_slices.py"))
    assert "tests/memory/test_loss.py" in slices["mirror"]
    everything = [test for tests in found.values() for test in tests]
    assert len(everything) == len(set(everything)) and "tests/test_formats.py" not in everything


@pytest.mark.parametrize(
    ("codes", "verdict"),
    [
        ((1, 0), "caught"),
        ((1, 1), "unclear"),
        ((0, 0, 0), "survived"),
        ((5, 2, 0), "caught"),
        ((3, 3), "unclear"),
    ],
)
def test_a_fault_is_caught_by_a_test_that_passes_without_it(tmp_path, monkeypatch, codes, verdict):
    """The fault is in the tree while tests run, and gone after them."""
    for name in ("package/a.py", "tests/test_a.py", "tests/test_b.py", "tests/test_uses.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(
            "import package.a\n" if "uses" in name else "x = 1\n", encoding="utf-8"
        )
    monkeypatch.setattr(mutations, "PACKAGE", "package")
    answers, seen = iter(codes), []

    def run(tree, tests):
        seen.append((tmp_path / "package/a.py").read_text("utf-8"))
        code = next(answers)
        return code, ["tests/test_a.py::test"] if code == 1 else []

    fault = mutations.Fault("off by one", "package/a.py", 1, 4, 5, "2")
    stages = mutations.stages(tmp_path, fault.file)
    found = mutations.examine(fault, tmp_path, tmp_path, stages, run)
    assert found["verdict"] == verdict and set(seen) == {"x = 2\n"}
    assert (tmp_path / "package/a.py").read_text("utf-8") == "x = 1\n"


def test_pytest_runs_in_forks_with_the_package_of_their_tree(tmp_path):
    for name, value in (("good", 1), ("bad", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.py").write_text(f"value = {value}\n", encoding="utf-8")
        test = "import own\n\ndef test_it():\n    assert own.value == 1\n"
        (tmp_path / name / "test_own.py").write_text(test, encoding="utf-8")
    forks = mutations.Forks(tmp_path)
    assert forks(tmp_path / "good", ["test_own.py"])[0] == 0
    assert forks(tmp_path / "bad", ["test_own.py"]) == (1, ["test_own.py::test_it"])
    assert forks(tmp_path / "good", ["test_none.py"])[0] == 4
    forks.close()
    assert forks.process.returncode == 0


def test_the_last_line_of_a_fault_counts(tmp_path):
    row = {"number": 1, "area": "numerics", "file": "m.py", "line": 2, "before": "a", "after": "b"}
    for verdict in ("survived", "equivalent"):
        mutations.append({**row, "verdict": verdict}, tmp_path / "found.jsonl")
    for function in ("f", "C.g"):  # the same line in another function is another fault
        mutations.append(
            {**row, "number": 2, "after": "c", "verdict": "survived"}, tmp_path / "found.jsonl"
        )
        mutations.append(
            {**row, "after": "c", "function": function, "verdict": "caught"},
            tmp_path / "found.jsonl",
        )
    mutations.append({**row, "area": "cli", "verdict": "survived"}, tmp_path / "found.jsonl")
    assert mutations.summary(tmp_path / "found.jsonl", "core").splitlines() == [
        "2 of 3 faults caught, 1 more change nothing that could be seen.", "1: m.py:2: a  ->  b: equivalent"
    ]  # fmt: skip
    assert all(
        json.loads(line) for line in (tmp_path / "found.jsonl").read_text("utf-8").splitlines()
    )

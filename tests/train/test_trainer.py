"""The only way to change a run from outside is a method of Trainer: read off the code of the package (exact)."""

from __future__ import annotations

import ast
from pathlib import Path

import narrowgauge
from narrowgauge.train import trainer

PACKAGE = Path(narrowgauge.__file__).parent
OWN = PACKAGE / "train" / "trainer.py"
MOST_ATTRIBUTES, MOST_IMPORTS = 20, 15
NAMES = {"trainer"}  # of variables, besides those that are annotated


def parts(node):
    """a.b[0].c -> {"a", "b", "c"} without the last: whose attribute is assigned."""
    found = set()
    node = node.value
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        node = node.func if isinstance(node, ast.Call) else node.value
    return found | ({node.id} if isinstance(node, ast.Name) else set())


def trainers(tree):
    """Names of variables that hold a Trainer."""
    found = set(NAMES)
    for node in ast.walk(tree):
        annotation = node.annotation if isinstance(node, ast.arg | ast.AnnAssign) else None
        if annotation is not None and ast.unparse(annotation).strip("'\"") == "Trainer":
            found.add(node.arg if isinstance(node, ast.arg) else ast.unparse(node.target))
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) == "Trainer"
        ):
            found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return found


def targets(node):
    if isinstance(node, ast.Assign | ast.Delete):
        given = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        given = [node.target]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "setattr",
        "delattr",
        "object.__setattr__",
    ):
        return [ast.Attribute(node.args[0], "", ast.Store())] if node.args else []
    elif isinstance(node, ast.For | ast.comprehension):
        given = [node.target]
    else:
        given = (
            [each.optional_vars for each in node.items if each.optional_vars]
            if isinstance(node, ast.With)
            else []
        )
    nested = [each for one in given for each in ast.walk(one) if isinstance(each, ast.Attribute)]
    return [each for each in nested if isinstance(each.ctx, ast.Store | ast.Del)]


def assignments(source):
    """Line and text of each assignment to an attribute of a Trainer, or of an object that it holds."""
    if "trainer" not in source.lower():
        return []  # neither a variable of that name nor an annotation
    tree = ast.parse(source)
    names = trainers(tree)
    return [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(tree)
        for target in (targets(node) if hasattr(node, "lineno") else ())
        if parts(target) & names
    ]


def test_no_other_file_assigns_to_a_trainer():
    found = {
        str(path.relative_to(PACKAGE)): places
        for path in PACKAGE.rglob("*.py")
        # transformers' Trainer is another class
        if path != OWN
        and path.name != "transformers_trainer.py"
        and (places := assignments(path.read_text("utf-8")))
    }
    assert found == {}


def test_assignments_are_found():
    source = """
def change(self, run: Trainer):
    self.trainer.step = 3
    run.counters.step += 1
    with opened() as run.log:
        run.step, other = 1, 2
    setattr(run.counters, "step", 3)
    run.load(found)
    later = Trainer(config)
    later.flags = None
    step = run.step
"""
    assert sorted(line for line, _ in assignments(source)) == [3, 4, 5, 6, 7, 10]


def test_trainer_stays_small():
    tree = ast.parse(OWN.read_text("utf-8"))
    attributes = {
        each.attr
        for node in ast.walk(tree)
        for each in targets(node)
        if isinstance(each.value, ast.Name) and each.value.id == "self"
    }
    imported = [
        node
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module.startswith("narrowgauge")
    ]
    assert trainer.Trainer.__name__ == "Trainer" and len(attributes) <= MOST_ATTRIBUTES, sorted(
        attributes
    )
    assert len(imported) <= MOST_IMPORTS

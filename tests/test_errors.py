"""Every error of the package has a code that names its cause. exact"""

from __future__ import annotations

import ast
import copy
import json
import pickle
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from narrowgauge import errors
from narrowgauge.errors import ConfigError, NarrowgaugeError, NarrowgaugeWarning, Reason

PACKAGE = Path(errors.__file__).parent
CLASSES = {
    name
    for name, each in vars(errors).items()
    if isinstance(each, type) and issubclass(each, NarrowgaugeError | NarrowgaugeWarning)
}


@cache
def constructed() -> list[tuple[Path, ast.Call]]:
    """Every call in the package that makes one of our errors."""
    return list(_constructed())


def _constructed() -> Iterator[tuple[Path, ast.Call]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and (
                    node.func.id in CLASSES
                    or (
                        node.func.id == "warn"
                        and any(each.arg == "stacklevel" for each in node.keywords)
                    )
                )
            ):
                yield path, node


def code_of(call: ast.Call) -> ast.expr | None:
    return next((each.value for each in call.keywords if each.arg == "code"), None)


def test_every_error_has_a_code():
    assert [f"{path}:{call.lineno}" for path, call in constructed() if code_of(call) is None] == []


def test_codes_are_a_subject_and_a_cause():
    for path, call in constructed():
        code = code_of(call)
        if isinstance(code, ast.Constant):
            assert re.fullmatch(r"[a-z0-9_-]+\.[a-z0-9_-]+", code.value), (
                f"{path}:{call.lineno}: {code.value!r}"
            )


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_code_survives_pickle_and_copy(name):
    error = getattr(errors, name)("A sentence.", code="subject.cause")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(again), str(again), again.code) == (
            type(error),
            "A sentence.",
            "subject.cause",
        )


def test_only_errors_warn_issues_warnings():
    """Deprecations of former names aside, which Python shows to developers alone."""
    found = [
        f"{path}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if "warnings" in (source := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "warnings.warn"
        and "DeprecationWarning" not in map(ast.unparse, node.args)
    ]
    assert [place.rpartition(":")[0] for place in found] == [errors.__file__]


@pytest.mark.parametrize("category", [errors.UsageWarning, errors.SlowerWarning])
def test_a_warning_names_the_line_of_its_caller(category):
    def caller():
        errors.warn("A sentence.", code="subject.cause", stacklevel=2, category=category)

    with pytest.warns(NarrowgaugeWarning) as caught:
        caller()
    [found] = caught
    assert (found.category, found.message.code) == (category, "subject.cause")
    assert (
        found.filename == __file__
        and "caller()" in Path(__file__).read_text(encoding="utf-8").splitlines()[found.lineno - 1]
    )


def test_warnings_keep_the_categories_that_users_filter():
    assert issubclass(errors.UsageWarning, UserWarning)
    assert issubclass(errors.SlowerWarning, RuntimeWarning)
    assert not issubclass(errors.SlowerWarning, UserWarning)


def test_a_reason_is_its_text_and_keeps_its_code():
    reason = Reason("subject.cause", "A sentence.")
    assert reason == "A sentence." and json.dumps([reason]) == '["A sentence."]'
    for again in (
        pickle.loads(pickle.dumps(reason)),
        copy.copy(reason),
        copy.deepcopy([reason])[0],
    ):
        assert (type(again), again, again.code) == (Reason, "A sentence.", "subject.cause")


def test_an_error_without_a_code_has_an_empty_one():
    assert ConfigError("A sentence.").code == ""

"""Refuses lm-eval task files that would run code, unless the user trusts the file.

    !function, !!python/...    lm-eval imports a module from beside the file, or calls the named
                               object
    include, group members     other files with the same rights: each is checked too
    a metric of another name   evaluate.load() downloads a script of this name, or finds a folder of
                               this name, and runs it
    hf_evaluate: true          the same for a name that lm-eval knows
    dataset_path               a script (.py), or "pandas", which unpickles in datasets before 5
    templates ({{ ... }})      lm-eval renders them in a plain Jinja environment, from which all of
                               Python can be reached. They are rendered in Jinja's sandbox here

Reading a file composes YAML nodes without constructing objects, so it runs nothing. Checked against
lm-eval 0.4.13: tasks/_yaml_loader.py, api/registry.py and utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from narrowgauge.errors import ConfigError
from narrowgauge.storage import reading

TRUST = "Read the code, then pass --trust-task-code; or write the task without it."
FILE = reading.Kind(most_bytes=reading.MIB, follow_links=True, step="Name a YAML file.")
PLAIN = "tag:yaml.org,2002:"
PYTHON = f"{PLAIN}python/"
UNPICKLED = frozenset({"pandas"})  # builders of `datasets` that read pickles


def refuse_code(file: Path, metrics: frozenset[str]) -> None:
    """Raises ConfigError if scoring the task `file`, or a file that it includes, would run code.

    metrics  names of the metrics that lm-eval computes itself
    """
    waiting, seen = [file], set[Path]()
    while waiting:
        # Resolve links as lm-eval does for neighbouring files
        each = waiting.pop().expanduser().resolve()
        if each not in seen:
            seen.add(each)
            waiting += _checked(each, file, metrics)


def compose(file: Path) -> Any:
    """YAML nodes of a file, without constructed objects.

    Raises ConfigError if the file cannot be read.
    """
    text = reading.text_of(file, FILE)
    try:
        return yaml.compose(text)
    except (yaml.YAMLError, AttributeError, TypeError, ValueError, RecursionError) as error:
        words = " ".join(str(error).split())
        raise ConfigError(
            f"tasks = '{file}': cannot be read as a task file of lm-eval: {words}. Name a YAML file.",
            code="lm-eval.unreadable",
        ) from None


def _checked(file: Path, named: Path, metrics: frozenset[str]) -> Iterator[Path]:
    """Checks one file and yields the files that it includes."""
    found = f"tasks = '{named}': {'' if file == named.expanduser().resolve() else f'{file}, which it includes, '}"
    waiting, seen = [compose(file)], set[int]()
    while waiting:
        node = waiting.pop()
        # An alias, seen before; a cycle of aliases would loop for ever
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        # Any tag outside plain YAML names a constructor, which lm-eval's loader would call.
        if not node.tag.startswith(PLAIN) or node.tag.startswith(PYTHON):
            words = node.value if isinstance(node, yaml.ScalarNode) else "..."
            tag = node.tag.replace(PLAIN, "!!")
            raise ConfigError(
                f"{found}runs code by {tag} {words} (line {node.start_mark.line + 1}): scoring would import and call it. {TRUST}",
                code="lm-eval.code",
            )
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            waiting += [part for pair in node.value for part in pair]
            for key, value in node.value:
                if reason := _runs_code(key.value, value, metrics):
                    raise ConfigError(
                        f"{found}{reason} (line {value.start_mark.line + 1}). {TRUST}",
                        code="lm-eval.code",
                    )
                if key.value == "include":
                    yield from (file.parent / name for name in _texts(value))


def _runs_code(key: Any, value: yaml.Node, metrics: frozenset[str]) -> str:
    """Returns the reason why a value of a task file would run code, or ''."""
    texts = _texts(value)
    if key == "class":
        return f"runs code: class {texts} is a Python task"
    if key == "hf_evaluate" and texts[:1] != ["false"]:
        return "runs code: hf_evaluate fetches a metric's script and runs it"
    if key == "metric" and (unknown := [name for name in texts if name not in metrics]):
        return f"runs code: metric {unknown[0]!r} is not one of lm-eval's own, so the package evaluate would fetch a script of this name"
    if key == "dataset_path" and (
        strange := [name for name in texts if name.endswith(".py") or name in UNPICKLED]
    ):
        return f"runs code: dataset_path {strange[0]!r} is a script, or reads pickles"
    return ""


def _texts(node: yaml.Node) -> list[str]:
    """The scalars of a node or of a list node."""
    parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
    return [str(part.value) for part in parts if isinstance(part, yaml.ScalarNode)]


@contextmanager
def sandboxed_templates() -> Iterator[None]:
    """Renders lm-eval's templates in Jinja's sandbox while the body runs.

    Filters and options are the same.

    In lm-eval 0.4.13 a template such as `{{ cycler.__init__.__globals__.os.system(...) }}` ran. The
    sandbox denies access to Python's own attributes.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from lm_eval import utils

    plain = utils.env
    utils.env = ImmutableSandboxedEnvironment(
        loader=plain.loader,
        undefined=plain.undefined,
        keep_trailing_newline=plain.keep_trailing_newline,
    )
    utils.env.filters.update(plain.filters)
    try:
        yield
    finally:
        utils.env = plain

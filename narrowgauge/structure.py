"""What can be read off a model's structure: layers that a pattern names, Transformer blocks, weights that no Linear holds.

Patterns of dotted names are shell wildcards and ranges of numbers:

    "*.mlp.*"          wildcards over the whole name; `*` crosses dots
    "mlp.up_proj"      without a leading `*` it also matches the end of a name, from a dot on: "model.layers.0.mlp.up_proj"
    "layers.0-3"       a part of the form A-B stands for the numbers from A to B, both included

Weights that are no Linear's but are multiplied as one, which `convert` cannot give a recipe and `describe` lists:

    Conv1D of transformers            y = x @ weight + bias, weight [in, out]: GPT-2 and its kin
    nn.MultiheadAttention             q, k and v of one weight [3 E, E], or of three where kdim or vdim differ
    experts in one parameter          [experts, ...]: the mixtures of experts of transformers 5

Left out: convolutions, recurrent layers and embeddings, which are other operations.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from torch import Tensor, nn

from narrowgauge.errors import ConfigError


def require_module(model: object, verb: str) -> None:
    """Raises ConfigError in the name of `verb` for what is no model."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{verb}: type {type(model).__name__} is no nn.Module. Pass the model first.", code="convert.not-a-module"
        )


# --- Patterns ---

_RANGE = re.compile(r"(\d+)-(\d+)")
MOST_NUMBERS = 100_000  # of a range; more is a slip of the pen


def matches(name: str, pattern: str) -> bool:
    """Whether `pattern` means the dotted `name`."""
    whole = expanded(pattern)
    ends = [f"*.{each}" for each in whole if not each.startswith("*")]
    return any(fnmatchcase(name, each) for each in (*whole, *ends))


def expanded(pattern: str) -> list[str]:
    """The pattern without ranges: "layers.0-2.mlp" -> ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"].

    Raises ConfigError for a range that runs backwards.
    """
    parts: list[list[str]] = []
    for part in pattern.split("."):
        limits = _RANGE.fullmatch(part)
        if limits is None:
            parts.append([part])
            continue
        first, last = int(limits[1]), int(limits[2])
        if not first <= last < first + MOST_NUMBERS:
            raise ConfigError(
                f"pattern {pattern!r}: the range {part!r} runs from {first} to {last}. "
                f"Write the smaller number first, and at most {MOST_NUMBERS:,} numbers.",
                code="pattern.range",
            )
        parts.append([str(number) for number in range(first, last + 1)])
    return [".".join(chosen) for chosen in itertools.product(*parts)]


# --- Transformer blocks: the numbered layer lists. A recipe may leave some of them in 16 bits (`recipe.WideBlocks`) ---


@dataclass(frozen=True)
class Block:
    """Where a layer stands: block `index` (from 0) of `count` in the list called `stack`."""

    stack: str
    index: int
    count: int

    def __str__(self) -> str:
        return f"block {self.index + 1} of {self.count} in {self.stack or 'the model'}"


def blocks(model: nn.Module) -> dict[str, Block]:
    """Name of each Linear that stands in a block -> its block.

    A stack is a ModuleList, or a Sequential of modules of one class, whose members all hold Linears without being one. Of
    nested ones the outermost counts: the experts inside a block are no blocks.
    """
    found: dict[str, Block] = {}
    for stack, members in outermost(model, _is_stack):
        for index, (child, member) in enumerate(members.items()):
            for name, module in member.named_modules():
                if isinstance(module, nn.Linear):
                    found[".".join(filter(None, (stack, child, name)))] = Block(stack, index, len(members))
    return found


def outermost(model: nn.Module, is_stack: Callable[[nn.Module], bool]) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """(name, members by their own names) of each stack that stands in no other; a shared one once, under its first name."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(not stack or f"{name}.".startswith(f"{stack}.") for stack in found)
        if not inside and is_stack(module):
            found.append(name)
            yield name, dict(module.named_children())


def _is_stack(module: nn.Module) -> bool:
    members = list(module.children())
    if not isinstance(module, nn.ModuleList | nn.Sequential) or not members:
        return False
    if isinstance(module, nn.Sequential) and len({type(member) for member in members}) > 1:
        return False
    holding = [member for member in members if any(isinstance(inner, nn.Linear) for inner in member.modules())]
    return holding == members and not any(isinstance(member, nn.Linear) for member in members)


# --- Weights that no Linear holds, or that are read without calling it ---

_CONV1D = "transformers' Conv1D is no nn.Linear: replace it by one with the transposed weight"
_ATTENTION = "nn.MultiheadAttention multiplies it in a function of its own: replace it by an attention with nn.Linear"
_EXPERTS = "the experts share one parameter: give each an nn.Linear"
_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_experts")


def other_weights(name: str, module: nn.Module) -> Iterator[tuple[str, str, str]]:
    """(dotted name, shape, why it stays, in words) of each weight that `module` itself multiplies as a Linear would.

    name  of the module in its model; the weight of a Conv1D is called by it
    """
    prefix = f"{name}." if name else ""
    if any(kind.__name__ == "Conv1D" for kind in type(module).__mro__):
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2:
            yield (name, f"{weight.shape[0]} -> {weight.shape[1]}", _CONV1D)
    elif isinstance(module, nn.MultiheadAttention):
        for own in _PROJECTIONS:
            weight = getattr(module, own)
            if weight is not None:
                yield (prefix + own, f"{weight.shape[1]} -> {weight.shape[0]}", _ATTENTION)
    elif _holds_experts(name, module):
        for own, weight in module.named_parameters(recurse=False):
            if weight.ndim == 3:
                count, rows, columns = weight.shape
                yield (prefix + own, f"{count} experts of {rows} x {columns}", _EXPERTS)


def _holds_experts(name: str, module: nn.Module) -> bool:
    """By its name, its class, or a number of experts; not the convolutions in it, whose weights have three axes as well."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return False
    named = "expert" in f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
    return named or any(hasattr(module, count) for count in _EXPERT_COUNTS)


_PRODUCTS = {"linear", "matmul", "mm", "bmm", "addmm", "einsum"}
_READ = re.compile(r"self\.(\w+)\.weight\b")


_SETTINGS = (
    ast.Attribute, ast.Name, ast.Load, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.cmpop, ast.boolop, ast.unaryop,
)  # fmt: skip


def read_weights(owner: nn.Module) -> frozenset[str]:
    """Children of `owner` by whose weight its class's `forward` multiplies itself, as F.linear(x, self.child.weight) does.

    By structure: it may also call the child, in another branch. A branch counts unless the module's own settings switch it off, as
    `if self.pretraining_tp > 1` does in BLOOM. Empty where there is no source.
    """
    found = _read_weights(type(owner).forward)
    return frozenset(child for child, tests in found if all(_may_be(test, wanted, owner) for test, wanted in tests))


def _may_be(test: str, wanted: bool, owner: nn.Module) -> bool:
    """Whether a condition on the settings of a module may be true (wanted) or false. One that cannot be computed may."""
    try:
        return bool(eval(test, {"__builtins__": {}}, {"self": owner})) is wanted
    except Exception:  # of another class, or not yet set
        return True


@cache
def _read_weights(forward: Callable[..., Any]) -> frozenset[tuple[str, tuple[tuple[str, bool], ...]]]:
    """(child, conditions on settings of the module under which its weight is multiplied) of a forward method."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    found: set[tuple[str, tuple[tuple[str, bool], ...]]] = set()

    def visit(node: ast.AST, tests: tuple[tuple[str, bool], ...]) -> None:
        if isinstance(node, ast.If) and _is_setting(node.test):
            test = ast.unparse(node.test)
            for branch, wanted in ((node.body, True), (node.orelse, False)):
                for statement in branch:
                    visit(statement, (*tests, (test, wanted)))
            return
        for operand in _operands(node):
            if (match := _READ.match(ast.unparse(operand))) is not None:
                found.add((match[1], tests))
        for each in ast.iter_child_nodes(node):
            visit(each, tests)

    visit(tree, ())
    return frozenset(found)


def _is_setting(test: ast.expr) -> bool:
    """Whether a condition depends on attributes of `self` and constants alone, and not on the mode, which changes."""
    nodes = list(ast.walk(test))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    modes = any(isinstance(node, ast.Attribute) and node.attr == "training" for node in nodes)
    return names == {"self"} and not modes and all(isinstance(node, _SETTINGS) for node in nodes)


def _operands(node: ast.AST) -> list[ast.expr]:
    """What a matrix product multiplies; nothing of another node."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return [*node.args, *(each.value for each in node.keywords)] if name in _PRODUCTS else []
    return [node.left, node.right] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult) else []


# What DDP, FSDP, torch.compile and activation checkpointing put into the names of what they wrap.
WRAPPERS = frozenset(("module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"))


# Names that recipes add to a state dict.
ADDED = re.compile(r"(^|\.)(scaling\..*|steps\.(x|w|cold_left)|sampling\.variance)$")


def is_weight(name: str) -> bool:
    """Of a tensor of a state dict: whether an unconverted model has it too."""
    return not ADDED.search(name)


def plain_name(name: str) -> str:
    """The name of a layer or parameter without what wrappers add to it: the same however the model is wrapped."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)

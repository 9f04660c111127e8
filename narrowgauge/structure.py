"""Model structure: name patterns, Transformer blocks, and weights outside Linears.

Patterns of dotted names are shell wildcards and ranges of numbers:

    "*.mlp.*"          wildcards over the whole name; `*` crosses dots
    "mlp.up_proj"      without a leading `*` it also matches the end of a name, from a dot on:
                       "model.layers.0.mlp.up_proj"
    "layers.0-3"       a part of the form A-B stands for the numbers from A to B, both included

A Linear (`is_linear`) is an nn.Linear, a subclass of it, or transformers' Conv1D, whose weight is
stored [in, out]: y = x @ weight + bias, in GPT-2 and related models.

Weights outside of Linears that are used in a matmul. Without a recipe, `describe` lists them:

    nn.MultiheadAttention        q, k and v in one weight [3 E, E], or in three if kdim or vdim
                                 differ
    experts in one parameter     [experts, ...]: the mixtures of experts of transformers 5. `convert`
                                 gives a recipe to those whose layout it knows (nn/experts.py)

Convolutions, recurrent layers and embeddings are other operations and are skipped.
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

from narrowgauge.errors import ConfigError, Reason

# Key in the `__dict__` of a model that `distribute` was given: its DistributedState. It stands here
# so that a snapshot reads it without importing torch.distributed, which takes a second.
DISTRIBUTED_STATE = "_narrowgauge_distributed_state"


def require_module(model: object, verb: str) -> None:
    """Raise ConfigError if `model` is not an nn.Module. verb: function named in the message."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{verb}: type {type(model).__name__} is no nn.Module. Pass the model first.",
            code="convert.not-a-module",
        )


# --- Linears, also of other classes ---


def is_linear(module: nn.Module) -> bool:
    """True for a module that computes x @ weight.T + bias, or says so by its class."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """True for transformers' Conv1D, by its name: transformers need not be installed."""
    if not any(kind.__name__ == "Conv1D" for kind in type(module).__mro__):
        return False
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2


def features(layer: nn.Module) -> tuple[int, int]:
    """(in_features, out_features) of a Linear."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    weight: Any = layer.weight
    rows, columns = weight.shape
    return rows, columns


# --- Patterns ---

_RANGE = re.compile(r"(\d+)-(\d+)")
MOST_NUMBERS = 100_000  # numbers in a range; a longer one is a typing error


def matches(name: str, pattern: str) -> bool:
    """True if the pattern matches the dotted name."""
    whole = expanded(pattern)
    ends = [f"*.{each}" for each in whole if not each.startswith("*")]
    return any(fnmatchcase(name, each) for each in (*whole, *ends))


def expanded(pattern: str) -> list[str]:
    """Expand ranges: "layers.0-2.mlp" -> ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"].

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


# --- Transformer blocks: the numbered layer lists. A recipe may leave some in 16 bits ---


@dataclass(frozen=True)
class Block:
    """Position of a layer: block `index` (from 0) of `count` in the list called `stack`."""

    stack: str
    index: int
    count: int

    def __str__(self) -> str:
        return f"block {self.index + 1} of {self.count} in {self.stack or 'the model'}"


def blocks(model: nn.Module) -> dict[str, Block]:
    """Name of each Linear inside a block -> its block.

    A stack is a ModuleList, or a Sequential of modules of one class. Each of its members must
    contain Linears or experts in one parameter, and must not be a Linear. Only the outermost of nested stacks counts: the
    experts inside a block are not blocks.
    """
    found: dict[str, Block] = {}
    for stack, members in outermost(model, _is_stack):
        for index, (child, member) in enumerate(members.items()):
            for name, module in member.named_modules():
                if is_linear(module):
                    found[".".join(filter(None, (stack, child, name)))] = Block(
                        stack, index, len(members)
                    )
    return found


def outermost(
    model: nn.Module, is_stack: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """Yield (name, {child name: module}) of each stack that is not nested in another stack.

    named_modules visits a shared module once, under its first name.
    """
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
    holding = [
        member
        for member in members
        if any(is_linear(inner) or _is_of_experts(inner) for inner in member.modules())
    ]
    return holding == members and not any(map(is_linear, members))


def _is_of_experts(module: nn.Module) -> bool:
    """True if the module holds experts in one parameter: a block may have no other matrices."""
    own = module.parameters(recurse=False)
    return holds_experts("", module) and any(each.ndim == 3 for each in own)


# --- Weights outside Linears, or used without calling the Linear ---

_ATTENTION = Reason(
    "attention",
    "nn.MultiheadAttention multiplies it in a function of its own: convert gives torch's class a recipe, and no subclass",
)
_EXPERTS = Reason("experts", "the experts share one parameter: convert gives each a recipe")
GROUPED = "grouped_from"  # attribute of converted experts: their matrices are layers of their own
_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_experts")


def other_weights(name: str, module: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted name, shape, reason) of each weight that `module` itself uses in a matmul.

    name  dotted name of the module in its model
    """
    prefix = f"{name}." if name else ""
    if isinstance(module, nn.MultiheadAttention):
        if "q_proj" in module._modules:  # converted: its projections are layers
            return
        for own in _PROJECTIONS:
            weight = getattr(module, own)
            if weight is not None:
                yield (prefix + own, f"{weight.shape[1]} -> {weight.shape[0]}", _ATTENTION)
    elif holds_experts(name, module) and not hasattr(module, GROUPED):
        for own, weight in module.named_parameters(recurse=False):
            if weight.ndim == 3:
                count, rows, columns = weight.shape
                yield (prefix + own, f"{count} experts of {rows} x {columns}", _EXPERTS)


def holds_experts(name: str, module: nn.Module) -> bool:
    """True if the name, the class name or an attribute marks the module as a container of experts.

    Convolutions are excluded, because their weights have three axes as well.
    """
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
    """Children of `owner` whose weight its `forward` uses directly in a matmul.

    Example: F.linear(x, self.child.weight).

    Found in the source of `forward`, which may also call the child in another branch. A branch
    counts unless the module's own settings switch it off, as `if self.pretraining_tp > 1` in BLOOM.
    Empty if the source is not available.
    """
    found = _read_weights(type(owner).forward)
    return frozenset(
        child
        for child, tests in found
        if all(_may_be(test, wanted, owner) for test, wanted in tests)
    )


def _may_be(test: str, wanted: bool, owner: nn.Module) -> bool:
    """True if a condition on a module's settings may evaluate to `wanted`.

    A condition that cannot be evaluated counts as possible.
    """
    try:
        # eval is safe here: `_is_setting` admits only attributes of self, constants and
        # comparisons.
        return bool(eval(test, {"__builtins__": {}}, {"self": owner})) is wanted
    except Exception:  # an attribute of another class, or not yet set
        return True


@cache
def _read_weights(
    forward: Callable[..., Any],
) -> frozenset[tuple[str, tuple[tuple[str, bool], ...]]]:
    """(child, conditions) for each child weight that a forward method uses in a matmul.

    The conditions are (test, value) pairs on the module's settings under which the branch runs.
    """
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
            # unparse normalizes the source, so that one regex covers every way to write the
            # attribute.
            if (match := _READ.match(ast.unparse(operand))) is not None:
                found.add((match[1], tests))
        for each in ast.iter_child_nodes(node):
            visit(each, tests)

    visit(tree, ())
    return frozenset(found)


def _is_setting(test: ast.expr) -> bool:
    """True if a condition reads only attributes of `self` and constants.

    `self.training` is excluded, because the mode changes.
    """
    nodes = list(ast.walk(test))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    modes = any(isinstance(node, ast.Attribute) and node.attr == "training" for node in nodes)
    return names == {"self"} and not modes and all(isinstance(node, _SETTINGS) for node in nodes)


def _operands(node: ast.AST) -> list[ast.expr]:
    """Operands of a matmul node; [] for other nodes."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return [*node.args, *(each.value for each in node.keywords)] if name in _PRODUCTS else []
    return (
        [node.left, node.right]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
        else []
    )


# Name parts that DDP, FSDP, torch.compile and activation checkpointing insert.
WRAPPERS = frozenset(("module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"))


# Names that recipes add to a state dict: amax histories, learned steps, and sampling statistics.
ADDED = re.compile(r"(^|\.)(scaling\..*|steps\.(x|w|cold_left)|sampling\.variance)$")


def is_weight(name: str) -> bool:
    """True if a tensor of a state dict also exists in the unconverted model."""
    return not ADDED.search(name)


def plain_name(name: str) -> str:
    """Name of a layer or parameter without the parts that wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)

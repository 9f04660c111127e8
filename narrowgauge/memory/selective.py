"""Selective checkpointing: save outputs of matmuls and attention, recompute the rest of a block.

A dispatch mode observes torch's operations. Linears with a recipe report their `output` GEMM
themselves (nn.keep_policy), whichever kernel computes it. The Linear's result is saved, and torch
operations inside it are ignored. During recomputation such a Linear quantizes only the operands
that its backward needs.

Saved outputs form a queue; recomputation takes them in the same order. Attention with dropout is
recomputed: reusing its output would skip its random numbers and shift all later ones. Under
torch.compile the partitioner saves the outputs, by torch's own selective contexts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from narrowgauge.memory.recomputation import checkpointed
from narrowgauge.memory.saved_tensors import report_saved
from narrowgauge.nn.keep_policy import KEEPER

# Not every release of torch has all of them.
_MATMULS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_scaled_mm_v2",
    "_int_mm",
    "_grouped_mm",
    "convolution",
)
_ATTENTION = tuple(
    f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")
)
_ATTENTION += (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
SAVED_OPERATIONS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (*_MATMULS, *_ATTENTION)
    if hasattr(torch.ops.aten, name)
)
# This package's operators, by name: each is defined on first use.
_OURS = frozenset(f"narrowgauge::{name}" for name in ("block_mm", "scaled_mm", "int4_mm"))


def selective_checkpoint(
    block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a block's forward so that backward recomputes it, except matmuls and attention."""
    return checkpointed(forward, args, kwargs, _contexts)


def _contexts() -> Any:
    if torch.compiler.is_compiling():
        return create_selective_checkpoint_contexts(_policy)
    # torch's own contexts count every operation of a kind. A Linear that reuses its saved result
    # skips some operations, so eager mode has its own queue.
    saved: deque[tuple[Any, Any]] = deque()
    return _Record(saved), _Replay(saved)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if _is_saved(operation, args, kwargs)
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


class _MatmulMode(TorchDispatchMode):
    """Dispatch mode that intercepts matmuls and attention.

    saved  queue of (operation, or None for a Linear with a recipe; (output, versions))
    """

    def __init__(self, saved: deque[tuple[Any, Any]]) -> None:
        super().__init__()
        self.saved = saved
        # Inside of a Linear with a recipe, which reports its own result.
        self.in_linear = False
        self._tokens: list[Any] = []

    def __enter__(self) -> Any:
        self.in_linear = False
        self._tokens.append(KEEPER.set(self))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        KEEPER.reset(self._tokens.pop())

    def begin(self) -> Tensor | None:
        raise NotImplementedError

    def end(self, output: Tensor | None) -> None:
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.in_linear or not _is_saved(func, args, kwargs):
            return func(*args, **kwargs)
        return self.on_matmul(func, args, kwargs)

    def on_matmul(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class _Record(_MatmulMode):
    """Forward pass: save the outputs."""

    def on_matmul(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = func(*args, **kwargs)
        # Below autograd, detach() creates a new version counter unless ADInplaceOrView is enabled.
        # The shared counter is needed to detect in-place changes.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._put(func, tree_map_only(Tensor, Tensor.detach, found))
        return found

    def begin(self) -> None:
        self.in_linear = True

    def end(self, output: Tensor | None) -> None:
        self.in_linear = False
        if output is not None:
            self._put(None, output.detach())

    def _put(self, func: Any, output: Any) -> None:
        tensors = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        # Saved-tensor hooks do not see this queue.
        report_saved(*tensors)
        self.saved.append((func, (output, [each._version for each in tensors])))


class _Replay(_MatmulMode):
    """Recomputation: return the saved outputs."""

    def on_matmul(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._take(func)

    def begin(self) -> Tensor:
        self.in_linear = True
        found: Tensor = self._take(None)
        return found

    def end(self, output: Tensor | None) -> None:
        self.in_linear = False

    def _take(self, func: Any) -> Any:
        name = "a Linear with a recipe" if func is None else str(func)
        if not self.saved:
            raise RuntimeError(
                f"checkpoint: backward asks for the output of {name}, which is not kept (any more). Under 'selective' a graph has one "
                "backward pass: take 'full' for retain_graph=True."
            )
        # Popped: a saved output is freed as soon as recomputation has used it.
        was, (output, versions) = self.saved.popleft()
        if was is not func:
            raise RuntimeError(
                f"checkpoint: forward kept the output of {'a Linear with a recipe' if was is None else was}, and the repetition computes "
                f"{name} there. A block must compute the same when it is called again; take 'none' where it cannot."
            )
        if versions != [each._version for each in tree_leaves(output) if isinstance(each, Tensor)]:
            raise RuntimeError(
                f"checkpoint: the output of {name}, which 'selective' keeps, was changed in place. Write it without, or take 'full'."
            )
        return output


def _is_saved(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return (operation in SAVED_OPERATIONS or operation.name() in _OURS) and not _has_dropout(
        operation, args, kwargs
    )


def _has_dropout(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for index, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            return bool(kwargs.get("dropout_p", args[index] if index < len(args) else 0.0))
    return False

"""Coverage: the share of a model's matrix-product operations that runs in low precision.

    print(coverage(model, batch))
    91 % of matrix-product operations in 8 bits; 9 % in bf16: lm_head 6 %, attention 3 %

Counted are the operations of one training step on one batch, from shapes. A product y = a @ b of F
operations counts F forward, and F more for each operand that requires a gradient. The three
products of a Linear count by the bits of their wider operand, as its recipe says. Attention that
torch computes in one kernel is two products. It counts in full under a mask, as torch's FLOP
counter has it, although kernels skip the masked half of a causal one. Work that is repeated
(activation checkpointing) counts once.

A copy of the model runs forward under fake tensors. They have shapes and no elements, so nothing is
computed, and the model, its state and all random generators stay as they are. A model that reads
values (`if x.max() > 0`) cannot run so. It then computes one forward pass itself, with its recipes
suspended; generators, buffers and fields of converted layers are restored.

Left out: products inside kernels that torch's FLOP counter does not know, such as cuDNN's recurrent
layers and kernels of other packages.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from narrowgauge.conversion.attention_kernels import AttentionCall, sentence
from narrowgauge.errors import ConfigError, warn
from narrowgauge.formats import E4M3
from narrowgauge.nn.converted_model import quantized_linears, suspended
from narrowgauge.nn.fp8_attention import state_of
from narrowgauge.nn.narrow_layer import matrices, narrow_layer, recipe_of
from narrowgauge.ops import rng
from narrowgauge.ops.timing.work import OPERANDS, of_operator
from narrowgauge.structure import is_linear, other_weights, require_module

if TYPE_CHECKING:
    from narrowgauge.recipe import Gemm

HIGH_PRECISION_BITS = 16
SHOWN = 4  # parts of the rest that the sentence names
LEAST = 0.005  # a part below this share is not named
# Operator -> positions of the matrices that it multiplies. Two by default.
MATRICES = {"addmm": (1, 2), "baddbmm": (1, 2)}


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Shares of the matrix-product operations of one training step.

    operations  their number: a multiplication and an addition are two
    narrow      bits -> share, of products in fewer than 16 bits
    wide        type ("bf16") -> part of the model ("lm_head") -> share
    attention   the kernels that compute attention (`attention_kernels`); '' without attention
    """

    operations: int
    narrow: Mapping[int, float]
    wide: Mapping[str, Mapping[str, float]]
    attention: str = ""

    @property
    def share(self) -> float:
        """Share of all products in fewer than 16 bits, 0 to 1."""
        return sum(self.narrow.values())

    def as_dict(self) -> dict[str, Any]:
        """In JSON types, as run.json has it (docs/architecture.md)."""
        return {
            "sentence": str(self),
            "operations": self.operations,
            "narrow": {str(bits): share for bits, share in self.narrow.items()},
            "wide": {kind: dict(parts) for kind, parts in self.wide.items()},
            "attention": self.attention,
        }

    def __str__(self) -> str:
        if not self.operations:
            return "The batch needs no matrix product"
        shares = [f"{_percent(share)} in {bits} bits" for bits, share in self.narrow.items()]
        first, *more = shares or ["0 % in low precision"]
        number, _, how = first.partition(" in ")
        words = ", ".join([f"{number} of matrix-product operations in {how}", *more])
        return "; ".join([words, *map(_of_rest, self.wide.items())])


def _of_rest(kind: tuple[str, Mapping[str, float]]) -> str:
    words, parts = kind
    named = [f"{part} {_percent(share)}" for part, share in parts.items() if share >= LEAST]
    if len(named) > SHOWN:
        named[SHOWN:] = [f"{len(named) - SHOWN} more parts"]
    listed = f": {', '.join(named)}" if named else ""
    return f"{_percent(sum(parts.values()))} in {words}{listed}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def coverage(model: nn.Module, batch: Any) -> Coverage:
    """Count the products of one training step of `model` on `batch`.

    batch  arguments of the model's forward: a mapping by name, a tuple or list in order, or one
           tensor. Under fake tensors their values are not read

    Costs a forward pass under fake tensors: 0.25 ms an operator, 50 ms a block of a Llama, and no
    memory for weights or activations.
    Raises ConfigError for a model whose weights are sharded already, and for a model that cannot
    run on this batch.
    """
    require_module(model, "coverage")
    sharded = [name for name, own in model.named_parameters() if type(own).__name__ == "DTensor"]
    if sharded:
        raise ConfigError(
            f"coverage: {sharded[0]!r} is sharded over ranks, and one rank has a part of it. Count before the model is sharded.",
            code="coverage.sharded",
        )
    try:
        with (
            _uncompiled(),
            _shapes_alone(model) as (stand_in, as_fake),
            _counting(stand_in, elsewhere=frozenset(model.modules())) as counter,
        ):
            _call(stand_in, tree_map(as_fake, batch))
    # It reads values, an operator has no fake form, the batch does not fit, or a copy of the model
    # runs the model itself.
    except Exception:
        try:
            with _uncompiled(), _undisturbed(model), _counting(model) as counter:
                _call(model, batch)
        except Exception as error:
            raise ConfigError(
                f"coverage: {type(model).__name__} cannot compute this batch: {type(error).__name__}: {error}. "
                "Pass the arguments of its forward: a dict by name, or a tuple in order.",
                code="coverage.batch",
            ) from error
    return counter.coverage(model)


def recorded(model: nn.Module, batch: Any) -> dict[str, Any]:
    """As `coverage`, for run.json; only a `sentence` if it cannot be counted.

    A model without a count may still train, so a failed count ends no run.
    """
    try:
        return coverage(model, batch).as_dict()
    except ConfigError as error:
        return {"sentence": f"The share of low precision is unknown: {error}"}


def _call(model: nn.Module, batch: Any) -> None:
    with torch.enable_grad():
        if isinstance(batch, Mapping):
            model(**batch)
        elif isinstance(batch, tuple | list):
            model(*batch)
        else:
            model(batch)


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Inside the block, torch.compile's functions run as they were written.

    Compiled code hides its products, and Inductor's would read the addresses of fake tensors.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _shapes_alone(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield (copy of the model with fake tensors, function that makes a value fake)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def as_fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, Tensor) else value

    # deepcopy finds the fake tensors in its memo, so it reads and copies no weight.
    memo: dict[int, Any] = {}
    for own in model.parameters():
        memo[id(own)] = nn.Parameter(as_fake(own.detach()), own.requires_grad)
    memo |= {id(buffer): as_fake(buffer) for buffer in model.buffers()}
    stand_in = copy.deepcopy(model, memo)
    # Checkpointing may run blocks without gradients, which hides what requires one.
    for module in stand_in.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]
    # A product for each token and expert: transformers' other ways read which expert has tokens.
    getattr(stand_in, "set_experts_implementation", lambda name: None)("batched_mm")
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))  # the run will give them
        # Fake tensors draw from the CPU's generator.
        stack.enter_context(_generators_restored())
        stack.enter_context(suspended(stand_in))
        stack.enter_context(mode)
        yield stand_in, as_fake


@contextmanager
def _generators_restored() -> Iterator[None]:
    before = rng.generators()
    try:
        yield
    finally:
        rng.set_generators(before)


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore what a forward pass without recipes changes: generators, buffers, layers' fields."""
    restore = [layer.state.snapshot() for _, layer in quantized_linears(model, "coverage")]
    # Clones in place of the buffers: a write, and a copy back, would be seen by a graph that waits
    # for its backward pass.
    clones = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    places = [module._buffers for module in model.modules() if module._buffers]
    originals = [dict(buffers) for buffers in places]
    with _generators_restored():
        try:
            for buffers in places:
                buffers.update(
                    {name: clones[each] for name, each in buffers.items() if each is not None}
                )
            with suspended(model):
                yield
        finally:
            for buffers, before in zip(places, originals, strict=True):
                buffers.update(before)
            for each in restore:
                each()


@contextmanager
def _counting(
    model: nn.Module, elsewhere: frozenset[nn.Module] = frozenset()
) -> Iterator[_Products]:
    """Count the products of the forward passes inside, and which module computes each.

    elsewhere  modules that must not run: of the model of which this one is a copy. A forward that
               was put on a model as a function (TRL does) still calls the original's modules
    """
    names = {module: name for name, module in model.named_modules()}
    running: list[nn.Module] = [model]

    def enter(module: nn.Module, arguments: Any) -> None:
        if module in elsewhere:
            raise _RunsTheOriginalError
        running.append(module if module in names else running[-1])

    def leave(module: nn.Module, arguments: Any, output: Any) -> None:
        running.pop()

    with ExitStack() as stack:
        # Suspended, torch's attention would multiply its projections itself.
        for module in model.modules():
            if hasattr(module, "always_projects"):
                vars(module)["always_projects"] = True
                stack.callback(vars(module).pop, "always_projects")
        stack.callback(register_module_forward_pre_hook(enter).remove)
        # always_call keeps the stack of modules balanced if a forward raises.
        stack.callback(register_module_forward_hook(leave, always_call=True).remove)
        products = stack.enter_context(_Products(names, running))
        stack.enter_context(_Attention(products))
        yield products


class _RunsTheOriginalError(Exception):
    """Raised where the forward of a copied model runs modules of the original."""


class _Products(TorchDispatchMode):
    """Adds up operations: `narrow` by bits, `wide` by (type, part of the model)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's wrapper against tracing takes time

    def __init__(self, names: Mapping[nn.Module, str], running: list[nn.Module]) -> None:
        super().__init__()
        self.names, self.running = names, running
        self.in_attention = False
        self.attention_calls: list[AttentionCall] = []
        self.in_fp8 = 0  # calls of attention that the model computes in FP8
        self.in_kernel = 0  # calls that a kernel of `ops.attention16` computes in a fused model
        self.written_out: dict[nn.Module, None] = {}  # in the order of their first products
        self.narrow: Counter[int] = Counter()
        self.wide: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        work = None if self.in_attention else of_operator(0, func, args, kwargs or {}, found)
        if work is not None and work.flops:
            lhs, rhs = (args[at].requires_grad for at in MATRICES.get(work.operation, (0, 1)))
            self._add(self.running[-1], work.operation, work.operands, work.flops, lhs, rhs)
        return found

    def _add(
        self, module: nn.Module, operation: str, operands: str, flops: int, lhs: bool, rhs: bool
    ) -> None:
        """Add a product and its gradients. lhs, rhs: the operand requires a gradient."""
        recipe = recipe_of(module)
        if recipe is None:
            self.wide[operands, self._part(module, operation)] += flops * (1 + lhs + rhs)
            return
        gemms = recipe.gemms().values()  # output, grad_input, grad_weight
        for gemm, is_computed in zip(gemms, (True, lhs, rhs), strict=True):
            if is_computed and (bits := bits_of(gemm)) < HIGH_PRECISION_BITS:
                self.narrow[bits] += flops
            elif is_computed:
                # Its recipe multiplies in 16 bits, whatever the type of the model is.
                own = OPERANDS[torch.bfloat16] if operands == "fp32" else operands
                self.wide[own, self._part(module, operation)] += flops

    def _part(self, module: nn.Module, operation: str) -> str:
        """Part of the model under which a product in high precision is listed."""
        name, kind = self.names.get(module, ""), type(module).__name__
        leaf = next((part for part in reversed(name.split(".")) if not part.isdigit()), "") or kind
        if any(each.startswith("lora_") for each in name.split(".")):  # of peft
            return "adapters"
        if is_linear(module):
            return leaf
        if any(" experts of " in shape for _, shape, _ in other_weights(name, module)):
            return "experts"
        if operation in ("bmm", "baddbmm"):
            if "att" not in f"{leaf} {kind}".lower():
                return f"products in {kind}"
            self.written_out[module] = None
            return "attention"
        return leaf if leaf == kind else f"{leaf} ({kind})"

    def coverage(self, model: nn.Module) -> Coverage:
        """The counts. Call it outside of the modes: torch is asked about attention."""
        total = self.narrow.total() + self.wide.total()
        wide: dict[str, dict[str, float]] = {}
        for (kind, part), flops in self.wide.most_common():
            wide.setdefault(kind or "other types", {})[part] = flops / total
        narrow = {bits: flops / total for bits, flops in sorted(self.narrow.items())}
        attention = sentence(
            model, self.attention_calls, self.written_out, self.in_fp8, self.in_kernel
        )
        return Coverage(operations=total, narrow=narrow, wide=wide, attention=attention)


class _Attention(TorchFunctionMode):
    """Counts torch's attention by its shapes.

    Torch chooses among several kernels below this call, and its FLOP counter knows none of a CPU.
    """

    def __init__(self, products: _Products) -> None:
        super().__init__()
        self.products = products

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | kwargs
        # Recipes are suspended in a count; a module says whether it has FP8 otherwise.
        state = state_of(self.products.running[-1])
        is_narrow = state is not None and not state.reason
        # Of a fused module (fuse.rotary.FusedAttention), whose kernel takes no fake tensors.
        has_kernel = getattr(vars(self.products.running[-1]).get("forward"), "has_kernel", None)
        if is_narrow:
            self.products.in_fp8 += 1
        elif has_kernel is not None and has_kernel(given):
            self.products.in_kernel += 1
        else:
            self.products.attention_calls.append(AttentionCall.of(given))
        self.products.in_attention = True
        try:
            found = func(*args, **kwargs)
        finally:
            self.products.in_attention = False
        q, k, v = given["query"], given["key"], given["value"]
        # q @ k.T, and the softmax of it @ v; keys and values may be shared by groups of heads.
        flops = 2 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        wants = [each.requires_grad for each in (q, k, v)]
        # Backward has a product for each of v, the softmax's result, q and k; forward has two.
        backward = (wants[2] + (wants[0] or wants[1]) + wants[0] + wants[1]) / 2
        # Of the result: autocast rounds the operands inside the function.
        kind = OPERANDS.get(found.dtype, ""), "attention"
        if is_narrow:
            self.products.narrow[E4M3.bits] += flops
        self.products.wide[kind] += round((backward + (not is_narrow)) * flops)
        return found


def bits_of(gemm: Gemm) -> int:
    """Bits of a GEMM's wider operand, which decide on which units it can run."""
    return max(
        HIGH_PRECISION_BITS if cast is None else cast.format.bits for cast in (gemm.lhs, gemm.rhs)
    )


# --- Without a batch


def warn_of_small_share(model: nn.Module, decided: Mapping[str, Any]) -> None:
    """Warn if less than half of the multiplied weights got a recipe, by elements.

    decided  names of the layers that a pattern, a policy of the recipe or "auto" decided about

    Without a batch the number of operations is unknown, so elements of weights stand for it. Output
    heads and routers count on neither side, since `convert` keeps them on purpose.
    """
    from narrowgauge.conversion.disguises import reason_without_recipe
    from narrowgauge.conversion.kept_layers import output_head, reason_of_weight, reason_to_keep

    head, reached = output_head(model), 0
    left: Counter[str] = Counter()
    reasons: dict[str, str] = {}

    def leave(name: str, weight: Tensor, reason: str) -> None:
        leaf = next((part for part in reversed(name.split(".")) if not part.isdigit()), name)
        left[leaf] += 0 if nn.parameter.is_lazy(weight) else weight.numel()
        reasons.setdefault(leaf, reason)

    for name, module in model.named_modules():
        if (layer := narrow_layer(module)) is not None:
            # A recipe of 16 bits was asked for, or chosen by "auto": nothing was missed.
            given = matrices(layer) if layer.recipe is not None else ()
            reached += sum(weight.numel() for _, weight in given)
        elif is_linear(module):
            reason = reason_to_keep(name, module, [], head)
            if name not in decided and reason and getattr(reason, "code", "") != "kept":
                leave(name, module.weight, reason)
        elif isinstance(module, nn.modules.conv._ConvNd):
            if why := reason_without_recipe(name, module, decided):
                leave(name, module.weight, why)
        else:
            for weight, _, reason in other_weights(name, module):
                own = weight.removeprefix(f"{name}.") if weight != name else "weight"
                if f"{name}.0.{own}" not in decided:  # the first of its experts
                    leave(weight, getattr(module, own), reason_of_weight(module, reason))
    total = reached + left.total()
    if 2 * reached < total:
        leaf, elements = left.most_common(1)[0]
        warn(
            f"convert: {_percent(reached / total)} of the elements of multiplied weights got a recipe. The largest part without one is "
            f"{leaf!r}, {_percent(elements / total)}: {reasons[leaf]}. print(narrowgauge.describe(model, batch=...)) counts operations.",
            code="convert.small-share",
            stacklevel=3,
        )

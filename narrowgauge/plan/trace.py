"""Trace the allocations of a step without computing it.

Tensors are fake, and kernels allocate their outputs and run nothing. A storage is alive from the
first operation that returns it until no object holds it. The trace has the operations that torch's
dispatcher sees, one by one, as eager mode runs them. It lacks temporary memory inside kernels
(workspaces).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from narrowgauge.addresses import dry_run
from narrowgauge.errors import ConfigError
from narrowgauge.memory.saved_tensors import reporting
from narrowgauge.ops.timing.work import Work, of_kernel, of_operator
from narrowgauge.plan.autocast import narrowed, widened

if TYPE_CHECKING:
    from narrowgauge.ops.registry import Device


@dataclass
class Allocation:
    """One storage.

    number     index in Trace.allocations
    nbytes     requested size
    phase      index in Trace.phases
    module     dotted name of the module that was running
    operation  operator that created it
    part       an entry of PARTS, or '' if unknown
    """

    number: int
    nbytes: int
    phase: int
    module: str
    operation: str
    part: str = ""


@dataclass
class Trace:
    """Allocations and frees in order.

    allocations  by number
    events       n: allocation number n begins; ~n: it ends
    phases       (index in events, name) of each phase
    work         operations in order, with the index of their phase
    """

    allocations: list[Allocation] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=lambda: [(0, "")])
    work: list[Work] = field(default_factory=list)

    def begin(self, phase: str) -> None:
        self.phases.append((len(self.events), phase))

    def by_phase(self) -> Iterator[tuple[str, list[int]]]:
        """Yield (name, events) of each phase."""
        ends = [place for place, _ in self.phases[1:]] + [len(self.events)]
        for (start, name), end in zip(self.phases, ends, strict=True):
            yield name, self.events[start:end]


class Recorder:
    """Fills a trace while `recording` is active."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.modules: list[str] = [""]
        self.names: dict[nn.Module, str] = {}
        self.is_forward = False
        self._numbers: dict[int, int] = {}  # {address of a storage: its number}

    def saw(self, tensor: Tensor, operation: str) -> None:
        """Record the storage of a tensor that an operation returned, if it is new."""
        storage = tensor.untyped_storage()
        place = storage._cdata
        # A meta tensor only carries a shape.
        if place in self._numbers or tensor.device.type == "meta":
            return
        trace = self.trace
        number = len(trace.allocations)
        self._numbers[place] = number
        trace.allocations.append(
            Allocation(number, storage.nbytes(), len(trace.phases) - 1, self.modules[-1], operation)
        )
        trace.events.append(number)
        # The finalizer runs as soon as the last tensor on the storage is gone, as the allocator's
        # free does.
        weakref.finalize(storage, self._freed, place, number)

    def _freed(self, place: int, number: int) -> None:
        self.trace.events.append(~number)
        self._numbers.pop(place, None)

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
        """Record a call of a torch operator."""
        if (work := of_operator(len(self.trace.phases) - 1, func, args, kwargs, found)) is not None:
            self.trace.work.append(work)

    def launched(self, kernel: str, tensors: Iterable[Tensor]) -> None:
        """Record a launch of a narrowgauge kernel."""
        self.trace.work.append(of_kernel(len(self.trace.phases) - 1, kernel, tensors))

    def begin(self, phase: str, is_forward: bool = False) -> None:
        self.is_forward = is_forward
        self.trace.begin(phase)

    def alive(self) -> set[int]:
        return set(self._numbers.values())

    def name(self, part: str, tensors: Iterable[Tensor | None]) -> None:
        """Label the storages of the tensors with a part."""
        for tensor in tensors:
            if (
                tensor is not None
                and (number := self._numbers.get(tensor.untyped_storage()._cdata)) is not None
            ):
                self.trace.allocations[number].part = part


GROUPED_MM = (
    {torch.ops.aten._grouped_mm.default} if hasattr(torch.ops.aten, "_grouped_mm") else set()
)


def _grouped_mm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """GEMM of fused experts in the dtype of its operands; CPU and GPU compute it in float32 too.

    torch's own fake implementation refuses all dtypes but bfloat16 (torch 2.13,
    _meta_registrations.py), so it provides only the shape.
    """
    names = ("self", "mat2", "offs", "bias", "out_dtype")
    given = dict(zip(names, args, strict=False)) | kwargs
    lhs, rhs = given["self"], given["mat2"]
    if lhs.dtype != rhs.dtype:
        raise ConfigError(
            f"plan: grouped_mm: its operands are {lhs.dtype} {list(lhs.shape)} and {rhs.dtype} {list(rhs.shape)}, of two types. Cast one.",
            code="plan.grouped-mm",
        )
    narrow = {"self": lhs.to(torch.bfloat16), "mat2": rhs.to(torch.bfloat16), "out_dtype": None}
    form = torch.ops.aten._grouped_mm.default(**(given | narrow))
    return torch.empty_strided(
        form.shape, form.stride(), dtype=given.get("out_dtype") or lhs.dtype, device=lhs.device
    )


class _Dispatch(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not wrap `__torch_dispatch__` against tracing.

        Nothing is compiled here, and the wrapper takes a tenth of the time.
        """
        return False

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        try:
            found = _grouped_mm(args, kwargs) if func in GROUPED_MM else func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ConfigError(
                f"plan: {self.recorder.modules[-1] or 'the model'} reads the values of a tensor ({name}, as .item(), int(x), x[mask] or "
                "`if x > 0` do), and a plan has shapes alone. Let an argument or a shape decide there instead.",
                code="plan.reads-values",
            ) from error
        except UnsupportedOperatorException as error:
            raise ConfigError(
                f"plan: {self.recorder.modules[-1] or 'the model'} calls {name}, of which torch does not know what it returns without "
                "computing it. Register a fake implementation (torch.library.register_fake).",
                code="plan.no-fake",
            ) from error
        for each in tree_leaves(found):
            if isinstance(each, Tensor):
                self.recorder.saw(each, name)
        self.recorder.ran(func, args, kwargs, found)
        return found


class _OnDevice(TorchFunctionMode):
    """Emulate the device's attention kernel and a GPU's autocast for fake tensors.

    Attention is one kernel that saves its output and a number per row. Fake tensors would decompose
    it into GEMMs.
    """

    def __init__(self, device: Device) -> None:
        self.on_gpu = device.type == "cuda"
        self.attention = _on_gpu if self.on_gpu else _on_cpu

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            args, kwargs = narrowed(args, kwargs)
            return self.attention(*args, **kwargs)
        # A mode is inactive inside of a function that it intercepts, but checkpointing recomputes
        # there.
        if func is Tensor.backward:
            with self:
                return _backward(*args, **kwargs)
        if self.on_gpu:
            args, kwargs = widened(func, args, kwargs)
        return func(*args, **kwargs)


def _backward(
    loss: Tensor, gradient: Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = ()
) -> None:  # fmt: skip
    """Tensor.backward without torch.autograd.backward.

    The mode would intercept that function too, and be inactive inside.
    """
    seed = torch.ones_like(loss) if gradient is None else gradient
    keep = create_graph if retain_graph is None else retain_graph
    run = torch.autograd.graph._engine_run_backward
    run(
        (loss,),
        (seed,),
        keep,
        create_graph,
        tuple(inputs or ()),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _on_gpu(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    # Flash attention takes 16-bit inputs without a mask, memory-efficient attention the rest.
    if query.dtype in (torch.bfloat16, torch.float16) and attn_mask is None:
        found: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
        return found
    needs = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        if attn_mask.dtype == torch.bool:
            attn_mask = attn_mask.to(query.dtype)
    if enable_gqa and key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        # This kernel has no grouped queries, so keys and values are repeated, as torch does.
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    found = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs, dropout_p, is_causal, scale=scale
    )[0]
    return found


def _on_cpu(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    # The CPU decomposes these cases too.
    if dropout_p or (attn_mask is not None and attn_mask.requires_grad):
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # The CPU kernel takes additive masks only.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
            ~attn_mask, -torch.inf
        )
    found: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return found


class _Converter(FakeTensorConverter):
    """Keeps no weak references to fake tensors, so that `model.to(dtype)` can swap parameters.

    torch refuses to swap a tensor that has a weak reference. The references would only save a
    second fake tensor for the same meta tensor, and each operator creates meta tensors of its own.
    """

    def set_tensor_memo(self, t: Tensor, v: FakeTensor) -> None:
        pass


def _fake_mode() -> FakeTensorMode:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.fake_tensor_converter = _Converter(copy_data=False, export=False)
    return mode


@contextmanager
def recording(device: Device) -> Iterator[Recorder]:
    """Record allocations. Tensors that are created inside are fake, on the pretended `device`."""
    recorder = Recorder()

    def enter(module: nn.Module, arguments: Any) -> None:
        # A module without a name, e.g. in the loss, counts as its caller.
        recorder.modules.append(recorder.names.get(module) or recorder.modules[-1])

    def leave(module: nn.Module, arguments: Any, output: Any) -> None:
        recorder.modules.pop()

    with ExitStack() as stack:
        stack.enter_context(_fake_mode())
        stack.enter_context(dry_run(device, recorder.launched))
        # States of random generators are real tensors.
        stack.enter_context(reporting(lambda tensor: recorder.saw(tensor, "note")))
        stack.callback(register_module_forward_pre_hook(enter).remove)
        # always_call keeps the stack of names balanced if a forward raises.
        stack.callback(register_module_forward_hook(leave, always_call=True).remove)
        stack.enter_context(_OnDevice(device))
        # Entered after the fake mode, so it sees every operator, and the fake mode computes its
        # results.
        stack.enter_context(_Dispatch(recorder))
        yield recorder

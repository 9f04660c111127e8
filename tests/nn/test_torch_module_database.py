"""The checks of PyTorch's TestModule on every module of its database that `convert` changes (exact; forward and gradients bounded).

PyTorch keeps arguments and inputs of its modules in `common_modules.module_db`; the checks themselves (test/test_modules.py) are not
in its wheel, and are written here for layers whose products are rounded. REFUSED lists the ones that end in a sentence.

Left out, since the database marks them so for these modules, or since they need a second device: test_memory_format,
test_cpu_gpu_parity, test_multiple_device_transfer (moved to meta and back here), test_check_inplace.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.conversion import kept_layers
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.nn.embedding import QEmbedding
from narrowgauge.nn.linear import QLinear
from tests.compare import assert_same, sqnr_db
from tests.torch_databases import torch_databases

pytestmark = pytest.mark.slow  # the import of the database alone takes 4 s

RECIPES = ("fp8-current", "fp8-delayed", "int8", "int4-hq-lss", "nvfp4", "bf16")
FOUR_BITS = ("int4-hq-lss", "nvfp4")
# Those that convert changes, if layers of any size are converted.
CHANGED = (
    "nn.Embedding", "nn.Linear", "nn.Transformer", "nn.TransformerDecoderLayer", "nn.TransformerEncoder",
    "nn.TransformerEncoderLayer",
)  # fmt: skip
SINGLE = ("nn.Embedding", "nn.Linear")
# Modules of the database that hold an nn.Linear, and read its weight without calling it: convert leaves them as they are.
UNCHANGED = {
    "nn.LinearCrossEntropyLoss", "nn.MultiheadAttention", "nn.AdaptiveLogSoftmaxWithLoss", "ao.nn.qat.Linear",
    "ao.nn.quantizable.MultiheadAttention", "ao.nn.quantizable.LSTM", "ao.nn.quantizable.LSTMCell", "nn.LazyLinear",
}  # fmt: skip


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of the database have 3 to 10 features, and `convert` leaves those below 16 as they are."""
    monkeypatch.setattr(kept_layers, "SMALLEST", 1)


def infos() -> dict[str, Any]:
    return {info.name: info for info in torch_databases()[0].module_db}


class Case:
    """One entry of the database: a module, converted, and what it is called with."""

    def __init__(self, info: Any, entry: Any, recipe: str, dtype: torch.dtype) -> None:
        self.info, self.entry, self.recipe, self.dtype = info, entry, recipe, dtype
        self.args, self.named = entry.forward_input.args, entry.forward_input.kwargs

    def plain(self) -> nn.Module:
        torch.manual_seed(1)
        given = self.entry.constructor_input
        named = dict(given.kwargs)
        if "dtype" not in named and self.info.name not in ("nn.TransformerEncoder",):
            named["dtype"] = self.dtype
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of TransformerEncoder, that it will not use nested tensors
            return self.info.module_cls(*copy.deepcopy(given.args), **named).to(self.dtype)

    def module(self) -> nn.Module:
        return convert(self.plain(), self.recipe)

    def call(self, module: nn.Module, args: Any = None, named: Any = None) -> Any:
        torch.manual_seed(7)  # dropout, and rounding that draws
        return module(
            *(self.args if args is None else args), **(self.named if named is None else named)
        )


def convert(module: nn.Module, recipe: str) -> nn.Module:
    """In place; of a module alone too, which convert does not take."""
    has_rows = any(type(each) is nn.Embedding for each in module.modules())
    model = nn.Sequential(module, nn.Linear(16, 16))
    ng.convert(model, recipe, embeddings="int8" if has_rows else None)
    return model[0]


def cases(name: str, recipe: str, dtype: torch.dtype = torch.float32) -> Iterator[Case]:
    """All entries of a module; of those that hold many layers, which have up to 72, some four."""
    info = infos()[name]
    for training in (True, False):
        torch.manual_seed(3)
        entries = info.module_inputs_func(
            info, device="cpu", dtype=dtype, requires_grad=False, training=training
        )
        for entry in entries if name in SINGLE else entries[:: max(len(entries) // 2, 1)]:
            yield Case(info, entry, recipe, dtype)


def outputs(y: Any) -> Tensor:
    return y[0] if isinstance(y, tuple) else y


def gradients(module: nn.Module, y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    gy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(5))
    return list(torch.autograd.grad(y, [*module.parameters(), *inputs], gy, materialize_grads=True))


# --- the checks of TestModule


def forward(case: Case) -> None:
    """Against the definition that the database has of it, and of nothing but the module's own if it has none."""
    module = case.module()
    y = outputs(case.call(module))
    assert y.dtype == case.dtype and y.isfinite().all()
    want = outputs(case.call(case.plain()))
    assert y.shape == want.shape
    if case.info.name in SINGLE:  # others have norms and sums behind: nothing is derived for them
        assert sqnr_db(want.double(), y.double()) > (4 if case.recipe in FOUR_BITS else 15)
    with ng.suspended(module):
        torch.testing.assert_close(outputs(case.call(module)), want)


def factory_kwargs(case: Case) -> None:
    if not isinstance(case.plain(), nn.Linear):
        return
    given = case.entry.constructor_input
    for device, dtype in (("meta", torch.float32), ("cpu", torch.float64), ("cpu", torch.bfloat16)):
        layer = QLinear(*given.args, **given.kwargs, device=device, dtype=dtype, recipe=case.recipe)
        assert {(each.device.type, each.dtype) for each in (layer.weight,)} == {(device, dtype)}
        assert {each.device.type for each in (*layer.parameters(), *layer.buffers())} == {device}
    with torch.device("meta"):
        layer = QLinear(*given.args, **given.kwargs, recipe=case.recipe)
    assert all(each.is_meta for each in (*layer.parameters(), *layer.buffers()))


def representation(case: Case) -> None:
    assert case.recipe in repr(case.module()) or "learned step" in repr(case.module())


def pickled(case: Case) -> None:
    module = case.module()
    y = outputs(case.call(copy.deepcopy(module)))
    again = pickle.loads(pickle.dumps(module))
    assert type(again) is type(module)
    assert_same(outputs(case.call(again)).detach(), y.detach())


def saved_and_loaded(case: Case) -> None:
    """The module as a whole, and its state in a module of the same class, also by `assign`."""
    module = case.module()
    y = outputs(case.call(copy.deepcopy(module))).detach()
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    assert_same(outputs(case.call(torch.load(file, weights_only=False))).detach(), y)
    for assign in (False, True):
        other = case.module()
        with torch.no_grad():
            for each in other.parameters():
                each.add_(1)
        other.load_state_dict(module.state_dict(), assign=assign)
        assert_same(outputs(case.call(other)).detach(), y)


def deep_copied(case: Case) -> None:
    module = case.module()
    copied = copy.deepcopy(module)
    assert not {id(each) for each in copied.parameters()} & {
        id(each) for each in module.parameters()
    }
    assert_same(outputs(case.call(copied)).detach(), outputs(case.call(module)).detach())


def non_contiguous(case: Case) -> None:
    """Inputs that lie in memory in other ways give the same numbers and gradients."""

    def spread(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.ndim == 0 or x.numel() < 2:
            return x
        wide = x.detach().new_zeros((*x.shape, 2))
        wide[..., 0] = x.detach()
        return wide[..., 0].requires_grad_(x.requires_grad)

    for way in (
        spread,
        lambda x: x.detach().T.contiguous().T.requires_grad_(x.requires_grad) if x.ndim == 2 else x,
    ):
        found = []
        for args in (
            case.args,
            [way(each) if isinstance(each, Tensor) else each for each in case.args],
        ):
            module = case.module().train()
            y = outputs(case.call(module, args))
            inputs = [each for each in args if isinstance(each, Tensor) and each.requires_grad]
            found.append([y.detach(), *gradients(module, y, inputs)])
        torch.testing.assert_close(found[1], found[0])


def grad(case: Case) -> None:
    """gradcheck inside `suspended`; outside the gradients are finite, and near those of the module before it was converted."""
    module = case.module().double()
    floats = tuple(
        each.detach().double().requires_grad_() if each.is_floating_point() else each
        for each in case.args
    )
    named = {
        key: each.double() if isinstance(each, Tensor) and each.is_floating_point() else each
        for key, each in case.named.items()
    }
    weights = [
        each for each in module.parameters() if each.dtype == torch.float64
    ]  # learned steps are float32

    def function(*tensors: Tensor) -> Any:
        return outputs(case.call(module, tensors[: len(floats)], named))

    with ng.suspended(module):
        assert torch.autograd.gradcheck(
            function, (*floats, *weights), fast_mode=True, check_undefined_grad=False
        )
    y = function(*floats)
    found = gradients(module, y, [])
    assert all(each.isfinite().all() for each in found)
    if isinstance(module, nn.Linear):
        plain = case.plain().double()
        want = gradients(plain, outputs(case.call(plain, floats, named)), [])
        for one, other in zip(want, found, strict=False):  # further ones are those of learned steps
            assert sqnr_db(one, other) > (3 if case.recipe in FOUR_BITS else 15)


def gradgrad(case: Case) -> None:
    module = case.module()
    y = outputs(case.call(module))
    weight = next(
        each.weight for each in module.modules() if isinstance(each, QLinear | QEmbedding)
    )
    torch.autograd.grad(y.square().sum(), weight, create_graph=True)


def train_and_eval_differ(case: Case) -> None:
    """Only by what the module itself does: none of these has dropout above 0."""
    if any(isinstance(each, nn.Dropout) and each.p for each in case.plain().modules()):
        return
    found = [outputs(case.call(case.module().train(mode))).detach() for mode in (True, False)]
    torch.testing.assert_close(found[0], found[1])


def to_empty(case: Case) -> None:
    """To meta and back: memory without numbers, then those of another module."""
    module, like = case.module(), case.module()
    want = outputs(case.call(copy.deepcopy(like))).detach()
    moved = module.to("meta").to_empty(device="cpu")
    assert all(not each.is_meta for each in (*moved.parameters(), *moved.buffers()))
    moved.load_state_dict(like.state_dict())
    assert_same(outputs(case.call(moved)).detach(), want)


def cast_to_other_types(case: Case) -> None:
    module = case.module()
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        module.to(dtype)
        assert {
            each.dtype for name, each in module.named_parameters() if ".steps." not in f".{name}"
        } == {dtype}
        y = outputs(
            case.call(module, [_to(each, dtype) for each in case.args], _all_to(case.named, dtype))
        )
        assert y.dtype == dtype and y.isfinite().all()


def _to(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _all_to(named: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {key: _to(each, dtype) for key, each in named.items()}


CHECKS: tuple[Callable[[Case], None], ...] = (
    forward, factory_kwargs, representation, pickled, saved_and_loaded, deep_copied, non_contiguous, grad, gradgrad,
    train_and_eval_differ, to_empty, cast_to_other_types,
)  # fmt: skip
# Check -> the words in which it is refused.
REFUSED = {
    "gradgrad": r"has no second derivatives, and create_graph=True asks for them. Compute inside `with narrowgauge"
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_modules_of_torchs_database(check: Callable[[Case], None], name: str, recipe: str) -> None:
    found = list(cases(name, recipe))
    assert found
    for case in found:
        if (words := REFUSED.get(check.__name__)) is None:
            check(case)
        else:
            with pytest.raises(NarrowgaugeError, match=words):
                check(case)


def test_the_table_has_all_modules_that_convert_changes() -> None:
    changed = set()
    for name, info in infos().items():
        if name in UNCHANGED or info.is_lazy:
            continue
        for case in cases(name, "fp8-current"):
            module = case.plain() if name in CHANGED else _built(case)
            before = {id(each): type(each) for each in module.modules()}
            if any(isinstance(each, nn.Linear | nn.Embedding) for each in module.modules()):
                convert(module, "fp8-current")
            if any(before.get(id(each)) is not type(each) for each in module.modules()):
                changed.add(name)
                break
    assert changed == set(CHANGED)


def _built(case: Case) -> nn.Module:
    given = case.entry.constructor_input
    return case.info.module_cls(*copy.deepcopy(given.args), **given.kwargs)


@pytest.mark.parametrize("codes", [None, "int8"])
def test_errors_of_embeddings_are_those_of_torch(codes: str | None) -> None:
    """The class and the words of the database."""
    info = infos()["nn.Embedding"]
    entries = info.module_error_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
    )
    assert entries
    for entry in entries:
        given, called = (
            entry.module_error_input.constructor_input,
            entry.module_error_input.forward_input,
        )
        with pytest.raises(entry.error_type, match=entry.error_regex):
            module = info.module_cls(*given.args, **given.kwargs)
            module = convert(module, "bf16") if codes else module
            module(*called.args, **called.kwargs)

"""Determine numerically which known function a module computes (`ops.norm_act`, `ops.rotary`).

The module runs on random inputs in float32, without gradients, and its result is compared with the
definition. The tolerance is 1e-5 of the row's maximum; rotary embeddings must be bit-identical.
Some inputs are small, so that the eps under a norm's root matters. The module is in training mode,
so that its own dropout shows.

A norm's weights and an MLP's Linears are replaced by known tensors meanwhile. Meta and fake models
can therefore be probed too. Random generators and training modes are restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from narrowgauge.addresses import holds_numbers
from narrowgauge.fuse.rotary import NAME
from narrowgauge.ops import rng, rotary
from narrowgauge.ops.norm_act import Kind, value
from narrowgauge.ops.norm_act.spec import Activation, Gated

# Relative to the largest magnitude of a row.
TOLERANCE = 1e-5


def _with_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function to run on real tensors, even under FakeTensorMode."""

    @wraps(function)
    def call(*given: Any) -> Any:
        with _disable_current_modes():
            return function(*given)

    return call


@contextmanager
def _temporary_attributes(module: nn.Module, found: dict[str, Any]) -> Iterator[None]:
    """Set instance attributes with the given names, and remove them at the end.

    Python finds them before parameters and submodules, which nn.Module serves by `__getattr__`.
    """
    module.__dict__.update(found)
    try:
        yield
    finally:
        for name in found:
            del module.__dict__[name]


@_with_real_tensors
def kind_of(module: nn.Module) -> Kind | str:
    """Return the Kind of a norm or an activation, or the reason why it is none."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, nn.Parameter) and weight.ndim == 1:
        return _norm(module, weight)
    if any(True for _ in module.parameters()) or any(True for _ in module.children()):
        return f"a {type(module).__name__} is neither a norm nor an activation"
    x = torch.linspace(-6, 6, 97)[None]
    kinds = (Kind(name) for name in get_args(Activation))
    found = next((kind for kind in kinds if _computes(module, kind, (x,), x)), None)
    return found or f"a {type(module).__name__} computes none of {', '.join(get_args(Activation))}"


def _norm(module: nn.Module, weight: nn.Parameter) -> Kind | str:
    bias = getattr(module, "bias", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float):
        return f"a {type(module).__name__} does not say its eps"
    kinds = [
        Kind(name, eps)
        for name in (("rms-norm", "gemma-norm") if bias is None else ("layer-norm",))
    ]
    generator = torch.Generator().manual_seed(0)
    # Rows of size 1e-3 and 1e-2: there the eps under the root changes the result.
    x = torch.randn(4, len(weight), generator=generator) * torch.tensor(
        [[1.0], [1e-3], [30.0], [1e-2]]
    )
    # A nonzero mean distinguishes LayerNorm from RMSNorm.
    x = x + (0.1 if bias is not None else 0.0) * x.abs().amax(1, keepdim=True)
    # Meta and fake weights have no data: probe on the CPU instead.
    device = weight.device if holds_numbers(weight) else "cpu"
    names = ("weight",) if bias is None else ("weight", "bias")
    known = {name: 1 + 0.1 * torch.randn(len(weight), generator=generator) for name in names}
    x, known = x.to(device), {name: each.to(device, weight.dtype) for name, each in known.items()}
    with _temporary_attributes(module, known):
        found = next(
            (kind for kind in kinds if _computes(module, kind, (x, *known.values()), x)), None
        )
    return found or f"a {type(module).__name__} computes something else"


@_with_real_tensors
def gated_kind_of(mlp: nn.Module, gate: str, up: str, down: str) -> Kind | str:
    """Return the Kind of a gated MLP, or the reason why it is none.

    gate, up, down  names of its Linears
    """
    generator = torch.Generator().manual_seed(0)
    g, u = (4 * torch.randn(3, 33, generator=generator) for _ in range(2))
    fake_linears = {
        gate: _FakeLinear(lambda x: g),
        up: _FakeLinear(lambda x: u),
        down: _FakeLinear(lambda x: x),
    }
    with _temporary_attributes(mlp, fake_linears):
        kinds = (Kind(name) for name in get_args(Gated))
        found = next(
            (kind for kind in kinds if _computes(mlp, kind, (g, u), torch.zeros(3, 33))), None
        )
    functions = ", ".join(Kind(name).activation for name in get_args(Gated))
    return found or f"a {type(mlp).__name__} does not multiply one of {functions} of {gate} by {up}"


@dataclass(frozen=True)
class _FakeLinear:
    """Stand-in for a Linear. It has a `weight`, since T5 checks the dtype of its Linears' weights."""

    function: Callable[[Tensor], Tensor]
    weight: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)


@_with_real_tensors
def refuse_rotary(function: Callable[..., Any]) -> str | None:
    """Return the reason why `function` is not the rotary embedding of `ops.rotary`, or None."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (3, 1))
    cos, sin = (torch.randn(2, 5, 8, generator=generator) for _ in range(2))
    found = _result(function, q, k, cos, sin)
    # float32 and the same operations: exact equality is required.
    expected = rotary.reference(q, k, cos, sin, (torch.float32, torch.float32), inverse=False)
    same = isinstance(found, tuple) and len(found) == 2 and all(map(torch.equal, found, expected))
    return None if same else f"its {NAME} computes something else"


def _computes(module: nn.Module, kind: Kind, tensors: tuple[Tensor, ...], x: Tensor) -> bool:
    """Return True if module(x) equals the function `kind` of `tensors`."""
    modes = [(each, each.training) for each in module.modules()]
    # A dropout inside the module changes its training result, which rules it out.
    module.train()
    found = _result(module.forward, x)
    for each, training in modes:
        each.training = training
    if not isinstance(found, Tensor) or found.shape != x.shape:
        return False
    expected = value(kind, tensors).to(torch.float32)
    size = expected.abs().amax(-1, keepdim=True)
    return bool(((found.to(torch.float32) - expected).abs() <= TOLERANCE * size).all())


@torch.no_grad()
def _result(function: Callable[..., Any], x: Tensor, *more: Tensor) -> Any:
    """Call the function without gradients; return None if it raises."""
    devices = [x.device] if x.is_cuda else []
    with rng.preserved(devices), torch.autocast(x.device.type, enabled=False):
        try:
            return function(x, *more)
        except Exception:
            return None

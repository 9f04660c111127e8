"""The grouped Linear of a mixture of experts: one parameter [E, N, K], one product for each expert.

    T tokens, k experts for each; S = T k rows, sorted by expert, n_e of them for expert e
    x [S, K], w [E, N, K], b [E, N]

    output       y_e  = x_e  @ w_e.T + b_e     [n_e, N]
    grad_input   gx_e = gy_e @ w_e             [n_e, K]
    grad_weight  gw_e = gy_e.T @ x_e           [N, K]; zero for an expert without rows

Each w_e is an ExpertLinear: a QLinear whose weight is a view of the parameter. It has the recipe,
the caches and the state of its expert, so a recipe with one scale per tensor has one per expert.
Everything that holds for a QLinear holds for it: a loop over experts has the result of a loop over
QLinears, bit for bit. Gate and up projection are one product where the model fuses them, and x is cast once.

An expert without rows is not called: it casts nothing, and its amax histories stay as they are.

`route` sorts by expert, then by place in the top k, then by token. `gather` and `combine` add the
contributions of a token's experts in the order of a loop over experts, forward from the first
expert and backward from the last one. Without a recipe the results thus equal transformers' loop
bit for bit, and no sum depends on the order of threads.

On a GPU, `grouped_function` multiplies all experts of a stack in one launch, where its kernels take
the recipe: the codes of the loop, and sums in another order. Elsewhere the products run one after
another. The host must then know the number of rows of each expert, so on a GPU it waits once per
layer for the router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.addresses import holds_numbers
from narrowgauge.nn.coded_weight import CodedWeight
from narrowgauge.nn.frozen_experts import lent_matrix
from narrowgauge.nn.grouped_function import grouped_products
from narrowgauge.nn.linear import QLinear, called_with, views_of
from narrowgauge.nn.suspended_linear import suspended_linear


@dataclass(frozen=True)
class Slice:
    """The place of one expert's matrix.

    parameters     `_parameters` of the module that holds the stack. A copy of the model copies both
                   together, and a replaced Parameter is found
    weight, bias   names in `parameters`; '' if there is no bias
    index          number of the expert
    is_transposed  the parameter is [E, K, N]
    """

    parameters: dict[str, Any]
    weight: str
    bias: str
    index: int
    is_transposed: bool

    def matrix(self, stack: Tensor) -> Tensor:
        """w_e [N, K] of the stack, or of one entry of `stack.unbind()`."""
        own = stack[self.index] if stack.ndim == 3 else stack
        return own.t() if self.is_transposed else own


class ExpertLinear(QLinear):
    """A QLinear whose weight is one matrix of a parameter [E, N, K] of another module.

    It registers no weight: the parameter belongs to the stack, and state dicts stay as they are.
    `weight` and `bias` are views, during a call of the stack those that its gradient follows.
    """

    place: Slice
    is_expert = True

    def __init__(self, place: Slice) -> None:
        nn.Module.__init__(self)
        stack = place.parameters[place.weight]
        self.place = place
        self.out_features, self.in_features = (
            stack.shape[:0:-1] if place.is_transposed else stack.shape[1:]
        )
        self._become(None)

    # In the class, so that they precede nn.Module's search for attributes.
    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        if (views := views_of(self)) is not None:
            return views[0]
        stack = self.parameter
        if type(stack) is CodedWeight and self.frozen is not None:
            return lent_matrix(self, stack)
        # A slice of a sharded stack would be gathered, and hang a rank that asks alone. A stack that
        # torch's parametrization computes is known in a pass alone. Outside of a pass only shape,
        # type and device are asked for.
        if stack is None or type(stack).__name__ == "DTensor":
            known: Any = self._neighbor() if stack is None else stack.to_local()  # type: ignore[attr-defined]
            lone: Tensor = known.detach().new_full((), torch.nan)
            return lone.expand(self.weight_shape).requires_grad_(known.requires_grad)
        return self.place.matrix(stack)

    @property
    def frozen(self) -> Any:
        """Its codes; None while a parametrization (PEFT) computes the stack from them."""
        # The computed stack has what PEFT adds, and the codes have not.
        return None if self.parameter is None else self._modules.get("frozen")

    @property
    def code_source(self) -> Any:
        return self.state.gathered if self.frozen is None else self.frozen

    def _neighbor(self) -> Tensor:
        """A parameter of the same module, for its type and device."""
        held = (each for each in self.place.parameters.values() if each is not None)
        return next(held, torch.empty(0))

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        if (views := views_of(self)) is not None:
            return views[1]
        own: Tensor | None = self.place.parameters.get(self.place.bias)
        return None if own is None else own[self.place.index]

    @property
    def parameter(self) -> Tensor | None:
        stack: Tensor | None = self.place.parameters.get(self.place.weight)
        return stack

    def held_parameters(self) -> Iterator[Tensor]:
        for name in (self.place.weight, self.place.bias):
            if (own := self.place.parameters.get(name)) is not None:
                yield own

    def weight_in_memory(self) -> Tensor | None:
        return None if self.parameter is None else self.weight

    def names(self, name: str) -> tuple[str, ...]:
        """ "mlp.experts.3.down_proj" is also found as "mlp.experts" and "mlp.experts.down_proj"."""
        stack = name.rsplit(".", 2)[0] if name.count(".") > 1 else ""
        return name, stack, f"{stack}.{self.place.weight}".lstrip(".")

    def forward(self, input: Tensor) -> Tensor:
        state = self.state
        if self.frozen is not None or not (state.recipe is None or state.is_suspended):
            return super().forward(input)
        state.was_called = True
        return self.as_before(input, self.weight)

    def as_before(self, x: Tensor, weight: Tensor) -> Tensor:
        product: Callable[..., Tensor] = nn.functional.linear
        if self.state.recipe is not None:
            product = suspended_linear
        bias = self.bias
        if bias is None or not self.place.is_transposed:
            return product(x, weight, bias)
        # As models with this layout write it: the product is rounded before the bias is added.
        return product(x, weight, None) + bias

    def restore(self) -> None:
        """Nothing to turn back: the module that holds the stack drops its slices."""
        self.recipe = None


def grouped_linear(
    layers: Sequence[ExpertLinear],
    x: Tensor,
    counts: RowCounts,
    stack: Tensor,
    biases: Tensor | None,
) -> Tensor:
    """x [S, K], sorted by expert -> [S, N].

    layers  one for each expert, all of one stack
    counts  rows of each expert; further rows of x belong to no expert here and become zero
    stack   their weights as the module stores or computes them; biases [E, N] or None
    """
    for layer in layers:
        layer.state.was_called = True  # an expert without rows is idle, not bypassed
    is_transposed = layers[0].place.is_transposed
    y = grouped_products(layers, x, counts.on_device, stack, biases, is_transposed)
    return _looped(layers, x, counts.on_host, stack, biases) if y is None else y


def _looped(
    layers: Sequence[ExpertLinear],
    x: Tensor,
    counts: Sequence[int],
    stack: Tensor,
    biases: Tensor | None,
) -> Tensor:
    """`grouped_linear`, expert by expert."""
    # One gradient for the stack, from E of its matrices. Codes have none, and are read one by one.
    is_coded = type(stack) is CodedWeight
    own = [None] * len(layers) if is_coded else stack.unbind(0)
    each_bias = [None] * len(layers) if biases is None else biases.unbind(0)
    rest = x.shape[0] - sum(counts)
    *groups, last = x.split([*counts, rest])
    made = [
        called_with(layer, rows, layer.weight if each is None else layer.place.matrix(each), bias)
        for layer, rows, each, bias in zip(layers, groups, own, each_bias, strict=True)
        if rows.shape[0]
    ]
    if rest or not made:
        dtype = made[0].dtype if made else x.dtype
        made.append(last.new_zeros(rest, layers[0].out_features, dtype=dtype))
    return made[0] if len(made) == 1 else torch.cat(made)


@dataclass(frozen=True)
class RowCounts:
    """Rows of each of E experts.

    on_device  int32 [E + 1]; the last number counts the rows of experts of other ranks
    is_known   False without numbers, as in a plan: then all experts have equally many
    """

    on_device: Tensor
    is_known: bool
    rows: int

    @classmethod
    def of(cls, experts: Tensor, count: int) -> RowCounts:
        """experts: [S] integer, expert of each row; `count` and above stand for none."""
        zeros = torch.zeros(count + 1, dtype=torch.int32, device=experts.device)
        places = experts.long().clamp(max=count)
        found = zeros.scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))
        return cls(found, holds_numbers(experts), experts.shape[0])

    @classmethod
    def equal(cls, rows: int, count: int, device: torch.device) -> RowCounts:
        """Each of `count` experts has as many rows; a rest has no expert."""
        each, rest = divmod(rows, count)
        found = torch.full((count + 1,), each, dtype=torch.int32, device=device)
        found[-1:].fill_(rest)
        return cls(found, False, each * count)

    @cached_property
    def on_host(self) -> list[int]:
        """The numbers without the last one. On a GPU the host waits for them."""
        count = self.on_device.shape[0] - 1
        if not self.is_known:
            share, more = divmod(self.rows, count)
            return [share + (index < more) for index in range(count)]
        found: list[int] = self.on_device[:-1].tolist()
        return found


@dataclass(frozen=True)
class Routing:
    """Rows sorted by expert.

    order   [S] int64, place of each row in the top k, counted through [k, T]
    tokens  [S] int64, token of each row
    rows    [k, T] int64, rows of each token, in the order of their experts
    counts  rows of each expert; the rest have an expert of another rank
    """

    order: Tensor
    tokens: Tensor
    rows: Tensor
    counts: RowCounts

    @classmethod
    def of(cls, experts: Tensor, count: int) -> Routing:
        """experts: [T, k] integer, expert of each place; `count` and above stand for none."""
        tokens, places = experts.shape
        flat = experts.t().reshape(-1)
        order = flat.argsort(stable=True)
        rows = torch.empty_like(order)
        rows[order] = torch.arange(order.shape[0], device=order.device)
        rows = rows.view(places, tokens)
        # The rows of a token ascend with its experts.
        rows = rows if places == 1 else rows.sort(dim=0).values
        return cls(order, order % max(tokens, 1), rows, RowCounts.of(flat, count))

    def gather(self, x: Tensor) -> Tensor:
        """x [T, K] -> [S, K]: the token of each row."""
        found: Tensor = _Gather.apply(x, self.tokens, self.rows)
        return found

    def weights(self, weights: Tensor) -> Tensor:
        """weights [T, k] -> [S, 1]: the router's weight of each row."""
        return weights.t().reshape(-1).index_select(0, self.order).unsqueeze(-1)

    def combine(self, y: Tensor) -> Tensor:
        """y [S, K] -> [T, K]: the sum of each token's rows."""
        found: Tensor = _Combine.apply(y, self.tokens, self.rows)
        return found


class _Gather(torch.autograd.Function):
    """x [T, K] -> [S, K]. The gradient adds the rows of a token, from its last expert on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return _sum(gy, reversed(rows.unbind(0))), None, None


class _Combine(torch.autograd.Function):
    """y [S, K] -> [T, K]. Adds the rows of a token, from its first expert on."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return _sum(y, iter(rows.unbind(0)))

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        return gy.index_select(0, tokens), None, None


def _sum(y: Tensor, rows: Iterator[Tensor]) -> Tensor:
    total = y.index_select(0, next(rows))
    for each in rows:
        total = total + y.index_select(0, each)
    return total

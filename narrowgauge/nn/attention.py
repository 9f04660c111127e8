"""nn.MultiheadAttention with a recipe for each of its four projections.

    q = x_q @ w_q.T + b_q,  k = x_k @ w_k.T + b_k,  v = x_v @ w_v.T + b_v
    y = (softmax(q @ k.T / sqrt(d) + mask) @ v) @ w_o.T + b_o        d features of a head

torch holds w_q, w_k and w_v as rows of one parameter `in_proj_weight` [3 E, E], or as three if the
inputs differ in width, and multiplies all four in a function of its own. Here each is a QLinear:
`q_proj`, `k_proj`, `v_proj`, whose weights are views of those parameters, and `out_proj`. The
parameters, their names and the state dict stay. q, k and v share the casts of one input.

Attention itself is torch's kernel, or two products in the dtype of q where the weights are asked
for. Without any recipe, and suspended, torch's own forward runs.

`opened` gives every attention its projections while `convert` decides; those that got no recipe are
torch's again afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from narrowgauge.nn import experts, step_end
from narrowgauge.nn.disguised import adopt as adopt_linear
from narrowgauge.nn.linear import QLinear, called_with, views_of

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class Projection(QLinear):
    """A QLinear whose weight is a view of its attention's parameter, which it does not register.

    parameters  `_parameters` of the attention. A copy of the model copies both together, and a
                replaced Parameter is found
    index       0, 1, 2 for q, k, v
    """

    def __init__(self, attention: nn.MultiheadAttention, index: int) -> None:
        nn.Module.__init__(self)
        self.parameters_of_owner, self.index = attention._parameters, index
        # True if the three weights are rows of one parameter.
        self.is_packed = attention._qkv_same_embed_dim
        self.in_features = (attention.embed_dim, attention.kdim, attention.vdim)[index]
        self.out_features = attention.embed_dim
        self._become(None)

    # In the class, so that they precede nn.Module's search for attributes.
    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        if (views := views_of(self)) is not None:
            return views[0]
        if (own := self.parameter) is not None:
            return self.rows_of(own) if self.is_packed else own
        # torch's parametrization computes it in a pass. Outside, only shape, type and device are
        # asked for.
        held = (each for each in self.parameters_of_owner.values() if each is not None)
        known: Tensor = next(held, torch.empty(0))
        lone = known.detach().new_full((), torch.nan)
        return lone.expand(self.out_features, self.in_features).requires_grad_(known.requires_grad)

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        if (views := views_of(self)) is not None:
            return views[1]
        whole = self.parameters_of_owner.get("in_proj_bias")
        return None if whole is None else self.rows_of(whole)

    def rows_of(self, whole: Tensor) -> Tensor:
        """The layer's rows of a tensor that holds those of q, k and v."""
        return whole[self.index * self.out_features : (self.index + 1) * self.out_features]

    @property
    def parameter_name(self) -> str:
        return "in_proj_weight" if self.is_packed else f"{PROJECTIONS[self.index]}_weight"

    @property
    def parameter(self) -> Tensor | None:
        return self.parameters_of_owner.get(self.parameter_name)

    def held_parameters(self) -> Iterator[Tensor]:
        for name in (self.parameter_name, "in_proj_bias"):
            if (own := self.parameters_of_owner.get(name)) is not None:
                yield own

    def weight_in_memory(self) -> Tensor | None:
        return None if self.parameter is None else self.weight

    def restore(self) -> None:
        """Nothing to turn back: the attention drops its projections."""
        self.recipe = None


class QMultiheadAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention whose projections are QLinears.

    always_projects  True: call the projections without a recipe too, so that a count of their
                     products sees them (conversion/coverage.py)
    """

    always_projects = False

    @property
    def projections(self) -> list[QLinear]:
        return [each for each in self._modules.values() if isinstance(each, QLinear)]

    @property
    def is_narrow(self) -> bool:
        """True if a projection computes by a recipe."""
        return any(each.recipe is not None and not each.is_suspended for each in self.projections)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As nn.MultiheadAttention."""
        lacks_mask = is_causal and attn_mask is None  # torch's own error says so
        if not (self.is_narrow or self.always_projects) or query.is_nested or lacks_mask:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights,
                is_causal,
            )  # fmt: skip
        is_batched = query.dim() == 3
        # Project before anything is transposed: layers share casts of one tensor object, and a
        # transposed view would be another object for each of q, k and v.
        q, k, v = (
            self._in_batches(self._project(name, x), is_batched)
            for name, x in zip(PROJECTIONS, (query, key, value), strict=True)
        )
        q, k, v, more = self._heads(q, k, v)
        mask = _mask(attn_mask, key_padding_mask, q, k, more)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            # No kernel of torch returns the weights, so both products are made here. The scale goes
            # to q, as torch has it: float16 scores would overflow without it.
            scores = (q * math.sqrt(1 / q.shape[-1])) @ k.transpose(-2, -1)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, dropout)
            y = weights @ v
        else:
            skips = is_causal and key_padding_mask is None  # the mask is causal, says the caller
            y = F.scaled_dot_product_attention(
                q, k, v, None if skips else mask, dropout, is_causal=skips
            )
        y = y.transpose(1, 2).flatten(2)
        y = self.out_proj(y if self.batch_first or not is_batched else y.transpose(0, 1))
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if is_batched:
            return y, weights
        return y.squeeze(0), None if weights is None else weights.squeeze(0)

    def _project(self, name: str, x: Tensor) -> Tensor:
        """x [..., kdim] -> [..., E] by the projection of this name."""
        layer: Any = self._modules[name]
        if {layer.parameter_name, "in_proj_bias"} <= self._parameters.keys():
            found: Tensor = layer(x)
            return found
        return self._project_by_attributes(layer, x)

    @_disable_dynamo
    def _project_by_attributes(self, layer: Any, x: Tensor) -> Tensor:
        """Project by `in_proj_weight` and the like, read as torch's own forward reads them.

        Parametrizations, pruning, PEFT's adapters and DataParallel's replicas keep these tensors out
        of `_parameters`.
        """
        weight, bias = getattr(self, layer.parameter_name), self.in_proj_bias
        return called_with(
            layer,
            x,
            layer.rows_of(weight) if layer.is_packed else weight,
            None if bias is None else layer.rows_of(bias),
        )

    def _in_batches(self, x: Tensor, is_batched: bool) -> Tensor:
        """[B, T, E] of the layout that the user chose."""
        if not is_batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """[B, T, E] -> [B, heads, T, d]; and the number of keys that the module adds."""
        batch, more = q.shape[0], 0
        if self.bias_k is not None and self.bias_v is not None:
            # One learned key and value for all batches. No mask hides it.
            k = torch.cat([k, self.bias_k.to(k.dtype).expand(batch, 1, -1)], dim=1)
            v = torch.cat([v, self.bias_v.to(v.dtype).expand(batch, 1, -1)], dim=1)
            more += 1
        q, k, v = (
            # No -1, which is ambiguous for an empty batch.
            each.reshape(batch, each.shape[1], self.num_heads, self.head_dim).transpose(1, 2)
            for each in (q, k, v)
        )
        if self.add_zero_attn:
            k, v = (F.pad(each, (0, 0, 0, 1)) for each in (k, v))
            more += 1
        return q, k, v, more


def _mask(
    attention: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor, more: int
) -> Tensor | None:
    """The sum of both masks, added to the scores [B, heads, L, S]; None without any.

    attention  [L, S] or [B heads, L, S]; bool: True hides, else added
    padding    [B, S] or [S], as attention
    more       keys that the module added, which no mask hides
    """

    def added(mask: Tensor) -> Tensor:
        if mask.dtype == torch.bool:
            # -inf and not the lowest number: the sum of two masks must not become finite.
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -math.inf)
        return F.pad(mask.to(q.dtype), (0, more))

    found: Tensor | None = None
    if attention is not None:
        found = added(attention)
        if attention.dim() == 3:
            found = found.reshape(q.shape[0], q.shape[1], *found.shape[1:])
    if padding is not None:
        hidden = added(padding).reshape(q.shape[0], 1, 1, k.shape[-2])
        found = hidden if found is None else found + hidden
    return found


# --- Adopting, and turning back


def adopt(module: nn.MultiheadAttention) -> None:
    """Give torch's attention projections without a recipe, in place."""
    module.__class__ = QMultiheadAttention
    for index, name in enumerate(PROJECTIONS):
        module._modules[name] = Projection(module, index).train(module.training)
    # A NonDynamicallyQuantizableLinear, which only marks that torch reads its weight.
    adopt_linear(module.out_proj)


def give_back(module: QMultiheadAttention) -> None:
    """Turn it into torch's class again, in place, and drop the projections."""
    for name in PROJECTIONS:
        step_end.forget(module._modules.pop(name))
    if isinstance(module.out_proj, QLinear):
        module.out_proj.restore()
    module.__class__ = nn.MultiheadAttention  # type: ignore[assignment]


def attentions(model: nn.Module) -> Iterator[QMultiheadAttention]:
    return (each for each in model.modules() if isinstance(each, QMultiheadAttention))


def is_opened(model: nn.Module) -> bool:
    """True if a module of the model has layers for the matrices of its own parameters."""
    return any(attentions(model)) or any(experts.grouped_experts(model))


@contextmanager
def opened(model: nn.Module) -> Iterator[None]:
    """Inside the block, every attention of torch has projections, and experts have slices.

    Afterwards, those of which no layer has a recipe are as they were.
    """
    with experts.opened(model):
        for module in list(model.modules()):
            # A subclass may compute something else, and a parametrized weight is no parameter.
            if type(module) is nn.MultiheadAttention and type(module.out_proj) in (
                nn.modules.linear.NonDynamicallyQuantizableLinear, nn.Linear,
            ):  # fmt: skip
                adopt(module)
        try:
            yield
        finally:
            _close_attentions(model)


def close(model: nn.Module) -> None:
    """Turn back the modules of which no layer has a recipe."""
    experts.close(model)
    _close_attentions(model)


def _close_attentions(model: nn.Module) -> None:
    for module in list(attentions(model)):
        if all(each.recipe is None for each in module.projections):
            give_back(module)

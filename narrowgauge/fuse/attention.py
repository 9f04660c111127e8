"""Attention of transformers' models by the CPU's own kernel of `ops.attention16`.

The `forward` of an attention module looks up its attention function by a name in the configuration:

    attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, ...)

The fused module (rotary.FusedAttention) runs a copy of `forward` in which that global name is bound
to a `Lookup`. Where the lookup ends at torch's attention ("sdpa"), the kernel computes it if it
accepts the call, and torch's attention otherwise. The configuration is unchanged, so a saved model
names the attention that it had, and a model with attention="fp8" keeps that.

torch's own attention runs under torch.compile, in float32 without autocast, with a bias that is
learned (T5 in training), and on processors without AVX512-BF16.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.addresses import type_of
from narrowgauge.nn import transforms
from narrowgauge.nn.attention16 import attention16
from narrowgauge.ops.attention16 import KERNELS, Attention16Spec, AttentionFunctions
from narrowgauge.ops.dropout import Dropout
from narrowgauge.ops.registry import device_facts

NAME = "ALL_ATTENTION_FUNCTIONS"
SDPA = "sdpa"  # transformers' name of torch's attention
# Arguments of transformers' attention functions with which torch's attention is left to itself.
LEFT_TO_TORCH = ("position_bias", "cache", "softcap", "output_attentions")
Choose = Callable[[Attention16Spec], "AttentionFunctions | None"]


def looks_up(module: nn.Module) -> bool:
    """Return True if the module's class looks up its attention in `forward`, on a CPU."""
    own: Any = type(module).forward
    if not isinstance(own, types.FunctionType) or NAME not in own.__code__.co_names:
        return False
    like = next(module.parameters(), None)
    return like is not None and type_of(like.device) == "cpu" and hasattr(module, "config")


def kernel_of(spec: Attention16Spec) -> AttentionFunctions | None:
    """Return the functions of the kernel for a call, or None if torch's attention should run."""
    found = KERNELS.choose(spec).kernel
    if found.by_torch:
        return None
    functions: AttentionFunctions = found.run()
    return functions


def spec_in_memory(given: Mapping[str, Any]) -> Attention16Spec:
    """The spec of a call on fake tensors, as if they had memory.

    given  arguments of scaled_dot_product_attention, by name
    """
    q, k, v = _as_autocast_has_them(*(given[name] for name in ("query", "key", "value")))
    spec = Attention16Spec.of(q, k, v, given.get("attn_mask"))
    return replace(spec, device=replace(spec.device, wrapper=""))


@dataclass(eq=False)
class Lookup:
    """ALL_ATTENTION_FUNCTIONS with torch's attention replaced.

    own     the object that the module's file has under that name
    choose  `kernel_of`, cached
    """

    own: Any
    choose: Choose

    def get_interface(self, name: Any, default: Any) -> Any:
        return self._of(self.own.get_interface(name, default))

    def __getitem__(self, name: Any) -> Any:
        return self._of(self.own[name])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def _of(self, found: Any) -> Any:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return self.attend if found is sdpa_attention_forward else found

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attention for transformers' interface: query [batch, heads, tokens, width] -> (y, None).

        y is [batch, tokens, heads, width].
        """
        mask = _whole(attention_mask, query, key)
        if (
            not torch.compiler.is_compiling()
            and not transforms.is_active(query, key, value)
            and query.ndim == key.ndim == value.ndim == 4
            and (mask is not None or attention_mask is None)
            and not any(options.get(name) is not None and options[name] is not False for name in LEFT_TO_TORCH)
        ):  # fmt: skip
            q, k, v = _as_autocast_has_them(query, key, value)
            functions = self.choose(Attention16Spec.of(q, k, v, mask))
            scale = 1 / math.sqrt(q.shape[-1]) if scaling is None else scaling
            if (
                functions is not None
                and scale > 0
                and len(q) == len(k)
                and q.shape[1] % k.shape[1] == 0
            ):
                wanted = getattr(module, "is_causal", True) if is_causal is None else is_causal
                # A single query of a cache attends to all keys, as in torch's interface.
                causal = bool(wanted) and mask is None and q.shape[2] > 1
                if causal:
                    # Keys that no query sees: of a static cache, or appended a second time when
                    # checkpointing computes a layer again. transformers leaves them out too.
                    k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
                drawn = Dropout.drawn(dropout)
                y = attention16(
                    functions, q, k, v, mask, is_causal=causal, scale=scale, dropout=drawn
                )
                return y.transpose(1, 2), None
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **options
        )  # fmt: skip
        return found


def describe(module: nn.Module) -> str:
    """Describe the kernel that computes the attention of a module, for `Fusion.backend`."""
    native, like = KERNELS.kernels[0].name, next(module.parameters())
    asked: Any = getattr(module.config, "_attn_implementation", None) or SDPA
    if asked.startswith("narrowgauge_float32"):  # of train.attention
        return f"own code (attention is in float32 here, and {native} computes in bfloat16)"
    if asked != SDPA:
        return f"own code (the model asks for {asked!r} attention, and {native} is for {SDPA!r})"
    dtype = like.dtype
    if torch.is_autocast_enabled(like.device.type):
        dtype = torch.get_autocast_dtype(like.device.type)
    reason = _refusal(module, like, dtype)
    if not reason:
        return native
    if dtype == torch.float32 and not _refusal(module, like, torch.bfloat16):
        return f"{native} under autocast to bfloat16, own code in float32"
    return f"own code ({native}: {reason})"


def _refusal(module: Any, like: Tensor, dtype: torch.dtype) -> str:
    """Return the reason why the kernel computes no attention of the module in this dtype, or ''.

    like  a parameter of the module
    """
    keywords = (each for each in type(module).forward.__code__.co_consts if isinstance(each, tuple))
    if any("position_bias" in each for each in keywords):
        return "has no gradient of a learned bias"
    width = int(getattr(module, "head_dim", 0) or getattr(module, "attention_head_size", 64))
    device = device_facts(like.device.type, like.device.index)
    spec = Attention16Spec(device, (dtype,) * 3, width, width)
    return "; ".join(f"{refusal}" for _, refusal in KERNELS.choose(spec).refusals)


def _whole(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as [batch or 1, heads or 1, queries, keys]; None if it is something else."""
    if mask is None or mask.ndim != 4 or query.ndim != 4:
        return None
    batch, heads, queries, _ = query.shape
    fits = mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)
    fits = fits and mask.shape[2] in (1, queries) and mask.shape[3] == key.shape[2]
    fits = fits and (mask.dtype == torch.bool or mask.is_floating_point())
    return mask.expand(-1, -1, queries, -1) if fits else None


def _as_autocast_has_them(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast in its dtype, as torch casts the operands of its attention."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(each.to(dtype) for each in tensors)

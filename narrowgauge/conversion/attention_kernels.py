"""The kernel that computes a model's attention, and the reason why no faster one does.

    Attention: torch's flash in 12 calls
    Attention: torch's math in 12 calls, since dropout excludes flash
    Attention: narrowgauge's native-cpp in 12 calls    (a fused model on a CPU)
    Attention: separate products in 12 modules of LlamaAttention

torch chooses among several kernels at each call of `scaled_dot_product_attention`:

    flash, cuDNN   one pass over blocks of keys, nothing of [queries, keys] in memory
    efficient      the same, with a mask and in float32 too; slower
    math           products and a softmax, with [queries, keys] in memory

`coverage` collects the calls of one forward pass under fake tensors. Afterwards torch is asked
about stand-ins for them: uninitialized tensors of one example and of as few heads as show how keys
are shared. The choice depends on lengths, widths, dtypes, flags and on the device, not on values.

Left out: kernels of other packages, which are named by transformers' setting alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

# Kernels of torch by their number, and their order of speed.
NAMES = {
    SDPBackend.MATH.value: "math",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.CUDNN_ATTENTION.value: "cuDNN",
    SDPBackend.OVERRIDEABLE.value: "the device's own",
}
SPEED = {"math": 0, "efficient": 1}  # all others: 2
BY_TORCH = (None, "sdpa", "eager")  # settings of transformers whose calls `coverage` sees


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The facts of one call of torch's attention that its choice of a kernel depends on.

    dtype         of the operands; under autocast, autocast's
    axes          4 for [batch, heads, tokens, width]
    sharing       heads of queries for each head of keys
    width         of queries and keys; value_width: of values
    mask          (axes, dtype, whether it requires a gradient), or None
    requires      whether queries, keys and values require a gradient
    """

    device: torch.device
    dtype: torch.dtype
    axes: int
    queries: int
    keys: int
    sharing: int
    width: int
    value_width: int
    mask: tuple[int, torch.dtype, bool] | None
    dropout: float
    is_causal: bool
    enable_gqa: bool
    requires: tuple[bool, bool, bool]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> AttentionCall:
        """given: arguments of scaled_dot_product_attention, by name."""
        q, k, v = (given[name] for name in ("query", "key", "value"))
        mask: Tensor | None = given.get("attn_mask")
        device, dtype = q.device, q.dtype
        if (
            device.type != "meta"
            and torch.is_autocast_enabled(device.type)
            and dtype.is_floating_point
        ):
            dtype = torch.get_autocast_dtype(device.type)
        is_shared = q.ndim > 3 and bool(given.get("enable_gqa"))
        mask_dtype = None if mask is None else mask.dtype if mask.dtype == torch.bool else dtype
        return cls(
            device=device,
            dtype=dtype,
            axes=q.ndim,
            queries=q.shape[-2],
            keys=k.shape[-2],
            sharing=q.shape[-3] // k.shape[-3] if is_shared else 1,
            width=q.shape[-1],
            value_width=v.shape[-1],
            mask=None if mask_dtype is None else (mask.ndim, mask_dtype, mask.requires_grad),  # type: ignore[union-attr]
            dropout=float(given.get("dropout_p", 0.0)),
            is_causal=bool(given.get("is_causal")),
            enable_gqa=bool(given.get("enable_gqa")),
            requires=(q.requires_grad, k.requires_grad, v.requires_grad),
        )

    @property
    def kernel(self) -> str | None:
        """The kernel that torch chooses here; None on a device that cannot be asked."""
        if self.device.type == "meta":
            return None
        leading = (1,) * (self.axes - 3)
        sizes = (
            (*leading, self.sharing, self.queries, self.width),
            (*leading, 1, self.keys, self.width),
            (*leading, 1, self.keys, self.value_width),
        )
        q, k, v = (
            torch.empty(
                size[-self.axes :], dtype=self.dtype, device=self.device, requires_grad=needs
            )
            for size, needs in zip(sizes, self.requires, strict=True)
        )
        mask = None
        if self.mask is not None:
            axes, dtype, requires_grad = self.mask
            # Leading axes of 1: torch asks for the number of axes, and broadcasts the rest.
            size = (1,) * (axes - 2) + (self.queries, self.keys)
            mask = torch.empty(size, dtype=dtype, device=self.device, requires_grad=requires_grad)
        try:
            # Outside of autocast, whose dtype the stand-ins have already.
            with torch.enable_grad(), torch.autocast(self.device.type, enabled=False):
                chosen = torch._fused_sdp_choice(
                    q, k, v, mask, self.dropout, self.is_causal, enable_gqa=self.enable_gqa
                )
        except (RuntimeError, NotImplementedError):  # no kernel of torch has these operands
            return None
        return NAMES.get(chosen)

    def excluded(self) -> str:
        """ ", since the mask excludes flash", or '' if nothing in this call excludes a faster one."""
        found = self.kernel
        if found is None:
            return ""
        without: dict[str, dict[str, Any]] = {
            "the mask": {"mask": None} if self.mask else {},
            "dropout": {"dropout": 0.0} if self.dropout else {},
            "float32": {"dtype": torch.bfloat16} if self.dtype == torch.float32 else {},
        }
        changes = {cause: change for cause, change in without.items() if change}
        # The fewest causes first: dropping a second one would name it without need.
        several = (combinations(changes, count) for count in range(1, len(changes) + 1))
        for causes in chain.from_iterable(several):
            change = {key: value for cause in causes for key, value in changes[cause].items()}
            if (
                self.mask
                and self.mask[1] != torch.bool
                and "dtype" in change
                and "mask" not in change
            ):
                change["mask"] = (self.mask[0], torch.bfloat16, self.mask[2])
            faster = replace(self, **change).kernel
            if faster is not None and SPEED.get(faster, 2) > SPEED.get(found, 2):
                verb = "excludes" if len(causes) == 1 else "exclude"
                return f", since {' and '.join(causes)} {verb} {faster}"
        return ""


def sentence(
    model: nn.Module,
    calls: Iterable[AttentionCall],
    written_out: Iterable[nn.Module],
    in_fp8: int = 0,
    in_kernel: int = 0,
) -> str:
    """ "Attention: ...", without a full stop; '' for a model without attention.

    calls        of torch's attention, in one forward pass
    written_out  modules that multiply queries, keys and values by products of their own
    in_fp8       calls of `fp8_attention`, which are not among `calls`
    in_kernel    calls of narrowgauge's own kernel in a fused model, which are not among `calls`
    """
    parts = []
    if in_fp8:
        parts.append(
            ("FP8 by its definition in torch, backward in 16 bits, in ", in_fp8, "call", "")
        )
    if in_kernel:
        parts.append(("narrowgauge's native-cpp in ", in_kernel, "call", ""))
    for call, count in Counter(calls).items():
        named = call.kernel or "attention by a kernel that is not known"
        parts.append((f"torch's {named} in ", count, "call", call.excluded()))
    kinds = Counter(type(module).__name__ for module in written_out)
    parts += [
        ("separate products in ", count, "module", f" of {kind}") for kind, count in kinds.items()
    ]
    asked = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if not parts and asked not in BY_TORCH:
        return f"Attention: {asked}, as the model's configuration asks"
    # Calls of unequal lengths may have the same kernel for the same reason.
    merged: Counter[tuple[str, str, str]] = Counter()
    for begin, count, unit, end in parts:
        merged[begin, unit, end] += count
    said = [
        f"{begin}{count} {unit}{'s' * (count > 1)}{end}"
        for (begin, unit, end), count in merged.items()
    ]
    return f"Attention: {'; '.join(said)}" if said else ""

"""Convolutions whose kernels do not overlap: which ones these are, and their patches.

    kernel_size == stride     patch embeddings of ViT, CLIP, SigLIP and Swin; ConvNeXt's downsampling
    kernel_size 1             a Linear over the channels of each pixel, of every `stride`-th one

    y[b, :, i, j] = weight.flatten(1) @ patch[b, i, j] + bias

weight [out_channels, in_channels, *kernel_size] for one, two or three axes, without padding,
dilation or groups. Pixels behind the last whole patch are not read, as in torch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from narrowgauge.errors import Reason

KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LINEAR = "linear"  # name of the Linear that `convert` gives a convolution (nn/patches.py)


def refuse_overlap(layer: nn.Module) -> Reason | None:
    """Why the settings of a convolution make it no Linear over patches; None if they do not."""
    kind = type(layer).__name__
    if not isinstance(layer, KINDS):
        return Reason("convolution", f"{kind} is no convolution of patches")
    padding = layer.padding
    if padding != "valid" and (padding == "same" or any(padding)):
        return Reason("convolution", f"{kind} pads its input")
    if layer.groups != 1:
        return Reason("convolution", f"{kind} has {layer.groups} groups of channels")
    is_pixel = set(layer.kernel_size) == {1}
    if not is_pixel and (layer.kernel_size != layer.stride or set(layer.dilation) != {1}):
        return Reason("convolution", f"kernels of {kind} overlap or leave gaps")
    return None


def patches_of(x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """x [B, C, *lengths] -> patches [B, *counts, C * elements of the kernel], a copy."""
    if set(kernel) == {1}:
        every: Any = (..., *(slice(None, None, step) for step in stride))
        return x[every].movedim(1, -1)
    axes = len(kernel)
    counts = [length // side for length, side in zip(x.shape[2:], kernel, strict=True)]
    whole: Any = (..., *(slice(n * side) for n, side in zip(counts, kernel, strict=True)))
    pairs = [side for pair in zip(counts, kernel, strict=True) for side in pair]
    x = x[whole].reshape(*x.shape[:2], *pairs)
    # [B, C, n0, k0, n1, k1] -> [B, n0, n1, C, k0, k1]
    order = [0, *range(2, 2 + 2 * axes, 2), 1, *range(3, 3 + 2 * axes, 2)]
    return x.permute(order).flatten(1 + axes)


def as_linear(x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, ...]) -> Tensor:
    """What such a convolution computes on x [B, C, *lengths], by F.linear over patches."""
    kernel = tuple(weight.shape[2:])
    y = nn.functional.linear(patches_of(x, kernel, stride), weight.flatten(1), bias)
    return y.movedim(-1, 1)

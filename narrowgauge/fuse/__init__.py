"""fuse: norms and activations hand the Linears that read them their input already cast. `convert(model, recipe, fuse=True)`.

    before   norm writes y; q, k and v find in `nn.caches` that they read one tensor, and the first casts it
    after    the kernel that computes y casts it in the same pass, and hands the codes over with y

What is fused, found by structure in the blocks of transformers (patterns.py):

    RMSNorm, LayerNorm         before q, k, v, before gate and up, before the first Linear of an MLP
    silu(gate) * up            before down; its backward pass hands gate and up their gradients, cast
    GELU, and GELU by tanh     before the second Linear of an MLP; its backward pass hands the first one its gradient, cast
    rotary embedding           queries and keys of an attention in one kernel, forward and backward; casts nothing

Nothing is taken on a name alone: a module is fused only if it computes, on random numbers, what the kernel computes. A layer takes
what is handed over only if it reads that very tensor and its recipe asks for that very cast (`nn.caches`); else it casts for itself, as
ever. So fusing changes no number but those of the functions themselves, which a kernel rounds once where PyTorch rounds between
operations; where no kernel runs (on the CPU, under torch.compile, by a recipe that rotates) the module's own code does, and the
numbers are to the bit those without.

With delayed scaling the window of the first reader is the window of all: they see the same tensor.
"""

from __future__ import annotations

from narrowgauge.fuse.forward import Fusion
from narrowgauge.fuse.fusion import fuse, fusions, unfuse

__all__ = ["Fusion", "fuse", "fusions", "unfuse"]

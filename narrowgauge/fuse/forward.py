"""What stands in for the `forward` of a module, and what became of it in words."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from narrowgauge.nn.float32_modules import Float32Forward
from narrowgauge.ops.registry import Kernel, Registry, Spec

Save = Literal["exact", "fp8", "int8"]
OWN = "own code"


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """A function of a model that Linears read, or a rotary embedding: what became of it, in words.

    readers    the Linears that read it; of a rotary embedding none
    function   "rms-norm", "swiglu", "rotary", ...; '' where it is none of them
    backend    which kernel computes and casts it, and why no other; '' where it is not fused
    kept       what is kept for its backward pass, in words; '' where the own code decides
    reason     why it is not fused, '' if it is
    unread     casts handed over that no layer took, as a share of all; None before the first
    """

    name: str
    readers: tuple[str, ...]
    function: str = ""
    backend: str = ""
    kept: str = ""
    reason: str = ""
    unread: float | None = None

    def __str__(self) -> str:
        readers = f" -> {', '.join(self.readers)}" if self.readers else ""
        if self.reason:
            return f"{self.name}{readers}: not fused ({self.reason})"
        lost = f"; {self.unread:.0%} of its casts were read by nobody" if self.unread else ""
        kept = f"; {self.kept}" if self.kept else ""
        return f"{self.name} ({self.function}){readers}: {self.backend}{kept}{lost}"


@dataclass(eq=False)
class FusedForward:
    """Called in the place of the `forward` of `module`, whose own code runs under torch.compile and where no kernel computes.

    save    what is kept for backward (keeping.py); None: "exact" where a kernel computes, and elsewhere what the own code keeps
    kept    what stood there, of a module that computes in float32: that is its own code then
    """

    module: nn.Module
    save: Save | None = field(default=None, kw_only=True)
    kept: Float32Forward | None = field(default=None, kw_only=True)
    _kernels: dict[Hashable, Kernel[Any] | None] = field(default_factory=dict, init=False, repr=False)

    def own(self, *given: Any, **options: Any) -> Any:
        """What the module's own code computes."""
        if self.kept is not None:
            return self.kept(*given, **options)
        forward: Any = type(self.module).forward
        return forward(self.module, *given, **options)

    def kernel(self, registry: Registry[Spec], spec: Spec) -> Kernel[Spec] | None:
        """The kernel that computes; None: the module's own code does, which the definition would only repeat, unless `save` asks for it."""
        key = registry.op, spec
        if key not in self._kernels:
            found = registry.choose(spec).kernel
            self._kernels[key] = None if found.by_torch and self.save is None else found
        return self._kernels[key]

    def backend_words(self, registry: Registry[Spec], spec: Spec) -> str:
        """Which kernel computes, and why no other."""
        found = registry.choose(spec)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.refusals)
        if not found.kernel.by_torch:
            return found.kernel.name
        return f"{OWN if self.save is None else 'the definition in plain torch'} ({reasons})"

    def fusion(self, name: str, readers: tuple[str, ...]) -> Fusion:
        """What became of the function called `name`, which the `readers` read."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Without the kernels: they belong to this process."""
        return self.__dict__ | {"_kernels": {}}

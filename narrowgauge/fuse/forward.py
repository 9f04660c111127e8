"""Replacement for a module's `forward`, and the report about it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

if TYPE_CHECKING:
    from narrowgauge.nn.float32_modules import Float32Forward
    from narrowgauge.ops.registry import Device, Kernel, KernelChoice, Registry, Spec

Save = Literal["exact", "fp8", "int8"]
OWN_CODE = "own code"


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """Report about one fusable function of a model.

    name               of the module
    readers            the Linears that read its output; () for a rotary embedding
    function           "rms-norm", "swiglu", "rotary", ...; "" if not recognized
    backend            kernel that computes and quantizes it, with the reasons against faster ones;
                       "" if not fused
    saved              tensors saved for backward, in words; "" if the module's own code runs
    reason             why it is not fused; "" if it is
    unused_cast_share  share of the produced casts that no layer used; None before the first
    """

    name: str
    readers: tuple[str, ...]
    function: str = ""
    backend: str = ""
    saved: str = ""
    reason: str = ""
    unused_cast_share: float | None = None

    def __str__(self) -> str:
        readers = f" -> {', '.join(self.readers)}" if self.readers else ""
        if self.reason:
            return f"{self.name}{readers}: not fused ({self.reason})"
        lost = (
            f"; {self.unused_cast_share:.0%} of its casts were read by nobody"
            if self.unused_cast_share
            else ""
        )
        saved = f"; {self.saved}" if self.saved else ""
        return f"{self.name} ({self.function}){readers}: {self.backend}{saved}{lost}"


@dataclass(eq=False)
class FusedForward:
    """Callable in place of the `forward` of `module`.

    The module's own code runs under torch.compile, and if no kernel is available.

    module            the module whose forward is replaced
    save              form of the tensors saved for backward (saving.py); None: "exact" with a
                      kernel, else as in the module's own code
    replaced_forward  the replaced Float32Forward of a module that computes in float32; it then
                      counts as the module's own code
    """

    module: nn.Module
    save: Save | None = field(default=None, kw_only=True)
    replaced_forward: Float32Forward | None = field(default=None, kw_only=True)
    _kernels: dict[Hashable, Kernel[Any] | None] = field(
        default_factory=dict, init=False, repr=False
    )

    def module_forward(self, *given: Any, **options: Any) -> Any:
        """Run the module's own forward."""
        if self.replaced_forward is not None:
            return self.replaced_forward(*given, **options)
        # The class's forward: the instance attribute is this object.
        forward: Any = type(self.module).forward
        return forward(self.module, *given, **options)

    def kernel(self, registry: Registry[Spec], spec: Spec) -> Kernel[Spec] | None:
        """Return the kernel for `spec`, cached; None if the module's own code should run.

        The plain torch definition counts as a kernel only if `save` is set: else it would merely
        repeat the module's own code.
        """
        key = registry.op, spec
        if key not in self._kernels:
            # Cached: `choose` evaluates the refusals of every kernel, too slow for each call.
            found = self._choose(registry, spec).kernel
            self._kernels[key] = None if found.by_torch and self.save is None else found
        return self._kernels[key]

    def _choose(self, registry: Registry[Spec], spec: Spec) -> KernelChoice[Spec]:
        """Choose a kernel; on a CPU the definition if `save` is set.

        A recomputed result must have the bits of the forward pass, and the kernels of a CPU refuse
        the casts of either.
        """
        device: Device = spec.device  # type: ignore[attr-defined]
        by_definition = self.save is not None and device.type == "cpu"
        return registry.choose(spec, registry.kernels[-1].name if by_definition else None)

    def describe_backend(self, registry: Registry[Spec], spec: Spec) -> str:
        """Describe the chosen kernel, or the reasons why none was chosen."""
        found = self._choose(registry, spec)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.refusals)
        if not found.kernel.by_torch:
            return found.kernel.name
        return f"{OWN_CODE if self.save is None else 'the definition in plain torch'} ({reasons})"

    def fusion(self, name: str, readers: tuple[str, ...]) -> Fusion:
        """Return the report about this function.

        name     dotted name of the module
        readers  dotted names of the Linears that read it
        """
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Drop the cached kernels, which belong to this process."""
        return self.__dict__ | {"_kernels": {}}

"""PyTorch transforms around a layer with a recipe: torch.fx is supported, others raise an error.

    torch.fx.symbolic_trace    the layer is a leaf of the graph, as nn.Linear is
    all others                 TransformError, with the way to compute or trace without the recipe:
                               torch.func, jit.trace, jit.script, make_fx, forward-mode AD, vmap
                               over backward, second derivatives, torch.ao.quantization

A recipe rounds, so its derivative is a convention (straight-through) that only its own backward
implements. It draws noise and updates amax histories on the host, which a trace would record as
constants. Imported on the first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from narrowgauge.errors import ShapeError, TransformError

if TYPE_CHECKING:
    from narrowgauge.recipe import Recipe

_SUSPENDED = "`with narrowgauge.suspended(model):`"
_KEYS = torch._C._TorchDispatchModeKey


def is_active(*inputs: object) -> bool:
    """True if a torch transform other than torch.compile surrounds a call with these inputs."""
    c = torch._C
    if (
        c._are_functorch_transforms_active()
        or c._is_tracing()
        or c._get_dispatch_mode(_KEYS.PROXY) is not None
    ):
        return True
    return forward_ad._current_level >= 0 or not all(isinstance(each, Tensor) for each in inputs)


def refuse_active(
    recipe: Recipe | None, what: str = "linear", rule: str = "a recipe", **operands: Tensor | None
) -> None:
    """Raise TransformError if an unsupported transform is active.

    recipe    of the layer; None if its forward pass draws noise or changes state
    what      name of the function in the message
    rule      "a recipe", or another cause, in the message
    operands  name -> tensor
    """
    if torch._C._are_functorch_transforms_active():
        raise TransformError(
            f"{what}: {rule} has no rule for transforms of torch.func (grad, vmap, jvp, ...). Use torch.autograd, or compute "
            f"inside {_SUSPENDED}.",
            code="transform.functorch",
        )
    if torch._C._is_tracing():
        raise TransformError(
            f"{what}: torch.jit.trace cannot record {rule}. Use torch.export, or trace inside {_SUSPENDED}.",
            code="transform.jit-trace",
        )
    if forward_ad._current_level >= 0:
        for name, tensor in operands.items():
            if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
                raise TransformError(
                    f"{what}: {rule} has no rule for forward-mode AD, and {name} has a tangent. Use backward, or compute inside "
                    f"{_SUSPENDED}.",
                    code="transform.forward-mode",
                )
    proxies, functional = (
        torch._C._get_dispatch_mode(key) for key in (_KEYS.PROXY, _KEYS.FUNCTIONAL)
    )
    # AOTAutograd traces in functional mode, with the weights as graph inputs. The graph is right
    # unless a call also depends on random numbers or state.
    if (proxies is not None and functional is None) or (
        functional is not None and (recipe is None or _changes(recipe))
    ):
        raise TransformError(
            f"{what}: make_fx would record the noise, casts and amax of one call as constants of its graph. Use torch.export or "
            f"torch.compile, or trace inside {_SUSPENDED}.",
            code="transform.make-fx",
        )


def _changes(recipe: Recipe) -> bool:
    """True if two calls with equal tensors may differ: the recipe draws noise or has state."""
    gemms = recipe.gemms().values()
    casts = [cast for gemm in gemms for cast in (gemm.lhs, gemm.rhs) if cast is not None]
    draws = any(cast.draws for cast in casts) or any(gemm.rotate is not None for gemm in gemms)
    return draws or recipe.has_state


def leaf(layer: nn.Module, x: Any) -> Any:
    """Record the call of a layer as one node for torch.fx.symbolic_trace.

    x  the layer's input, which is not a tensor

    Raises ShapeError if x is no Proxy of torch.fx, TransformError if the
    layer itself is the root of the trace.
    """
    kind = type(layer).__name__
    if not isinstance(x, torch.fx.Proxy):
        raise ShapeError(
            f"linear: x is a {type(x).__name__}; it must be a dense tensor of floats. Convert it first.",
            code="linear.x-type",
        )
    tracer = x.tracer
    path = tracer.path_of_module(layer) if isinstance(tracer, torch.fx.Tracer) else ""
    if not path:
        raise TransformError(
            f"{kind}: torch.fx can call a layer with a recipe, and has no graph of what is inside. Trace the model that holds it, or "
            f"trace inside {_SUSPENDED}.",
            code="transform.fx",
        )
    return tracer.create_proxy("call_module", path, (x,), {})


def refuse_script(layer: nn.Module) -> NoReturn:
    """Raise TransformError for torch.jit.script."""
    # Returning an nn.Linear would let scripting work, but torch stores the returned module in the
    # model's own table of modules: the model would lose its layer.
    raise TransformError(
        f"{type(layer).__name__}: torch.jit.script cannot compile a recipe. Script a copy without: "
        "narrowgauge.convert(copy.deepcopy(model), None). Or use torch.export.",
        code="transform.script",
    )


def refuse_qconfig(layer: nn.Module, qconfig: object) -> None:
    """Raise TransformError for torch.ao.quantization, which would silently skip the layer.

    qconfig  None if the layer is not to be quantized
    """
    if qconfig is None:
        return
    raise TransformError(
        f"{type(layer).__name__}: torch.ao.quantization quantizes nn.Linear and nn.Embedding, and would skip this layer. "
        "Give it narrowgauge.convert(copy.deepcopy(model), None).",
        code="transform.quantization",
    )


def refuse_backward(what: str, way_on: str) -> NoReturn:
    """Raise TransformError for second derivatives, and for vmap over a backward pass."""
    if not torch.is_grad_enabled():
        raise TransformError(
            f"backward: {what} takes one gradient at a time, and vmap (is_grads_batched=True, vectorize=True) gives many. Call backward "
            f"for each. {way_on}",
            code="transform.batched-gradient",
        )
    raise TransformError(
        f"backward: {what} has no second derivatives, and create_graph=True asks for them. {way_on}",
        code="transform.second-derivative",
    )


def explained(error: RuntimeError | TypeError, *tensors: Tensor | None) -> Exception:
    """Return a clearer error for a MaskedTensor or an operand made in inference mode.

    error    the error that torch raised in a Linear, which is returned in all other cases
    tensors  x, weight, bias
    """
    for name, tensor in zip(("x", "weight", "bias"), tensors, strict=True):
        if type(tensor).__name__ == "MaskedTensor":
            return ShapeError(
                f"linear: {name} is a MaskedTensor, which torch can neither cast nor multiply by a matrix. Pass {name}.to_tensor(0), "
                "and mask the result.",
                code="linear.masked-tensor",
            )
    if not any(each is not None and each.is_inference() for each in tensors):
        return error
    return TransformError(
        "linear: the layer or its input was made inside torch.inference_mode, and such tensors cannot be trained. Copy the model "
        "outside of it, or compute inside `with torch.inference_mode():`.",
        code="transform.inference-tensor",
    )

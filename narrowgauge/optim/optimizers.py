"""AdamW, Lion and SGD with momentum, with states of 32, 16, 8 or 4 bits.

rules.py contains the equations, moments.py the formats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from narrowgauge.optim import rules
from narrowgauge.optim.base import Backend, LowPrecisionOptimizer

if TYPE_CHECKING:
    from narrowgauge.optim.masters import Master

# Pairs "first/second" are valid too, see states.py.
StateName = Literal["fp32", "8bit", "fp8", "fp8-lm", "4bit"] | str
Embeddings = Literal["fp32", "same"]


class AdamW(LowPrecisionOptimizer):
    """AdamW (decoupled weight decay, arXiv 1711.05101).

    params      parameters, named parameters, groups, or a model (then `groups(model)`). A group
                may set its own `states`, and its own `rule` ("lion" or a `rules.Rule`) with
                that rule's options
    states      format of both moments, with the bytes per parameter: fp32 8, 8bit 2.02, fp8
                2.05, fp8-lm 3.02, 4bit 1.03. A pair such as "8bit/fp16" sets each moment, see
                states.py
    master      master weights of 16-bit parameters, see masters.py; None if all parameters are
                float32 (else ConfigError)
    embeddings  "fp32": parameters with the name of an embedding keep float32 states, because
                their rows have rare gradients and then move far; "same" treats them as any
                other. Names are known only from a model or named parameters
    seed        seed of all stochastic rounding
    backend     "triton": one kernel for many tensors, on NVIDIA GPUs; "native": step.cpp, on
                the CPU; "torch": plain torch in chunks. All compute the same numbers. "auto":
                the first available backend, with a warning if it is plain torch
    """

    rule = rules.ADAMW

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        states: StateName = "fp32",
        master: Master = None,
        embeddings: Embeddings = "fp32",
        seed: int = 0,
        backend: Backend = "auto",
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params,
            backend,
            **numbers,
            states=states,
            master=master,
            embeddings=embeddings,
            seed=seed,
        )


class Lion(LowPrecisionOptimizer):
    """Lion (arXiv 2302.06675): steps by the sign of an interpolated momentum.

    It keeps one moment. See AdamW for the options.
    """

    rule = rules.LION

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        states: StateName = "fp32",
        master: Master = None,
        embeddings: Embeddings = "fp32",
        seed: int = 0,
        backend: Backend = "auto",
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(
            params,
            backend,
            **numbers,
            states=states,
            master=master,
            embeddings=embeddings,
            seed=seed,
        )


class SGD(LowPrecisionOptimizer):
    """SGD with momentum, coupled weight decay and torch's Nesterov form. Options: see AdamW."""

    rule = rules.SGD

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        states: StateName = "fp32",
        master: Master = None,
        embeddings: Embeddings = "fp32",
        seed: int = 0,
        backend: Backend = "auto",
    ) -> None:
        numbers = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(
            params,
            backend,
            **numbers,
            states=states,
            master=master,
            embeddings=embeddings,
            seed=seed,
        )


# By the name of their rule, as in the setting `optimizer`.
OPTIMIZERS: dict[str, type[LowPrecisionOptimizer]] = {
    each.rule.name: each for each in (AdamW, Lion, SGD)
}

"""AdamW on weights that exist in bfloat16 only, made possible by stochastic rounding.

Rounding to nearest loses every update below half a unit in the last place, 1/512 of the weight. Rounding stochastically keeps it
on average: with update u and unit q, the weight moves by q with probability u / q.

    p32 <- p;  AdamW on p32 in float32;  p <- round_to_bfloat16(p32)

One tensor at a time, so that a single float32 copy exists. The random bits come from a generator that the state dict holds.
Rounding as in "Revisiting BFloat16 Training" (arXiv 2010.06192). Moments are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import ConfigError

_DROPPED_BITS = 16
_KEPT = -(1 << _DROPPED_BITS)


def round_to_bfloat16(x: Tensor, bits: Tensor) -> Tensor:
    """x float32, rounded stochastically to bfloat16: E[result] = x.

    bits  int32 of x's shape, uniform in [0, 65536). The 16 dropped mantissa bits plus `bits` carry into the kept ones with
          probability equal to the dropped fraction. Values that bfloat16 holds stay; NaN and infinity stay.
    """
    carried = ((x.view(torch.int32) + bits) & _KEPT).view(torch.float32)
    return torch.where(x.isfinite(), carried, x).to(torch.bfloat16)


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW (decoupled weight decay, arXiv 1711.05101) with bfloat16 parameters and float32 arithmetic.

    Parameters in float32 are updated in float32, without rounding. seed starts the generator of the rounding.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        ours = [parameter for group in self.param_groups for parameter in group["params"]]
        wrong = next((p for p in ours if p.dtype not in (torch.bfloat16, torch.float32)), None)
        if wrong is not None or not ours:
            raise ConfigError(
                f"StochasticAdamW: {'no parameter' if wrong is None else f'a parameter of {wrong.dtype}'} was given; "
                "it trains bfloat16 and float32 ones. Use torch.optim.AdamW or MasterWeights for others."
            )
        device = ours[0].device
        self.generator = torch.Generator(device=device).manual_seed(seed)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        state["step"] += 1
        weight = parameter.to(torch.float32)
        if weight is parameter:
            weight = parameter.clone()
        adamw_update(
            weight, gradient.to(torch.float32), state["exp_avg"], state["exp_avg_sq"], int(state["step"]),
            lr=group["lr"], betas=group["betas"], eps=group["eps"], weight_decay=group["weight_decay"],
        )  # fmt: skip
        if parameter.dtype == torch.bfloat16:
            bits = torch.randint(
                1 << _DROPPED_BITS, weight.shape, generator=self.generator, device=weight.device, dtype=torch.int32
            )
            weight = round_to_bfloat16(weight, bits)
        parameter.copy_(weight)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        state = state_dict.pop("generator").cpu()
        if state.numel() != self.generator.get_state().numel():
            raise ConfigError(
                "StochasticAdamW: the saved generator belongs to another kind of device than "
                f"{self.generator.device}, and its random numbers cannot go on there. Resume on the device that saved it."
            )
        self.generator.set_state(state)
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            # torch has cast float32 moments to the parameter's bfloat16; take them from the source again.
            own = self.state[parameters[index]]
            for name in ("exp_avg", "exp_avg_sq"):
                own[name] = saved[name].to(device=parameters[index].device, dtype=torch.float32, copy=True)


def adamw_update(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW step in place on float32 tensors; `step` counts from 1.

    w <- w (1 - lr wd) - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)
    """
    beta1, beta2 = betas
    weight.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (exp_avg_sq / (1 - beta2**step)).sqrt_().add_(eps)
    weight.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))

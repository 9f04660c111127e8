"""Update rules: their moments, the scalars of a step, and the update of float32 tensors.

    AdamW, arXiv 1711.05101    m <- m + (1 - b1)(g - m);  v <- b2 v + (1 - b2) g^2
        w <- (1 - lr wd) w - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)
    Lion, arXiv 2302.06675     c = m + (1 - b1)(g - m)
        w <- (1 - lr wd) w - lr sign(c);  m <- m + (1 - b2)(g - m)
    SGD, as torch.optim.SGD    d = g + wd w;  m <- mu m + d
        w <- w - lr (d + mu m if nesterov else m)
    RAdam, arXiv 1908.03265    m and v of AdamW;  rho_t = rho - 2 t b2^t / (1 - b2^t),  rho = 2 / (1 - b2) - 1
        w <- (1 - lr wd) w - lr / (1 - b1^t) m (r_t sqrt(1 - b2^t) / (sqrt(v) + eps) if rho_t > 5 else 1)
        r_t^2 = (rho_t - 4)(rho_t - 2) rho / ((rho - 4)(rho - 2) rho_t)

RAdam is torch.optim.RAdam with decoupled weight decay. The limit of 5 and eps are torch's and the
authors' code's; the paper has 4 and no eps. If b2 <= 2/3, no step divides by sqrt(v).

Error feedback. A quantized first moment m' = Q(m) has a rounding error. With rounding to nearest,
the errors of many steps add up: m stands still if a step changes it by less than half a gap. A
change of m by one unit moves the weight by a known distance over all later steps, up to later
changes of v. The step subtracts this distance from the weight at once:

    w <- w + (m - m') lag

    AdamW   lag = -lr_t / (sqrt(v) c_t + eps) K_t
            K_t = sum_{j > 0} b1^j (1 - b1^t) / (1 - b1^(t + j))
    SGD     lag = -lr mu / (1 - mu), with Nesterov mu times as much
    RAdam   AdamW's, with term j of K_t times r_{t+j} / r_t. Before rho_t > 5 a later step may
            divide by sqrt(v) or not. So K_t is two sums, and each has the terms of its kind

If gradients have stopped, v decays too, and K_t contains b1 / sqrt(b2) instead of b1. The errors
then add up to a bounded sum. A moment below all codes leaves Adam without momentum, but the weight
still moves. The method is error feedback (1-bit SGD, arXiv 1901.09847) with the error kept in the
weight instead of a buffer.

Later steps return the correction only at the same learning rate. If the rate falls, term j of
AdamW's K_t has the factor max(0, 1 - FALL j f), with f = lr_{t-1} / lr_t - 1. A constant or rising
rate has f = 0. SGD's lag has no such factor.

Bound of m. With quantized states, AdamW and RAdam clamp m to the range that exact steps can reach. Lion and
SGD have no bound. By Cauchy-Schwarz, over the gradients of steps 1 ... t,

    m_t^2 <= B_t^2 v_t    with    B_t^2 = (1 - b1)^2 / (1 - b2) sum_{i < t} (b1^2 / b2)^i

(1.17 at b1 = 0.9, b2 = 0.95 and 7.3 at b2 = 0.999 for large t; without limit if b1^2 >= b2). A
larger |m| / sqrt(v) is a quantization error: m becomes B_t sqrt(v), so no step is larger than
gradients could make it. An exact m never changes, for any eps and weight decay. If betas change
during a run, the bound uses the present ones.

A rule belongs to the optimizer or to a parameter group (`rule=`), so one optimizer can step
matrices and vectors by different rules. Every rule works with all state formats and masters. This
file is the definition, which plain torch computes. The kernels in C++ and Triton implement the
rules of BUILT_IN and refuse others. CONTRIBUTING.md lists the files of a new rule.

Scalars are computed in double precision and rounded once to float32. The order of operations is
torch's, except that sqrt(v) is multiplied by the reciprocal of its correction: half a unit in the
last place of the denominator.

The settings of a run read the names and options of RULES without torch, so that --help is quick.
So torch is imported inside the updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from narrowgauge.errors import OptionError, closest

if TYPE_CHECKING:
    from torch import Tensor

# Terms of K_t that are summed exactly; the rest is a geometric series.
LAG_TERMS = 128
# Six times the fall of the last step. FALL = 1 predicts a linear schedule, but a correction before
# the last steps is noise of K_t roundings that no later step returns. In the closed loop of
# tests/optim/adam_loop.py (betas 0.9 and 0.95, learning rate 0.03) 0, 1, 2, 3, 4, 6 and 8 ended at
# 180, 30, 7.6, 3.3, 2.0, 1.2 and 1.1 times torch's distance. Walks at a constant rate do not change.
FALL = 6.0
# Factor of the bound for rounding errors of m and v, and the largest bound that float32 can
# multiply by a root.
SLACK, MOST = 1 + 2.0**-8, 2.0**120
# RAdam divides by sqrt(v) above this rho_t: from step 6 on at b2 = 0.999.
LEAST_RHO = 5.0


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Scalars of one step, shared with step.cpp and the Triton kernel.

    Rules with a kernel return these. A rule of plain torch may use them or return its own scalars.

    decay          1 - lr wd; the coupled weight decay in SGD
    step_size      negative
    correction     1 / sqrt(1 - beta2^t)
    bound          B_t of AdamW and RAdam, see the module
    lag            K_t; for SGD the whole factor of the weight
    lag_of_decay   K_t if v decays too
    """

    beta1: float = 0.0
    one_minus_beta1: float = 0.0
    beta2: float = 0.0
    one_minus_beta2: float = 0.0
    eps: float = 0.0
    decay: float = 1.0
    step_size: float = 0.0
    correction: float = 1.0
    bound: float = 0.0
    lag: float = 0.0
    lag_of_decay: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True, kw_only=True)
class RectifiedConstants(Constants):
    """Scalars of one step of RAdam. `lag` and `lag_of_decay` are sums over later steps that divide.

    divides       True if this step divides by sqrt(v)
    lag_of_plain  K_t over later steps that do not
    """

    divides: bool
    lag_of_plain: float


Updated: TypeAlias = (
    "tuple[Tensor, Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor, Tensor]"
)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An update rule.

    name         name in groups and saved states
    moments      names of the state tensors, at most two
    constants    (group, step) -> scalars of a step; steps count from 1
    update       (weight, gradient, first moment, second moment, constants, clamps) -> (weight,
                 first, second, decays[, lag]), all float32 of one shape. decays: True where the
                 first moment only decays. lag: see the module, only if the weight is to be
                 corrected. clamps: True if the rule keeps two moments and one is quantized,
                 so a rule with a bound clamps m. A moment that the rule does not keep is
                 zeros, and its result is ignored
    draws_first  round the first moment stochastically, regardless of `decays`
    lags         True if update returns a lag for a quantized first moment
    kernel       number of the rule in step.cpp and in the Triton kernel; None: plain torch alone
                 computes it
    backends     backends with a branch for `kernel`
    granularity  "element": update accepts any slice of a tensor; "matrix": it needs the whole
                 tensor, [rows, columns]
    lr           default learning rate
    weight_decay default weight decay
    options      options of a group beside lr and weight_decay, with their defaults
    run_options  options with another default in a training run
    """

    name: str
    moments: tuple[str, ...]
    constants: Callable[[Mapping[str, Any], int], Any]
    update: Callable[[Tensor, Tensor, Tensor, Tensor, Any, bool], Updated] = field(compare=False)
    granularity: Literal["element", "matrix"] = "element"
    lr: float = field(default=1e-3, compare=False)
    weight_decay: float = field(default=0.0, compare=False)
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)
    run_options: Mapping[str, Any] = field(default_factory=dict, compare=False)
    draws_first: bool = False
    lags: bool = False
    kernel: int | None = None
    backends: frozenset[str] = frozenset({"native", "triton"})

    @property
    def numbers(self) -> dict[str, Any]:
        """Numbers of a group with their defaults, in the order of positional arguments.

        Flags come last, as in torch.optim.SGD.
        """
        flags = {name: value for name, value in self.options.items() if isinstance(value, bool)}
        others = {name: value for name, value in self.options.items() if name not in flags}
        return {"lr": self.lr, **others, "weight_decay": self.weight_decay, **flags}


def only_decays(g: Tensor, m: Tensor, share: float = 1.0) -> Tensor:
    """Return True where the gradient is small beside the moment, |g| <= |m| / 4.

        share  share of one gradient in a settled moment: 1 for an average of gradients, 1 -
               momentum for a sum

    Such moments are rounded toward zero. If m stood still while v decays, the later steps would
    move the weight back by more than the lag subtracted at the earlier v.
    """
    # Tried and lost: a limit of |m| / 16 let moments stand still while v decayed, and weights
    # walked 5 times too far. Stochastic rounding of decaying moments is unbiased, but 1 of 4,096
    # weights survives 90 steps at a code.
    return g.abs() * 4.0 <= m.abs() * share


def bound(beta1: float, beta2: float, step: int) -> float:
    """B_t, the largest |m| / sqrt(v) of AdamW and RAdam after `step` steps, at most MOST.

    SLACK covers the rounding errors of m and v.
    """
    if beta1 == 0 or step == 1:
        total = 1.0
    elif beta2 == 0:
        return MOST
    else:
        ratio = beta1**2 / beta2
        # ratio^step - 1 without cancellation; the exponent is limited to what MOST needs.
        powers = math.expm1(min(step * math.log(ratio), 300.0))
        # B_t of this step, not its limit for large t: at t = 1 the limit would allow 2.3 steps in
        # one.
        total = float(step) if ratio == 1 else powers / (ratio - 1)
    return min((1 - beta1) * math.sqrt(total / (1 - beta2)) * SLACK, MOST)


def fall(group: Mapping[str, Any]) -> float:
    """lr_{t-1} / lr_t - 1 of a group whose learning rate falls, else 0."""
    now, before = float(group["lr"]), group.get("previous_lr", 0.0)
    return before / now - 1 if before > now > 0 else 0.0


def rectification(beta2: float, step: int) -> float:
    """r_t of RAdam, or 0 if the step does not divide by sqrt(v)."""
    power, most = beta2**step, 2 / (1 - beta2) - 1
    rho = most - 2 * step * power / (1 - power)
    if rho <= LEAST_RHO:
        return 0.0
    return math.sqrt((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho))


def _is_plain(beta2: float, step: int) -> float:
    """1 if the step of RAdam does not divide by sqrt(v), else 0."""
    return float(rectification(beta2, step) == 0)


@lru_cache(maxsize=64)
def lags(
    beta1: float,
    beta2: float,
    step: int | None,
    fall: float = 0.0,
    factor: Callable[[float, int], float] | None = None,
) -> tuple[float, float]:
    """(K_t, K_t where v decays) of AdamW: LAG_TERMS terms and a geometric series for the rest.

    step    None for a rule without bias corrections
    fall    of the learning rate, see the module
    factor  (beta2, step) -> what a later step is multiplied by, beside AdamW's

    If b1^2 >= b2, the second sum diverges, and the first is used instead.
    """
    # A constant v in place of a decaying one would leave a quarter of the error.
    ratio = beta1 / math.sqrt(beta2) if beta1**2 < beta2 else 1.0
    # The sums contain the bias corrections: without them the first steps were 50 lr wrong.
    power, power2 = (0.0, 0.0) if step is None else (beta1**step, beta2**step)
    now, now2, falls, falls_both = 1 - power, math.sqrt(1 - power2), 1.0, 1.0
    total = total_of_decay = 0.0
    left = 1.0
    for j in range(1, LAG_TERMS + 1):
        power, power2, falls, falls_both = (
            power * beta1,
            power2 * beta2,
            falls * beta1,
            falls_both * ratio,
        )
        left = max(0.0, 1 - FALL * fall * j)
        if factor is not None and step is not None:
            left *= factor(beta2, step + j)
        share = now / (1 - power) * left
        total += falls * share
        total_of_decay += falls_both * share * math.sqrt(1 - power2) / now2
    total += left * falls * beta1 / (1 - beta1)
    if ratio == 1.0:
        return total, total
    rest = left * falls_both * ratio / (1 - ratio) * math.sqrt(1 - power2) / now2
    return total, total_of_decay + rest


def _with_betas(group: Mapping[str, Any], lr: float, **others: Any) -> Constants:
    beta1, beta2 = group["betas"]
    betas = {
        "beta1": beta1,
        "one_minus_beta1": 1 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
    }
    return Constants(**betas, decay=1 - lr * float(group["weight_decay"]), **others)


def _adamw_constants(group: Mapping[str, Any], step: int) -> Constants:
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    step_size, correction = -lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
    lag, lag_of_decay = lags(beta1, beta2, step, fall(group))
    return _with_betas(
        group, lr, eps=group["eps"], step_size=step_size, correction=correction, bound=bound(beta1, beta2, step), lag=lag,
        lag_of_decay=lag_of_decay,
    )  # fmt: skip


def _averages(g: Tensor, m: Tensor, v: Tensor, c: Constants) -> tuple[Tensor, Tensor, Tensor]:
    """Return m and v of AdamW after the step, and sqrt(v)."""
    from narrowgauge.optim.moments import square_root

    m = m + (g - m) * c.one_minus_beta1
    # This order of products is torch's addcmul; another order changes the last bit.
    v = v * c.beta2 + g * c.one_minus_beta2 * g
    # Not torch.sqrt, which is not correctly rounded on a CPU; the kernels must match bit for bit.
    return m, v, square_root(v)


def _clamped(m: Tensor, root: Tensor, c: Constants) -> tuple[Tensor, Tensor]:
    """Return m within its bound, and True where it was beyond."""
    import torch

    limit = root * c.bound
    # A NaN in m or v compares as False, so it is not clamped and stays visible.
    held = m.abs() > limit
    # Clamps m itself. Clamping only the update was tried: m then stayed at its code and walked at
    # the bound for ever.
    return torch.where(held, torch.copysign(limit, m), m), held


def _adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, c: Constants, clamps: bool) -> Updated:
    import torch

    decays = only_decays(g, m)
    m, v, root = _averages(g, m, v, c)
    if not clamps:
        return w * c.decay + m * c.step_size / (root * c.correction + c.eps), m, v, decays
    m, held = _clamped(m, root, c)
    # torch computes `number / tensor` as number * reciprocal(tensor), which rounds twice. A
    # quotient of two tensors is rounded once, as in the kernels.
    rate = torch.full_like(root, c.step_size) / (root * c.correction + c.eps)
    lag = rate * torch.where(decays, torch.full_like(root, c.lag_of_decay), c.lag)
    return w * c.decay + m * rate, m, v, decays | held, lag


def _lion_constants(group: Mapping[str, Any], step: int) -> Constants:
    return _with_betas(group, float(group["lr"]), step_size=-float(group["lr"]))


def _lion(w: Tensor, g: Tensor, m: Tensor, v: Tensor, c: Constants, clamps: bool) -> Updated:
    import torch

    direction = m + (g - m) * c.one_minus_beta1
    # NaN stays, unlike torch.sign
    sign = torch.where(direction > 0, 1.0, torch.where(direction < 0, -1.0, direction))
    return w * c.decay + sign * c.step_size, m + (g - m) * c.one_minus_beta2, v, only_decays(g, m)


def _sgd_constants(group: Mapping[str, Any], step: int) -> Constants:
    decay, step_size = float(group["weight_decay"]), -float(group["lr"])
    momentum, nesterov = group["momentum"], group["nesterov"]
    lag = step_size * momentum / (1 - momentum) * (momentum if nesterov else 1.0)
    return Constants(
        beta1=momentum,
        one_minus_beta1=1 - momentum,
        decay=decay,
        step_size=step_size,
        nesterov=nesterov,
        lag=lag,
    )


def _sgd(w: Tensor, g: Tensor, m: Tensor, v: Tensor, c: Constants, clamps: bool) -> Updated:
    import torch

    # SGD's m is a sum of gradients, so a settled m is 1 / (1 - mu) gradients. Without the factor,
    # 4-bit tiles grow without end (weights walked 36 times too far).
    decays = only_decays(g, m, c.one_minus_beta1)
    d = g + w * c.decay
    m = m * c.beta1 + d
    # lag is constant for SGD: its rate does not depend on v.
    return (
        w + (d + m * c.beta1 if c.nesterov else m) * c.step_size,
        m,
        v,
        decays,
        torch.full_like(w, c.lag),
    )


def _radam_constants(group: Mapping[str, Any], step: int) -> RectifiedConstants:
    (beta1, beta2), lr, falls = group["betas"], float(group["lr"]), fall(group)
    factor, correction = rectification(beta2, step), 1 / math.sqrt(1 - beta2**step)
    own = factor or 1.0
    lag, lag_of_decay = lags(beta1, beta2, step, falls, rectification)
    return RectifiedConstants(
        **vars(_with_betas(group, lr)) | {
            # (sqrt(v) + eps) / sqrt(1 - b2^t) in the form of AdamW
            "eps": group["eps"] * correction, "step_size": -lr / (1 - beta1**step) * own, "correction": correction,
            "bound": bound(beta1, beta2, step), "lag": lag / own, "lag_of_decay": lag_of_decay / own,
        },
        divides=factor > 0, lag_of_plain=0.0 if factor else lags(beta1, beta2, step, falls, _is_plain)[0],
    )  # fmt: skip


def _radam(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, c: RectifiedConstants, clamps: bool
) -> Updated:
    import torch

    if c.divides:
        return _adamw(w, g, m, v, c, clamps)
    decays = only_decays(g, m)
    m, v, root = _averages(g, m, v, c)
    if not clamps:
        return w * c.decay + m * c.step_size, m, v, decays
    m, held = _clamped(m, root, c)
    rate = torch.full_like(root, c.step_size) / (root * c.correction + c.eps)
    lag = rate * torch.where(decays, torch.full_like(root, c.lag_of_decay), c.lag)
    return w * c.decay + m * c.step_size, m, v, decays | held, lag + c.step_size * c.lag_of_plain


ADAMW = Rule(
    name="adamw", moments=("exp_avg", "exp_avg_sq"), constants=_adamw_constants, update=_adamw,
    weight_decay=0.01, options={"betas": (0.9, 0.999), "eps": 1e-8}, run_options={"betas": (0.9, 0.95)}, lags=True,
    kernel=0,
)  # fmt: skip
LION = Rule(
    name="lion", moments=("exp_avg",), constants=_lion_constants, update=_lion,
    lr=1e-4, options={"betas": (0.9, 0.99)}, run_options={"betas": (0.9, 0.95)}, draws_first=True, kernel=1,
)  # fmt: skip
SGD = Rule(
    name="sgd", moments=("momentum_buffer",), constants=_sgd_constants, update=_sgd,
    options={"momentum": 0.9, "nesterov": False}, lags=True, kernel=2,
)  # fmt: skip
RADAM = Rule(
    name="radam", moments=("exp_avg", "exp_avg_sq"), constants=_radam_constants, update=_radam,
    options={"betas": (0.9, 0.999), "eps": 1e-8}, lags=True,
)  # fmt: skip
# Rules with a name in groups, settings and saved states. BUILT_IN: those that kernels compute.
RULES = {rule.name: rule for rule in (ADAMW, LION, SGD, RADAM)}
BUILT_IN = {name: rule for name, rule in RULES.items() if rule.kernel is not None}


def refuse(rule: Rule, backend: str) -> str:
    """Reason why "native" or "triton" cannot compute the rule, or ''."""
    own = BUILT_IN.get(rule.name)
    if own is rule and backend in rule.backends:
        return ""
    other = "" if own is None or own is rule else ", which is not rules.RULES' own"
    return f"has no kernel for rule {rule.name!r}{other}"


def number(rule: Rule) -> int:
    """Number of a built-in rule in the kernels."""
    assert rule.kernel is not None
    return rule.kernel


def get(name: str, known: Mapping[str, Rule]) -> Rule:
    """Return the rule called `name` from `known` or RULES.

    Raises ConfigError with the closest names.
    """
    rules = {**RULES, **known}
    # `in` on a list compares by equality: a group may contain an unhashable value.
    if name not in list(rules):
        near = closest(str(name), rules) or ", ".join(map(repr, rules))
        raise OptionError(
            f"optim: no rule {name!r}. Closest: {near}. Or pass a narrowgauge.optim.rules.Rule itself.",
            code="optim.rule",
        )
    return rules[name]

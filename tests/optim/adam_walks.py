"""How far do weights travel under narrow optimizer states, beside exact Adam? A search over random gradient histories.

    python -m tests.optim.adam_walks                10,008 histories, every state format and rule: about 20 minutes, one thread
    python -m tests.optim.adam_walks --rows 16      fewer histories in each setting; nothing recorded

A history is the gradient of 64 elements over STEPS steps, of one of SHAPES under one of GATES. A row of a parameter is one tile: 64
columns of
N(0, 1) noise, which keep the tile's scale, and three histories of 64 columns, each smaller by up to `decades` decades.
SETTINGS are betas, weight decay, micro-batches, eps, and whether the run is saved and loaded half way.

The walk of an element is the largest |w_t - w_0| over the steps, in units of the learning rate (SGD: of the learning rate
times the largest gradient of the element, times 1 - momentum). `exact` follows the same rule in float64. With a floor of
FLOOR lr, below which walks are noise,

    ratio = (walk + FLOOR) / (exact walk + FLOOR)

so that more than 2 is an over-walk and less than 1/2 an under-walk. The ratio of a history is the median over its elements, since
stochastic rounding makes single elements random; the worst single element and the share of elements beyond 2 are recorded, too.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import RESULTS, record

LR = 1e-3
STEPS = 400
FLOOR = 2.0
TILE, GROUP = 256, 64
SHAPES = ("noise", "biased", "constant", "alternating", "wave", "heavy")
GATES = ("always", "burst", "stops", "fades", "decays", "grows", "sparse", "repeated")


@dataclass(frozen=True)
class Setting:
    betas: tuple[float, float]
    weight_decay: float = 0.0
    micro_batches: int = 1
    resumes: bool = False
    eps: float = 1e-8


SETTINGS = (
    Setting((0.9, 0.999)),
    Setting((0.9, 0.95), weight_decay=0.1),
    Setting((0.95, 0.98), micro_batches=4),
    Setting((0.8, 0.99), resumes=True),
    Setting((0.9, 0.999), weight_decay=0.1, eps=1e-12, resumes=True),
    Setting((0.98, 0.999)),
    Setting((0.9, 0.95), eps=1e-15),
    Setting((0.5, 0.9), micro_batches=2),
)


class Histories:
    """Random gradient histories, one row of TILE columns per draw; `gradient(t)` is float32 [rows, TILE], t from 0."""

    def __init__(self, rows: int, decades: float, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.decades = decades
        groups = TILE // GROUP

        def draw(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(rows, groups, generator=self.generator)

        def pick(count: int) -> Tensor:
            return torch.randint(count, (rows, groups), generator=self.generator)

        self.shape, self.gate = pick(len(SHAPES)), pick(len(GATES))
        self.below = draw(0, decades)  # decades below the row's largest
        self.below[:, 0], self.shape[:, 0], self.gate[:, 0] = 0.0, 0, 0
        size = 10.0 ** (draw(-3, 2)[:, :1] - self.below)
        self.start, self.length = pick(STEPS // 2), 1 + pick(40)
        self.rate = 10.0 ** -torch.where(
            self.gate == 5, draw(1.7, 2.5), draw(0.5, 2.5)
        )  # share that a step takes or adds
        self.period = 2 + pick(60)
        self.burst = 10.0 ** (self.below * draw(0, 1))  # how far above its size a burst reaches
        self.phase = draw(0, 6.3)
        wide = lambda x: x.repeat_interleave(GROUP, 1)  # noqa: E731
        self._size = wide(size)
        self._wide = wide
        self._noisy = wide((self.shape == 0) | (self.shape == 1) | (self.shape == 5))

    def gradient(self, t: int) -> Tensor:
        noise = torch.randn(self._size.shape, generator=self.generator)
        shape, gate = self.shape, self.gate
        level = torch.ones_like(self.phase)
        level = torch.where(shape == 3, float((-1) ** t), level)
        level = torch.where(shape == 4, torch.sin(6.2832 * t / self.period + self.phase), level)
        since = t - self.start
        begun = since >= self.length
        envelope = torch.ones_like(level)
        envelope = torch.where((gate == 1) & (t < self.length), self.burst, envelope)
        envelope = torch.where((gate == 2) & begun, 0.0, envelope)
        envelope = torch.where((gate == 3) & begun, 1e-6, envelope)
        envelope = torch.where(gate == 4, (1 - self.rate) ** t, envelope)
        envelope = torch.where(gate == 5, (1 - self.rate) ** (STEPS - t), envelope)
        envelope = torch.where((gate == 6) & (t % self.period != 0), 0.0, envelope)
        envelope = torch.where((gate == 7) & (since % self.period < 2), self.burst, envelope)
        level = level * envelope
        # No gradient is smaller than the search's range, except those that are zero.
        least = 10.0 ** (self.below - self.decades)
        level = torch.where(
            (level != 0) & (level.abs() < least), torch.copysign(least, level), level
        )
        level = self._wide(level)
        shape = self._wide(shape)
        noise = torch.where(shape == 5, noise * torch.exp(1.5 * noise.roll(1, 1)), noise)
        noise = torch.where(shape == 1, 0.3 * noise + 1.0, noise)
        return torch.where(self._noisy, noise, 1.0) * level * self._size


class Exact:
    """AdamW, Lion or SGD in float64."""

    def __init__(self, rule: str, setting: Setting, rows: int) -> None:
        self.rule, self.setting, self.steps = rule, setting, 0
        self.w, self.m, self.v = (torch.zeros(rows, TILE, dtype=torch.float64) for _ in range(3))

    def step(self, g: Tensor) -> Tensor:
        g, (beta1, beta2) = g.double(), self.setting.betas
        self.steps += 1
        if self.rule == "sgd":
            g = g + self.setting.weight_decay * self.w
            self.m.mul_(beta1).add_(g)
            self.w.sub_(self.m, alpha=LR)
            return self.w
        self.w.mul_(1 - LR * self.setting.weight_decay)
        if self.rule == "lion":
            self.w.sub_((self.m * beta1 + g * (1 - beta1)).sign_(), alpha=LR)
            self.m.mul_(beta2).add_(g, alpha=1 - beta2)
            return self.w
        self.m.mul_(beta1).add_(g, alpha=1 - beta1)
        self.v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        root = (self.v / (1 - beta2**self.steps)).sqrt_().add_(self.setting.eps)
        self.w.addcdiv_(self.m, root, value=-LR / (1 - beta1**self.steps))
        return self.w


class Narrow:
    """The same rule by an optimizer under test; saved and loaded half way where the setting resumes."""

    def __init__(
        self, build: Callable[[nn.Parameter], torch.optim.Optimizer], setting: Setting, rows: int
    ) -> None:
        self.build, self.setting, self.steps = build, setting, 0
        self.parameter = nn.Parameter(torch.zeros(rows, TILE))
        self.optimizer = build(self.parameter)

    def step(self, g: Tensor) -> Tensor:
        self.steps += 1
        if self.setting.resumes and self.steps == STEPS // 2:
            saved = copy.deepcopy(self.optimizer.state_dict())
            self.optimizer = self.build(self.parameter)
            self.optimizer.load_state_dict(saved)
        self.optimizer.zero_grad()
        self.parameter.grad = torch.zeros_like(self.parameter)
        for part in range(
            self.setting.micro_batches
        ):  # unequal parts, which add up to the gradient
            share = (
                1.5
                if part == 0
                else (1 - 1.5 / self.setting.micro_batches) / (1 - 1 / self.setting.micro_batches)
            )
            self.parameter.grad += g * (
                share / self.setting.micro_batches if self.setting.micro_batches > 1 else 1.0
            )
        self.optimizer.step()
        return self.parameter.detach()


def builder(
    rule: str, states: str, setting: Setting, **options: Any
) -> Callable[[nn.Parameter], torch.optim.Optimizer]:
    """An optimizer of narrowgauge for one parameter, or of torch where states is "torch"."""
    from narrowgauge.optim import SGD, AdamW, Lion

    (beta1, _), decay = setting.betas, setting.weight_decay
    if rule == "sgd":
        return lambda p: SGD(
            [p], lr=LR, momentum=beta1, weight_decay=decay, states=states, **options
        )
    if rule == "lion":
        return lambda p: Lion(
            [p], lr=LR, betas=setting.betas, weight_decay=decay, states=states, **options
        )
    return lambda p: AdamW(
        [p],
        lr=LR,
        betas=setting.betas,
        eps=setting.eps,
        weight_decay=decay,
        states=states,
        **options,
    )


@dataclass(frozen=True)
class Walks:
    """Of one setting: histories [rows], walks of the exact rule and of each case, [rows, TILE], in lr."""

    histories: Histories
    exact: Tensor
    found: dict[str, Tensor]

    def ratios(self, case: str) -> Tensor:
        """[rows, 3, GROUP], without the noise that keeps the scale."""
        ratio = (self.found[case] + FLOOR) / (self.exact + FLOOR)
        return ratio.view(len(ratio), -1, GROUP)[:, 1:]

    def history(self, number: int) -> str:
        """The words of a history, numbered as in `ratios` without its last axis."""
        row, group = divmod(number, TILE // GROUP - 1)
        h, group = self.histories, group + 1
        return f"{SHAPES[h.shape[row, group]]} {GATES[h.gate[row, group]]}, 1e-{h.below[row, group]:.1f}"


def search(
    rule: str,
    setting: Setting,
    builds: dict[str, Callable[[nn.Parameter], Any]],
    rows: int,
    decades: float,
    seed: int,
) -> Walks:
    histories = Histories(rows, decades, seed)
    exact, cases = (
        Exact(rule, setting, rows),
        {name: Narrow(build, setting, rows) for name, build in builds.items()},
    )
    walk, found = (
        torch.zeros(rows, TILE, dtype=torch.float64),
        {name: torch.zeros(rows, TILE) for name in builds},
    )
    largest = torch.zeros(rows, TILE)
    for t in range(STEPS):
        g = histories.gradient(t)
        largest = torch.maximum(largest, g.abs())
        walk = torch.maximum(walk, exact.step(g).abs())
        for name, case in cases.items():
            found[name] = torch.maximum(found[name], case.step(g).abs())
    unit = LR * torch.ones_like(largest) if rule != "sgd" else LR * largest / (1 - setting.betas[0])
    unit = unit.clamp(min=torch.finfo(torch.float32).tiny).double()
    return Walks(
        histories, walk / unit, {name: each.double() / unit for name, each in found.items()}
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tests.optim.adam_walks", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument(
        "--rows", type=int, default=417, help="of each setting, three histories in each"
    )
    parser.add_argument(
        "--decades", type=float, default=9.0, help="over which gradients of a tile spread"
    )
    parser.add_argument(
        "--states", nargs="*", default=["fp32", "8bit", "fp8", "fp8-lm", "e4m3/8bit", "4bit"]
    )
    parser.add_argument("--rules", nargs="*", default=["adamw", "sgd", "lion"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for rule in options.rules:
        for number, setting in enumerate(SETTINGS):
            names = list(
                dict.fromkeys(n if rule == "adamw" else first_of(n) for n in options.states)
            )
            builds = {name: builder(rule, name, setting) for name in names}
            walks = search(rule, setting, builds, options.rows, options.decades, number)
            case = {"rule": rule, "decades": options.decades} | asdict(setting)
            lines = [{"states": name} | case | summary(walks, name) for name in names]
            for line in lines:
                shown = (
                    f"{each:.3g}" if isinstance(each, float) else str(each)
                    for each in line.values()
                )
                print(" ".join(shown), flush=True)
            if options.rows == parser.get_default(
                "rows"
            ):  # at once: a run that is stopped leaves the settings that it has finished
                record("adam-walks", lines, RESULTS / "adam_walks.jsonl")


def first_of(states: str) -> str:
    """The name of the first moment alone, for rules that keep one."""
    return {"fp8-lm": "e4m3"}.get(states, states.partition("/")[0])


def summary(walks: Walks, case: str) -> dict[str, Any]:
    ratios = walks.ratios(case)
    of_histories = ratios.median(-1).values.flatten()
    most, least = int(of_histories.argmax()), int(of_histories.argmin())
    return {
        "histories": len(of_histories),
        "over": float(of_histories[most]),
        "over_history": walks.history(most),
        "under": float(1 / of_histories[least]),
        "under_history": walks.history(least),
        "histories_beyond_2": int(((of_histories > 2) | (of_histories < 0.5)).sum()),
        "element_over": float(ratios.max()),
        "element_under": float(1 / ratios.min()),
        "elements_beyond_2": float(((ratios > 2) | (ratios < 0.5)).double().mean()),
    }


if __name__ == "__main__":
    main()

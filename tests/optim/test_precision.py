"""The ladder: masters and stochastic rounding against float32 AdamW (exact where it can be, else statistical)."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.errors import ConfigError
from narrowgauge.optim import PRECISIONS, MasterWeights, StochasticAdamW, precision, round_to_bfloat16
from narrowgauge.optim.stochastic import adamw_update
from tests.compare import assert_same


def parameter(dtype: torch.dtype = torch.float32, size: int = 64) -> torch.nn.Parameter:
    torch.manual_seed(2)
    return torch.nn.Parameter(torch.randn(size).to(torch.bfloat16).to(dtype))


def test_every_rung_has_its_name_and_an_unknown_one_the_closest() -> None:
    assert list(PRECISIONS) == ["fp32", "amp-bf16", "amp-fp16", "bf16-o2", "bf16-o3"]
    with pytest.raises(ConfigError, match=r"no precision 'bf16-02'. Closest: 'bf16-o2'"):
        precision.get("bf16-02")


def test_adamw_update_is_torchs() -> None:
    ours, theirs = parameter(), parameter()
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, foreach=False, fused=False)
    m, v = torch.zeros(64), torch.zeros(64)
    for step in range(1, 6):
        gradient = torch.randn(64, generator=torch.Generator().manual_seed(step))
        theirs.grad = gradient.clone()
        optimizer.step()
        with torch.no_grad():
            adamw_update(ours, gradient, m, v, step, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)  # the same formula, other order of two products


def test_master_weights_keep_updates_too_small_for_bfloat16() -> None:
    weight, wide = parameter(torch.bfloat16), parameter()
    masters = MasterWeights([weight], lambda p: torch.optim.AdamW(p, lr=1e-5))
    reference = torch.optim.AdamW([wide], lr=1e-5)
    for _ in range(20):
        weight.grad, wide.grad = torch.ones_like(weight), torch.ones_like(wide)
        masters.step()
        reference.step()
    assert_same(masters.masters[0].detach(), wide.detach())
    assert_same(weight.detach(), wide.detach().to(torch.bfloat16))


def test_master_weights_resume_exactly() -> None:
    def build() -> tuple[torch.nn.Parameter, MasterWeights]:
        weight = parameter(torch.bfloat16)
        return weight, MasterWeights([weight], lambda p: torch.optim.AdamW(p, lr=1e-3))

    def steps(weight: torch.nn.Parameter, optimizer: MasterWeights, first: int, last: int) -> None:
        for step in range(first, last):
            weight.grad = torch.randn(64, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            optimizer.step()

    weight, optimizer = build()
    steps(weight, optimizer, 0, 6)
    half, stopped = build()
    steps(half, stopped, 0, 3)
    resumed, again = build()
    with torch.no_grad():
        resumed.copy_(half)
    again.load_state_dict(stopped.state_dict())
    steps(resumed, again, 3, 6)
    assert_same(resumed.detach(), weight.detach())
    assert_same(again.masters[0].detach(), optimizer.masters[0].detach())


def test_stochastic_rounding_chooses_neighbours_and_is_unbiased() -> None:
    """x is 0.3 of the way between two bfloat16 numbers: of 200,000 draws 30 % go up, |z| < 4 (false alarm 6e-5)."""
    low, high = torch.tensor(1.0), torch.tensor(1.0 + 2.0**-7)
    x = (low + 0.3 * (high - low)).expand(200_000).contiguous()
    bits = torch.randint(65536, x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    rounded = round_to_bfloat16(x, bits).float()
    assert set(rounded.unique().tolist()) == {float(low), float(high)}
    share = float((rounded == high).float().mean())
    fraction = float((x[0].double() - 1) * 2**7)
    assert abs(share - fraction) / (fraction * (1 - fraction) / len(x)) ** 0.5 < 4


def test_stochastic_rounding_leaves_representable_and_nonfinite_numbers() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -3.5, float("inf"), float("-inf"), 3.3895e38, 1e-45])
    x = torch.cat((x.to(torch.bfloat16).float(), torch.tensor([float("nan")])))
    for bits in (0, 65535):
        rounded = round_to_bfloat16(x, torch.full(x.shape, bits, dtype=torch.int32))
        assert_same(rounded, x.to(torch.bfloat16), any_nan=True)


def test_stochastic_adamw_moves_weights_that_rounding_to_nearest_would_freeze() -> None:
    """Updates of 1e-4 on weights of 1: half a unit of bfloat16 is 2e-3 below 1. After 200 steps the mean has moved 0.02."""
    weight = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = StochasticAdamW([weight], lr=1e-4, weight_decay=0.0)
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    mean = float(weight.detach().float().mean())
    # Each weight is a random walk of 200 draws with units of at most 2**-8; the mean's standard error is below 3e-4.
    assert abs(mean - 0.98) < 4 * (200 * 1e-4 * 2**-8) ** 0.5 / 64 + 1e-4


def test_stochastic_adamw_resumes_exactly() -> None:
    def steps(weight: torch.nn.Parameter, optimizer: StochasticAdamW, first: int, last: int) -> None:
        for step in range(first, last):
            weight.grad = torch.randn(64, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            optimizer.step()

    weight = parameter(torch.bfloat16)
    optimizer = StochasticAdamW([weight])
    steps(weight, optimizer, 0, 6)
    resumed = parameter(torch.bfloat16)
    stopped = StochasticAdamW([resumed])
    steps(resumed, stopped, 0, 3)
    again = StochasticAdamW([resumed], seed=99)
    again.load_state_dict(stopped.state_dict())
    assert again.state[resumed]["exp_avg"].dtype == torch.float32
    steps(resumed, again, 3, 6)
    assert_same(resumed.detach(), weight.detach())


def test_master_weights_take_over_what_was_written_into_the_model() -> None:
    """Weights loaded after the optimizer was made were once undone by its next step (exact)."""
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = MasterWeights([weight], lambda masters: torch.optim.SGD(masters, lr=2.0**-12))
    weight.data.fill_(1.0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert_same(optimizer.masters[0].detach(), torch.full((4,), 1 - 2.0**-12))
    optimizer.step()
    assert_same(optimizer.masters[0].detach(), torch.full((4,), 1 - 2.0**-11))


def test_optimizers_refuse_or_keep_what_they_would_narrow() -> None:
    wide = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    assert MasterWeights([wide], lambda masters: torch.optim.SGD(masters)).masters[0] is wide
    with pytest.raises(ConfigError, match=r"a parameter of torch.float64 was given"):
        StochasticAdamW([wide])
    with pytest.raises(ConfigError, match=r"something else than tensors"):
        MasterWeights([{"params": [wide]}], lambda masters: torch.optim.SGD(masters))  # type: ignore[list-item]

"""States that an earlier version saved: converted when they are loaded, within a rounding of the formats (bounded)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from narrowgauge.errors import CheckpointError
from narrowgauge.optim import AdamW, Lion, moments
from narrowgauge.optim.moments import Encoded
from tests.raising import raises

ROWS, COLUMNS = 16, 300
TILES, TILE = 2, 256


def former_state() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """A state of form 2 as it was written, and the moments that its codes stood for [ROWS, COLUMNS]."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(-127, 128, (ROWS, COLUMNS), generator=generator).to(torch.int8)
    second = torch.randint(0, 256, (ROWS, COLUMNS), generator=generator).to(torch.uint8)
    scales = 2.0 ** torch.randint(-20, 3, (2, ROWS, TILES), generator=generator).float()
    wide = scales.repeat_interleave(TILE, 2)[..., :COLUMNS]
    m = first.float() * first.float().abs() / 127**2 * wide[0]
    v = (
        torch.where(second > 0, torch.ldexp(1 + (second % 8) / 8, (second // 8).int() - 32), 0.0)
        * wide[1]
    )
    state = {"step": torch.tensor(7.0), "exp_avg": first, "exp_avg_sq": second}
    return (
        state
        | {
            "exp_avg_scale": scales[0].to(torch.bfloat16),
            "exp_avg_sq_scale": scales[1].to(torch.bfloat16),
        },
        m,
        v,
    )


def decoded(format: moments.Moment, codes: Tensor, scale: Tensor) -> Tensor:
    cut = nn.functional.pad(codes, (0, TILES * TILE - COLUMNS)).view(ROWS, TILES, TILE)
    return format.decode(Encoded(cut, scale)).flatten(1)[:, :COLUMNS]


def check(state: dict[str, Tensor], m: Tensor, v: Tensor) -> None:
    found = decoded(moments.E5M2, state["exp_avg"], state["exp_avg_scale"])
    assert ((found - m).abs() <= m.abs() / 8 * (1 + 1e-6)).all()
    found = decoded(moments.TAPERED8, state["exp_avg_sq"], state["exp_avg_sq_scale"])
    assert ((found - v).abs() <= v / 4 * (1 + 1e-6)).all() and ((found > 0) == (v > 0)).all()


@pytest.mark.parametrize("form", [1, 2])
def test_moments_of_an_earlier_version_are_converted(form):
    state, m, v = former_state()
    parameter = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    optimizer = AdamW([parameter], states="8bit")
    saved = optimizer.state_dict()
    saved["state"] = {0: state}
    saved["param_groups"][0]["form"] = form
    if form == 1:
        del saved["param_groups"][0]["form"]
    optimizer.load_state_dict(saved)
    check(optimizer.state[parameter], m, v)
    assert optimizer.state_dict()["param_groups"][0]["form"] == moments.FORM
    kept = optimizer.state_dict()
    optimizer.load_state_dict(kept)  # of the present form: nothing changes
    check(optimizer.state[parameter], m, v)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert parameter.isfinite().all() and optimizer.state[parameter]["step"] == 8


def test_the_taper_of_60_octaves_is_converted():
    """Form 3, a byte for each of its codes: 16 codes per octave over 4 octaves, then half as many over twice as many, and so on."""
    octaves = [
        (n, 16 >> part)
        for part, end in enumerate((4, 12, 28, 60))
        for n in range((end - 4) // 2, end)
    ]
    shares = [2.0**-n * (1 - k / codes / 2) for n, codes in octaves for k in range(codes)]
    v = torch.tensor([0.0, *shares[:255][::-1]], dtype=torch.float64)
    codes = torch.arange(256).to(torch.uint8).expand(ROWS, 256).contiguous()
    state = {
        "step": torch.tensor(7.0), "exp_avg": torch.zeros(ROWS, 256, dtype=torch.int8), "exp_avg_sq": codes,
        "exp_avg_scale": torch.ones(ROWS, 1, dtype=torch.bfloat16),
        "exp_avg_sq_scale": torch.ones(ROWS, 1, dtype=torch.bfloat16),
    }  # fmt: skip
    parameter = nn.Parameter(torch.zeros(ROWS, 256))
    optimizer = AdamW([parameter], states="8bit")
    saved = optimizer.state_dict()
    saved["state"] = {0: state}
    saved["param_groups"][0]["form"] = 3
    optimizer.load_state_dict(saved)
    kept = optimizer.state[parameter]
    found = moments.TAPERED8.decode(
        Encoded(kept["exp_avg_sq"].view(ROWS, 1, 256), kept["exp_avg_sq_scale"])
    )[:, 0].double()
    # Where a segment of the former taper was finer by an octave, half a gap of the present one.
    assert ((found - v).abs() <= v / 4 * (1 + 1e-6)).all()
    assert (found[:, v >= 2.0**-3] == v[v >= 2.0**-3]).all() and (found[0, 1:] > 0).all()
    assert not kept["exp_avg"].any()


def test_a_whole_optimizer_of_an_earlier_version_is_converted():
    state, m, v = former_state()
    parameter = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    optimizer = AdamW([parameter], states="8bit")
    optimizer.state[parameter].update(state)
    optimizer.param_groups[0]["form"] = 2
    saved = optimizer.__getstate__()
    again = AdamW.__new__(AdamW)
    again.__setstate__(saved)
    check(again.state[parameter], m, v)
    assert again.param_groups[0]["form"] == moments.FORM


def test_one_moment_of_a_pair_is_converted():
    state, m, _ = former_state()
    parameter = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    optimizer = Lion([parameter], states="8bit")
    saved = optimizer.state_dict()
    saved["state"] = {0: {name: x for name, x in state.items() if "sq" not in name}}
    saved["param_groups"][0]["form"] = 2
    optimizer.load_state_dict(saved)
    found = decoded(
        moments.E5M2,
        optimizer.state[parameter]["exp_avg"],
        optimizer.state[parameter]["exp_avg_scale"],
    )
    assert ((found - m).abs() <= m.abs() / 8 * (1 + 1e-6)).all()


def test_the_first_form_of_four_bits_is_refused_still():
    optimizer = AdamW([nn.Parameter(torch.zeros(ROWS, 512))], states="4bit")
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["form"]
    with raises(CheckpointError, "optim.state"):
        optimizer.load_state_dict(saved)

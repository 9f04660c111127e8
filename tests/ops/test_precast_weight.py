"""What an optimizer's step leaves of a weight's cast, by the definition: the amax that is foretold, the bits of casting anew (exact)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from narrowgauge.formats import E4M3, E5M2, INT8
from narrowgauge.nn.amax_history import AmaxHistory, roll_history
from narrowgauge.ops.quantize import precast_weight
from narrowgauge.ops.quantize.amax_state import IN_USE
from narrowgauge.ops.quantize.pair import quantize_pair
from narrowgauge.ops.quantize.precast_weight import PrecastWeight, quantize_precast
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, DelayedScaling
from narrowgauge.scaling import POW2
from tests.compare import assert_same

AMAX = st.sampled_from([0.0, 1e-40, 2.0**-126, 0.02, 0.5, 3.0, 3e38])
CASTS = (Cast(format=E4M3), Cast(format=E5M2, scale=POW2), Cast(format=INT8))


@given(
    st.lists(AMAX, min_size=1, max_size=5),
    st.tuples(AMAX, AMAX),
    st.sampled_from([-2, 0, 3]),
    st.sampled_from(["max", "most_recent"]),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_the_foretold_amax_is_the_one_that_ending_the_step_gives(history, live, margin, algorithm):
    window = AmaxHistory(
        DelayedScaling(length=len(history), margin=margin, algorithm=algorithm), torch.device("cpu")
    )
    window.history.copy_(torch.tensor(history))
    window.live.copy_(torch.tensor([*live, 0.0]))
    foretold = precast_weight.next_amax(window)
    roll_history([window])
    assert_same(foretold, window.live[:1].clone())


def left(x: torch.Tensor, cast: Cast, expected: float) -> PrecastWeight:
    window = (
        AmaxHistory(cast.calibrate, x.device)
        if isinstance(cast.calibrate, DelayedScaling)
        else None
    )
    found = PrecastWeight.of(x, cast, window)
    if window is not None:
        window.live[IN_USE] = expected
    precast_weight.write(found, x)
    found.commit(x)
    return found


def weight(shape: tuple[int, int], spoiled: float | None = None) -> torch.Tensor:
    x = torch.randn(shape)
    if spoiled is not None:
        x[0, 0] = spoiled
    return x


def parts(*casts: QTensor | torch.Tensor | None) -> list[torch.Tensor | None]:
    """The tensors of which casts consist."""
    return [
        part
        for each in casts
        for part in ((each.data.contiguous(), each.scale) if isinstance(each, QTensor) else (each,))
    ]


@pytest.mark.parametrize("cast", CASTS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (40, 24)])
def test_current_scaling_has_the_bits_of_casting_anew(cast, shape):
    for spoiled in (None, 0.0, 1e30, 1e-42, float("nan"), float("-inf")):
        x = weight(shape, spoiled)
        found = left(x, cast, 0.0)
        assert found.matches(x, cast, None)
        *both, amax = quantize_precast(x, found, None)
        assert amax is None
        assert_same(parts(*both), parts(*quantize_pair(x, cast)[:2]), any_nan=True)
        assert not found.matches(x, cast, None), "each is taken once"


@pytest.mark.parametrize("cast", CASTS, ids=str)
@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize(
    ("in_use", "expected"), [(2.0, 2.0), (2.0, 1.5), (2.0, 0.0), (0.0, 2.0), (0.0, 0.0)]
)
def test_delayed_scaling_has_the_bits_of_casting_anew(cast, records, in_use, expected):
    cast = Cast(format=cast.format, scale=cast.scale, calibrate=DelayedScaling(length=3))
    for spoiled in (None, 1e30, float("nan")):
        x = weight((7, 20), spoiled)
        found = left(x, cast, expected)
        assert found.buffers is not None
        found.buffers.live.copy_(torch.tensor([in_use, 0.1, 0.0]))
        truth = found.buffers.live.clone()
        plain, turned, amax = quantize_precast(x, found, found.buffers.live, records=records)
        expected_both = quantize_pair(x, cast, amax_state=truth, records=records)
        assert_same(found.buffers.live, truth)
        if spoiled is not None and spoiled != spoiled:  # codes under a scale of NaN are free
            assert (
                plain.scale.isnan().all()
                and turned.scale.isnan().all()
                and amax is not None
                and amax.isnan().all()
            )
        else:
            assert_same(parts(plain, turned, amax), parts(*expected_both))


def test_it_serves_no_other_weight_cast_or_window():
    cast, other = (
        Cast(format=E4M3, calibrate=DelayedScaling()),
        Cast(format=E5M2, calibrate=DelayedScaling()),
    )
    x = weight((4, 8))
    found = left(x, cast, 1.0)
    live = found.buffers.live
    assert found.matches(x, cast, live)
    assert not found.matches(x, other, live)
    assert not found.matches(x, cast, live.clone()) and not found.matches(x, cast, None)
    assert not found.matches(x.clone(), cast, live) and not found.matches(x.view(8, 4), cast, live)
    x.add_(1)
    assert not found.matches(x, cast, live)
    found.commit(x)
    assert not found.matches(x, cast, live), "nothing was written for this version"
    precast_weight.write(found, x)
    found.commit(x)
    assert found.matches(x, cast, live) and (found.left, found.taken) == (2, 0)
    found.forget()
    assert not found.matches(x, cast, live)
    found.disable("why not")
    assert found.codes is None and found.refused == "why not"

"""Definitions in pieces of rows, as a GPU has them, beside the whole (exact): codes, scales, rotations, noise."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from narrowgauge.formats import E2M1, INT4, INT8
from narrowgauge.nn import leverage_score, operands
from narrowgauge.nn.rotated_pieces import cast_in_pieces
from narrowgauge.nn.rotation import Rotation
from narrowgauge.ops import chunking
from narrowgauge.ops.hadamard import definition as hadamard
from narrowgauge.ops.quantize import definition
from narrowgauge.ops.random import Key
from narrowgauge.recipe import Cast, ClippedRms, Hadamard
from narrowgauge.recipes import MXFP4, NVFP4
from narrowgauge.scaling import WHOLE
from tests.compare import assert_same


@pytest.fixture
def small_pieces(monkeypatch):
    """As on a GPU, 7 to 60 rows of 64 to 100 columns a piece: `cut(True)` cuts, `cut(False)` does not."""
    for module in (chunking, definition, operands):
        monkeypatch.setattr(module, "PIECE", 700)

    def cut(is_on_gpu):
        monkeypatch.setattr(chunking, "type_of", lambda device: "cuda" if is_on_gpu else "cpu")

    return cut


def both(cut, work):
    cut(False)
    whole = work()
    cut(True)
    return whole, work()


X = torch.randn(61, 100, generator=torch.Generator().manual_seed(3))
CASTS = {
    "row": Cast(format=INT8, tile=(1, WHOLE)), "tensor": Cast(format=INT4), "columns": Cast(format=INT4, tile=(WHOLE, 1)),
    "tiles": MXFP4.output.lhs, "two levels": NVFP4.output.lhs, "squares": NVFP4.output.rhs,
    "stochastic": MXFP4.grad_input.lhs, "rms": Cast(format=INT4, calibrate=ClippedRms(clip=2.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("expand", [None, torch.bfloat16])
def test_a_cast_in_pieces_has_the_same_codes_and_scales(small_pieces, name, turned, expand):
    cast, x = CASTS[name], X.T if turned else X
    noise = Key((2**32 - 5, 17)) if cast.draws else None
    cut = both(small_pieces, lambda: definition.quantize(x, cast, None, noise, expand))
    assert len(chunking.row_chunks(x, max(cast.tile[0], 1))) > 1
    whole, piecewise = cut
    assert_same(piecewise.data, whole.data)
    assert_same(piecewise.scale, whole.scale)
    assert piecewise.global_scale is None or piecewise.global_scale == whole.global_scale


def test_a_given_amax_and_noise_in_memory_are_cut_with_the_rows(small_pieces):
    cast = replace(CASTS["row"], rounding="stochastic")
    amax, noise = X.abs().amax(1, keepdim=True) * 0.7, torch.rand(X.shape)
    whole, piecewise = both(small_pieces, lambda: definition.quantize(X, cast, amax, noise, None))
    assert_same(piecewise.data, whole.data)
    assert_same(piecewise.scale, whole.scale)


def test_a_key_after_so_many_elements_goes_on_where_they_end():
    for words in ((2**32 - 5, 17), torch.tensor([2**32 - 5, 17])):
        key = Key(words)
        assert_same(key.after(200).uniform((11, 9)).flatten(), key.uniform((299,))[200:])


@pytest.mark.parametrize("signs", [None, torch.randint(0, 2, (128,)) * 2.0 - 1])
def test_rotations_and_codes_in_pieces_have_the_same_bits(small_pieces, signs):
    bits = torch.randint(0, 256, (61, 16), dtype=torch.uint8)
    whole, piecewise = both(
        small_pieces,
        lambda: (
            hadamard.rotate(X, 64, signs),
            hadamard.unrotate(hadamard.rotate(X, 64, signs), 64, 100, signs, bits),
            *hadamard.encode(X, torch.tensor([[0.3]]), INT4, True, True),
        ),
    )
    for one, other in zip(piecewise, whole, strict=True):
        assert_same(one, other)


def test_norms_of_rows_in_pieces(small_pieces):
    assert_same(*both(small_pieces, lambda: leverage_score.row_norms(X * 1e-30)))


@pytest.mark.parametrize(
    "cast", [MXFP4.output.lhs, MXFP4.grad_weight.lhs], ids=["nearest", "stochastic"]
)
def test_rotated_rows_are_cast_in_pieces_to_the_same_codes(small_pieces, cast):
    rotation = Rotation(Hadamard(block=32), None)
    key = Key((9, 1)) if cast.draws else None
    small_pieces(False)
    whole = definition.quantize(rotation(X), cast, None, key, None)
    small_pieces(True)
    plan: Any = SimpleNamespace(quantize=definition.quantize)
    piecewise = cast_in_pieces(X, cast, rotation, key, plan, None)
    assert cast.format == E2M1 and piecewise.inner == whole.inner == 128
    assert_same(piecewise.data, whole.data)
    assert_same(piecewise.scale, whole.scale)
    assert_same(piecewise.values(), whole.values())


@pytest.mark.parametrize(("rows", "together"), [(61, 1), (5000, 1), (5000, 64), (20_000, 7)])
def test_a_large_tensor_has_larger_pieces_and_not_more(small_pieces, rows, together):
    """exact"""
    small_pieces(True)
    slices = chunking.row_chunks(torch.empty(rows, 70), together)
    assert 1 < len(slices) <= chunking.MAX_CHUNKS
    assert [each.start for each in slices] == [0, *(each.stop for each in slices[:-1])] and slices[
        -1
    ].stop == rows
    assert all((each.stop - each.start) % together == 0 for each in slices[:-1])

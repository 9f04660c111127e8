"""The container: its invariants, each refused in a sentence, and its views (exact)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from narrowgauge import formats
from narrowgauge.errors import ShapeError
from narrowgauge.formats import E2M1, E4M3, INT4, INT8, NF4
from narrowgauge.ops.quantize import dequantize, quantize
from narrowgauge.recipe import WHOLE, Cast
from narrowgauge.scaling import E4M3_TWO_LEVEL, POW2, scale_shape
from tests.compare import assert_same
from tests.oracles import plain
from tests.raising import raises

BLOCKS = Cast(format=E4M3, tile=(2, 4), scale=POW2)
NIBBLES = Cast(format=INT4, tile=(1, 4))
TWO_LEVEL = Cast(format=E2M1, tile=(1, 4), scale=E4M3_TWO_LEVEL)


def quantized(cast, rows=5, columns=7, **options):
    torch.manual_seed(0)
    return quantize(torch.randn(rows, columns), cast, **options)


# --- invariants -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", [BLOCKS, NIBBLES, TWO_LEVEL], ids=str)
@pytest.mark.parametrize(
    "damage",
    [
        lambda q: {"data": q.data[None]},
        lambda q: {"data": q.data[:, 0]},
        lambda q: {"scale": q.scale[0]},
        lambda q: {"data": q.data[:, :-1]},
        lambda q: {"data": torch.cat((q.data, q.data), dim=0)},
        lambda q: {"scale": q.scale[:, :-1]},
        lambda q: {"scale": q.scale.T},
        lambda q: {"inner": q.inner + 4},
        lambda q: {"cast": replace(q.cast, tile=(1, 1))},
        lambda q: {"cast": replace(q.cast, format=E2M1 if q.cast.format == E4M3 else E4M3)},
        lambda q: {"scale": q.scale.double()},
        lambda q: {"scale": q.scale.to(torch.bfloat16)},
        lambda q: {"data": q.data.to(torch.float16)},
        lambda q: {"data": q.data.to(torch.int32)},
        lambda q: {"global_scale": None if q.global_scale is not None else torch.ones(())},
    ],
)
def test_what_does_not_fit_is_refused(cast, damage):
    q = quantized(cast)
    with pytest.raises(ShapeError, match=r"^QTensor: .+\.( [A-Z].+\.)?$"):
        replace(q, **damage(q))


@pytest.mark.parametrize(
    "bad", [torch.ones(1), torch.ones((), dtype=torch.float64)], ids=["one axis", "float64"]
)
def test_a_global_scale_is_a_single_float32(bad):
    with raises(ShapeError, "qtensor.global-scale-shape", bad.dtype, list(bad.shape)):
        replace(quantized(TWO_LEVEL), global_scale=bad)


def test_codes_of_four_bits_may_come_one_to_a_byte():
    """As integer units read them: the same numbers and the same cast; and they can be turned (exact)."""
    packed = quantize(torch.randn(5, 7), Cast(format=INT4))
    loose = replace(packed, data=packed.cast.format.unpack(packed.data, 7))
    assert not loose.is_packed and loose.shape == packed.shape
    assert_same(dequantize(loose), dequantize(packed))
    assert_same(dequantize(loose.transposed()), dequantize(packed).T.contiguous())
    assert_same(loose.expanded(torch.float32).compact().data, packed.data)


def test_refusals_name_what_was_given_and_what_was_expected():
    q = quantized(BLOCKS)
    with raises(ShapeError, "qtensor.shape", "scale [3, 1]", "7 e4m3", "scale [3, 2]"):
        replace(q, scale=q.scale[:, :1])
    with raises(ShapeError, "qtensor.dtype", "int16", "int4", "torch.int8", "torch.uint8"):
        replace(quantized(NIBBLES), data=torch.zeros(5, 4, dtype=torch.int16))


def test_integers_of_4_bits_may_lie_one_to_a_byte():
    """What an INT8 GEMM reads; the cast says what they are."""
    q = quantized(NIBBLES)
    loose = replace(q, data=q.cast.format.unpack(q.data, q.inner))
    assert not loose.is_packed and loose.nbytes > q.nbytes
    assert_same(loose.values(), q.values())


@pytest.mark.parametrize("cast", [BLOCKS, NIBBLES, TWO_LEVEL], ids=str)
@pytest.mark.parametrize("shape", [(3, 7), (1, 1), (0, 5), (5, 0), (0, 0), (2, 8)], ids=str)
@pytest.mark.parametrize("expand", [None, torch.float32, torch.bfloat16], ids=str)
def test_every_quantized_tensor_satisfies_them(cast, shape, expand):
    q = quantize(torch.randn(shape), cast, expand=expand)
    assert replace(q) is not q and q.shape == shape and q.device == torch.device("cpu")
    assert q.values().shape == shape and dequantize(q).shape == shape
    assert tuple(q.scale.shape) == scale_shape(shape, cast.tile)
    assert q.is_expanded == (expand is not None)
    assert q.is_packed == (cast.format.bits == 4 and expand is None)


def test_bytes_are_those_of_codes_and_scales():
    """16 x 64: e4m3 1,024 + 8 * 16 * 4; int4 512 + 16 * 16 * 4; two-level with the float32 of the tensor."""
    assert quantized(BLOCKS, 16, 64).nbytes == 1024 + 8 * 16 * 4
    assert quantized(NIBBLES, 16, 64).nbytes == 512 + 16 * 16 * 4
    assert quantized(TWO_LEVEL, 16, 64).nbytes == 512 + 16 * 16 * 4 + 4
    assert quantized(NIBBLES, 16, 63).data.shape == (16, 32)


# --- transposition ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [(WHOLE, WHOLE), (4, 4), (1, 1), (128, 128)], ids=str)
@pytest.mark.parametrize("expand", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", [E4M3, INT8], ids=str)
def test_a_transposed_tensor_is_the_quantized_transpose(format, tile, expand):
    """Bit for bit, and without copying: one quantization serves both orientations."""
    x = torch.randn(6, 10)
    cast = Cast(format=format, tile=tile, scale=POW2)
    q = quantize(x, cast, expand=expand)
    turned, expected = q.transposed(), quantize(x.T, cast, expand=expand)
    assert turned.shape == (10, 6) and turned.memory.data_ptr() == q.memory.data_ptr()
    assert_same(turned.data, expected.data)
    assert_same(turned.scale, expected.scale)
    assert_same(dequantize(turned), dequantize(q).T.contiguous())
    assert_same(turned.transposed().data, q.data)


@pytest.mark.parametrize(
    "q",
    [
        lambda: quantized(Cast(format=E4M3, tile=(1, WHOLE))),
        lambda: quantized(Cast(format=E4M3, tile=(2, 4))),
        lambda: quantized(Cast(format=INT4)),
        lambda: quantized(Cast(format=NF4, tile=(4, 4))),
    ],
)
def test_tiles_that_do_not_transpose_and_packed_codes_are_refused(q):
    with raises(ShapeError, "qtensor.transposed"):
        q().transposed()


def test_expanded_four_bit_values_can_be_transposed():
    q = quantized(Cast(format=INT4), expand=torch.float32)
    assert_same(dequantize(q.transposed()), dequantize(q).T.contiguous())


# --- codes and expanded values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", formats.ELEMENTS, ids=str)
@pytest.mark.parametrize("shape", [(3, 7), (4, 8), (0, 5), (5, 0)], ids=str)
def test_expanding_and_compacting_lose_nothing(format, shape):
    """Back to the same bytes, NaN where the format has one; expanded is what quantize(expand=) gives (exact)."""
    x = torch.randn(shape)
    x[:1, :2] = torch.tensor([float("nan"), -0.0])[: shape[1]]
    cast = Cast(format=format, tile=(1, 4))
    q = quantize(x, cast)
    for dtype in (torch.float32, torch.bfloat16)[
        : 1 if isinstance(format, formats.TableFormat) else 2
    ]:
        expanded = q.expanded(dtype)
        assert expanded.data.dtype == dtype and expanded.is_expanded
        assert_same(plain(expanded.data), plain(quantize(x, cast, expand=dtype).data))
        assert_same(plain(dequantize(expanded)), plain(dequantize(q)))
        assert_same(plain(expanded.compact().values()), plain(q.values()))
        number = ~x.isnan() & ~dequantize(q).isnan()
        assert expanded.compact().data.dtype == q.data.dtype
        assert_same(expanded.compact().values()[number], q.values()[number])
    assert q.compact() is q

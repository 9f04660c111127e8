"""Weights that somebody else multiplies by: said at convert and by describe; torch's fused encoder is refused (exact)."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import ConfigError, ShapeError
from narrowgauge.structure import read_weights
from tests.compare import assert_same
from tests.raising import raises, warns, with_code


class Attention(nn.Module):
    """As timm's eva02: the bias of q, k and v is put together, and the Linear not called."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj, self.wo, self.tied = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        qkv = F.linear(x, weight=self.qkv.weight, bias=torch.cat((self.qkv.bias,)))
        qkv = qkv.to(self.wo.weight.dtype) if isinstance(self.wo.weight, torch.Tensor) else qkv
        return self.wo(self.proj(qkv)) @ self.tied.weight.T


def test_a_weight_that_its_owner_multiplies_by_is_told_of():
    assert read_weights(Attention()) == {"qkv", "tied"} and not read_weights(nn.Linear(2, 2))
    model = nn.Sequential(Attention(), Attention())
    with warns("convert.bypassed", "Attention.forward", "'0.qkv'", "3 more"):
        ng.convert(model, "fp8-current")
    with warns("convert.bypassed", "'qkv'", "1 more"):
        ng.convert(Attention(), "fp8-current")
    for row in ng.describe(model):
        read = "qkv" in row.name or "tied" in row.name
        assert bool(with_code(row.notes, "read-by-owner")) == read
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ng.convert(model, {"*.qkv": None, "*.tied": None})


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
def test_an_encoder_with_a_padding_mask_hands_no_nested_tensor_to_its_linears():
    """In evaluation it packs them; where nothing is padding its output is that of its layers (exact)."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 5, 32), torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    with torch.no_grad():
        plain = encoder(x, src_key_padding_mask=padding)
        ng.convert(encoder, "int8")
        found = encoder(x, src_key_padding_mask=padding)
        assert (found - plain)[~padding].norm() < 0.01 * plain[
            ~padding
        ].norm()  # int8 is off by 0.003
        ng.convert(encoder, None)
        assert_same(encoder(x, src_key_padding_mask=padding), plain)
        with raises(ShapeError, "linear.dtype"):
            ng.QLinear(32, 32, recipe="int8")(
                torch.nested.nested_tensor([torch.randn(3, 32), torch.randn(2, 32)])
            )


def test_one_weight_that_is_read_is_one_and_no_more():
    with pytest.warns(UserWarning) as told:
        ng.convert(Attention(), {"qkv": "fp8-current", "proj": "fp8-current"})
    [warning] = with_code([each.message for each in told], "convert.bypassed")
    assert "'qkv'" in str(warning) and "more layers" not in str(warning)


def relu(x):
    return x.clamp(min=-1.0)


def test_an_own_function_called_relu_is_not_taken_for_torchs():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        32, 2, 64, dropout=0.0, activation=relu, batch_first=True
    ).eval()
    model, x = nn.ModuleList([layer, nn.Linear(32, 32)]), torch.randn(2, 5, 32)
    with torch.no_grad():
        plain = layer(x)
        for patterns in ({"1": "fp8-current"}, "fp8-current", None):
            ng.convert(model, patterns)
            assert layer.activation_relu_or_gelu == 0
            assert torch.equal(layer(x), plain) == (patterns != "fp8-current")


def test_a_layer_whose_user_refused_the_fused_encoder_keeps_refusing_it():
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    layer.activation_relu_or_gelu = 0
    for recipe in ("fp8-current", None):
        ng.convert(layer, recipe)
        assert layer.activation_relu_or_gelu == 0


@pytest.mark.parametrize("activation", ["relu", "gelu", nn.GELU()])
def test_the_fused_encoder_does_not_pass_the_recipe_by(activation):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        32, 2, 64, dropout=0.0, activation=activation, batch_first=True
    )
    encoder, before = nn.TransformerEncoder(layer, 1), layer.activation_relu_or_gelu
    ng.convert(encoder, "fp8-current")
    x = torch.randn(2, 5, 32)
    encoder.eval()
    hook = encoder.layers[0].linear1.register_forward_hook(
        lambda *_: None
    )  # for which torch leaves the fused kernel
    with torch.no_grad():
        expected = encoder(x)
    hook.remove()
    with torch.no_grad():
        found = encoder(x)
    assert_same(found, expected)
    assert "bypass" not in str(ng.describe(encoder))
    ng.convert(encoder, None)
    assert encoder.layers[0].activation_relu_or_gelu == before > 0
    with torch.no_grad():
        assert not torch.equal(encoder(x), found)


class Sliced(nn.Module):
    """As BLOOM's MLP: a branch for exactness that its settings switch off."""

    def __init__(self, slices: int, exact: bool) -> None:
        super().__init__()
        self.slices, self.exact, self.down = slices, exact, nn.Linear(32, 32)

    def forward(self, x):
        if self.slices > 1 and self.exact:
            return F.linear(x, self.down.weight[:, :]) + self.down.bias
        return self.down(x)


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.third = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.missing_later = None

    def forward(self, x):
        if self.training:
            x = F.linear(x, self.one.weight)
        if x.shape[0] > 4:
            x = F.linear(x, self.other.weight)
        if not self.missing_later:
            return self.third(x)
        return F.linear(x, self.third.weight)


@pytest.mark.parametrize(
    ("slices", "exact", "read"),
    [(1, False, False), (4, False, False), (1, True, False), (4, True, True)],
)
def test_a_branch_that_settings_switch_off_reads_nothing(
    slices: int, exact: bool, read: bool
) -> None:
    model = nn.Sequential(Sliced(slices, exact))
    assert read_weights(model[0]) == (frozenset({"down"}) if read else frozenset())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ng.convert(model, "fp8-current")
    assert bool(with_code(told, "convert.bypassed")) is read


def test_branches_on_the_mode_or_the_input_count() -> None:
    assert read_weights(Modes()) == {
        "one",
        "other",
        "third",
    }  # behind a return, which is not followed


def test_describe_names_the_pattern_that_left_a_layer_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    ng.convert(model, {"*": "fp8-current", "1": None})
    notes = {row.name: row.note for row in ng.describe(model)}
    assert notes["1"] == "pattern '1' leaves it as it is"
    ng.convert(model, {"2": None})
    assert {row.name: row.note for row in ng.describe(model)}[
        "2"
    ] == "pattern '2' leaves it as it is"
    ng.convert(model, None)
    assert [note.code for row in ng.describe(model) for note in row.notes] == ["not-converted"] * 3


def test_a_lazy_linear_gets_a_sentence_before_it_has_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(32), nn.Linear(32, 32))
    with raises(ConfigError, "convert.lazy-linear", "'0'"):
        ng.convert(model, "fp8-current")
    ng.convert(model, {"*": "fp8-current", "0": None})
    model(torch.randn(2, 32))
    ng.convert(model, "fp8-current")
    assert [row.recipe for row in ng.describe(model)] == ["fp8-current"] * 2

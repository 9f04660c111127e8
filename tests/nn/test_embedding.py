"""Embeddings with codes: exactly LSQ in float64 (bounded by float32's roundings), and what `convert` makes of models that have some."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from narrowgauge.nn.embedding import FORMATS, QEmbedding
from narrowgauge.nn.learned_step import RATE, WATCHED
from tests.raising import coded, raises

IDS = torch.tensor([[0, 3, 3, 7], [11, 0, 5, 30]])


class Model(nn.Module):
    def __init__(self, tied: bool = False, **options) -> None:
        super().__init__()
        self.words = nn.Embedding(31, 32, **options)
        self.up = nn.Linear(32, 32)
        self.lm_head = nn.Linear(32, 31, bias=False)
        if tied:
            self.lm_head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.up(self.words(ids)))


def made(codes: str | None = "int4", **options) -> Model:
    torch.manual_seed(0)
    return ng.convert(Model(**options), "bf16", embeddings=codes)


def trained(model: Model, steps: int, rate: float = 0.01) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())
        loss.backward()
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("codes", FORMATS)
def test_forward_and_gradients_are_lsq(codes):
    """Against the paper's equations in float64: forward within two roundings of float32, gradients within sums of 256 products.

    The step is chosen so that part of the rows is clipped.
    """
    layer, most = made(codes).words, FORMATS[codes].max
    trained_step = 0.4 * float(layer.weight.detach().abs().max()) / most
    layer.steps.cold_left.zero_()
    with torch.no_grad():
        layer.steps.w.fill_(math.log(trained_step) / RATE)
    gy = torch.randn(*IDS.shape, 32)
    y = layer(IDS)
    y.backward(gy)

    step = torch.tensor(math.exp(float(layer.steps.w.detach()) * RATE), dtype=torch.float64)
    weight = layer.weight.detach().double()
    ratio = weight[IDS] / step
    inside, q = ratio.abs() <= most, ratio.clamp(-most, most).round()
    assert 0.02 < (~inside).double().mean() < 0.6
    far = (
        (ratio - ratio.floor()) - 0.5
    ).abs() > 1e-3  # of halves: there float32 may round to the other side
    assert torch.allclose(y.detach().double()[far], (q * step)[far], rtol=1e-6, atol=0)
    expected = torch.zeros_like(weight).index_add_(
        0, IDS.flatten(), torch.where(inside, gy.double(), 0.0).flatten(0, 1)
    )
    assert torch.allclose(layer.weight.grad.double(), expected, rtol=1e-6, atol=1e-6)
    by_step = (gy.double() * (q - torch.where(inside, ratio, 0.0))).sum() / math.sqrt(
        weight.numel() * most
    )
    assert float(layer.steps.w.grad) == pytest.approx(
        float(by_step) / (float(step) * RATE), rel=1e-3
    )


def test_the_step_begins_with_the_weights_and_then_learns():
    model = made()
    start = 2 * model.words.weight.detach().abs().mean() / math.sqrt(7)
    values = model.words(IDS).detach().unique() / start
    assert torch.allclose(values, values.round(), atol=1e-5) and values.abs().max() <= 7.001
    first = copy.deepcopy(model.words.weight.detach())
    losses = trained(model, 30)
    assert losses[-1] < losses[0] / 2
    assert not model.words.steps.is_cold
    assert float((model.words.steps.w.detach() * RATE).exp()) != pytest.approx(
        float(start), rel=1e-3
    )
    untouched = [row for row in range(31) if row not in IDS]
    assert (
        model.words.weight.detach()[untouched] - first[untouched]
    ).abs().max() < 0.05  # weight decay alone


def test_a_checkpoint_goes_on_to_the_bit():
    whole, half = made(), made()
    trained(half, 3)
    trained(whole, 3)
    again = made()
    again.load_state_dict(half.state_dict())
    assert torch.equal(again(IDS), whole(IDS))
    assert "words.steps.w" in half.state_dict()


def test_copies_and_other_codes_and_the_way_back():
    model = made()
    trained(model, 2)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(IDS), model(IDS))
    step = model.words.steps.w
    assert ng.convert(model, "bf16", embeddings="int4").words.steps.w is step
    assert ng.convert(model, "bf16").words.steps.w is step
    assert ng.convert(model, "bf16", embeddings="int8").words.format is FORMATS["int8"]
    with ng.suspended(model):
        assert torch.equal(model.words(IDS), model.words.weight[IDS])
    ng.convert(model, None)
    assert type(model.words) is nn.Embedding
    assert not any(".steps." in name for name in model.state_dict())


def test_a_tied_head_reads_the_weight_itself():
    model = made(tied=True)
    assert model.lm_head.weight is model.words.weight
    x = torch.randn(2, 32)
    assert torch.equal(model.lm_head(x), x @ model.words.weight.T)
    [row] = [row for row in ng.describe(model) if row.name == "words"]
    assert row.shape == "31 rows of 32" and row.recipe == "int4 rows" and "lm_head" in row.note
    losses = trained(model, 20)
    assert losses[-1] < losses[0]


def test_a_table_of_its_own_has_a_row_without_a_note():
    [row] = [row for row in ng.describe(made("int8")) if row.name == "words"]
    assert row.recipe == "int8 rows" and row.note == ""


def test_an_optimizer_without_the_step_is_warned_of():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ng.convert(model, "bf16", embeddings="int8")
    with pytest.warns(UserWarning, match="no learned step of 1 layers"):
        for _ in range(WATCHED + 2):
            model(IDS).sum().backward()
            optimizer.step()
            ng.advance(model)


@pytest.mark.parametrize(
    ("options", "codes", "why"),
    [
        ({"max_norm": 1.0}, "int4", coded("convert.embedding-codes", "max_norm")),
        ({"sparse": True}, "int4", coded("convert.embedding-codes", "sparse")),
        ({}, "int3", coded("convert.embeddings", "'int4', 'int8'")),
    ],
)
def test_what_cannot_have_codes_is_refused_and_left_as_it_was(options, codes, why):
    model = Model(**options)
    with raises(ConfigError, why):
        ng.convert(model, "fp8-current", embeddings=codes)
    assert type(model.words) is nn.Embedding and type(model.up) is nn.Linear


def test_an_embedding_with_a_forward_of_its_own_is_refused():
    class Scaled(nn.Embedding):
        def forward(self, input):
            return 8 * super().forward(input)

    model = Model()
    model.words = Scaled(31, 32)
    with raises(ConfigError, "convert.embedding-codes"):
        ng.convert(model, "bf16", embeddings="int4")
    with raises(ConfigError, "convert.embedding-codes", "nn.Embedding"):
        ng.convert(nn.Sequential(nn.Linear(32, 32)), "bf16", embeddings="int4")


def test_16_bit_weights_and_no_positions():
    model = made().to(torch.bfloat16)
    assert model.words(IDS).dtype == torch.bfloat16
    assert model.words.steps.w.dtype == torch.float32
    assert model.words(IDS[:0]).shape == (0, 4, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(model, 2)


def test_a_frozen_table_gets_a_frozen_step():
    model = Model()
    model.words.requires_grad_(False)
    ng.convert(model, "bf16", embeddings="int4")
    assert isinstance(model.words, QEmbedding) and not model.words.steps.w.requires_grad
    trained(model, 2)

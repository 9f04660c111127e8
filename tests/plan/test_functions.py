"""`narrowgauge.plan(...)`: any model as functions; what it refuses, and what it leaves as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from narrowgauge.plan import Plan
from tests.raising import coded, raises

GIB = 2**30


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def stack(layers: int, width: int = 64, block: type[nn.Module] = Block) -> nn.Module:
    return nn.Sequential(*[block(width) for _ in range(layers)])


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


@pytest.mark.slow
def test_layers_are_carried_on():
    """A function of the number of layers gives what a whole model gives (within a thousandth), and parts by hand (exact)."""
    x = torch.zeros(32, 64)
    few = ng.plan(stack, loss, adamw, x, layers=12)
    whole = ng.plan(lambda: stack(12), loss, adamw, x)
    assert few.forecast.top.alive == pytest.approx(whole.forecast.top.alive, rel=1e-3)
    weights = 12 * (2 * 64 * 256 + 64 + 256) * 4
    parts = whole.forecast.parts()
    assert parts["weights"] == weights and parts["batch"] == x.nbytes
    assert (
        parts["states"] == 2 * weights + 12 * 4 * 4
    )  # two moments, and a count of steps for each tensor
    assert few.fits is None and "name a card" in str(few)


def test_a_model_may_be_converted_where_it_is_made():
    """`.to(dtype)` in the function that makes the model gives the count of a model made in that type."""

    def made() -> nn.Module:
        torch.set_default_dtype(torch.bfloat16)
        try:
            return stack(3)
        finally:
            torch.set_default_dtype(torch.float32)

    def converting() -> nn.Module:
        assert torch.utils.swap_tensors is swap, "nothing of torch is replaced while it is counted"
        return stack(3).to(torch.bfloat16)

    x, swap = torch.zeros(16, 64, dtype=torch.bfloat16), torch.utils.swap_tensors
    converted, own = (ng.plan(make, loss, adamw, x) for make in (converting, made))
    assert (
        converted.allocated == own.allocated and converted.forecast.parts() == own.forecast.parts()
    )
    assert str(converted).startswith("converting")


def test_a_module_stays_as_it_is():
    model = ng.convert(stack(3), "fp8-row")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    draws = torch.get_rng_state()
    found = ng.plan(model, loss, adamw, torch.zeros(16, 64), card="rtx-4090")
    assert isinstance(found, Plan) and found.fits and found.as_dict()["card"]["name"] == "RTX 4090"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), draws) and all(
        each.grad is None for each in model.parameters()
    )
    assert float(loss(model, torch.ones(16, 64)).detach()) > 0  # its tensors are real


def test_a_model_that_reads_values_is_named_with_the_module_and_the_operation():
    class Looks(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else super().forward(x)

    class Chooses(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[x[:, 0] > 0])

    for kind in (Looks, Chooses):
        with raises(ConfigError, "plan.reads-values", "plan: 0", "0 reads"):
            ng.plan(lambda kind=kind: stack(2, block=kind), loss, adamw, torch.zeros(4, 64))
    ng.plan(lambda: stack(2), loss, adamw, torch.zeros(4, 64))  # and nothing is left behind


def test_refusals():
    x = torch.zeros(4, 64)
    with raises(ConfigError, "card.unknown", "'h100'"):
        ng.plan(lambda: stack(2), loss, adamw, x, card="h1000")
    with raises(ConfigError, "card.memory"):
        ng.plan(lambda: stack(2), loss, adamw, x, memory="lots")
    with raises(ConfigError, "plan.layers", "Sequential"):
        ng.plan(stack(2), loss, adamw, x, layers=9)
    with raises(ConfigError, "plan.no-argument"):
        ng.plan(lambda: stack(2), loss, adamw, x, layers=9)


def test_what_does_not_fit_is_said():
    found = ng.plan(lambda: stack(2, 4096), loss, adamw, torch.zeros(4, 4096), memory="2GiB")
    assert found.fits is False and "too much" in str(found) and found.allocated > 2 * GIB


def test_the_loss_in_chunks_reads_no_targets_there():
    """As the documentation shows it, without `checked`: fake targets hold nothing to be checked."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(512, 64), nn.Linear(64, 512, bias=False)

    def in_chunks(model: nn.Module, ids: Tensor) -> Tensor:
        hidden = model.table(ids)
        total, count = ng.memory.chunked_cross_entropy(
            hidden[:, :-1], model.head.weight, ids[:, 1:]
        )
        return total / count

    assert ng.plan(Head, in_chunks, adamw, torch.zeros(2, 16, dtype=torch.long)).allocated > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"micro_batches": 0},
            coded("plan.whole-number", "micro_batches", "= 0", "number, 1"),
        ),
        ({"micro_batches": "2"}, coded("plan.whole-number", "micro_batches = '2'")),
        ({"layers": -1}, coded("plan.whole-number", "layers = -1", "number, 0")),
        ({"memory": 24}, coded("plan.words", "memory = 24", "'24GiB'")),
        ({"card": 24}, coded("plan.words", "card = 24")),
        ({"model": None}, coded("plan.model", "model = None")),
        ({"loss": lambda model, x: model(x)}, coded("plan.loss-type", "a tensor of [8, 64]")),
        ({"loss": lambda model, x: 1.0}, coded("plan.loss-type", "float")),
        ({"model": lambda: Block(64).requires_grad_(False)}, coded("plan.no-gradient")),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    given = {
        "model": lambda: Block(64),
        "loss": loss,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
    }
    with raises(ConfigError, words):
        ng.plan(**{**given, "batch": torch.zeros(8, 64), **options})


@pytest.mark.slow
def test_blocks_in_segments_are_counted_one_by_one():
    """Three or four blocks form no segments of eight."""

    def segmented(layers: int) -> nn.Module:
        model = stack(layers, 256)
        ng.memory.checkpoint(model, "sqrt")
        return model

    x = torch.zeros(512, 256)
    found = ng.plan(segmented, loss, adamw, x, layers=16)
    assert "all 16 layers: its blocks are computed again in segments" in str(found)
    assert found.allocated == ng.plan(segmented, loss, adamw, x, layers=16, full=True).allocated

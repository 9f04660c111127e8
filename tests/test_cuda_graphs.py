"""CUDA graphs of a step: what becomes a graph when, refusals, and that training is what it was (exact).

Without a GPU a recorder stands in for CUDA's: what it "replays" is run again, from the static inputs alone.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge import cuda_graphs as graphs
from narrowgauge import recipes
from narrowgauge.cuda_graphs import (
    FORWARD_BACKWARD,
    WEIGHT_CASTS,
    GraphedStep,
    GraphPart,
    Graphs,
    cast_weight,
    keeps_casts,
    make_capturable,
    refuse,
)
from narrowgauge.errors import BackendError, ConfigError
from narrowgauge.nn import plan
from narrowgauge.nn.linear import QLinear
from tests.compare import assert_same
from tests.raising import raises, require

CPU = torch.device("cpu")


class Recorder:
    """Counts what it is asked for. A replay runs the call again; a capture does not."""

    def __init__(self, fails: str = "") -> None:
        self.warmed = self.captures = self.replays = 0
        self.fails = fails

    def warm(self, call: Callable[[], None]) -> None:
        self.warmed += 1
        call()

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        if self.fails:
            raise RuntimeError(self.fails)
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            call()

        return replay


def built(recipe: str = "fp8-delayed") -> nn.Module:
    torch.manual_seed(0)
    return ng.convert(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)), recipe)


def batches(count: int, rows: tuple[int, ...] = (4, 6)) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(rows[i % len(rows)], 32, generator=generator)} for i in range(count)]


def trained(
    recorder: Recorder | None, recipe: str = "fp8-delayed", steps: int = 6, micro: int = 2
) -> list[Tensor]:
    """Losses and norms, then weights and windows; with a recorder through graphs, else by the loop as one would write it."""
    model = built(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def backward(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    step = (
        GraphedStep(model, optimizer, backward, clip=0.5, warmup=2, recorder=recorder)
        if recorder
        else None
    )
    found: list[Tensor] = []
    data = batches(steps * micro)
    for number in range(steps):
        parts = data[number * micro : (number + 1) * micro]
        if step is not None:
            for batch in parts:
                step.accumulate(batch)
            found.append(step.readings().clone())
            step.update()
            continue
        loss = sum((backward(**batch).detach() for batch in parts), torch.zeros(()))
        norm = ng.optim.clip_gradients(model.parameters(), 0.5, wide=True)
        found.append(torch.stack((loss, norm)))
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
    return [*found, *model.state_dict().values()]


# Two shapes of micro-batches, clipping, update; and the casts of the weights, where the recipe has some that serve a step.
@pytest.mark.parametrize(
    ("recipe", "captures"),
    [
        ("fp8-delayed", 5),
        ("fp8-row", 5),
        ("fp8-block", 5),
        ("int8", 5),
        ("int4-hq-bs", 5),
        ("nvfp4", 5),
        ("bf16", 4),
    ],
)
def test_training_is_what_it_was(recipe, captures):
    recorder = Recorder()
    for a, b in zip(
        trained(recorder, recipe, steps=8), trained(None, recipe, steps=8), strict=True
    ):
        assert_same(a, b)
    assert recorder.captures == captures and recorder.replays > recorder.captures


@pytest.mark.parametrize("micro", [1, 3])
def test_weights_are_cast_once_in_a_step(monkeypatch, micro):
    """Whatever the number of its micro-batches, from the first `advance` on. Counted by the shapes of the two weights."""
    casts = []
    whole = plan.OperandPlan.quantize

    def counted(self, x, *rest):
        casts.append(tuple(x.shape))
        return whole(self, x, *rest)

    monkeypatch.setattr(plan.OperandPlan, "quantize", counted)
    # Casts a weight twice, along the axis that each product contracts; the other weight is its transpose.
    model = built("fp8-row")
    step = GraphedStep(
        model, torch.optim.AdamW(model.parameters()), lambda x: _backward(model, x.detach().requires_grad_()), warmup=1,
        recorder=Recorder(),
    )  # fmt: skip
    for number in range(6):
        casts.clear()
        for batch in batches(micro, rows=(4,)):
            step.accumulate(batch)
        step.readings()
        step.update()
        assert number == 0 or casts.count((48, 32)) == casts.count((32, 48)) == 2
    assert step.graphs.captured[FORWARD_BACKWARD] == 1
    assert step.graphs.captured.get(WEIGHT_CASTS, 0) == (micro > 1)
    layer = model[0]
    assert layer.state.cache.casts.is_empty, (
        "what a graph has made is out of reach between its parts, as for an evaluation"
    )


def test_a_step_with_another_number_of_micro_batches_computes_with_the_weights_of_now():
    """Also after steps with one, which would not have asked for casts of their own."""
    model = ng.convert(nn.Sequential(nn.Linear(32, 32)), "fp8-current")
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(32))
        model[0].bias.zero_()
    seen: list[float] = []

    def backward(x: Tensor) -> Tensor:
        y = model(x)
        seen.append(y[0, 0].item())
        loss = y.sum() * 0
        loss.backward()
        return loss

    step = GraphedStep(
        model, torch.optim.SGD(model.parameters(), 0.0), backward, warmup=1, recorder=Recorder()
    )
    for micro in (2, 2, 2, 1, 2, 2, 1, 1, 1, 3):
        seen.clear()
        for _ in range(micro):
            step.accumulate({"x": torch.ones(1, 32)})
        step.update()
        assert [round(value) for value in seen] == [model[0].weight[0, 0].item()] * micro
        with torch.no_grad():
            model[0].weight.add_(torch.eye(32))
    assert step.graphs.captured[WEIGHT_CASTS] == 1


def test_casts_of_a_step_do_not_ask_for_the_version_of_the_weight():
    """A graph changes the weight behind the host's back; and what is not among the casts is built anew each time."""
    layer = QLinear(32, 48, recipe="fp8-row")
    casts = cast_weight(layer)
    assert casts.rows is not None and casts.cols is not None
    x = torch.randn(4, 32)
    before = layer(x)
    layer.use_casts(casts)
    with torch.no_grad():
        layer.weight.mul_(2.0)
    assert_same(layer(x), before)
    casts.rows = None
    assert not torch.equal(layer(x), before)
    assert casts.rows is None and casts.cols is not None
    layer.empty_cache()
    assert not torch.equal(layer(x), before)


@pytest.mark.parametrize("recipe", recipes.ALL, ids=lambda recipe: recipe.name)
def test_casts_made_ahead_are_those_that_the_layer_makes(recipe):
    """For every recipe: exact, or none at all."""
    torch.manual_seed(0)
    layer = QLinear(64, 48, recipe=recipe)
    x = torch.randn(8, 64)
    results = []
    for ahead in (False, True):
        torch.manual_seed(1)
        layer.zero_grad()
        if ahead:
            layer.use_casts(cast_weight(layer))
        given = x.clone().requires_grad_()
        y = layer(given)
        y.square().sum().backward()
        results.append([y.detach(), given.grad, layer.weight.grad.clone()])
        layer.empty_cache()
    assert_same(*results)
    assert cast_weight(layer).is_empty != keeps_casts(layer)


def test_one_graph_per_shape_after_the_warm_up():
    """Two shapes of micro-batches, clipping, update: each is warmed up twice and captured once."""
    recorder = Recorder()
    graphs, ran = Graphs(recorder, CPU, warmup=2), []
    for rows in (4, 4, 4, 6, 4, 6, 6, 6):
        graphs.run("part", GraphPart(lambda x: ran.append(len(x))), {"x": torch.zeros(rows, 2)})
    assert ran == [4, 4, 4, 6, 4, 6, 6, 6]
    assert (recorder.warmed, recorder.captures, recorder.replays) == (
        4,
        2,
        4,
    ) and graphs.captured == {"part": 2}
    graphs.clear()
    graphs.run("part", GraphPart(lambda x: None), {"x": torch.zeros(4, 2)})
    assert recorder.warmed == 5 and graphs.captured == {}


def test_another_dtype_is_another_graph_and_inputs_are_copied():
    recorder, seen = Recorder(), []
    graphs = Graphs(recorder, CPU, warmup=1)
    for value in (1.0, 2.0, 3.0):
        graphs.run(
            "part",
            GraphPart(lambda x: seen.append((x.data_ptr(), x.item()))),
            {"x": torch.full((1,), value)},
        )
    graphs.run("part", GraphPart(lambda x: None), {"x": torch.ones(1, dtype=torch.float64)})
    assert [value for _, value in seen] == [1.0, 2.0, 3.0] and seen[1][0] == seen[2][0], (
        "replays read the same memory"
    )
    assert graphs.captured == {"part": 1} and recorder.warmed == 2


def test_more_shapes_than_there_is_room_for_stay_eager_and_say_so():
    recorder = Recorder()
    graphs = Graphs(recorder, CPU, warmup=1, most_shapes=2)
    for rows in (1, 1, 2, 2, 3, 3, 4, 4):
        graphs.run("part", GraphPart(lambda x: None), {"x": torch.zeros(rows)})
    assert recorder.captures == 2 and recorder.warmed == 6
    assert graphs.notes == [
        "part: more than 2 shapes of micro-batches, the others stay eager, such as x [3]. Lower length_buckets."
    ]


def test_what_cannot_be_captured_raises_and_is_not_run_in_its_place():
    """And leaves no casts behind that lie in the memory of a graph."""
    model = built("fp8-row")
    ng.advance(model)
    runs = []

    def backward(x: Tensor) -> Tensor:
        runs.append(len(x))
        loss = model(x).sum()
        loss.backward()
        return loss

    optimizer = torch.optim.AdamW(model.parameters())
    step = GraphedStep(
        model,
        optimizer,
        backward,
        warmup=1,
        recorder=Recorder("operation not permitted\nwhen capturing"),
    )
    [batch] = batches(1)
    step.accumulate(batch)
    step.discard()  # from here on it is known that a step has one micro-batch
    with raises(BackendError, "cuda-graphs.capture", FORWARD_BACKWARD, "operation not permitted"):
        step.accumulate(batch)
    assert runs == [4]
    assert all(layer.state.cache.casts.is_empty for layer in model if isinstance(layer, QLinear))


def test_casts_of_weights_do_not_outlive_an_update():
    """A replay changes the weight and not its version: what the host keeps of it would be stale."""
    model = built("fp8-row")
    step = GraphedStep(
        model, torch.optim.AdamW(model.parameters()), lambda x: model(x).sum(), warmup=1, recorder=Recorder()
    )  # fmt: skip
    model(torch.randn(4, 32))
    step.update()
    model(torch.randn(4, 32))
    assert any(
        not layer.state.cache.casts.is_empty for layer in model if isinstance(layer, QLinear)
    )
    step.update()
    assert all(layer.state.cache.casts.is_empty for layer in model if isinstance(layer, QLinear))


def test_discarded_gradients_are_zero_and_stay_the_same_tensors():
    model = built()
    step = GraphedStep(
        model, torch.optim.AdamW(model.parameters()), lambda x: _backward(model, x), warmup=1, recorder=Recorder()
    )  # fmt: skip
    [batch] = batches(1)
    addresses = [parameter.grad.data_ptr() for parameter in model.parameters()]
    step.accumulate(batch)
    assert step.readings()[1] > 0
    step.discard()
    assert all(not parameter.grad.any() for parameter in model.parameters())
    assert [parameter.grad.data_ptr() for parameter in model.parameters()] == addresses
    assert step.readings()[0] == 0


def _backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).sum()
    loss.backward()
    return loss


def test_refusals_say_every_reason():
    model = built("int4-hq-lss")
    optimizer = ng.optim.AdamW(model.parameters(), states="8bit")
    ng.optim.in_backward(optimizer)
    reasons = refuse(model, optimizer, CPU, scaler=object())
    codes = ["device", "learned-steps", "samples", "in-backward", "grad-scaler"]
    assert [each.code for each in reasons] == codes
    require(reasons[0], "device", "cpu")
    for reason in reasons[1:3]:
        require(reason, reason.code, "int4-hq-lss", "first in 0")
    with raises(ConfigError, "cuda-graphs.unsupported"):
        GraphedStep(model, optimizer, lambda: torch.zeros(()))


def test_a_device_needs_a_capturable_optimizer():
    model = built()
    cuda = torch.device("cuda", 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert any("make_capturable" in reason for reason in refuse(model, optimizer, cuda))
    make_capturable(optimizer, CPU)
    assert refuse(model, optimizer, cuda) == [] or torch.version.hip
    assert all(
        group["capturable"] and group["lr"].item() == pytest.approx(1e-3)
        for group in optimizer.param_groups
    )
    assert len({group["lr"].data_ptr() for group in optimizer.param_groups}) == len(
        optimizer.param_groups
    )
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    assert any("SGD has no capturable=True" in reason for reason in refuse(model, sgd, cuda))


def test_a_step_that_no_graph_can_hold_stays_eager_and_says_so():
    """That of narrowgauge.optim on a CPU: the run learns what it would, and one note names the reason."""
    found = []
    for graphed in (True, False):
        model = built()
        optimizer = ng.optim.AdamW(model.parameters(), states="8bit", lr=1e-2)
        recorder = Recorder()
        warmup = 1 if graphed else 10**9
        step = GraphedStep(
            model, optimizer, lambda x, m=model: _backward(m, x), warmup=warmup, recorder=recorder
        )
        for batch in batches(5, rows=(4,)):
            step.accumulate(batch)
            found.append(step.readings().clone())
            step.update()
        assert (
            FORWARD_BACKWARD in step.graphs.captured
        ) == graphed and "update" not in step.graphs.captured
        assert bool(step.graphs.notes) == graphed
    for a, b in zip(found[:5], found[5:], strict=True):
        assert_same(a, b)


def test_the_note_of_a_step_that_stays_eager():
    model = built()
    optimizer = ng.optim.AdamW(model.parameters(), states="8bit", backend="torch")
    step = GraphedStep(
        model, optimizer, lambda x: _backward(model, x), warmup=1, recorder=Recorder()
    )
    for _ in range(3):
        step.update()
    [note] = step.graphs.notes
    assert note == (
        "update stays eager: a parameter of [48, 32] on cpu is stepped by torch, which works out its numbers on the host."
    )


@pytest.mark.parametrize("changes", [{"warmup": 0}, {"most_shapes": 0}])
def test_a_part_is_run_before_it_is_captured(changes):
    with raises(ConfigError, "cuda-graphs.counts"):
        Graphs(Recorder(), CPU, **changes)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "fp8-current", "fp8-row", "fp8-block"])
@pytest.mark.parametrize("fused", [False, True])
def test_graphs_train_as_eager_code_does(recipe, fused):
    """Two shapes, two micro-batches: losses and norms of each step within the order of sums in backward."""
    device = torch.device("cuda")
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(
            device, torch.bfloat16
        )
        ng.convert(model, recipe, fuse=fused)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        make_capturable(optimizer, device)

        def backward(x: Tensor, model: nn.Module = model) -> Tensor:
            loss = model(x).float().square().mean()
            loss.backward()
            return loss

        warmup = 2 if graphed else 10**9
        step = GraphedStep(model, optimizer, backward, clip=1.0, warmup=warmup)
        generator = torch.Generator().manual_seed(1)
        for _ in range(8):
            for rows in (64, 96):
                step.accumulate({"x": torch.randn(rows, 256, generator=generator).bfloat16()})
            found.append(step.readings().tolist())
            step.update()
        assert bool(step.graphs.captured) == graphed
    eager, replayed = torch.tensor(found[:8]), torch.tensor(found[8:])
    torch.testing.assert_close(replayed, eager, rtol=1e-3, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("states", ["fp32", "8bit", "fp8-lm"])
def test_narrow_states_step_in_graphs(states):
    """The same gradients, and the rate changed on the way: weights and states have the bits of eager steps."""
    device = torch.device("cuda")
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)).to(device, torch.bfloat16)
        optimizer = ng.optim.AdamW(
            model.parameters(), states=states, master="bf16-remainder", lr=1e-3
        )
        warmup = 2 if graphed else 10**9
        step = GraphedStep(model, optimizer, lambda x, m=model: _backward(m, x), warmup=warmup)
        generator = torch.Generator().manual_seed(1)
        for number in range(8):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 / (1 + number)
            for parameter in model.parameters():
                parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))
            step.update()
        assert step.graphs.captured == ({"update": 1} if graphed else {}) and not step.graphs.notes
        found.append(([p.detach() for p in model.parameters()], optimizer.state_dict()["state"]))
    assert_same(*found)


@pytest.mark.gpu
def test_replays_draw_new_numbers():
    device = torch.device("cuda")
    drawn = torch.zeros(8, device=device)
    recorded = Graphs(graphs.CudaRecorder(device), device, warmup=1)
    values = []
    for _ in range(4):
        recorded.run("noise", GraphPart(lambda: drawn.copy_(torch.rand(8, device=device))))
        values.append(drawn.tolist())
    assert len({tuple(each) for each in values}) == 4 and recorded.captured == {"noise": 1}

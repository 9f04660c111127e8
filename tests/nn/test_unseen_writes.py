"""Weights that are written where `_version` shows nothing: each forward pass reads the weight as it is (exact, random stories).

A story is a random order of forward, backward, writes, optimizer steps, `advance`, `train` and `eval`. Its model is compared bit by bit
with a second model, whose caches are emptied before each forward pass, and whose backward passes run at once.
"""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.nn import weight_cache
from narrowgauge.nn.linear import QLinear
from narrowgauge.nn.step_watch import PATIENCE
from narrowgauge.ops import fingerprint
from tests.compare import assert_same
from tests.raising import require
from tests.selection import quick

RECIPES = (
    "bf16",
    "fp8-delayed",
    "fp8-current",
    "fp8-block",
    "fp8-row",
    "int8",
    "nvfp4",
    "int4-hq-bs",
    "int4-hq-lss",
)
ROWS, IN, OUT = 8, 32, 48


# --- writers: each changes weight [N, K] in a way that is repeated by (layer, random numbers) alone ---------------------------


def merge(layer: nn.Linear, numbers: random.Random) -> None:
    """As PEFT merges an adapter."""
    layer.weight.data += torch.randn(len(layer.weight), 2) @ torch.randn(2, layer.weight.shape[1])


def average(layer: nn.Linear, numbers: random.Random) -> None:
    layer.weight.data.copy_(torch.lerp(layer.weight.detach(), torch.randn(layer.weight.shape), 0.1))


def foreach(layer: nn.Linear, numbers: random.Random) -> None:
    torch._foreach_mul_([layer.weight.data], -1.5)


def through_numpy(layer: nn.Linear, numbers: random.Random) -> None:
    layer.weight.detach().numpy()[numbers.randrange(len(layer.weight))] += 0.5


def flat_master(layer: nn.Linear, numbers: random.Random) -> None:
    """As ZeRO, Megatron and apex: the weight is a part of a flat buffer, which is written as a whole."""
    flat = torch.cat([torch.zeros(3), layer.weight.detach().flatten()])
    layer.weight.data = flat[3:].view(layer.weight.shape)
    flat.copy_(flat * 1.25 + 0.01)


def another_tensor(layer: nn.Linear, numbers: random.Random) -> None:
    layer.weight.data = torch.randn(layer.weight.shape)


def one_element(layer: nn.Linear, numbers: random.Random) -> None:
    row, column = (numbers.randrange(size) for size in layer.weight.shape)
    layer.weight.data[row, column] = numbers.choice([3.0, -0.0, 1e-3])


def permutation(layer: nn.Linear, numbers: random.Random) -> None:
    layer.weight.data.copy_(layer.weight.detach()[torch.randperm(len(layer.weight))])


def signs_of_two_rows(layer: nn.Linear, numbers: random.Random) -> None:
    layer.weight.data[[0, numbers.randrange(1, len(layer.weight))]] *= -1


def view_without_gradients(layer: nn.Linear, numbers: random.Random) -> None:
    with torch.no_grad():
        layer.weight.data.view(-1)[numbers.randrange(layer.weight.numel()) :].mul_(0.75)


def bytes_of_storage(layer: nn.Linear, numbers: random.Random) -> None:
    storage = layer.weight.untyped_storage()
    place = numbers.randrange(layer.weight.numel()) * 4 + 2 + layer.weight.storage_offset() * 4
    storage[place] = (storage[place] + 1) % 128


def set_memory(layer: nn.Linear, numbers: random.Random) -> None:
    with torch.no_grad():
        layer.weight.set_(torch.randn(layer.weight.shape))


def assigned_state(layer: nn.Linear, numbers: random.Random) -> None:
    state = layer.state_dict()
    state["weight"] = torch.randn(layer.weight.shape)
    layer.load_state_dict(state, assign=True)


def swapped(layer: nn.Linear, numbers: random.Random) -> None:
    new = nn.Parameter(torch.randn(layer.weight.shape), requires_grad=layer.weight.requires_grad)
    try:
        torch.utils.swap_tensors(layer.weight, new)
    except RuntimeError:  # a graph or an optimizer refers to it
        layer.weight.data = new.data


def another_thread(layer: nn.Linear, numbers: random.Random) -> None:
    new = torch.randn(layer.weight.shape)
    thread = threading.Thread(target=lambda: layer.weight.data.copy_(new))
    thread.start()
    thread.join()


WRITERS: tuple[Callable[[nn.Linear, random.Random], None], ...] = (
    merge, average, foreach, through_numpy, flat_master, another_tensor, one_element, permutation, signs_of_two_rows,
    view_without_gradients, bytes_of_storage, set_memory, assigned_state, swapped, another_thread,
)  # fmt: skip


# --- stories ------------------------------------------------------------------------------------------------------------------


class Side:
    """A model of a story. keeps: with its caches; else these are emptied before each forward pass."""

    def __init__(self, model: nn.Module, keeps: bool, through: str) -> None:
        self.model, self.keeps, self.through = model, keeps, through
        self.before: dict[int, Tensor] = {}  # what a perturbed weight was

    def layers(self) -> list[QLinear]:
        return [each for each in self.model.modules() if isinstance(each, QLinear)]

    def forward(self, seed: int) -> tuple[Tensor, Tensor]:
        if not self.keeps:
            for layer in self.layers():
                layer.empty_cache()
        torch.manual_seed(seed)
        x = torch.randn(ROWS, IN, requires_grad=True)
        h = x * 1.0
        if self.through == "plain" or not torch.is_grad_enabled():
            return x, self.model(h)
        return x, checkpoint(self.model, h, use_reentrant=self.through == "reentrant")

    def gradients(self, x: Tensor, y: Tensor, seed: int) -> list[Tensor | None]:
        torch.manual_seed(seed + 1)
        self.model.zero_grad()
        y.square().sum().backward()
        return [
            x.grad,
            *(None if p.grad is None else p.grad.clone() for p in self.model.parameters()),
        ]


def story(recipe: str, seed: int, length: int = 14) -> None:
    numbers = random.Random(seed)
    torch.manual_seed(seed)
    model = ng.convert(nn.Sequential(nn.Linear(IN, OUT), nn.Tanh(), nn.Linear(OUT, IN)), recipe)
    if numbers.random() < 0.3:
        model[0].weight.requires_grad_(False)
    for layer in (model[0], model[2]):
        layer.weight_codes = numbers.choice(["auto", "auto", "step", "recast"])
    through = numbers.choice(["plain", "plain", "reentrant", "non-reentrant"])
    sides = [Side(model, True, through), Side(copy.deepcopy(model), False, through)]
    waiting: list[tuple[Tensor, Tensor, list[Tensor | None], int, int]] = []
    writes, late = 0, False

    def backward() -> None:
        nonlocal late
        x, y, expected, number, before = waiting.pop(numbers.randrange(len(waiting)))
        found = sides[0].gradients(x, y, number)
        if before == writes:
            assert_same(found, expected)
        else:  # the gradient is that of the weight of either time
            late = True

    for number in range(length):
        now = 1000 * seed + 10 * number
        what = numbers.choice(
            ["forward"] * 4
            + ["backward"] * 2
            + ["write"] * 4
            + ["step", "advance", "train", "eval", "test"]
        )
        if what == "forward":
            assert_same(*([each.detach() for each in side.model.parameters()] for side in sides))
            (x, y), (reference_x, reference_y) = (side.forward(now) for side in sides)
            assert_same(y.detach(), reference_y.detach())
            waiting.append((x, y, sides[1].gradients(reference_x, reference_y, now), now, writes))
            if (
                recipe == "int4-hq-lss"
            ):  # recomputation writes learned steps of the cold start: its order is that of the reference
                backward()
        elif what == "write":
            writer, index, perturbs = (
                numbers.choice(WRITERS),
                numbers.choice([0, 2]),
                numbers.random() < 0.3,
            )
            while waiting and writer in (
                swapped,
                set_memory,
            ):  # torch refuses the backward pass after it
                backward()
            for side in sides:
                torch.manual_seed(now)
                weight = side.model[index].weight
                if perturbs and index in side.before:  # sharpness-aware: back to the very bits
                    weight.data.copy_(side.before.pop(index))
                    continue
                if perturbs:
                    side.before[index] = weight.detach().clone()
                writer(side.model[index], random.Random(now))
            writes += 1
        elif what == "backward" and waiting:
            backward()
        elif what == "test":
            with torch.no_grad():
                assert_same(*(side.forward(now)[1] for side in sides))
        elif what in ("step", "advance"):
            while waiting:
                backward()
            if late:  # amax of other gradients
                for mine, theirs in zip(*(side.model.buffers() for side in sides), strict=True):
                    theirs.copy_(mine)
                late = False
            for side in sides:
                if what == "step":
                    torch.manual_seed(now)
                    for parameter in side.model.parameters():
                        parameter.grad = (
                            torch.randn(parameter.shape) if parameter.requires_grad else None
                        )
                    torch.optim.SGD(
                        side.model.parameters(), lr=0.05
                    ).step()  # anew: parameters were replaced
                else:
                    ng.advance(side.model)
            writes += 1
        elif what in ("train", "eval"):
            while (
                waiting and through != "plain"
            ):  # a checkpoint recomputes in the mode of its backward pass
                backward()
            for side in sides:
                side.model.train(what == "train")
    while waiting:
        backward()


@pytest.mark.filterwarnings(
    "ignore:.*an optimizer step ended in eval mode", "ignore:.*advance was not called"
)
@pytest.mark.parametrize("recipe", quick(["fp8-delayed", "fp8-block", "int4-hq-bs"], RECIPES))
def test_each_forward_pass_reads_the_weight_as_it_is(recipe):
    for seed in range(6):
        story(recipe, seed)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*an optimizer step ended in eval mode", "ignore:.*advance was not called"
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_forward_pass_reads_the_weight_as_it_is_in_long_stories(recipe):
    for seed in range(100, 116):
        story(recipe, seed, length=40)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_a_write_between_two_forward_passes(writer, training):
    """Each writer by name, with the kept casts that a loop has after its first step."""
    for recipe in ("bf16", "fp8-delayed", "int4-hq-bs"):
        torch.manual_seed(1)
        model = ng.convert(nn.Sequential(nn.Linear(IN, OUT)), recipe)
        model(torch.randn(ROWS, IN)).sum().backward()
        ng.advance(model)
        model.train(training)
        x = torch.randn(ROWS, IN)
        before = model(x).detach()
        model(x)
        writer(model[0], random.Random(2))
        found = model(x).detach()
        fresh = copy.deepcopy(model)(x).detach()
        assert_same(found, fresh)
        assert writer is one_element or not torch.equal(found, before)


# --- what is reported ---------------------------------------------------------------------------------------------------------


def messages(run: Callable[[], None]) -> list[Warning | str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [each.message for each in caught]


@pytest.mark.parametrize("recipe", ["fp8-delayed", "int4-hq-lss"])
def test_an_optimizer_with_flat_masters_is_reported_within_sixteen_steps(recipe):
    """It writes `param.data` from float32 copies, and torch tells of none of its steps."""
    torch.manual_seed(0)
    model = ng.convert(nn.Sequential(nn.Linear(IN, OUT), nn.Tanh(), nn.Linear(OUT, IN)), recipe)
    masters = [p.detach().double() for p in model.parameters()]
    x, counts = torch.randn(ROWS, IN), []

    def step() -> None:
        model(x).square().mean().backward()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            if parameter.grad is not None:
                master -= 1e-2 * parameter.grad
                parameter.data.copy_(master)
            parameter.grad = None

    for _ in range(4 * PATIENCE):
        counts.append(messages(step))
    words = [each for found in counts for each in found]
    assert len(words) == 2, "one for each layer, and once"
    assert sum(map(len, counts[:PATIENCE])) == 2
    assert [each.code for each in words] == ["advance.not-called"] * 2
    assert not [each for _ in range(2) for each in messages(lambda: (step(), ng.advance(model)))]


def test_many_micro_batches_are_no_missing_step():
    model = ng.convert(nn.Sequential(nn.Linear(IN, OUT)), "fp8-delayed")
    x = torch.randn(ROWS, IN)
    assert messages(lambda: [model(x).sum().backward() for _ in range(3 * PATIENCE)]) == []


@pytest.fixture
def on_a_gpu(monkeypatch):
    """As on a device whose memory the host does not read: weights are compared by a sample."""
    monkeypatch.setattr(weight_cache, "fingerprint", fingerprint.Sampled)


def test_on_a_gpu_kept_codes_are_reported_and_given_up_after_a_write(on_a_gpu):
    """weight_codes="step", sharpness-aware steps; in evaluation nothing is reused."""
    torch.manual_seed(0)
    model = ng.convert(nn.Sequential(nn.Linear(IN, OUT)), "fp8-current", weight_codes="step")
    x = torch.randn(ROWS, IN)

    def losses(model: nn.Module) -> list[Tensor]:
        found = []
        for factor in (1.0, 1.5):
            model[0].weight.data.mul_(factor)
            loss = model(x).square().mean()
            loss.backward()
            found.append(loss.detach())
        model[0].weight.data.div_(1.5)
        ng.advance(model)
        return found

    words = messages(lambda: [losses(model) for _ in range(PATIENCE)])
    assert len(words) == 1
    require(words[0], "advance.unseen-writes", "1 layers", "'0'", "weight_codes='recast'")
    wide = copy.deepcopy(model)
    assert_same(losses(model), losses(wide))
    assert float(losses(model)[1]) > 2 * float(losses(model)[0])
    model[0].weight_codes = "step"
    ng.advance(model)
    model.eval()(x)
    before = model(x)
    model[0].weight.data.mul_(2)
    assert not torch.equal(model(x), before)


# --- what backward reads, and for how long ------------------------------------------------------------------------------------


def written(weight: Tensor) -> Callable[[], object]:
    old = weight.detach().clone()
    weight.data.mul_(-2)
    return lambda: weight.data.copy_(old)


def pointed_elsewhere(weight: Tensor) -> Callable[[], object]:
    """Averaged weights are swapped in so: the address of the weight that was cast comes back, its bytes were never written."""
    old = weight.data
    weight.data = -2 * old
    return lambda: setattr(weight, "data", old)


@pytest.mark.parametrize("weight_codes", ["auto", "step"])
@pytest.mark.parametrize(
    "perturb", [written, pointed_elsewhere], ids=lambda perturb: perturb.__name__
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_backward_casts_of_a_perturbed_weight_is_not_found_by_others(
    recipe, perturb, weight_codes
):
    """Forward, a perturbation, backward, restored: the next forward pass has the bytes of the first."""
    torch.manual_seed(0)
    model = ng.convert(nn.Sequential(nn.Linear(IN, OUT)), recipe, weight_codes=weight_codes)
    ng.advance(model)
    x = torch.randn(ROWS, IN)

    def gradient(model: nn.Module) -> Tensor:
        leaf = x.clone().requires_grad_()
        torch.manual_seed(5)
        model(leaf).square().sum().backward()
        return leaf.grad

    torch.manual_seed(5)
    first = model(x.clone().requires_grad_())
    restore = perturb(model[0].weight)
    first.sum().backward()
    restore()
    assert_same(gradient(model), gradient(copy.deepcopy(model)))


def test_backward_takes_the_codes_of_its_forward_pass():
    """One scale per tensor: the transposed codes of forward, whatever became of the weight since."""
    torch.manual_seed(0)
    model = ng.convert(nn.Sequential(nn.Linear(IN, OUT, bias=False)), "fp8-current")
    ng.advance(model)
    x = torch.randn(ROWS, IN, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), x)
    y = model(x)
    model[0].weight.data.zero_()
    model(x)  # another forward pass, of another weight
    assert_same(torch.autograd.grad(y.sum(), x), expected)


def with_amax_histories() -> nn.Sequential:
    """A model in `fp8-delayed` behind one training step."""
    torch.manual_seed(0)
    model = ng.convert(
        nn.Sequential(nn.Linear(IN, OUT), nn.Tanh(), nn.Linear(OUT, IN)), "fp8-delayed"
    )
    model(torch.randn(ROWS, IN)).square().sum().backward()
    ng.advance(model)
    model.zero_grad()
    return model


def gradients_of(model: nn.Module, y: Tensor) -> list[Tensor]:
    model.zero_grad()
    y.square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_backward_behind_an_advance_scales_the_gradient_by_the_new_amax_history():
    """Codes of x and w have the scales of the forward pass; gy is cast in the backward pass, by its history at that time."""
    model, x = with_amax_histories(), torch.randn(ROWS, IN)
    (3 * model(x)).square().sum().backward()  # the amax of gy that `advance` moves into its history
    copied, older = copy.deepcopy(model), copy.deepcopy(model)
    y = model(x)
    ng.advance(model)
    found = gradients_of(model, y)
    for layer, moved in ((copied[0], model[0]), (copied[2], model[2])):
        layer.scaling["gy"].live.copy_(moved.scaling["gy"].live)
    assert_same(found, gradients_of(copied, copied(x)))
    assert not torch.equal(found[0], gradients_of(older, older(x))[0])


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_a_checkpoint_recomputes_in_the_mode_of_its_backward_pass(use_reentrant):
    """As torch's own modules do. Evaluation scales a weight by its own amax, training by its history."""
    model, x = with_amax_histories(), torch.randn(ROWS, IN, requires_grad=True)
    with torch.no_grad():
        model[0].weight.mul_(1.5)  # the amax of the weight is not that of its history
    evaluated, trained = copy.deepcopy(model).eval(), copy.deepcopy(model)
    y = checkpoint(model, x, use_reentrant=use_reentrant)
    model.eval()
    upstream = 2 * y.detach()  # the forward pass was that of training
    y.backward(upstream)
    found = [parameter.grad for parameter in model.parameters()]
    for other, is_same in ((evaluated, True), (trained, False)):
        other(x).backward(upstream)
        expected = [parameter.grad for parameter in other.parameters()]
        assert all(map(torch.equal, found, expected)) == is_same


def test_codes_go_with_the_backward_pass_and_stay_for_a_second_one():
    model = ng.convert(nn.Sequential(nn.Linear(IN, OUT)), "fp8-current")
    ng.advance(model)
    x = torch.randn(ROWS, IN, requires_grad=True)
    y = model(x)
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert not y.grad_fn.context.sources.saved_for_w.is_empty
    (second,) = torch.autograd.grad(y.sum(), x)
    assert_same(first, second)
    assert y.grad_fn.context.sources.saved_for_w is None


def test_loops_of_one_forward_pass_per_step_take_no_fingerprint(monkeypatch):
    taken = []
    monkeypatch.setattr(
        weight_cache,
        "fingerprint",
        lambda weight: taken.append(1) or fingerprint.fingerprint(weight),
    )
    model = ng.convert(nn.Sequential(nn.Linear(IN, OUT)), "fp8-current")
    for passes, expected in ((1, 1), (1, 0), (1, 0), (2, 1), (2, 1), (1, 1), (1, 0)):
        ng.advance(model)
        taken.clear()
        for _ in range(passes):
            model(torch.randn(ROWS, IN)).sum().backward()
        assert len(taken) == expected

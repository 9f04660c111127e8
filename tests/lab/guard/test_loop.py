"""ng.Guard in loops of one's own: the run's bits without an alarm, what follows one, kills and odd loops (exact)."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.diagnose.guard_settings import GuardSettings
from narrowgauge.errors import ConfigError, OutOfMemoryError, StorageError
from narrowgauge.ops.registry import Device
from narrowgauge.snapshot import block_storage
from tests.compare import assert_same
from tests.processes import PYTHON, run
from tests.raising import coded, raises, warns
from tests.small_model import Model


@pytest.fixture
def plain(device_is):
    """A CPU without instructions for narrow numbers."""
    device_is(Device("cpu", bf16_gemm=False, int8_gemm=False))


class Loop:
    """A loop as users write them: dropout, a scheduler, an average of the weights, micro-batches."""

    def __init__(
        self,
        recipe="fp8-delayed",
        guard="every=4,steps=3",
        steps=14,
        sick=None,
        states=True,
        **options,
    ):
        torch.manual_seed(0)
        self.model = ng.convert(Model(), recipe)
        self.drop = nn.Dropout(0.1)
        self.optimizer = ng.optim.AdamW(self.model, lr=3e-3, states="8bit")
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 3e-3, total_steps=1000)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.batches = torch.randint(
            48, (steps, 2, 4, 12), generator=torch.Generator().manual_seed(1)
        )
        self.sick, self.done, self.losses, self.narrow = sick, 0, [], []
        self.guard = None
        if guard:
            self.guard = ng.Guard(
                guard,
                self.model,
                self.optimizer,
                self.step,
                also=[self.scheduler, self.average],
                **options,
            )

    def step(self, batch):
        total = 0.0
        for micro_batch in batch["ids"]:
            logits = self.model(micro_batch)
            loss = F.cross_entropy(self.drop(logits).flatten(0, 1), micro_batch.flatten()) / len(
                batch["ids"]
            )
            loss.backward()
            total += loss.detach()
        if not self.model.layers[0].up_proj.is_suspended:
            self.narrow.append(self.done)
            if self.sick:
                self.sick(self)
        self.update()
        ng.advance(self.model)
        self.scheduler.step()
        self.average.update_parameters(self.model)
        self.optimizer.zero_grad()
        return total

    def update(self):
        self.optimizer.step()

    def run(self, until=None):
        while self.done < (until or len(self.batches)):
            batch = {"ids": list(self.batches[self.done])}
            self.losses.append(float(self.guard(batch) if self.guard else self.step(batch)))
            self.done += 1
        return self

    def state(self):
        """What a checkpoint of such a loop holds."""
        parts = self.model, self.optimizer, self.scheduler, self.average, self.guard
        held = [copy.deepcopy(each.state_dict()) for each in parts if each is not None]
        for group in held[1]["param_groups"]:
            group.pop("differentiable", None)  # torch adds it in load_state_dict
        return held, torch.get_rng_state(), self.done

    def load(self, state):
        held, generator, self.done = copy.deepcopy(state)
        parts = [
            each
            for each in (self.model, self.optimizer, self.scheduler, self.average, self.guard)
            if each is not None
        ]
        for part, own in reversed(list(zip(parts, held, strict=True))):
            part.load_state_dict(own)
        torch.set_rng_state(generator)
        return self

    def bits(self):
        held, generator, done = self.state()
        return held[:4], generator, done, self.losses


def test_a_loop_without_an_alarm_has_the_bits_of_the_unguarded_one(plain):
    guarded = Loop().run()
    assert_same(guarded.bits(), Loop(guard="").run().bits())
    begins = [event["begun"] for event in guarded.guard.events]
    assert begins == [4, 8] and guarded.guard.is_checking  # the third was cut by the end
    first, second = guarded.guard.events
    assert first["control"] is not None and second["control"] is None
    assert all(
        abs(event["difference"]) < 0.1 and event["difference"] != 0
        for event in guarded.guard.events
    )
    assert 0 < abs(first["control"]) < 0.01, (
        "weights that differ in the last bit, and the same masks of dropout"
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name for name in ng.recipes.names() if name != "bf16"])
def test_every_recipe_goes_on_undisturbed(cpu, recipe):
    assert_same(Loop(recipe, "every=5,steps=5", 12).run().bits(), Loop(recipe, "", 12).run().bits())


def test_of_equal_arithmetic_the_difference_is_zero(plain):
    """Narrow products that compute in 16 bits differ from the reference in no bit: everything else was put back."""
    loop = Loop("fp8-current", "every=4,steps=3,then=warn")
    for layer in loop.model.modules():
        if isinstance(layer, ng.QLinear) and layer.recipe is not None:
            layer.is_suspended = True
    loop.run()
    assert [event["difference"] for event in loop.guard.events] == [0.0, 0.0]


def test_what_follows_an_alarm(plain):
    """A loss that is not finite on narrow numbers is an alarm at once, and BF16 goes on from the state of before."""
    with pytest.warns(
        UserWarning,
        match="steps 5 to 7: The loss in narrow numbers is not finite, and that of BF16",
    ):
        loop = Loop(guard="every=4,steps=3,then=stay", sick=lambda loop: nonfinite(loop, 5)).run()
    wide = Loop(guard="", recipe="fp8-delayed", steps=14)
    wide.run(4)
    with ng.suspended(wide.model):
        wide.run(8)
    wide.run()
    event = loop.guard.events[0]
    assert (event["verdict"], event["direction"], event["then"], event["lost"]) == (
        "worse",
        "not finite",
        "stay",
        0,
    )
    assert_same(loop.bits()[0], wide.bits()[0])
    assert sorted(set(loop.narrow)) == [*range(7), *range(8, 14)], "from 7 to 8 it was in BF16"


@pytest.mark.slow
def test_a_warning_leaves_the_run_as_it_is(plain):
    with warns("guard.worse", "not finite"):
        loop = Loop(guard="every=4,steps=3", steps=8, sick=lambda loop: nonfinite(loop, 5)).run()
    assert math.isnan(loop.losses[-1]) and loop.guard.events[0]["then"] == "warn"


def nonfinite(loop, step):
    if loop.done == step:
        next(loop.model.parameters()).grad.fill_(math.nan)


@pytest.mark.slow
@pytest.mark.parametrize("then", ["bf16", "fp8-current"])
def test_a_wider_recipe_stays_for_good(plain, then):
    recipe, guard = (
        "int4-hq-bs" if then != "bf16" else "fp8-delayed",
        f"every=4,steps=3,then={then}",
    )
    with warns("guard.worse", "not finite"):
        loop = Loop(recipe, guard, sick=lambda loop: nonfinite(loop, 5)).run()
    assert {
        layer.recipe.name
        for layer in loop.model.modules()
        if isinstance(layer, ng.QLinear) and layer.recipe
    } == {then}
    assert len(loop.guard.events) == (1 if then == "bf16" else 2)
    assert all(map(math.isfinite, loop.losses[-4:]))
    held = loop.state()
    again = Loop(recipe, guard).load(held)
    assert_same(again.model.state_dict(), loop.model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 4, 6, 7, 10])
def test_a_resumed_loop_ends_in_the_same_bits(plain, stop):
    whole = Loop().run()
    held = Loop().run(stop).state()
    resumed = Loop().load(held).run()
    assert_same(resumed.bits()[:3], whole.bits()[:3])
    begins = [event["begun"] for event in resumed.guard.events]
    assert begins == {3: [4, 8], 4: [4, 8], 6: [6], 7: [8], 10: [10]}[stop]


@pytest.mark.parametrize("how", ["loaded", "failed", "ended"])
def test_a_check_that_is_dropped_or_over_leaves_no_hook(plain, how):
    """A hook that stays samples the gradients of every later step."""
    loop = Loop()
    before = len(loop.optimizer._optimizer_step_pre_hooks)
    held = loop.guard.state_dict()
    loop.run(4)
    loop.guard.before_step()
    assert loop.guard.is_checking and len(loop.optimizer._optimizer_step_pre_hooks) == before + 1
    if how == "loaded":
        loop.guard.load_state_dict(held)
    elif how == "failed":
        with pytest.raises(TypeError):
            loop.guard(None)
    else:
        loop.step({"ids": list(loop.batches[4])})
        loop.guard.after_step({"ids": list(loop.batches[4])}, torch.tensor(1.0))
    assert len(loop.optimizer._optimizer_step_pre_hooks) == before


@pytest.mark.parametrize("skips", [False, True])
def test_gradients_are_not_compared_if_the_reference_skips_its_first_update(plain, skips):
    """As a GradScaler does after an overflow: the next update has the gradients of another step."""
    loop, updates = Loop(), []
    update = loop.update

    def skipping():
        if loop.guard.is_reference:
            updates.append(loop.done)
            if skips and len(updates) % 3 == 1:  # a replay has three steps
                return
        update()

    loop.update = skipping
    loop.run(7)
    [event] = loop.guard.events
    assert updates and bool(event["weights"]) is not skips


@pytest.mark.slow
def test_a_step_that_fails_in_the_reference_leaves_the_narrow_run(plain):
    plain = Loop(guard="").run(7)
    loop = Loop()

    def fails(batch, step=loop.step):
        if loop.guard.is_reference:
            raise RuntimeError("the loop's own")
        return step(batch)

    loop.guard._steps.step = fails
    with pytest.raises(RuntimeError, match="the loop's own") as error:
        loop.run(7)
    [note] = error.value.__notes__
    assert note.code == "guard.reference-failed"
    assert_same(loop.bits()[0], plain.bits()[0])


@pytest.mark.slow
def test_a_step_that_fails_ends_the_check_alone(plain):
    loop = Loop()
    loop.run(6)
    with pytest.raises(TypeError):
        loop.guard(None)
    assert not loop.guard.is_checking
    loop.run(9)
    assert [event["begun"] for event in loop.guard.events] == [6]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"guard": "every=2,steps=4"}, coded("guard.settings-text")),
        ({"guard": " "}, coded("guard.settings-empty")),
        ({"recipe": "bf16"}, coded("guard.not-converted", "16")),
        ({"guard": 7}, coded("guard.settings-type")),
        ({"guard": "every=4,steps=3,then=fp9"}, coded("guard.then", "then = 'fp9'")),
        ({"guard": "every=4,steps=3,then=nvfp4"}, coded("guard.then", "then = 'nvfp4'")),
    ],
)
def test_what_cannot_work_is_refused_at_once(given, words):
    with raises(ConfigError, words):
        Loop(**given)


def test_a_scheduler_that_was_not_handed_over_is_refused():
    loop = Loop(guard="")
    with raises(ConfigError, "guard.scheduler", "[scheduler]"):
        ng.Guard("every=4,steps=3", loop.model, loop.optimizer, loop.step)


@pytest.mark.slow
def test_rates_that_a_loop_counts_itself_are_noticed(plain):
    loop, calls = Loop(), []

    def counted(batch, step=loop.step):
        loss = step(batch)
        calls.append(loss)
        loop.optimizer.param_groups[0]["lr"] = 1e-3 * 0.9 ** len(calls)
        return loss

    loop.guard._steps.step = counted
    with raises(ConfigError, "guard.learning-rates"):
        loop.run()


@pytest.mark.slow
def test_batches_that_are_written_are_noticed(plain):
    loop = Loop()

    def writes(batch, step=loop.step):
        loss = step(batch)
        batch["ids"][0].zero_()
        return loss

    loop.guard._steps.step = writes
    with raises(ConfigError, "guard.batch-written"):
        loop.run()


def test_a_loss_that_is_none_is_refused_with_the_first_step(plain):
    loop = Loop()
    loop.guard._steps.step = lambda batch: None
    with raises(ConfigError, "guard.step-result", "NoneType"):
        loop.guard({"ids": list(loop.batches[0])})


@pytest.mark.parametrize(
    "steps",
    [
        {"every": 0},
        {"steps": 0},
        {"every": 4, "steps": 9},
        {"steps": 2.5},
        {"every": True},
        {"every": "9"},
        {"every": float("nan")},
    ],
    ids=str,
)
def test_steps_that_cannot_be_are_refused(steps):
    with raises(ConfigError, "guard.every-steps", "from 2"):
        GuardSettings(**steps)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"margin": -0.1}, coded("guard.margin", "margin = -0")),
        ({"margin": "0.25%"}, coded("guard.margin", "margin", "25")),
        ({"margin": True}, coded("guard.margin", "margin = True")),
        ({"least_margin": float("nan")}, coded("guard.margin", "least_margin = nan")),
        ({"least_margin": None}, coded("guard.margin", "least_margin = None")),
        ({"is_in_nats": 1}, coded("guard.is-in-nats", "= 1", "is_in_nats")),
        ({"then": None}, coded("guard.then", "then = None", "'warn'", "'stay'")),
        ({"then": ""}, coded("guard.then", "then = ''")),
    ],
    ids=str,
)
def test_margins_that_cannot_be_are_refused(given, words):
    with raises(ConfigError, words):
        GuardSettings(**given)


@pytest.mark.parametrize("name", ["warmup_steps", "total_steps", "steps_done"])
@pytest.mark.parametrize("value", [2.5, -1, True, "3", None, float("inf")], ids=str)
def test_counts_of_steps_that_are_none_are_refused(name, value):
    loop = Loop(guard="", states=False)
    with raises(ConfigError, "guard.whole-number", name, repr(value)):
        ng.Guard("every=4,steps=3", loop.model, loop.optimizer, loop.step, **{name: value})


@pytest.mark.parametrize(
    "change",
    [
        {"taken": -3},
        {"next": "8"},
        {"evidence": {}},
        {"evidence": {"checks": [{"loss": 1.0}]}},
        None,
    ],
    ids=str,
)
def test_a_state_that_no_guard_gave_is_refused(change):
    loop = Loop()
    before = loop.guard.state_dict()
    with raises(ConfigError, "guard.damaged-state", "state_dict"):
        loop.guard.load_state_dict(None if change is None else before | change)
    assert loop.guard.state_dict() == before


def test_no_room_is_refused_before_the_first_step(monkeypatch, tmp_path):
    monkeypatch.setattr(block_storage, "free_host_bytes", lambda: 1000)
    with raises(OutOfMemoryError, "memory.host-copy"):
        Loop()
    monkeypatch.setattr(
        block_storage.storage.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})
    )
    with pytest.raises(StorageError):
        Loop(where=tmp_path)


@pytest.mark.slow
def test_a_disk_holds_the_copies(tmp_path, plain):
    assert_same(Loop(where=tmp_path).run().bits(), Loop(guard="").run().bits())


KILLED = """
import os, sys, torch
torch.set_num_threads(1)  # as in the tests: sums over rows are cut among threads
from tests.lab.guard.test_loop import Loop
folder, dies_at = sys.argv[1], int(sys.argv[2])
loop = Loop(where=folder + "/copies")
if os.path.exists(folder + "/state.pt"):
    loop.load(torch.load(folder + "/state.pt", weights_only=False))
steps, own = [], loop.guard._steps.step
def step(batch):
    steps.append(batch)
    if len(steps) == dies_at:
        os.kill(os.getpid(), 9)
    return own(batch)
loop.guard._steps.step = step
while loop.done < 14:
    loop.run(loop.done + 1)
    torch.save(loop.state(), folder + "/new.pt")
    os.replace(folder + "/new.pt", folder + "/state.pt")
torch.save(loop.bits()[:3], folder + "/bits.pt")
"""


@pytest.mark.slow
def test_kills_leave_the_bits_of_the_unguarded_run_and_no_copies(tmp_path):
    """Killed after ever more steps, of the run and of BF16 alike, until it comes through."""
    for dies_at in (2, 5, 6, 8, 11, 99):
        done = run([PYTHON, "-c", KILLED, str(tmp_path), str(dies_at)])
        assert done.returncode in (0, -9), done.stderr
        assert list((tmp_path / "copies").glob("*")) == []
    assert done.returncode == 0
    assert_same(
        torch.load(tmp_path / "bits.pt", weights_only=False), Loop(guard="").run().bits()[:3]
    )


def test_other_settings_are_refused_at_resumption():
    held = Loop().guard.state_dict()
    with raises(ConfigError, "guard.other-settings"):
        Loop(guard="every=7,steps=3").guard.load_state_dict(held)


@pytest.mark.slow
def test_no_check_begins_that_the_run_would_cut(plain):
    loop = Loop(total_steps=14).run()
    assert [event["begun"] for event in loop.guard.events] == [4, 8] and not loop.guard.is_checking


def test_words_say_what_it_costs():
    guard = Loop().guard
    assert (
        "every 4 steps, 3 in BF16" in guard.words() and "KiB in the host's memory" in guard.words()
    )

"""A snapshot takes a training back to the bit, whatever its recipe and optimizer (exact)."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.errors import ConfigError, OutOfMemoryError, StorageError
from narrowgauge.snapshot import Snapshot, Training, block_storage, snapshot_bytes
from tests.compare import assert_same
from tests.raising import raises
from tests.selection import quick
from tests.small_model import Model

OPTIMIZERS = {
    "8bit": lambda model: ng.optim.AdamW(model, states="8bit"),
    "fp8-lm": lambda model: ng.optim.AdamW(model, states="fp8-lm"),
    "4bit": lambda model: ng.optim.AdamW(model, states="4bit"),
    "lion": lambda model: ng.optim.Lion(model),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
}


def copied(model, optimizer, scaler=None, where="host", also=()):
    training = Training(model=model, optimizer=optimizer, scaler=scaler, also=also)
    return Snapshot.take(training, where=where)


class Loop:
    """A model with dropout, its optimizer, and a loop that draws from every generator."""

    def __init__(self, recipe="fp8-delayed", optimizer="adamw", dtype=torch.float32, scaled=False):
        torch.manual_seed(0)
        self.model = Model()
        self.dropout = nn.Dropout(0.1)
        self.model.register_buffer("seen", torch.zeros(()))
        ng.convert(self.model, recipe).to(dtype)
        make = optimizer if callable(optimizer) else OPTIMIZERS[optimizer]
        self.optimizer = make(self.model)
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2) if scaled else None
        )

    def train(self, steps):
        losses = []
        for _ in range(steps):
            ids = torch.randint(48, (2, 12)) + random.randrange(2) - 1
            logits = self.dropout(self.model(ids.clamp(0)).float())
            loss = F.cross_entropy(logits.flatten(0, 1), ids.clamp(0).flatten())
            self.model.seen = self.model.seen + 1  # a buffer that is another tensor after each step
            if self.scaler:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                loss.backward()
                self.optimizer.step()
            ng.advance(self.model)
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    def state(self):
        """All that can be compared, as copies."""
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        held = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        states = torch.utils._pytree.tree_map(
            lambda x: x.clone() if isinstance(x, torch.Tensor) else x, self.optimizer.state_dict()
        )
        return (
            held,
            states,
            self.scaler.state_dict() if self.scaler else None,
            torch.get_rng_state(),
            random.getstate(),
        )


def is_taken_back(training, where="host", before=3):
    """Steps, a fork, steps, and the same steps once more, by `restore` and by `swap`."""
    training.train(before)
    taken = copied(training.model, training.optimizer, training.scaler, where)
    begin = training.state()
    losses = training.train(3)
    end = training.state()
    taken.restore()
    assert_same(training.state(), begin)
    assert_same(training.train(3), losses)
    assert_same(training.state(), end)
    taken.swap()
    assert_same(training.state(), begin)
    taken.swap()
    assert_same(training.state(), end)
    taken.swap()
    assert_same(training.train(3), losses)
    assert_same(training.state(), end)


def test_a_training_is_taken_back():
    is_taken_back(Loop("int4-hq-lss"))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ng.recipes.names())
@pytest.mark.parametrize("before", [0, 2])
def test_every_recipe_is_taken_back(cpu, recipe, before):
    is_taken_back(Loop(recipe), before=before)


def test_an_optimizer_is_taken_back_from_before_its_first_step():
    training = Loop(optimizer="8bit")
    is_taken_back(training, before=0)
    assert training.optimizer.state


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 3])
def test_every_optimizer_is_taken_back(optimizer, before):
    is_taken_back(Loop(optimizer=optimizer), before=before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "master"),
    [
        (torch.float16, "fp16-scaled"),
        (torch.bfloat16, "bf16-remainder"),
        (torch.bfloat16, "stochastic"),
    ],
)
def test_masters_are_taken_back(dtype, master):
    make = lambda model: ng.optim.AdamW(model, states="8bit", master=master)  # noqa: E731
    is_taken_back(Loop("fp8-current", make, dtype), before=1)


def test_a_loss_scale_is_taken_back():
    is_taken_back(Loop(scaled=True))


@pytest.mark.slow
def test_a_scale_that_was_not_used_yet_is_taken_back():
    is_taken_back(Loop(scaled=True), before=0)


def test_a_folder_holds_the_copy_and_keeps_nothing(tmp_path):
    is_taken_back(Loop(), tmp_path / "forks")
    assert list((tmp_path / "forks").iterdir()) == []


@pytest.mark.slow
def test_copies_longer_than_a_block_come_back(monkeypatch):
    monkeypatch.setattr(block_storage, "BLOCK", 1000)
    is_taken_back(Loop())


def test_casts_that_were_kept_are_made_anew():
    """A cast of the weights of now, used after going back, would show in the first loss."""
    training = Loop("fp8-current")
    training.train(2)
    taken = copied(training.model, training.optimizer)
    ids = torch.arange(24).reshape(2, 12)
    before = training.model(ids).detach()
    training.train(2)
    training.model(ids)
    taken.restore()
    assert_same(training.model(ids).detach(), before)


def test_addresses_stay():
    """What reads memory by its address, as CUDA graphs and kernels' tables do, goes on reading the right one."""
    training = Loop(optimizer="8bit")
    training.train(2)
    training.model.seen = training.model.seen.clone()
    tensors = [
        *training.model.parameters(),
        *(x for each in training.optimizer.state.values() for x in each.values()),
    ]
    addresses = [each.data_ptr() for each in tensors]
    taken = copied(training.model, training.optimizer)
    training.train(2)
    taken.swap()
    taken.restore()
    assert [each.data_ptr() for each in tensors] == addresses


def test_memory_that_several_tensors_share_is_kept_once():
    whole = torch.randn(64)
    model = nn.ParameterList([nn.Parameter(whole[:48].view(6, 8)), nn.Parameter(whole[16:])])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken, before = copied(model, optimizer), whole.clone()
    assert taken.nbytes == snapshot_bytes(model, optimizer) == 256
    with torch.no_grad():
        model[0] += 1.0
    after = whole.clone()
    taken.swap()
    assert_same(whole, before)
    taken.swap()
    assert_same(whole, after)


@pytest.mark.parametrize("optimizer", quick(["8bit", "adamw"], list(OPTIMIZERS)))
def test_bytes_are_told_before_the_first_step(optimizer):
    training = Loop(optimizer=optimizer)
    told = snapshot_bytes(training.model, training.optimizer)
    training.train(1)
    assert (
        copied(training.model, training.optimizer).nbytes
        == told
        == snapshot_bytes(training.model, training.optimizer)
    )


def test_schedulers_and_averages_are_taken_back():
    training = Loop()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(training.optimizer, 1e-2, total_steps=10)
    average = torch.optim.swa_utils.AveragedModel(training.model)
    taken = copied(training.model, training.optimizer, also=[scheduler, average])
    before = scheduler.state_dict().copy(), [each.clone() for each in average.parameters()]
    rate = scheduler.get_last_lr()
    training.train(2)
    scheduler.step()
    average.update_parameters(training.model)
    taken.restore()
    assert (
        scheduler.last_epoch,
        scheduler.get_last_lr(),
        training.optimizer.param_groups[0]["lr"],
    ) == (
        0,
        rate,
        rate[0],
    )
    assert int(average.n_averaged) == 0
    assert_same(
        [each.detach() for each in average.parameters()], [each.detach() for each in before[1]]
    )


def test_groups_that_were_added_since_go_again():
    training = Loop()
    taken = copied(training.model, training.optimizer)
    training.optimizer.param_groups[0]["lr"] = 1.0
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    taken.restore()
    assert [group["lr"] for group in training.optimizer.param_groups] == [1e-2]


@pytest.mark.parametrize("optimizer", ["8bit", "adamw"])
def test_a_state_that_was_loaded_since_goes_again(optimizer):
    """As a run does that looks at an older checkpoint and goes on."""
    training = Loop(optimizer=optimizer)
    training.train(1)
    older = copy.deepcopy(training.optimizer.state_dict())
    training.train(1)
    taken, begin = copied(training.model, training.optimizer), training.state()
    losses, end = training.train(2), training.state()
    training.optimizer.load_state_dict(older)
    training.train(1)
    taken.restore()
    assert_same(training.state(), begin)
    assert_same(training.train(2), losses)
    assert_same(training.state(), end)


def test_a_moved_model_is_refused():
    training = Loop()
    taken = copied(training.model, training.optimizer)
    training.model.to(torch.float64)
    with raises(ConfigError, "fork.moved"):
        taken.restore()


def test_what_cannot_be_put_back_is_refused():
    training = Loop()
    with raises(ConfigError, "fork.no-state-dict", "int", "state_dict"):
        copied(training.model, training.optimizer, also=[3])


def test_no_room_is_an_error_before_anything_is_copied(monkeypatch, tmp_path):
    training = Loop()
    monkeypatch.setattr(block_storage, "free_host_bytes", lambda: 1000)
    with raises(OutOfMemoryError, "memory.host-copy"):
        copied(training.model, training.optimizer)
    monkeypatch.setattr(
        block_storage.storage.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})
    )
    with raises(StorageError, "storage.full", "0 MiB"):
        copied(training.model, training.optimizer, where=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_room_of_this_host_is_known():
    room = block_storage.free_host_bytes()
    assert room is None or 0 < room < 2**60

"""LightningRunFolder: the folder holds what Lightning's loop computed (exact), and says what it cannot see."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import narrowgauge as ng
from narrowgauge.diagnose.runs import read_metrics, read_run
from narrowgauge.report import page, run_data
from tests.raising import warns

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")

from narrowgauge.integrations import LightningRunFolder

ROWS = torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*`tensorboardX`", "ignore:.*checkpoint directory"),
]


class Regression(lightning.LightningModule):
    def __init__(self, fails_at=None):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        ng.convert(self.model, "fp8-delayed")
        self.losses, self.norms, self.scored, self.fails_at = [], [], [], fails_at

    def loss(self, x):
        return (self.model(x) - x.roll(1, dims=1)).square().mean()

    def training_step(self, x):
        if self.global_step == self.fails_at:
            raise ValueError("as planned")
        loss = self.loss(x)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, x):
        self.scored.append(self.loss(x).detach())
        self.log("val_loss", self.scored[-1])

    def on_before_optimizer_step(self, optimizer):
        found = torch.stack([each.grad.norm() for each in self.parameters()]).norm()
        self.norms.append(float(found))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def fit(folder, module, callback=None, ckpt_path=None, **options):
    settings = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "default_root_dir": folder}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False}
    callback = callback or LightningRunFolder(folder / "run", tensor_every=2)
    trainer = lightning.Trainer(
        **settings | {"enable_checkpointing": False} | options, callbacks=[callback]
    )
    loader = DataLoader(ROWS, batch_size=4)
    trainer.fit(module, loader, DataLoader(ROWS[:4], batch_size=4), ckpt_path=ckpt_path)
    return trainer


def events(folder, kind):
    return [each for each in read_metrics(folder / "metrics.jsonl") if each["event"] == kind]


@pytest.mark.parametrize("micro_batches", [1, 4])  # 6 batches in an epoch: 4, and then 2
def test_the_folder_holds_what_the_loop_computed(tmp_path, micro_batches):
    lightning.seed_everything(5, verbose=False)
    module = Regression()
    fit(tmp_path, module, accumulate_grad_batches=micro_batches)
    sizes = [1] * 12 if micro_batches == 1 else [4, 2, 4, 2]
    steps = events(tmp_path / "run", "step")
    assert [each["step"] for each in steps] == list(range(1, len(sizes) + 1))
    means = [float(each.mean()) for each in torch.stack(module.losses).split(sizes)]
    assert [each["loss"] for each in steps] == pytest.approx(means, rel=2e-7)
    assert [each["grad_norm"] for each in steps] == pytest.approx(module.norms, rel=1e-6)
    half = len(sizes) // 2
    assert [each["lr"] for each in steps] == [1e-2] * half + [5e-3] * half
    # The first score is of the sanity check, before training, and is no evaluation.
    assert [each["loss"] for each in events(tmp_path / "run", "eval")] == [
        float(each) for each in module.scored[1:]
    ]
    assert {each["step"] for each in events(tmp_path / "run", "tensor")} == {
        each["step"] for each in steps if each["step"] % 2 == 0
    }
    assert [each["reason"] for each in events(tmp_path / "run", "done")] == ["finished"]
    run = read_run(tmp_path / "run" / "run.json")
    assert (run["recipe"], run["seed"], run["precision"]) == ("fp8-delayed", 5, "fp32")
    assert run["steps"] == len(sizes) and any("checkpoint" in each for each in run["unseen"])
    shown = page.page(run_data.read(tmp_path / "run"))
    assert shown["status"]["word"] == "finished" and shown["layers"] and shown["tensors"]


def test_a_resumed_run_goes_on_and_a_failed_one_has_no_end(tmp_path):
    fit(tmp_path / "whole", Regression())
    first = fit(tmp_path / "two", Regression(), max_epochs=1)
    first.save_checkpoint(tmp_path / "half.ckpt")
    fit(tmp_path / "two", Regression(), ckpt_path=tmp_path / "half.ckpt")
    whole, two = (events(tmp_path / name / "run", "step") for name in ("whole", "two"))
    assert [each["loss"] for each in two] == [each["loss"] for each in whole]
    assert [each["step"] for each in events(tmp_path / "two" / "run", "resume")] == [6]
    with pytest.raises(ValueError, match="as planned"):
        fit(tmp_path / "failed", Regression(fails_at=3))
    assert len(events(tmp_path / "failed" / "run", "step")) == 3
    assert not events(tmp_path / "failed" / "run", "done")


def test_an_evaluation_without_its_loss_is_told_of(tmp_path):
    callback = LightningRunFolder(tmp_path / "run", tensor_every=0, validation_loss="score")
    with warns("run-folder.no-validation-loss", "val_loss"):
        fit(tmp_path, Regression(), callback, max_epochs=1)
    assert not events(tmp_path / "run", "eval") and not events(tmp_path / "run", "tensor")


def test_a_loop_that_returns_no_loss_is_told_of(tmp_path):
    class Silent(Regression):
        automatic_optimization = False

        def training_step(self, x):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(x))
            optimizer.step()

    callback = LightningRunFolder(tmp_path / "run", tensor_every=0)
    with warns("run-folder.no-loss"):
        fit(tmp_path, Silent(), callback, max_epochs=1)
    assert not events(tmp_path / "run", "step") and len(events(tmp_path / "run", "eval")) == 1

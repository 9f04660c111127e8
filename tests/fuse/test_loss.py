"""The fused loss of causal language models: near transformers' own (bounded), and its own function where no kernel computes it (exact)."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.fuse import fusions
from narrowgauge.fuse.loss import ATTRIBUTE, FusedLoss
from tests.compare import assert_same
from tests.fuse.test_fusing import IDS, built
from tests.selection import needs_compiler

pytest.importorskip("transformers")
pytestmark = needs_compiler


def fused(name: str = "llama") -> tuple[nn.Module, FusedLoss]:
    model = built(name, "bf16")
    return model, model.__dict__[ATTRIBUTE]


def both(loss: FusedLoss, logits: Tensor, labels: Tensor, **options) -> list[tuple[Tensor, Tensor]]:
    found = []
    for function in (loss, loss.own):
        x = logits.detach().requires_grad_()
        value = function(logits=x, labels=labels, vocab_size=x.shape[-1], **options)
        value.backward()
        found.append((value.detach(), x.grad))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_items_in_batch": 17}, {"num_items_in_batch": torch.tensor(5)}, {"ignore_index": 3}],
    ids=str,
)
def test_loss_and_gradient_are_near_those_of_transformers(dtype, options):
    _, loss = fused()
    logits, labels = torch.randn(3, 9, 50).mul(3).to(dtype), torch.randint(50, (3, 9))
    labels[1, 2:6] = options.get("ignore_index", -100)
    for more in ({}, {"shift_labels": labels.flip(1)}):
        (mine, gradient), (theirs, expected) = both(loss, logits, labels, **options, **more)
        assert mine.dtype == torch.float32
        assert float((mine - theirs).abs()) <= 1e-6 * float(theirs)
        size = float(expected.abs().max())
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(gradient, expected, rtol=2 * unit, atol=1e-5 * size)


def test_all_labels_ignored_is_as_in_transformers():
    _, loss = fused()
    (mine, _), (theirs, _) = both(loss, torch.randn(2, 4, 9), torch.full((2, 4), -100))
    assert mine.isnan() and theirs.isnan()


def test_it_is_reported_and_taken_back():
    model, loss = fused()
    [found] = [each for each in fusions(model) if each.function == "cross-entropy"]
    assert found.backend == "native-cpp" and not found.reason
    ng.convert(model, None)
    assert ATTRIBUTE not in model.__dict__ and model.loss_function is loss.own
    own = lambda logits, labels, vocab_size: logits.sum()  # noqa: E731
    model.loss_function = own
    ng.convert(model, "bf16", fuse=True)
    assert model.loss_function is own, "another loss stays"
    assert ATTRIBUTE not in built("bert", "bf16").__dict__


def test_where_no_kernel_computes_the_own_function_does(monkeypatch):
    model, loss = fused()
    logits, labels = torch.randn(2, 6, 64), IDS[:, :6]
    given = {"logits": logits, "labels": labels, "vocab_size": 64}
    expected = loss.own(**given)
    taken = []
    own = loss.own
    loss.own = lambda **given: taken.append(1) or own(**given)
    with ng.suspended(model):
        assert_same(loss(**given), expected)
    assert len(taken) == 1
    assert_same(
        loss(**given | {"logits": logits.double()}), own(**given | {"logits": logits.double()})
    )
    with pytest.raises(IndexError):
        loss(**given | {"labels": labels + 64})
    assert len(taken) == 3
    torch.func.grad(lambda x: loss(**given | {"logits": x}))(logits)
    assert len(taken) == 4


def test_copies_have_layers_of_their_own():
    model, loss = fused()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        mine = other.__dict__[ATTRIBUTE]
        assert mine is not loss and any(mine.layer is each for each in other.modules())
        assert_same(other(input_ids=IDS, labels=IDS).loss, model(input_ids=IDS, labels=IDS).loss)

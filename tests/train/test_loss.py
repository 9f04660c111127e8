"""The loss of a step (bounded against one unsplit batch)."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from narrowgauge.conversion import convert
from narrowgauge.data import IGNORED
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.train import loop
from narrowgauge.train import loss as step_loss
from narrowgauge.train.config.settings import InvalidSettings, TrainConfig
from narrowgauge.train.loss import NO_CACHE, Objective, targets_of_step
from tests.compare import assert_same
from tests.raising import raises
from tests.train import tiny

CPU = torch.device("cpu")
SAME = 1e-6  # relative, float32: sums of a few hundred terms in another order, 2**-24 each, independent


def batch_of(rows, uneven):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (rows, 12), generator=generator)
    labels = torch.randint(0, 64, (rows, 12), generator=generator)
    if uneven:
        for row in range(rows):  # from no label at all in row 0 to all but one in the last
            labels[row, row + (row > 3) * 4 :] = IGNORED
    return {"input_ids": ids, "labels": labels}


def gradients(model, batches, chunked=True):
    model = copy.deepcopy(model)
    objective = (
        Objective.of(model, torch.float32, TrainConfig()) if chunked else Objective(model, NO_CACHE)
    )
    targets = targets_of_step(batches, 1)
    total = 0.0
    for batch in batches:
        loss = objective(batch, CPU) / targets
        loss.backward()
        total += float(loss.detach())
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=None, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(sizes)


@pytest.mark.parametrize("uneven", [False, True], ids=["all valid", "uneven"])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_a_step_does_not_depend_on_how_its_batch_is_cut(model, parts, uneven):
    whole = batch_of(8, uneven)
    rows = 8 // parts
    cut = [
        {key: value[i * rows : (i + 1) * rows] for key, value in whole.items()}
        for i in range(parts)
    ]
    # Reference in float64: mean over the valid labels, by torch's own reduction.
    exact = copy.deepcopy(model).double()
    logits = exact(input_ids=whole["input_ids"], use_cache=False).logits
    mean = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), whole["labels"].flatten(), ignore_index=IGNORED
    )
    mean.backward()
    loss, found = gradients(model, cut)
    unsplit_loss, unsplit = gradients(model, [whole])
    assert (
        loss
        == pytest.approx(unsplit_loss, rel=SAME)
        == pytest.approx(float(mean.detach()), rel=SAME)
    )
    for name, parameter in exact.named_parameters():
        scale = unsplit[name].norm()
        assert float((found[name] - unsplit[name]).norm() / scale) <= SAME, name
        assert float((found[name].double() - parameter.grad).norm() / scale) <= 4 * SAME, name


def test_in_chunks_as_with_the_whole_logits(model):
    batch = batch_of(8, uneven=True)
    loss, found = gradients(model, [batch])
    expected, reference = gradients(model, [batch], chunked=False)
    assert loss == pytest.approx(expected, rel=SAME)
    for name, gradient in reference.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) <= SAME, name
    with torch.no_grad():
        evaluated = Objective.of(model, torch.float32, TrainConfig())(batch, CPU)
        assert float(evaluated) == pytest.approx(
            float(Objective(model, NO_CACHE)(batch, CPU)), rel=SAME
        )


def test_labels_for_a_gpu_are_checked_on_the_host_before_they_are_copied(model, monkeypatch):
    """Each word of the vocabulary may be a target (64 of them here, for 32 features), and no other."""
    copied = []
    monkeypatch.setattr(
        step_loss, "on_device", lambda tensor, device: copied.append(device) or tensor
    )
    objective, batch = Objective.of(model, torch.float32, TrainConfig()), batch_of(2, uneven=False)
    batch["labels"][0, 0] = 63
    expected = objective(batch, CPU)
    assert_same(objective(batch, torch.device("cuda")), expected)
    copied.clear()
    batch["labels"][0, 0] = 64
    with raises(DataError, "chunked-loss.class", "target 64", "0 ... 63"):
        objective(batch, torch.device("cuda"))
    assert copied == []


def test_a_head_in_the_recipe_bf16_is_ordinary(model):
    """The operands and roundings are those of QLinear, so the losses agree as sums in another order do."""
    model = copy.deepcopy(model)
    convert(model, {"lm_head": "bf16"})
    objective = Objective.of(model, torch.bfloat16, TrainConfig())
    assert objective.head is model.lm_head
    batch = batch_of(4, uneven=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = objective(batch, CPU), Objective(model, NO_CACHE)(batch, CPU)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=2**-12)


class Scaled(LlamaForCausalLM):
    """Its logits are more than its head's product."""

    def forward(self, **inputs):
        output = super().forward(**inputs)
        output.logits = output.logits * 0.5
        return output


def test_other_heads_fall_back_and_say_why(model):
    def words(changed, computes_in=torch.bfloat16):
        objective = Objective.of(changed, computes_in, TrainConfig())
        assert objective.head is None and objective.forward is changed
        batch = batch_of(2, uneven=False)
        with torch.no_grad():
            assert_same(objective(batch, CPU), Objective(changed, NO_CACHE)(batch, CPU))
        return objective.description

    narrow = convert(copy.deepcopy(model), {"lm_head": "fp8-row"})
    assert words(narrow) == "whole logits: the output head follows the recipe 'fp8-row'"
    rounded = convert(copy.deepcopy(model), {"lm_head": "bf16"})
    assert (
        words(rounded, torch.float32) == "whole logits: the output head follows the recipe 'bf16'"
    )
    nested = copy.deepcopy(model)
    nested.lm_head = torch.nn.Sequential(nested.lm_head)
    assert words(nested) == "whole logits: the output head is a Sequential, not an nn.Linear"
    assert "hidden state" in words(Scaled(model.config))


def test_finding_out_leaves_no_trace(model):
    model = convert(copy.deepcopy(model), "fp8-delayed").train()
    model.model.norm.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    Objective.of(model, torch.float32, TrainConfig())
    assert_same(torch.get_rng_state(), state)
    assert_same(dict(model.state_dict()), before)
    assert model.training and model.lm_head.training and not model.model.norm.training


def test_a_step_without_targets_is_a_data_error():
    batch = batch_of(2, uneven=False)
    batch["labels"].fill_(IGNORED)
    with raises(DataError, "targets.none-valid", "step 7", "-100"):
        targets_of_step([batch, batch], 7)


def test_one_micro_batch_may_be_empty_of_targets():
    empty, full = batch_of(2, uneven=False), batch_of(2, uneven=False)
    empty["labels"].fill_(IGNORED)
    assert targets_of_step([empty, full], 1) == 24


@pytest.mark.slow
def test_whole_runs_agree_however_their_batches_are_cut(make):
    seen = []
    for parts in (1, 4):
        config = make(
            f"parts-{parts}", micro_batches=parts, precision="fp32", recipe="bf16", steps=2
        )
        assert loop.run(config) == 0
        seen.append(tiny.events(loop.Path(config.output), "step"))
    for whole, cut in zip(*seen, strict=True):
        assert cut["loss"] == pytest.approx(whole["loss"], rel=SAME)
        assert cut["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)
        assert cut["tokens"] == whole["tokens"] == 64


def test_the_ways_to_compute_logits_have_the_same_loss_and_gradients(model):
    """Bounded: sums of 64 words and 96 tokens in another order."""
    batch = batch_of(8, True)
    found = {}
    for way in ("chunks", "slices", "whole"):
        own = copy.deepcopy(model)
        objective = Objective.of(own, torch.float32, TrainConfig(loss=way))
        loss = objective(batch, CPU)
        loss.backward()
        found[way] = loss.detach(), own
        assert objective.slices == (way == "slices") and (objective.head is None) == (
            way == "whole"
        )
        assert ("slices" in objective.description) == (way == "slices")
        with torch.no_grad():  # as an evaluation has it
            assert_same(objective(batch, CPU), loss.detach())
    for way in ("chunks", "slices"):
        loss, own = found[way]
        assert float(loss) == pytest.approx(float(found["whole"][0]), rel=SAME)
        for (name, mine), theirs in zip(
            own.named_parameters(), found["whole"][1].parameters(), strict=True
        ):
            close = (
                mine.grad - theirs.grad
            ).norm() <= 64 * 2**-24 * theirs.grad.norm() * math.sqrt(96)
            assert close, name


def test_slices_are_refused_where_the_head_is_not_apart(model):
    head = copy.deepcopy(model)
    convert(head, {"lm_head": "fp8-current"})
    with raises(ConfigError, "loss.slices", "'slices'"):
        Objective.of(head, torch.bfloat16, TrainConfig(loss="slices"))
    with pytest.raises(
        InvalidSettings,
        match=r"training.loss = 'slices': parallel = 'fsdp=2,tp=2' cuts the words of the head",
    ):
        TrainConfig(loss="slices", parallel="fsdp=2,tp=2")

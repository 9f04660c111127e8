"""The loss of a step (bounded): the same gradient however it is cut into micro-batches, padded or packed.

Bound: 1e-6 of the gradient's norm. Each of the sums has fewer than 2^10 terms of float32, with relative error 2^-24 each; their
errors are random and far below the worst case of 2^-14.
"""

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
)
from transformers import T5ForConditionalGeneration as T5

from narrowgauge.data.batches import IGNORED
from narrowgauge.data.collate import Collator
from narrowgauge.errors import DataError
from narrowgauge.train.tasks.losses import (
    count_targets,
    step_loss,
    summed_loss,
    trainer_loss,
)
from narrowgauge.train.tasks.regression import squared_loss
from tests.raising import raises

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
CUTS = {"8x1": 8, "2x4": 2, "1x8": 1}


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="sdpa"))


@pytest.fixture(scope="module")
def bert():
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(**SIZES, num_labels=3, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    )


@pytest.fixture(scope="module")
def t5():
    torch.manual_seed(0)
    return T5(
        T5Config(
            vocab_size=50,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            dropout_rate=0,
            decoder_start_token_id=0,
        )
    )


def examples(kind, masked=0.0):
    """Eight of very different lengths; with `masked`, the labels of so large a beginning are -100."""
    draw = np.random.default_rng(0)
    found = []
    for size in (3, 20, 5, 9, 2, 14, 7, 11):
        ids = draw.integers(1, 50, size)
        labels = np.where(np.arange(size) < int(masked * size), IGNORED, ids)
        if kind == "classification":
            labels = int(draw.integers(3))
        elif kind == "seq2seq":
            labels = draw.integers(1, 50, 25 - size)
        found.append({"input_ids": ids, "labels": labels})
    return found


def gradient(model, batches, kind):
    model.zero_grad()
    total = count_targets(batches, kind)
    for batch in batches:
        step_loss(model, batch, kind, total).backward()
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def assert_close(found, expected):
    assert (found - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("name", "kind", "masked"),
    [
        ("llama", "causal-lm", 0),
        ("llama", "causal-lm", 0.6),
        ("bert", "classification", 0),
        ("t5", "seq2seq", 0),
    ],
    ids=["causal", "masked", "classification", "seq2seq"],
)
def test_the_gradient_does_not_depend_on_the_cut(request, name, kind, masked, cut):
    model, data, rows = request.getfixturevalue(name), examples(kind, masked), CUTS[cut]
    collate = Collator(pad_id=0)
    whole = gradient(model, [collate(data)], kind)
    parts = [collate(data[start : start + rows]) for start in range(0, 8, rows)]
    assert_close(gradient(model, parts, kind), whole)


@pytest.mark.parametrize("masked", [0, 0.6])
@pytest.mark.parametrize("attention", ["mask", "positions"])
def test_packed_and_padded_have_the_same_gradient(llama, attention, masked):
    data = examples("causal-lm", masked)
    padded = gradient(llama, [Collator(pad_id=0)(data)], "causal-lm")
    collate = Collator(pad_id=0, attention=attention, widths=(48,))
    packed = [collate([data[:3], data[3:5]]), collate([data[5:]])]
    assert count_targets(packed, "causal-lm") == count_targets(
        [Collator(pad_id=0)(data)], "causal-lm"
    )
    assert_close(gradient(llama, packed, "causal-lm"), padded)


def test_a_mean_of_means_would_be_seen(llama):
    """The test above can fail: dividing each micro-batch by its own count gives another gradient."""
    data, collate = examples("causal-lm", 0.6), Collator(pad_id=0)
    whole = gradient(llama, [collate(data)], "causal-lm")
    llama.zero_grad()
    parts = [collate(data[start : start + 2]) for start in range(0, 8, 2)]
    for part in parts:
        (step_loss(llama, part, "causal-lm", count_targets([part], "causal-lm")) / 4).backward()
    means = torch.cat([each.grad.flatten() for each in llama.parameters()])
    assert (means - whole).norm() > 0.01 * whole.norm()


def test_pad_equal_to_end_of_text_is_learnt_and_seen(llama):
    """The last token is 2, and so is the padding: it stays a target, and what is behind it changes nothing."""
    data = [{"input_ids": np.array([5, 6, 2]), "labels": np.array([5, 6, 2])}]
    one = gradient(llama, [Collator(pad_id=2, multiple=1, tokens_multiple=1)(data)], "causal-lm")
    padded = Collator(pad_id=2, multiple=16)(data)
    assert count_targets([padded], "causal-lm") == 2
    assert_close(gradient(llama, [padded], "causal-lm"), one)


def test_the_loss_is_that_of_transformers(llama):
    batch = Collator(pad_id=0)(examples("causal-lm", 0.6))
    total = count_targets([batch], "causal-lm")
    expected = llama(**batch).loss
    torch.testing.assert_close(step_loss(llama, batch, "causal-lm", total), expected)
    logits = llama(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    for number in (None, torch.tensor(total)):
        torch.testing.assert_close(
            trainer_loss("causal-lm")(logits, batch["labels"], number), expected
        )


def test_the_count_is_after_the_shift():
    labels = torch.tensor([[7, 8, IGNORED], [IGNORED, 9, 9]])
    assert count_targets([{"labels": labels}], "causal-lm") == 3
    assert count_targets([{"labels": labels}], "seq2seq") == 4


def test_all_labels_masked_is_an_error():
    labels = torch.tensor([[7, IGNORED, IGNORED]])
    with raises(DataError, "targets.none-valid", "in 1", "1 micro"):
        count_targets([{"labels": labels}], "causal-lm")
    assert float(summed_loss(torch.zeros(1, 3, 5), labels, "causal-lm")) == 0


def test_differences_are_taken_in_float32_whatever_both_are():
    """Exact: bfloat16 would make 255 of 254.9921875."""
    values, targets = (
        torch.tensor([[256.0]], dtype=torch.bfloat16),
        torch.tensor([[1.0078125]], dtype=torch.bfloat16),
    )
    found = squared_loss(values, targets)
    assert found.dtype == torch.float32 and float(found) == float(torch.tensor(254.9921875) ** 2)

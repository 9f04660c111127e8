"""Plans of an epoch, exactly: nothing lost or drawn twice, within the budget, the same wherever it is computed."""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.data.epochs import Batching, examples_of, plan, runs
from narrowgauge.data.rows import Waste, choose_widths, dynamic_waste, width_of
from narrowgauge.data.sampler import restore_order, sorted_batches
from narrowgauge.data.strata import strata_of
from narrowgauge.errors import ConfigError, DataError
from tests.raising import coded, raises

LENGTHS = st.lists(st.integers(1, 120), min_size=1, max_size=150)
FORMS = ["batch_size", "token_budget", "packed"]


def batching_of(form: str, **options) -> Batching:
    size = {
        "batch_size": {"batch_size": 6},
        "token_budget": {"token_budget": 512},
        "packed": {"token_budget": 512, "row_length": 128},
    }
    return Batching(**size[form], **options)


def shape(lengths, batch, widths) -> tuple[int, int]:
    """(positions, width) of a batch, packed or not, as the collator makes it."""
    longest = max(sum(int(lengths[index]) for index in examples_of([item])) for item in batch)
    width = width_of(longest, len(batch), widths, 16)
    return len(batch) * width, width


def drawn(found) -> list[int]:
    return [index for step in found.steps for batch in step for index in examples_of(batch)]


@pytest.mark.parametrize("form", FORMS)
@given(lengths=LENGTHS, world=st.integers(1, 4), seed=st.integers(0, 3), epoch=st.integers(0, 2))
def test_every_example_is_drawn_once(form, lengths, world, seed, epoch):
    """Property, with the ragged end as smaller steps; a world that the examples do not go round is an error."""
    try:
        found = plan(lengths, batching_of(form, world=world, seed=seed), epoch)
    except ConfigError as error:
        assert world > 1 and error.code == "batching.ranks"
        return
    assert sorted(drawn(found)) == list(range(len(lengths)))
    assert all(len(step) == world and all(step) for step in found.steps)
    assert found.notes == [found.alone] * bool(found.alone)


@pytest.mark.parametrize("form", FORMS)
@given(lengths=LENGTHS, world=st.integers(1, 4), ragged=st.sampled_from(["drop", "repeat"]))
def test_what_is_dropped_or_repeated_is_counted(form, lengths, world, ragged):
    found = plan(lengths, batching_of(form, world=world, ragged=ragged))
    counts = Counter(drawn(found))
    if ragged == "drop":
        assert set(counts.values()) <= {1}
        assert sorted([*counts, *found.dropped]) == list(range(len(lengths)))
        assert bool(found.dropped) + bool(found.alone) == len(found.notes)
    else:
        assert set(counts) == set(range(len(lengths)))
        assert sum(counts.values()) - len(lengths) == found.repeated
    assert len({tuple(map(len, step)) for step in found.steps}) <= len(found.widths)


@pytest.mark.parametrize("ragged", ["smaller", "repeat"])
@pytest.mark.parametrize("order", ["length", "shuffled"])
@given(
    lengths=LENGTHS,
    world=st.integers(1, 3),
    multiple=st.sampled_from([1, 8, 16]),
    budget=st.integers(128, 700),
)
def test_no_batch_passes_the_budget_and_all_fill_whole_tiles(
    lengths, world, multiple, budget, ragged, order
):
    batching = Batching(
        token_budget=budget,
        world=world,
        multiple=multiple,
        ragged=ragged,
        too_long="skip",
        order=order,
    )
    try:
        found = plan(lengths, batching)
    except ConfigError:
        return
    for step in found.steps:
        for batch in step:
            positions, _ = shape(lengths, batch, found.widths)
            assert positions <= budget
            assert positions % 16 == 0
    every = [*drawn(found), *found.skipped]
    assert (sorted(set(every)) if ragged == "repeat" else sorted(every)) == list(
        range(len(lengths))
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_plan_is_a_function_of_seed_and_epoch(form):
    lengths = np.random.default_rng(0).integers(3, 100, 400)
    same = plan(lengths, batching_of(form), 1), plan(lengths.tolist(), batching_of(form), 1)
    assert same[0] == same[1]
    others = plan(lengths, batching_of(form), 2), plan(lengths, batching_of(form, seed=1), 1)
    assert same[0].steps != others[0].steps != others[1].steps
    assert len(same[0]) == len(others[0]) == len(others[1])
    assert same[0].widths == others[0].widths


@pytest.mark.parametrize("examples", [64, 65, 71, 72, 73])
def test_batch_size_gives_as_many_steps_as_plain_shuffling(examples):
    lengths = np.random.default_rng(examples).integers(3, 100, examples)
    for world in (1, 2, 4):
        assert len(plan(lengths, Batching(batch_size=8, world=world))) == -(
            -examples // (8 * world)
        )


def test_shapes_are_few_and_padding_small():
    """2,000 lengths of a long-tailed distribution: at most 10 widths and one ragged step, far less padding than shuffled."""
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 0.8, 2000).astype(int), 2, 400)
    batching = Batching(token_budget=2048)
    found = plan(lengths, batching)
    shapes = {
        (len(batch), shape(lengths, batch, found.widths)[1])
        for step in found.steps
        for batch in step
    }
    assert len(found.widths) <= 10
    assert len(shapes) <= 12
    assert found.padding.planned.tokens == lengths.sum()
    assert (
        found.padding.planned.percent
        < 20
        < 60
        < found.padding.shuffled.percent
        < found.padding.fixed.percent
    )


def test_the_ranks_of_a_step_have_the_same_width():
    """But for the few steps in which a class runs out."""
    lengths = np.random.default_rng(0).integers(3, 200, 3000)
    batching = Batching(token_budget=1024, world=4)
    found = plan(lengths, batching)
    shapes = [{shape(lengths, batch, found.widths) for batch in step} for step in found.steps]
    assert sum(len(each) > 1 for each in shapes) <= len(found.widths)


def test_the_worst_step_is_the_first_and_the_rest_is_shuffled():
    lengths = np.random.default_rng(0).integers(3, 200, 3000)
    batching = Batching(token_budget=1024)
    found = plan(lengths, batching)
    positions = [shape(lengths, step[0], found.widths) for step in found.steps]
    assert positions[0] == max(positions)
    widths = np.array([width for _, width in positions[1:]])
    drift = np.corrcoef(np.arange(len(widths)), widths)[0, 1]
    assert abs(drift) < 4 / np.sqrt(
        len(widths)
    )  # four standard deviations of no correlation; fixed seed


def test_packing_wastes_less_than_padding():
    lengths = np.random.default_rng(0).integers(3, 60, 1000)
    packed = plan(lengths, batching_of("packed"))
    padded = plan(lengths, batching_of("token_budget"))
    assert packed.padding.planned.percent < 2 < padded.padding.planned.percent
    sizes = [sum(lengths[list(row)]) for step in packed.steps for batch in step for row in batch]
    assert max(sizes) <= 128


@given(
    lengths=st.lists(st.integers(1, 128), min_size=1, max_size=80),
    size=st.sampled_from(
        [{"batch_size": 1}, {"batch_size": 6}, {"token_budget": 128}, {"token_budget": 520}]
    ),
    multiple=st.sampled_from([1, 8, 64]),
    tokens_multiple=st.sampled_from([1, 16]),
    classes=st.integers(1, 10),
)
def test_packing_never_pads_more_than_not_packing(
    lengths, size, multiple, tokens_multiple, classes
):
    """Property: in sum over the epoch, counted on the batches as the collator makes them."""
    options = {**size, "multiple": multiple, "tokens_multiple": tokens_multiple, "classes": classes}
    packed, padded = (
        plan(lengths, Batching(row_length=128, **options)),
        plan(lengths, Batching(**options)),
    )
    counts = [found.padding.planned for found in (packed, padded)]
    assert counts[0].tokens == counts[1].tokens == sum(lengths)
    assert counts[0].positions <= counts[1].positions
    assert sorted(drawn(packed)) == list(range(len(lengths)))
    assert max(packed.widths) <= 128 and len(packed.widths) <= classes


def test_examples_that_do_not_go_into_a_row_together_are_padded_as_without_packing():
    """Exact: beyond half a row each stands alone, in rows no wider than its length asks for."""
    lengths = np.random.default_rng(0).integers(65, 81, 300)
    packed = plan(lengths, Batching(batch_size=8, row_length=128))
    padded = plan(lengths, Batching(batch_size=8))
    assert packed.padding.planned == padded.padding.planned
    assert packed.padding.planned.percent < 10 < 43 < 100 * (1 - lengths.mean() / 128)


def test_a_plan_says_when_packing_would_pad_more():
    lengths = [60] * 100 + [40] * 2
    found = plan(lengths, Batching(batch_size=2, row_length=112, classes=1))
    assert found.notes == [found.alone]
    assert found.alone == (
        "Rows of 112 tokens would be padded by 45.7 % with several examples in a row and by 6.9 % with one: each example has its "
        "own. Longer rows hold more."
    )
    assert {len(row) for step in found.steps for batch in step for row in batch} == {1}
    for epoch, among in ((1, None), (0, [3, 100, 101])):
        other = plan(lengths, Batching(batch_size=2, row_length=112, classes=1), epoch, among=among)
        assert (other.alone, other.widths) == (found.alone, found.widths)


def test_packing_is_decided_and_explained_for_the_order_that_is_asked():
    """By length one example in a row pads less; shuffled it would pad more. What is told is what a shuffled epoch has."""
    draw = np.random.default_rng(34)
    lengths = np.where(
        draw.random(1000) < 0.715, draw.integers(253, 332, 1000), draw.integers(467, 512, 1000)
    )
    by_length, shuffled = (
        plan(lengths, Batching(batch_size=16, row_length=512, order=order))
        for order in ("length", "shuffled")
    )
    padded = plan(lengths, Batching(batch_size=16, order="shuffled")).padding.planned
    assert by_length.alone and not shuffled.alone
    assert shuffled.padding.planned.positions < padded.positions
    lengths = np.random.default_rng(0).integers(260, 512, 1000)
    found = plan(lengths, Batching(batch_size=16, row_length=512, order="shuffled"))
    [told] = re.findall(r"by (\S+) % with one", found.alone)
    assert float(told) == pytest.approx(found.padding.planned.percent, abs=1) and float(told) > 20


def test_too_long_is_an_error_with_count_and_longest_or_skipped():
    lengths = [10, 700, 20, 513, 512]
    with raises(DataError, "plan.example-too-long", "of 5", "token_budget", "512"):
        plan(lengths, Batching(token_budget=512))
    found = plan(lengths, Batching(token_budget=512, too_long="skip"))
    assert sorted(found.skipped) == [1, 3]
    assert found.notes == ["2 examples are longer than the budget and are left out."]
    with raises(DataError, "plan.example-too-long", "row_length", "128"):
        plan(lengths, Batching(batch_size=2, row_length=128))


def test_an_example_without_tokens_is_refused():
    with raises(DataError, "plan.empty-example", "example 1"):
        plan([3, 0], Batching(batch_size=1))


def test_no_examples_are_no_steps():
    assert (
        len(plan([], Batching(batch_size=4)))
        == len(plan([], Batching(batch_size=4, row_length=16)))
        == 0
    )


def test_the_rest_of_an_epoch_keeps_the_widths():
    lengths = np.random.default_rng(0).integers(3, 100, 300)
    for form in FORMS:
        found = plan(lengths, batching_of(form), among=range(40, 90))
        assert sorted(drawn(found)) == list(range(40, 90))
        assert found.widths == plan(lengths, batching_of(form)).widths


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, coded("batching.size")),
        ({"batch_size": 1, "token_budget": 1}, coded("batching.size")),
        ({"batch_size": 0}, coded("batching.not-positive", "batch_size 0")),
        ({"batch_size": 1, "world": 0}, coded("batching.not-positive", "world 0")),
        ({"batch_size": 1, "multiple": 12}, coded("batching.power-of-two")),
        ({"batch_size": 1, "ragged": "keep"}, coded("batching.choice", "ragged", "'keep'")),
        ({"batch_size": 1, "too_long": "cut"}, coded("batching.choice", "too_long", "'cut'")),
        ({"batch_size": 1, "row_length": 100}, coded("batching.row-multiple", "112")),
        ({"token_budget": 64, "row_length": 128}, coded("batching.budget")),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with raises(ConfigError, message):
        Batching(**options)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=60),
    st.integers(1, 5),
    st.sampled_from([1, 8]),
)
def test_the_widths_are_the_best_there_are(lengths, count, multiple):
    """Against trying every choice (small cases)."""
    from itertools import combinations

    widths = choose_widths(np.array(lengths), count=count, multiple=multiple)
    candidates = sorted({-(-length // multiple) * multiple for length in lengths})[:10]
    if candidates[-1] < max(lengths):
        return

    def positions(chosen):
        return sum(min(width for width in chosen if width >= length) for length in lengths)

    best = min(
        positions((*rest, candidates[-1]))
        for size in range(count)
        for rest in combinations(candidates[:-1], min(size, len(candidates) - 1))
    )
    assert positions(widths) == best
    assert len(widths) <= count
    assert list(widths) == sorted(set(widths))


def test_many_distinct_lengths_are_thinned_and_still_held():
    lengths = np.random.default_rng(0).integers(1, 5000, 20_000)
    widths = choose_widths(lengths, count=8, multiple=1)
    assert len(widths) == 8
    assert widths[-1] == lengths.max()
    padded = np.asarray(widths)[np.searchsorted(widths, lengths)].sum()
    assert padded / lengths.sum() < 1.13  # eight equal steps of a uniform distribution: (1 + 1/8)


def test_a_width_grows_until_its_rows_fill_whole_tiles():
    assert width_of(17, 4, (8, 24), 16) == 24
    assert width_of(17, 3, (8, 24), 16) == 32
    with raises(DataError, "collator.widths", "25", "at 24"):
        width_of(25, 4, (8, 24), 16)


@given(LENGTHS, st.integers(1, 9))
def test_sorted_batches_restore_the_order(lengths, batch_size):
    batches = sorted_batches(lengths, batch_size=batch_size)
    widths = [[lengths[index] for index in batch] for batch in batches]
    flat = [length for batch in widths for length in batch]
    assert flat == sorted(flat, reverse=True)
    assert restore_order(batches, widths) == lengths


def test_sorted_batches_hold_a_budget_and_leave_none_out():
    lengths = [3, 100, 9, 8, 8, 60]
    batches = sorted_batches(lengths, token_budget=64)
    assert batches == [[1], [5], [2, 3, 4, 0]]
    with raises(DataError, "restore-order.count"):
        restore_order(batches, [[1], [1, 1], [1, 1, 1]])


def test_waste_is_counted():
    lengths = np.array([3, 5, 10, 1])
    assert dynamic_waste(lengths, 4, 8) == Waste(19, 64)
    assert dynamic_waste(lengths, 3, 1) == Waste(19, 31)
    assert dynamic_waste(lengths, 1, 8) == Waste(19, 40)
    assert str(Waste(19, 40)) == "21 of 40 positions (52.5 %)"
    assert Waste(0, 0).percent == 0
    report = plan(lengths, Batching(batch_size=2)).padding
    assert report.as_dict()["fixed"] == {"tokens": 19, "positions": 64, "percent": 100 * 45 / 64}


def tied_to_length(examples: int = 800, classes: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """(lengths, labels), of which the longer examples have the larger labels more often."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(4, 100, examples)
    return lengths, np.minimum(
        (lengths / 100 + draw.normal(0, 0.2, examples)).clip(0, 0.99) * classes, classes - 1
    ).astype(int)


@pytest.mark.parametrize("classes", [2, 4])
def test_every_batch_has_the_share_of_each_stratum(classes):
    """Exactly: the share of the data, less than two examples more or less; batches by length alone are far from it."""
    lengths, labels = tied_to_length(classes=classes)
    strata = strata_of(labels, lengths)
    shares = np.bincount(strata) / len(strata)

    def off(**options) -> float:
        steps = plan(lengths, Batching(batch_size=16, seed=1), 2, **options).steps
        return max(
            abs(np.bincount(strata[step[0]], minlength=classes) - 16 * shares).max()
            for step in steps
            if len(step[0]) == 16
        )

    assert off(strata=strata) < 2
    assert off() > 4


@pytest.mark.slow
@given(
    lengths=LENGTHS,
    labels=st.lists(st.integers(0, 5), min_size=150, max_size=150),
    world=st.integers(1, 3),
)
def test_strata_lose_nothing_and_keep_to_the_budget(lengths, labels, world):
    sizes = np.array(lengths)
    strata = strata_of(np.array(labels[: len(lengths)]), sizes)
    for form in ("batch_size", "token_budget"):
        batching = batching_of(form, world=world, too_long="skip")
        try:
            found = plan(sizes, batching, strata=strata)
        except ConfigError as error:
            assert world > 1 and error.code == "batching.ranks"
            continue
        assert sorted([*drawn(found), *found.skipped]) == list(range(len(lengths)))
        positions = sum(
            shape(sizes, batch, found.widths)[0] for step in found.steps for batch in step
        )
        assert positions == found.padding.planned.positions
        if form == "token_budget":
            assert all(
                shape(sizes, batch, found.widths)[0] <= 512
                for step in found.steps
                for batch in step
            )


def test_strata_pad_less_than_shuffling_and_their_ranks_are_of_one_width():
    lengths, labels = tied_to_length(2000)
    found = plan(lengths, Batching(batch_size=16, world=2), strata=strata_of(labels, lengths))
    by_length = plan(lengths, Batching(batch_size=16, world=2))
    assert (
        by_length.padding.planned.percent
        < found.padding.planned.percent
        < 0.75 * found.padding.shuffled.percent
    )
    widths = [{shape(lengths, batch, found.widths)[1] for batch in step} for step in found.steps]
    assert sum(len(each) > 1 for each in widths) < len(widths) / 10


@given(
    lengths=LENGTHS, world=st.integers(1, 3), micro_batches=st.integers(1, 4), multiple=st.sampled_from([1, 8]),
    labels=st.none() | st.lists(st.integers(0, 5), min_size=150, max_size=150),
)  # fmt: skip
@pytest.mark.parametrize("form", FORMS)
def test_shuffled_steps_lose_nothing_and_keep_to_the_budget(
    form, lengths, world, micro_batches, multiple, labels
):
    """And count the padding of their micro-batches as the collator makes it."""
    sizes, batching = (
        np.array(lengths),
        batching_of(form, world=world, multiple=multiple, order="shuffled"),
    )
    labels = (
        None
        if labels is None or form == "packed"
        else strata_of(np.array(labels[: len(lengths)]), sizes)
    )
    try:
        found = plan(sizes, batching, strata=labels, micro_batches=micro_batches)
    except ConfigError as error:
        assert world > 1 and error.code == "batching.ranks"
        return
    assert sorted(drawn(found)) == list(range(len(lengths)))
    batches = [batch for step in found.steps for batch in step]
    if form != "batch_size":
        assert all(shape(sizes, batch, found.widths)[0] <= 512 for batch in batches)
    cut = [
        shape(sizes, run, found.widths)[0]
        for batch in batches
        for run in runs(batch, micro_batches)
    ]
    assert found.padding.planned.positions == sum(cut)


def test_a_shuffled_step_is_a_random_sample_of_which_micro_batches_have_one_length():
    """Means of lengths scatter as those of random samples do; by length several times as much. Eight micro-batches pad little more."""
    lengths = np.random.default_rng(0).integers(4, 100, 3200)

    def scatter(found) -> float:
        """Over that of the mean of 32 at random."""
        return float(
            np.std([lengths[step[0]].mean() for step in found.steps]) / (lengths.std() / 32**0.5)
        )

    by_length = plan(lengths, Batching(batch_size=32))
    whole, cut = (
        plan(lengths, Batching(batch_size=32, order="shuffled"), micro_batches=micro_batches)
        for micro_batches in (1, 8)
    )
    assert 0.75 < scatter(whole) < 1.25 and scatter(by_length) > 4
    assert whole.steps == cut.steps  # micro-batches change the count of padding alone
    assert (
        by_length.padding.planned.percent
        < cut.padding.planned.percent
        < 16
        < 40
        < whole.padding.planned.percent
    )
    assert all(
        np.all(np.diff(np.searchsorted(whole.widths, lengths[step[0]])) <= 0)
        for step in whole.steps
    )


def test_shuffled_steps_keep_the_shares_of_strata_too():
    lengths, labels = tied_to_length()
    strata = strata_of(labels, lengths)
    steps = plan(lengths, Batching(batch_size=16, order="shuffled"), strata=strata).steps
    shares = 16 * np.bincount(strata) / len(strata)
    assert all(
        abs(np.bincount(strata[step[0]], minlength=2) - shares).max() < 2
        for step in steps
        if len(step[0]) == 16
    )


def test_an_unknown_order_is_refused():
    with raises(ConfigError, "batching.choice", "order", "'random'", "'length' or 'shuffled'"):
        Batching(batch_size=2, order="random")


def test_one_stratum_and_none_are_one_plan():
    lengths, labels = tied_to_length()
    none = plan(lengths, Batching(batch_size=16))
    assert plan(lengths, Batching(batch_size=16), strata=np.zeros(len(lengths), np.int64)) == none
    assert plan(lengths, Batching(batch_size=16, stratify=False), strata=labels) == none


def test_strata_of_labels_are_few():
    """Of many classes neighbours by their mean length, of numbers quarters; equal labels are never apart."""
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 40, 2000)
    lengths = 10 + labels + draw.integers(0, 5, 2000)
    strata = strata_of(labels, lengths)
    assert set(strata) == {0, 1, 2, 3} and all(
        len(set(strata[labels == each])) == 1 for each in range(40)
    )
    assert np.all(np.diff([lengths[strata == each].mean() for each in range(4)]) > 5)
    numbers = strata_of(draw.normal(size=1000), lengths[:1000])
    assert np.bincount(numbers).tolist() == [250] * 4
    assert (
        set(strata_of(np.ones(5), lengths[:5])) == {0}
        and len(strata_of(np.empty(0), lengths[:0])) == 0
    )


def test_strata_that_do_not_fit_are_refused():
    with raises(ConfigError, "plan.strata", "3 strata", "for 4", "4 examples"):
        plan([3, 4, 5, 6], Batching(batch_size=2), strata=np.zeros(3, np.int64))
    with raises(ConfigError, "plan.strata"):
        plan([3, 4], Batching(batch_size=2, row_length=16), strata=np.zeros(2, np.int64))

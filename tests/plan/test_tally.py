"""Operations of a model extrapolated from two shallow ones (exact)."""

from __future__ import annotations

from dataclasses import replace

from narrowgauge.plan.tally import Done, deeper, repeated

MATMUL = Done("forward", "products", "mm", 100, 40, "e4m3", True, "", 8, 8, 0)
NORM = Done("forward", "elementwise", "norm", 10, 20, "", False, "", 8, 8, 64)
UPDATE = Done("step", "optimizer", "adamw", 30, 300, "", True, "", 0, 0, 90)


def grown(times: int) -> Done:
    """The update of a model with `times` layers more: each adds 5 operations, 70 bytes, 11 elements."""
    return replace(
        UPDATE,
        flops=UPDATE.flops + 5 * times,
        nbytes=UPDATE.nbytes + 70 * times,
        elements=UPDATE.elements + 11 * times,
    )


def test_a_layer_more_repeats_its_operations_and_makes_the_update_larger():
    few = {MATMUL: 6, NORM: 3, UPDATE: 1}
    more = {MATMUL: 9, NORM: 4, grown(1): 1}
    assert deeper(few, more, 7) == {MATMUL: 6 + 7 * 3, NORM: 3 + 7, grown(7): 1}
    assert deeper(few, more, 1) == more
    assert deeper(few, more, 0) == few


def test_operations_of_different_sizes_grow_with_the_one_of_their_rank():
    small, large = replace(UPDATE, nbytes=50), replace(UPDATE, nbytes=500)
    few = {small: 1, large: 1}
    more = {replace(small, nbytes=52): 1, replace(large, nbytes=600): 1}
    expected = {replace(small, nbytes=56): 1, replace(large, nbytes=800): 1}
    assert deeper(few, more, 3) == expected


def test_micro_batches_repeat_all_but_the_update():
    assert repeated({MATMUL: 2, UPDATE: 1}, 2.5) == {MATMUL: 5.0, UPDATE: 1}

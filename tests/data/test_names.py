"""Names that users of `narrowgauge.data` may hold (exact)."""

import importlib

import pytest

from narrowgauge import data


@pytest.mark.parametrize("name", data.__all__)
def test_every_name_resolves(name):
    """Those that stand in the files of tasks too."""
    assert getattr(data, name) is not None


def test_a_name_that_moved_is_the_same_object():
    losses = importlib.import_module("narrowgauge.train.tasks.losses")
    assert data.step_loss is losses.step_loss


def test_another_name_is_no_attribute():
    with pytest.raises(AttributeError, match="Clasification"):
        _ = data.Clasification

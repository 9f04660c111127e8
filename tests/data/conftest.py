"""Small real things to test with: a few documents, a tokenizer trained on them, and no way to the network."""

import random

import pytest

from narrowgauge.data import train_bpe

WORDS = [
    "scale",
    "tile",
    "amax",
    "codes",
    "the",
    "of",
    "and",
    "a",
    "rounds",
    "stores",
    "narrow",
    "wide",
    "exact",
]


def prose(seed: int, lines: int) -> str:
    """Text in short lines, the same for the same seed."""
    draw = random.Random(seed)
    return "".join(" ".join(draw.choices(WORDS, k=8)).capitalize() + ".\n" for _ in range(lines))


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """A test that reaches for the Hub fails at once instead of retrying for a minute."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def texts():
    return [prose(seed, lines=20 + seed) for seed in range(40)]


@pytest.fixture(scope="session")
def tokenizer(texts, tmp_path_factory):
    return train_bpe(texts, 300, tmp_path_factory.mktemp("tokenizer")).tokenizer


@pytest.fixture
def folder(texts, tmp_path):
    """Forty text files: enough documents to split by."""
    place = tmp_path / "documents"
    place.mkdir()
    for number, text in enumerate(texts):
        (place / f"{number:02}.txt").write_text(text, encoding="utf-8")
    return place

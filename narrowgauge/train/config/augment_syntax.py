"""Parser of the setting `augment`: random changes of the pictures of a training batch.

    crop=4         4 pixels of black around a picture, of which its size is cut out at random
    flip           turned left to right, for half of the pictures
    crop=4,flip    both

Imports no torch, so that --help is quick.
"""

import re
from dataclasses import dataclass

from narrowgauge.train.config.rules import Matching

RULE = Matching(
    r"|flip|crop=\d{1,4}( ?, ?flip)?|flip ?, ?crop=\d{1,4}",
    "'crop=PIXELS', 'flip' or 'crop=PIXELS,flip'",
)


@dataclass(frozen=True)
class Augment:
    """Changes of a picture.

    crop  pixels of black around it before its size is cut out; 0: none
    flip  turned left to right for half of the pictures
    """

    crop: int = 0
    flip: bool = False

    def __str__(self) -> str:
        words = [f"crop={self.crop}"] if self.crop else []
        return ",".join([*words, *(["flip"] if self.flip else [])])


def parse(text: str) -> Augment:
    """The changes in a text that RULE accepts."""
    crop = re.search(r"crop=(\d+)", text)
    return Augment(int(crop[1]) if crop else 0, "flip" in text)

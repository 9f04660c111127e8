"""`narrowgauge generate RUN_OR_FOLDER`: let a trained model write, by narrow or wide products."""

import json as json_format
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from narrowgauge.train.config.settings import TrainConfig


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How tokens are drawn.

    Parameters
    ----------
    max_new_tokens
        Maximum number of new tokens; by default 64, or as many as the model has positions for.
    temperature
        Logits are divided by it before a token is drawn.
    top_k
        Draw from so many of the likeliest tokens; 0: from all.
    greedy
        Take the likeliest token at each place.
    seed
        Seed of the draws.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.8
    top_k: int = 40
    greedy: bool = False
    seed: int = 0


def generate(
    place: Path = Path(TrainConfig.output),
    /,
    *,
    # A prompt may begin with a hyphen, as a list does; "-" alone is standard input.
    prompt: Annotated[str, Parameter(allow_leading_hyphen=True)] = "",
    chat: bool = False,
    system: str = "",
    products: str = "narrow",
    recipe: str = "",
    checkpoint: str = "newest",
    device: str = "auto",
    drawing: Drawing = Drawing(),
    json: bool = False,
) -> int:
    """Write a text with the model of a run, or with a model folder such as RUN/final.

    Standard output is the new text alone.

    Parameters
    ----------
    place
        Folder of a run, or of a model.
    prompt
        Text that the model continues; -: standard input; empty: the model begins by itself.
    chat
        Render the prompt as a user's message by the tokenizer's chat template.
    system
        System message of the chat.
    products
        narrow: by the recipe of the run, or by --recipe; wide: in 16 bits.
    recipe
        Of a model folder: recipe of its products; empty: they are wide.
    checkpoint
        Of a run: newest, best, or a step.
    device
        auto, cpu, cuda or cuda:N.
    json
        Print the prompt, the text and facts about them as JSON.
    """
    from narrowgauge.train.evaluation.generation import GenerationOptions
    from narrowgauge.train.evaluation.generation import generate as written

    text = sys.stdin.read() if prompt == "-" else prompt
    options = GenerationOptions(
        prompt=text, chat=chat, system=system, products=products, recipe=recipe, checkpoint=checkpoint, device=device, **asdict(drawing)
    )  # fmt: skip
    result = written(place, options)
    print(json_format.dumps(result, indent=2) if json else result["text"])
    return 0

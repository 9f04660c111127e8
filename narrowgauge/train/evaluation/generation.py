"""`narrowgauge generate`: texts that a trained model writes, by narrow or by wide products.

    RUN      the weights of one of its checkpoints, in the recipe and the precision of the run
    FOLDER   a model folder such as RUN/final: wide, or converted to the recipe that is named. An
             adapter's is put around its base, which is read from where the training run had it
    GGUF     a file of llama.cpp, or the folder of model.gguf, which transformers decodes

Decoding is transformers' generate with its KV cache: greedy, or sampled from the `top_k` likeliest
tokens. Forced, suppressed and ending tokens of the model's generation settings apply, and rows of
the embedding that no token has are never drawn. The same seed gives the same text on one machine.

With a KV cache the products of a pass have one row for each sequence. A recipe with one scale for
the whole tensor therefore rounds other values than in a pass over the whole text. A weight is
rounded as in training.

Cost: a pass over the prompt, and a pass for each new token. Writes no file.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from narrowgauge.conversion import convert
from narrowgauge.data import chat
from narrowgauge.data.tokenizer import end_of_text, load
from narrowgauge.errors import ConfigError, NumericsError
from narrowgauge.nn.converted_model import suspended
from narrowgauge.ops import rng
from narrowgauge.optim import precision as precisions
from narrowgauge.train import adapter
from narrowgauge.train.config.settings import GENERATING, TrainConfig
from narrowgauge.train.device import chosen_device, threads
from narrowgauge.train.evaluation.saved import NEWEST, SavedRun
from narrowgauge.train.model_files import quiet
from narrowgauge.train.pretrained import CAUSAL_LM, SEQ2SEQ, own_configuration, pretrained

PRODUCTS = ("narrow", "wide")
GGUF = "model.gguf"  # of an export
NEW_TOKENS = 64  # at most, where no number is given


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Options of a generation.

    prompt          text that the model continues, or the user's message with `chat`
    max_new_tokens  None: NEW_TOKENS, or fewer where the model knows fewer positions
    chat            render the prompt, after `system`, by the tokenizer's chat template
    greedy          take the likeliest token; `temperature` and `top_k` are not used
    top_k           draw from so many of the likeliest tokens; 0: from all
    products        "narrow": by the recipe; "wide": in 16 bits
    recipe          (folders) recipe to convert to; '': none
    checkpoint      (runs) newest, best or a step
    """

    prompt: str = ""
    chat: bool = False
    system: str = ""
    max_new_tokens: int | None = None
    temperature: float = 0.8
    top_k: int = 40
    greedy: bool = False
    products: str = "narrow"
    recipe: str = ""
    checkpoint: str = NEWEST
    seed: int = 0
    device: str = "auto"

    def refuse(self) -> None:
        """Raises ConfigError for an option that is out of range."""
        is_too_few = self.max_new_tokens is not None and self.max_new_tokens < 1
        if is_too_few or self.top_k < 0 or not 0 < self.temperature < float("inf"):
            raise ConfigError(
                f"max_new_tokens = {self.max_new_tokens}, temperature = {self.temperature}, top_k = {self.top_k}: must be at least 1, "
                "above 0, and at least 0. For the likeliest token at each place, ask for greedy.",
                code="generate.numbers",
            )
        if self.products not in PRODUCTS:
            raise ConfigError(
                f"products = {self.products!r}: is not one of {', '.join(PRODUCTS)}. Choose one.",
                code="generate.products",
            )
        if self.system and not self.chat:
            raise ConfigError(
                f"system = {self.system!r}: is a part of a chat. Ask for chat as well, or leave it out.",
                code="generate.system",
            )


@dataclass(frozen=True)
class Writer:
    """A model that is ready to write.

    source      folder or checkpoint of the weights
    recipe      name of the recipe of its products; "none" if they are wide
    precision   numbers outside the recipe; None: the dtype of the weights
    special     plain prompts get the special tokens that the tokenizer adds
    """

    model: Any
    tokenizer: Any
    source: str
    recipe: str
    precision: Any
    special: bool


def generate(place: Path | str, asked: GenerationOptions) -> dict[str, Any]:
    """Writes a text with the model of a run or a folder. Returns JSON types.

    `prompt` is the text that the model read, `text` the new one, `tokens` the number of new tokens,
    `ended` "end of text" or "length". Raises ConfigError before the model is loaded where it can,
    NumericsError for logits that are not finite. Generators are restored.
    """
    asked.refuse()
    held = rng.generators()
    try:
        with _writer(Path(place), asked, chosen_device(asked.device)) as writer:
            rng.seed_all(asked.seed)
            return _written(writer, asked)
    finally:
        rng.set_generators(held)


@contextmanager
def _writer(place: Path, asked: GenerationOptions, device: torch.device) -> Iterator[Writer]:
    if (place / "config.toml").exists():
        with _of_run(place, asked, device) as writer:
            yield writer
    elif (place / "config.json").exists() or (place / adapter.BASE).exists():
        yield _of_folder(place, asked, device)
    # A folder may have the suffix too.
    elif (file := place / GGUF if place.is_dir() else place).is_file() and file.suffix == ".gguf":
        yield _of_gguf(file, asked, device)
    else:
        raise ConfigError(
            f"'{place}': holds neither a run (config.toml) nor a model (config.json, {GGUF}). Name a folder that narrowgauge train "
            "wrote, its final/, or an export.",
            code="generate.place",
        )


@contextmanager
def _of_run(place: Path, asked: GenerationOptions, device: torch.device) -> Iterator[Writer]:
    if asked.recipe:
        raise ConfigError(
            f"recipe = {asked.recipe!r}: a run has its own. Leave it out, or name the model's folder, {place / 'final'}.",
            code="generate.recipe-of-run",
        )
    saved = SavedRun.open(place, device)
    config = saved.config
    if config.task not in GENERATING:
        raise ConfigError(
            f"'{place}': its task is {config.task!r}, which writes no text. Name a run of {', '.join(GENERATING)}.",
            code="generate.task",
        )
    [path] = saved.paths(asked.checkpoint)[-1:]
    model, _, why = saved.model(path)
    is_wide = asked.products == "wide"
    if why and not is_wide:
        raise ConfigError(
            f"products = 'narrow': {why}. Name another checkpoint, or ask for wide products.",
            code="generate.not-narrow",
        )
    with threads(config.threads), suspended(model) if is_wide else nullcontext():
        yield Writer(
            model, saved.task.tokenizer, f"{path.parent.name}/{path.name}",
            "none" if is_wide else config.recipe, precisions.get(config.precision), config.task != "text",
        )  # fmt: skip


def _of_folder(place: Path, asked: GenerationOptions, device: torch.device) -> Writer:
    is_adapter = (place / adapter.BASE).exists()
    settings = TrainConfig(model=adapter.read_base(place).model if is_adapter else str(place))
    is_pair = getattr(own_configuration(settings, CAUSAL_LM), "is_encoder_decoder", False)
    model = pretrained(settings, SEQ2SEQ if is_pair else CAUSAL_LM, dtype="auto")
    model.eval().to(device)
    is_narrow = bool(asked.recipe) and asked.products == "narrow"
    if is_narrow:
        convert(model, asked.recipe)
    if is_adapter:
        adapter.load(model, place)
    recipe = asked.recipe if is_narrow else "none"
    return Writer(model, load(place), str(place), recipe, None, special=True)


def _of_gguf(file: Path, asked: GenerationOptions, device: torch.device) -> Writer:
    """The decoded model of a GGUF file, in float32, and the tokenizer that is in the file."""
    given = {"gguf_file": file.name, "local_files_only": True}
    try:
        # Its progress bar for GGUF has no switch.
        with quiet(), contextlib.redirect_stderr(io.StringIO()):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                file.parent, dtype=torch.float32, **given
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **given)
    # Without the package gguf an ImportError; for a type that it does not decode, as NVFP4, others.
    except Exception as error:
        words = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"'{file}': transformers cannot read it ({type(error).__name__}: {words}). Install gguf (pip install gguf), or give the "
            f"file to llama.cpp: llama-cli -m {file}. NVFP4, and files without a tokenizer, are read there alone.",
            code="generate.gguf",
        ) from error
    model.eval().to(device)
    is_narrow = bool(asked.recipe) and asked.products == "narrow"
    if is_narrow:
        convert(model, asked.recipe)
    return Writer(model, tokenizer, str(file), asked.recipe if is_narrow else "none", None, True)


def _written(writer: Writer, asked: GenerationOptions) -> dict[str, Any]:
    text, ids = _prompt(writer, asked)
    model, device = writer.model, next(writer.model.parameters()).device
    most = _most_new(model, len(ids), asked.max_new_tokens)
    inputs = torch.tensor([ids], device=device)
    context = writer.precision.context(device.type) if writer.precision else nullcontext()
    started_at_s = time.monotonic()
    with quiet(), torch.no_grad(), context:
        found = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), generation_config=_decoding(writer, asked, most),
            logits_processor=[RefuseNonfinite()],
        )[0].tolist()  # fmt: skip
    spent_s = time.monotonic() - started_at_s
    is_pair = model.config.is_encoder_decoder
    new = (
        found[1:] if is_pair else found[len(ids) :]
    )  # an encoder-decoder begins with a start token
    ends = _ends(writer)
    return {
        "source": writer.source,
        "recipe": writer.recipe,
        "prompt": text,
        "text": str(writer.tokenizer.decode(new, skip_special_tokens=True)),
        "tokens": len(new),
        "ended": "end of text" if new and new[-1] in ends else "length",
        "tokens_per_s": len(new) / spent_s,
    }


def _prompt(writer: Writer, asked: GenerationOptions) -> tuple[str, list[int]]:
    """(text that the model reads, its token ids)."""
    tokenizer, text, special = writer.tokenizer, asked.prompt, writer.special
    if asked.chat:
        turns = [{"role": "system", "content": asked.system}] if asked.system else []
        turns.append({"role": "user", "content": asked.prompt})
        # The template writes the special tokens itself.
        text, special = chat.prompt(tokenizer, turns, "the prompt"), False
    ids = list(tokenizer(text, add_special_tokens=special)["input_ids"])
    # An empty text: the model begins a text of its own.
    return text, ids or [end_of_text(tokenizer)]


def _most_new(model: Any, prompt: int, asked: int | None) -> int:
    """The number of new tokens, at most. Raises ConfigError where the model lacks the positions."""
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is None:
        return NEW_TOKENS if asked is None else asked
    is_pair = model.config.is_encoder_decoder
    left = (longest if prompt <= longest else 0) if is_pair else longest - prompt
    new = max(1, min(NEW_TOKENS, left)) if asked is None else asked
    if new > left:
        raise ConfigError(
            f"max_new_tokens = {new}: with a prompt of {prompt} tokens, more than the {longest} positions that {type(model).__name__} "
            "knows. Lower it, or shorten the prompt.",
            code="generate.positions",
        )
    return new


def _ends(writer: Writer) -> list[int]:
    """Ids of the tokens that end a text: the model's own, else the tokenizer's."""
    own = getattr(writer.model.generation_config, "eos_token_id", None)
    if own is None:
        return [end_of_text(writer.tokenizer)]
    return list(own) if isinstance(own, list | tuple) else [int(own)]


def _decoding(writer: Writer, asked: GenerationOptions, most: int) -> transformers.GenerationConfig:
    """The model's generation settings, with the options that were asked for."""
    own = writer.model.generation_config.to_dict()
    rows = writer.model.get_input_embeddings().weight.shape[0]
    beyond = list(range(len(writer.tokenizer), rows))
    sampled: dict[str, Any] = {
        "temperature": None,
        "top_k": None,
        "top_p": None,
        "do_sample": False,
    }
    if not asked.greedy:
        sampled |= {
            "do_sample": True,
            "temperature": asked.temperature,
            "top_k": asked.top_k or None,
        }
    ends, pad = _ends(writer), writer.tokenizer.pad_token_id
    return transformers.GenerationConfig(**own | sampled | {
        "max_new_tokens": most, "max_length": None, "num_beams": 1, "use_cache": True,
        "suppress_tokens": [*(own.get("suppress_tokens") or []), *beyond] or None,
        "eos_token_id": ends, "pad_token_id": ends[0] if pad is None else pad,
    })  # fmt: skip


class RefuseNonfinite:
    """A logits processor that raises NumericsError for logits that are not finite.

    generate would draw any token. No subclass of transformers' class: any callable serves.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # Tokens that may not be drawn are -inf already: suppressed ones, and rows without a token.
        best = scores.amax(-1)
        if bool(scores.isnan().any()) or not bool(best.isfinite().all()):
            raise NumericsError(
                f"generate: the logits of token {input_ids.shape[-1]} are not finite. The weights, or a product of the recipe, "
                "overflow: ask for wide products, or find the layer with narrowgauge blame.",
                code="generate.not-finite",
            )
        return scores

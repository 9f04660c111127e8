"""Every setting of a training run, once: its key, type, default, rule and help.

TOML keys, command-line flags, `narrowgauge train --help` and RUN/config.toml are all read off `TrainConfig`, so a new
setting is one entry here. The key `hidden_size` is the flag `--hidden-size`; `layers_recipe` alone is spelled `recipes`
on both sides, because in a file it is a table. Rules that need one value stand beside it; rules between values are in
`checks`. Names of recipes are checked later, by `narrowgauge.recipes`, because this file does without torch.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from narrowgauge.errors import ConfigError
from narrowgauge.train.config.checks import (
    BEST,
    COUNT,
    COUNT_OR_ZERO,
    NOT_EMPTY,
    TABLE,
    TASKS,
    Matching,
    OneOf,
    Problem,
    Range,
    cross_checks,
    key_of,
    refuse,
    setting,
)  # fmt: skip

MAX_INT = 2**63 - 1  # the largest integer that TOML promises, and that torch takes as a seed
NO_RECIPE = "none"  # an ordinary Linear, in the numbers of the precision
MODEL, DATA, TASK, PRECISION, TRAINING, RUN = (
    partial(setting, group) for group in ("model", "data", "task", "precision", "training", "run")
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A validated configuration. Vary one with `dataclasses.replace`; ConfigError lists every rule that is broken."""

    # fmt: off
    model: str = MODEL("", "Local folder or hub name of a model; empty: a Llama of the sizes below.")
    from_scratch: bool = MODEL(False, "With model: take its configuration, but start from random weights.")
    hidden_size: int = MODEL(320, "Width of the residual stream.", Range(2, 2**20))
    layers: int = MODEL(6, "Transformer blocks.", Range(1, 4096))
    heads: int = MODEL(8, "Attention heads.", Range(1, 4096))
    kv_heads: int = MODEL(0, "Heads of keys and values; 0: as many as heads.", Range(0, 4096))
    intermediate_size: int = MODEL(0, "Width of the MLP; 0: 8/3 of hidden_size, rounded up to a multiple of 64.", Range(0, 2**22))
    sequence_length: int = MODEL(256, "Tokens of a sequence.", Range(2, 2**22))

    data: str = DATA("stdlib", "Text to learn: a file, a folder or a data set's name; stdlib: Python's own sources. With a task: a table.",
        NOT_EMPTY)
    column: str = DATA("", "Column or JSON key that holds the text; empty: the only one, or 'text'.")
    tokenizer: str = DATA("", "Folder or hub name of a tokenizer; empty: the model's, or a BPE trained here.")
    vocab_size: int = DATA(4096, "Size of the BPE that is trained here.", Range(257, 2**24))
    validation_fraction: float = DATA(0.05, "Share of the documents held out for validation.", Range(0, 0.5, open_low=True))
    cache: str = DATA("", "Folder of tokenized data; empty: `cache` beside the run folder.")

    task: str = TASK("text", "What is learnt: running text, or the examples of a table.", OneOf(TASKS))
    validation_data: str = TASK("", "Table to validate on; empty: validation_fraction of the rows of data.")
    prompt_column: str = TASK("prompt", "causal-lm: column with the prompt.", NOT_EMPTY)
    completion_column: str = TASK("completion", "causal-lm: column with what follows it.", NOT_EMPTY)
    messages_column: str = TASK("", "causal-lm: column with chats; empty: prompts and completions.")
    train_on: str = TASK("answers", "Of a chat: all answers, or the last.", OneOf(("answers", "last")))
    text_column: str = TASK("text", "classification: column with the text.", NOT_EMPTY)
    pair_column: str = TASK("", "classification: column with a second text; empty: none.")
    label_column: str = TASK("label", "classification: column with the class.", NOT_EMPTY)
    classes: str = TASK("", "Names of the classes with commas, or their number; empty: those of the data.")
    source_column: str = TASK("source", "seq2seq: column with what is read.", NOT_EMPTY)
    target_column: str = TASK("target", "seq2seq: column with what is written.", NOT_EMPTY)
    columns: str = TASK("", "Names, with commas, of the columns of CSV and TSV without a header row.")
    max_length: int = TASK(0, "Tokens of an example, at most; 0: as many as the model knows.", COUNT_OR_ZERO)
    too_long: str = TASK("error", "Examples above max_length or the token budget.", OneOf(("error", "truncate", "skip")))
    no_target: str = TASK("error", "Examples of which nothing is learnt.", OneOf(("error", "skip")))
    token_budget: int = TASK(0, "Positions (rows x width) of an optimizer step; 0: batch_size rows instead.", COUNT_OR_ZERO)
    packing: int = TASK(0, "causal-lm: tokens of a row that several examples fill; 0: pad each.", COUNT_OR_ZERO)
    length_buckets: int = TASK(10, "Widths that batches are padded to, at most.", Range(1, 512))
    pad_multiple: int = TASK(8, "Widths are multiples of it.", OneOf((1, 2, 4, 8, 16, 32, 64, 128)))
    epochs: int = TASK(0, "Passes over the data, instead of steps; 0: steps.", COUNT_OR_ZERO)
    best: str = TASK("",
        "Metric whose best checkpoint is kept and exported; empty: loss, mcc of classes, none of text; none: the last is exported.",
        OneOf(BEST))

    recipe: str = PRECISION("fp8-current",
        "Number formats of the matrix products of every Linear; auto: the fastest for each, by a measurement; none: as the "
        "precision has them.", NOT_EMPTY)
    layers_recipe: TABLE = PRECISION(  # noqa: RUF009 (it returns a dataclasses.field)
        dict, "Other recipes for the layers that a pattern names, as 'lm_head=bf16'.", key="recipes")
    switch: str = PRECISION("", "Wider recipes later in the run, as 'fp8-current@80%' or 'layers.0.*=bf16@240:forward'.")
    precision: str = PRECISION("amp-bf16", "Numbers outside the recipe.", OneOf(("fp32", "amp-bf16", "amp-fp16", "bf16-o2", "bf16-o3")))
    fuse: bool = PRECISION(False, "Norms and activations cast what they compute for the Linears that read it.")
    save: str = PRECISION("", "What a Linear keeps for its backward pass; empty: as the recipe says.", OneOf(("", "original", "quantized")))

    steps: int = TRAINING(300, "Optimizer steps.", COUNT)
    batch_size: int = TRAINING(16, "Sequences or examples of an optimizer step.", Range(1, 2**20))
    micro_batches: int = TRAINING(1, "Parts into which a batch is cut to save memory.", Range(1, 2**20))
    learning_rate: float = TRAINING(1e-3, "Peak learning rate.", Range(0, 1, open_low=True))
    min_learning_rate: float = TRAINING(0.0, "Learning rate after the last step.", Range(0, 1))
    warmup_steps: int = TRAINING(20, "Steps over which the learning rate rises.", COUNT_OR_ZERO)
    optimizer: str = TRAINING("adamw", "Rule of the updates.", OneOf(("adamw", "lion", "sgd")))
    states: str = TRAINING("fp32", "Numbers of the optimizer's moments.", OneOf(("fp32", "8bit", "fp8", "fp8-lm", "4bit")))
    embedding_states: str = TRAINING("fp32", "Moments of embeddings: float32, or the same as all.", OneOf(("fp32", "same")))
    master: str = TRAINING("", "What keeps the low bits of 16-bit weights; empty: as the precision says.",
        OneOf(("", "fp32", "fp16-scaled", "bf16-remainder", "stochastic")))
    weight_decay: float = TRAINING(0.1, "Decoupled weight decay of AdamW.", Range(0, 1))
    beta1: float = TRAINING(0.9, "Decay of the first moment; SGD's momentum.", Range(0, 1, open_high=True))
    beta2: float = TRAINING(0.95, "AdamW's decay of the second moment; Lion's of its only one.", Range(0, 1, open_high=True))
    epsilon: float = TRAINING(1e-8, "AdamW's guard against division by zero.", Range(0, 1, open_low=True))
    clip: float = TRAINING(1.0, "Largest norm of the gradient; 0: not clipped.", Range(0, 1e6))
    freeze: str = TRAINING("", "Patterns of layers and parameters that do not train, as embed*,layers.0-3; empty: none.")
    checkpointing: str = TRAINING("none", "What is computed again in backward: none, full, every-N, selective or budget:512MiB.",
        Matching(r"none|full|selective|every-[1-9]\d{0,3}|budget:\d+(\.\d+)? ?(B|[KMG]iB)?",
                 "one of 'none', 'full', 'every-2', 'selective' or 'budget:512MiB'"))
    compress_activations: bool = TRAINING(False, "Keep what blocks save for backward in E4M3.")
    seed: int = TRAINING(0, "Decides weights, order of the data and stochastic rounding.", Range(0, MAX_INT))
    device: str = TRAINING("auto", "auto, cpu, cuda or cuda:N.",
        Matching(r"auto|cpu|cuda(:\d{1,3})?", "one of 'auto', 'cpu', 'cuda' or 'cuda:N'"))
    threads: int = TRAINING(0, "Threads of the CPU; 0: as torch decides.", Range(0, 4096))
    compile: bool = TRAINING(False, "Compile the model with torch.compile.")
    cuda_graph: bool = TRAINING(False, "Launch steps as CUDA graphs, on a GPU.")

    output: str = RUN("runs/latest", "Run folder.", NOT_EMPTY)
    resume: bool = RUN(False, "Continue the run in the run folder from its newest checkpoint.")
    eval_every: int = RUN(50, "Steps between evaluations; 0: only after the last step.", COUNT_OR_ZERO)
    eval_tokens: int = RUN(32768, "Validation tokens of an evaluation, at most.", COUNT)
    checkpoint_every: int = RUN(100, "Steps between checkpoints; 0: only after the last step.", COUNT_OR_ZERO)
    keep: int = RUN(2, "Checkpoints kept, the newest.", COUNT)
    log_every: int = RUN(10, "Steps between lines on the console.", COUNT)
    tensor_every: int = RUN(50, "Steps between tensor statistics; 0: none.", COUNT_OR_ZERO)
    launches_at: int = RUN(30, "Step in which a GPU's idle time between kernels is measured; 0: none.", COUNT_OR_ZERO)
    tensorboard: bool = RUN(False, "Write TensorBoard events to the run folder too.")
    compare: str = RUN("", "Recipe of a second run on the same data to compare with, as bf16; empty: none.")
    sample_tokens: int = RUN(64, "Tokens of the sample written at each evaluation; 0: none.", Range(0, 2**20))
    prompt: str = RUN("", "Text that the sample continues.")
    # fmt: on

    def __post_init__(self) -> None:
        problems = [problem for each in fields(self) if (problem := refuse(each, getattr(self, each.name)))]
        problems = problems or list(cross_checks(self))
        if problems:
            raise InvalidSettings(problems)


class InvalidSettings(ConfigError):
    """One line for each broken rule. `problems` lets the reader of a file add the line that each value came from."""

    def __init__(self, problems: Iterable[Problem], origins: Mapping[str, str] | None = None) -> None:
        self.problems = tuple(problems)
        origins = origins or {}
        places = [next(filter(None, map(origins.get, problem.keys.split())), "") for problem in self.problems]
        lines = zip(places, self.problems, strict=True)
        super().__init__("\n".join(f"{place}: {each.message}" if place else each.message for place, each in lines))


def by_key() -> dict[str, Field[Any]]:
    return {key_of(each): each for each in fields(TrainConfig)}


def resolved(config: TrainConfig) -> TrainConfig:
    """The same run with the sizes that depend on others written out: kv_heads, intermediate_size, cache."""
    sizes: dict[str, Any] = {} if config.model else {
        "kv_heads": config.kv_heads or config.heads,
        "intermediate_size": config.intermediate_size or math.ceil(8 * config.hidden_size / 3 / 64) * 64,
    }  # fmt: skip
    return replace(config, cache=config.cache or str(Path(config.output).parent / "cache"), **sizes)

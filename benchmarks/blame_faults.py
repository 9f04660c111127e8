"""Does blame find the product that is inaccurate, and does it leave healthy models alone?

    python -m benchmarks.blame_faults                     faults and healthy models; ten minutes of one core
    python -m benchmarks.blame_faults --only healthy --models llama gpt2
    python -m benchmarks.blame_faults --only factors

Faults: a Llama of 4 blocks (28 Linears, 84 products), trained for 120 steps on the bytes of this package; then in one product

    e2m1        an operand in E2M1, one scale per tensor           kernel      its kernel leaves out 16 of the contracted axis
    int4        an operand in INT4, one scale per tensor           saturate    the window of an operand is a sixteenth of its amax
                                                                   underflow   that of 2^14 times its amax, of E5M2 2^28

of each kind of product in four layers, once judged by others of its kind and once beside the step before. A window serves both products
that read its tensor, so for those two faults either counts as right; they are planted under fp8-delayed, the others under fp8-current.
Factors: one operand of one product is multiplied by 0.98, 0.99 or 0.995 before it is cast, as a truncating kernel would: each role in both
of its products, two layers, seven recipes. Where the codes of one cast serve both products, either counts; layers that share the casts of
x read them too, and are no other suspects.
Healthy: twenty models of five architectures, ten recipes, at the first step and after 120, as `HEALTHY` says.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import narrowgauge as ng
from benchmarks.harness import RESULTS, record
from benchmarks.planted_faults import shrinking
from narrowgauge.formats import E2M1, INT4
from narrowgauge.lab.blame import Blame, blame
from narrowgauge.lab.blame.watch import OPERANDS
from narrowgauge.nn.plan import PRODUCTS
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import GEMMS, Cast

STEPS, ROWS, LENGTH, VOCABULARY = 120, 8, 64, 128
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4
}  # fmt: skip
POSITIONS = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
DROPPED = 16
LAYERS = (
    "layers.0.self_attn.q_proj",
    "layers.1.mlp.down_proj",
    "layers.2.mlp.up_proj",
    "layers.3.self_attn.o_proj",
)
FACTORS = (0.98, 0.99, 0.995)
OF_FACTORS = ("fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "int8", "nvfp4", "mxfp4")
MAKERS = LAYERS[:2]  # layers that make the casts of their input: two others read those of the first
FAULTS = ("e2m1", "int4", "saturate", "underflow", "kernel")
Loss = Callable[[nn.Module, Tensor], Tensor]


@dataclass
class Trained:
    """A model in training, and what makes its steps."""

    model: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    seen: float = 0.0

    def batch(self) -> Tensor:
        """[ROWS, LENGTH] bytes, int64."""
        text = _text()
        starts = torch.randint(0, len(text) - LENGTH, (ROWS,), generator=self.generator)
        return torch.stack([text[start : start + LENGTH] for start in starts.tolist()])

    def gradient(self, batch: Tensor) -> Tensor:
        """Forward and backward under bfloat16 autocast."""
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(self.model, batch)
        loss.backward()
        return loss.detach()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.gradient(self.batch())
            self.optimizer.step()
            ng.advance(self.model)
        self.optimizer.zero_grad()

    def blamed(self, batch: Tensor, baseline: Blame | None = None) -> Blame:
        """Sets `seen`, the loss of the observed step."""

        def step() -> None:
            torch.manual_seed(1)
            self.seen = float(self.gradient(batch))

        return blame(self.model, step, baseline=baseline, confirm=0)


def _text(cache: list[Tensor] = []) -> Tensor:  # noqa: B006 (read once)
    if not cache:
        package = Path(ng.__file__).parent
        text = b"".join(path.read_bytes() for path in sorted(package.glob("nn/*.py")))
        cache.append(torch.tensor(list(text), dtype=torch.int64) % VOCABULARY)
    return cache[0]


# Models


def _causal(model: Any, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]


def _masked(model: Any, batch: Tensor) -> Tensor:
    hidden = torch.rand(batch.shape) < 0.15
    return model(
        input_ids=batch.masked_fill(hidden, 1), labels=batch.masked_fill(~hidden, -100)
    ).loss  # type: ignore[no-any-return]


def _translated(model: Any, batch: Tensor) -> Tensor:
    half = LENGTH // 2
    return model(input_ids=batch[:, :half], labels=batch[:, half:].contiguous()).loss  # type: ignore[no-any-return]


def _pictured(model: Any, batch: Tensor) -> Tensor:
    """Pictures whose shade is their class, and noise."""
    classes = batch[:, 0] % 10
    pixels = torch.randn(ROWS, 3, 32, 32) + classes[:, None, None, None] * 0.2
    return model(pixel_values=pixels, labels=classes).loss  # type: ignore[no-any-return]


def _llama() -> nn.Module:
    sizes = transformers.LlamaConfig(
        num_key_value_heads=2, tie_word_embeddings=False, **POSITIONS, **SIZES
    )
    return transformers.LlamaForCausalLM(sizes)


def _gpt2() -> nn.Module:
    """Its Conv1D as Linears, which is what they compute."""
    sizes = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=4, n_head=4
    )
    model = transformers.GPT2LMHeadModel(sizes)
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if type(child).__name__ == "Conv1D":
                layer = nn.Linear(*child.weight.shape)
                layer.weight.data, layer.bias.data = (
                    child.weight.data.T.contiguous(),
                    child.bias.data,
                )
                setattr(owner, name, layer)
    return model


def _t5() -> nn.Module:
    sizes = {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    }
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCABULARY, **sizes)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "llama": (_llama, _causal),
    "gpt2": (_gpt2, _causal),
    "bert": (
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**POSITIONS, **SIZES)),
        _masked,
    ),
    "t5": (_t5, _translated),
    "vit": (
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(image_size=32, patch_size=4, num_labels=10, **SIZES)
        ),
        _pictured,
    ),
}
HEALTHY = [
    *(
        ("llama", recipe)
        for recipe in (
            "fp8-current",
            "fp8-delayed",
            "fp8-block",
            "mxfp8",
            "nvfp4",
            "int4-hq-bs",
            "mxfp4",
        )
    ),
    *(("gpt2", recipe) for recipe in ("fp8-current", "int8", "nvfp4", "fp8-delayed")),
    *(("bert", recipe) for recipe in ("fp8-row", "int8", "int4-hq-bs")),
    *(("t5", recipe) for recipe in ("fp8-delayed", "int8", "int4-hq-lss")),
    *(("vit", recipe) for recipe in ("fp8-current", "int8", "fp8-delayed")),
]


def begun(name: str, recipe: str, seed: int) -> Trained:
    torch.manual_seed(seed)
    make, loss = MODELS[name]
    model = ng.convert(make().train(), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return Trained(model, loss, optimizer, torch.Generator().manual_seed(seed))


# Faults


@contextmanager
def planted(
    model: nn.Module, fault: str, layer_name: str, product: str, side: str
) -> Iterator[set[str]]:
    """Inside the block one product is at fault, in its lhs or rhs; gives the products that then read what is wrong."""
    layer = next(each for name, each in model.named_modules() if name.endswith(layer_name))
    assert isinstance(layer, ng.QLinear) and layer.recipe is not None
    recipe, gemm = layer.recipe, getattr(layer.recipe, product)
    role = {"output": "xw", "grad_input": ("gy", "w"), "grad_weight": ("gy", "x")}[product][
        side == "rhs"
    ]
    if fault in ("saturate", "underflow"):
        window: Any = layer.amax_history(role)
        before = window.history.clone(), window.live.clone()
        cast: Cast = getattr(gemm, side)
        factor = (
            1 / 16 if fault == "saturate" else 2.0 ** (28 if cast.format.name == "e5m2" else 14)
        )
        try:
            window.history *= factor  # which tells the layers that share the input
            window.live[0] *= factor
            yield set(PRODUCTS[role])
        finally:
            window.history.copy_(before[0]), window.live.copy_(before[1])
        return
    try:
        if fault == "kernel":
            with _dropping(layer, product):
                yield {product}
        else:
            cast = Cast(format=E2M1 if fault == "e2m1" else INT4)
            layer.compute_as(recipe.with_gemm(**{product: replace(gemm, **{side: cast})}))
            yield {product}
    finally:
        layer.compute_as(recipe)


@contextmanager
def _dropping(layer: ng.QLinear, product: str) -> Iterator[None]:
    """The kernel of a product of the layer leaves out the first columns of the contracted axis."""
    plan_of = layer.plan

    def plan(*given: Any) -> Any:
        whole = plan_of(*given)
        own = getattr(whole, product)
        kernel = own.choice.kernel

        def run(lhs: QTensor | Tensor, *rest: Any) -> Tensor:
            data = (lhs.data if isinstance(lhs, QTensor) else lhs).clone()
            data[:, :DROPPED] = 0
            short = replace(lhs, data=data) if isinstance(lhs, QTensor) else data
            return kernel.run(short, *rest)  # type: ignore[no-any-return]

        wrong = replace(own, choice=replace(own.choice, kernel=replace(kernel, run=run)))
        return replace(whole, **{product: wrong})

    layer.plan = plan  # type: ignore[method-assign]
    try:
        yield
    finally:
        del layer.plan


def faults(seed: int, layers: Sequence[str] = LAYERS) -> Iterator[dict[str, Any]]:
    """A row for each fault, product and layer, alone and beside a healthy step."""
    for recipe, own in (
        ("fp8-current", ("e2m1", "int4", "kernel")),
        ("fp8-delayed", ("saturate", "underflow")),
    ):
        trained = begun("llama", recipe, seed)
        trained.train(STEPS)
        healthy, batch = trained.blamed(trained.batch()), trained.batch()
        for fault in own:
            for place, layer in enumerate(layers):
                for product in GEMMS:
                    side = ("lhs", "rhs")[place % 2]
                    with planted(trained.model, fault, layer, product, side) as right:
                        for beside in (None, healthy):
                            found = trained.blamed(batch, beside)
                            yield {
                                "kind": "fault", "fault": fault, "recipe": recipe, "layer": layer, "product": product, "side": side,
                                "seed": seed, "loss": trained.seen, "baseline": beside is not None, **_place(found, layer, right),
                            }  # fmt: skip


def factors(
    seed: int, recipes: Sequence[str] = OF_FACTORS, layers: Sequence[str] = MAKERS
) -> Iterator[dict[str, Any]]:
    """A row for each recipe, layer, operand and factor."""
    for recipe in recipes:
        trained = begun("llama", recipe, seed)
        trained.train(STEPS)
        batch = trained.batch()
        for name in layers:
            layer: Any = next(
                each for own, each in trained.model.named_modules() if own.endswith(name)
            )
            for product, roles in OPERANDS.items():
                for role in roles:
                    for factor in FACTORS:
                        with shrinking(layer, product, role, factor) as right:
                            found = trained.blamed(batch)
                        yield {
                            "kind": "factor", "factor": factor, "recipe": recipe, "layer": name, "product": product, "role": role,
                            "seed": seed, "loss": trained.seen, **_of_factor(found, name, role, right),
                        }  # fmt: skip


def _of_factor(found: Blame, layer: str, role: str, right: set[str]) -> dict[str, Any]:
    """Where the culprit stands, by which operand, and suspects that read other codes."""
    is_right = [each.layer.endswith(layer) and each.product in right for each in found.findings]
    first = is_right.index(True)
    culprit = found.findings[first]
    reads = role if role != "x" else ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    block = culprit.layer.rpartition(".")[0]
    others = [
        each.name
        for each, own in zip(found.findings, is_right, strict=True)
        if each.is_suspect
        and not own
        and not (
            role == "x"
            and each.layer.startswith(block)
            and each.worse.role == "x"
            and each.layer.endswith(reads)
        )
    ]
    named = {each.role: each for each in (culprit.lhs, culprit.rhs)}
    return {
        "rank": first + 1, "is_suspect": culprit.is_suspect, "right_role": culprit.worse.role == role, "slope": named[role].slope,
        "own_slope": named[role].own_slope, "distance": named[role].distance, "scale_off": named[role].scale_off,
        "other_suspects": len(others),
    }  # fmt: skip


def _place(found: Blame, layer: str, right: set[str]) -> dict[str, Any]:
    is_right = [each.layer.endswith(layer) and each.product in right for each in found.findings]
    first = is_right.index(True)
    culprit, others = (
        found.findings[first],
        [each for each, own in zip(found.findings, is_right, strict=True) if not own],
    )
    return {
        "rank": first + 1, "is_suspect": culprit.is_suspect, "times": culprit.worse.times, "kernel": culprit.kernel,
        "is_kernel": culprit.is_kernel, "other_suspects": sum(each.is_suspect for each in others),
        "next_times": max(each.worse.times for each in others),
    }  # fmt: skip


def healthy(name: str, recipe: str, seed: int) -> Iterator[dict[str, Any]]:
    """Two rows: at the first step, and after STEPS."""
    trained = begun(name, recipe, seed)
    for steps in (0, STEPS):
        trained.train(steps)
        found = trained.blamed(trained.batch())
        worst = found.findings[0]
        noise = {
            product: [each.noise for each in found.findings if each.product == product]
            for product in GEMMS
        }
        yield {
            "kind": "healthy", "model": name, "recipe": recipe, "seed": seed, "steps": steps, "loss": trained.seen,
            "suspects": len(found.suspects), "products": len(found.findings), "worst": worst.name, "times": worst.worse.times,
            "limit": worst.worse.limit, "result_times": max(max(own) / statistics.median(own) for own in noise.values()),
            "uncast": max(reading.uncast for each in found.findings for reading in (each.lhs, each.rhs)),
            "kernel_over_bound": max(each.kernel / each.kernel_most for each in found.findings if each.kernel),
        }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Faults found and healthy models left alone.")
    parser.add_argument("--only", choices=("faults", "factors", "healthy"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="healthy ones"
    )
    parser.add_argument(
        "--recipes", nargs="+", choices=OF_FACTORS, default=list(OF_FACTORS), help="of factors"
    )
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.only in (None, "factors"):
        for recipe in options.recipes:
            rows = list(factors(options.seed, (recipe,)))
            record("blame_faults", rows, RESULTS / "blame_faults.jsonl")
            right = sum(
                row["rank"] == 1 and row["is_suspect"] and row["right_role"] for row in rows
            )
            others = sum(row["other_suspects"] > 0 for row in rows)
            print(
                f"{recipe}: right operand at rank one {right} of {len(rows)}; others suspect {others}",
                flush=True,
            )
    if options.only in (None, "faults"):
        rows = []
        for row in faults(options.seed):
            rows.append(row)
            print(
                f"{row['fault']:9} {row['layer']:26} {row['product']:11} {row['side']} {'beside' if row['baseline'] else 'alone':6} "
                f"rank {row['rank']}  times {row['times']:.2f} (next {row['next_times']:.2f})  suspects beside it {row['other_suspects']}",
                flush=True,
            )  # fmt: skip
        record("blame_faults", rows, RESULTS / "blame_faults.jsonl")
        for fault in FAULTS:
            own = [row for row in rows if row["fault"] == fault]
            print(
                f"{fault}: rank one {sum(row['rank'] == 1 for row in own)}, suspect {sum(row['is_suspect'] for row in own)} of {len(own)}"
            )
    if options.only in (None, "healthy"):
        rows = []
        for place, (name, recipe) in enumerate(HEALTHY):
            for row in (
                healthy(name, recipe, options.seed + place) if name in options.models else ()
            ):
                rows.append(row)
                print(
                    f"{name:6} {recipe:12} after {row['steps']:3} steps  loss {row['loss']:.3f}  {row['suspects']} suspects of "
                    f"{row['products']}  worst {row['times']:.2f} of {row['limit']} ({row['worst']})",
                    flush=True,
                )  # fmt: skip
        record("blame_faults", rows, RESULTS / "blame_faults.jsonl")
        print(
            f"{sum(row['suspects'] > 0 for row in rows)} of {len(rows)} looks at healthy models have a suspect"
        )


if __name__ == "__main__":
    main()

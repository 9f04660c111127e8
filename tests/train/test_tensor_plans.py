"""Models of transformers that ranks share by a plan: loss and gradients are those of one process (bounded: sums are in another order)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from narrowgauge import convert, distribute
from narrowgauge.distributed import distributed_state
from narrowgauge.errors import ConfigError
from narrowgauge.train.parallel import tensor, tensor_plans
from tests.raising import coded, require
from tests.selection import quick

NEAR = 1e-5  # of a gradient's size: float32, sums over two ranks
DECODER = {
    "vocab_size": 51, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PAIR = {
    "vocab_size": 52, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
T5 = {
    "vocab_size": 52,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
MODELS = {
    "Llama": ("AutoModelForCausalLM", DECODER),
    "Bert": ("AutoModelForSequenceClassification", DECODER),
    "T5": ("AutoModelForSeq2SeqLM", T5),
    "Marian": ("AutoModelForSeq2SeqLM", PAIR),
    "Qwen2": ("AutoModelForCausalLM", DECODER),
    "Qwen3": ("AutoModelForCausalLM", DECODER | {"head_dim": 8}),
    "Mistral": ("AutoModelForCausalLM", DECODER),
    "Gemma2": ("AutoModelForCausalLM", DECODER | {"head_dim": 8}),
    "Phi": ("AutoModelForCausalLM", DECODER),
    "Phi3": ("AutoModelForCausalLM", DECODER),
    "GPTNeoX": ("AutoModelForCausalLM", DECODER),
    "Granite": ("AutoModelForCausalLM", DECODER),
    "Olmo2": ("AutoModelForCausalLM", DECODER),
    "SmolLM3": ("AutoModelForCausalLM", DECODER),
    "Starcoder2": ("AutoModelForCausalLM", DECODER),
    "Roberta": ("AutoModelForSequenceClassification", DECODER),
    "Electra": ("AutoModelForSequenceClassification", DECODER | {"embedding_size": 16}),
    "DistilBert": ("AutoModelForSequenceClassification", {"vocab_size": 51, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}),
    "MT5": ("AutoModelForSeq2SeqLM", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "Bart": ("AutoModelForSeq2SeqLM", PAIR),
}  # fmt: skip
REFUSED = {
    "GPT2": (
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 51},
        coded("tensor-parallel.no-plan", "GPT2LMHeadModel"),
    ),
    "Mixtral": (
        DECODER | {"num_local_experts": 2},
        coded("tensor-parallel.unknown-style", "packed_colwise"),
    ),
    "Llama": (
        DECODER | {"num_key_value_heads": 1},
        coded(
            "tensor-parallel.head-count",
            "num_key_value_heads = 1 of LlamaForCausalLM",
            "tp=2",
        ),
    ),
    "Mistral": (
        DECODER | {"intermediate_size": 63},
        coded("tensor-parallel.divisor", "63 outputs", "tp=2"),
    ),
}


def _model(kind, auto, sizes, dropout=False):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    for key, value in {} if dropout else config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    return getattr(transformers, auto).from_config(config)


def _inputs(model, tokens=12):
    ids = torch.arange(2 * tokens).view(2, tokens) % 40 + 3
    labels = torch.tensor([0, 1]) if "Classification" in type(model).__name__ else ids.flip(1)
    return {"input_ids": ids, "labels": labels}


def _gradients(model, inputs):
    loss = model(**inputs).loss
    loss.backward()
    found = {}
    for name, each in model.named_parameters():
        if each.grad is not None:
            found[name] = each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
    return float(loss.detach()), found


def _furthest(kind, cuts_tokens=False, tokens=12):
    """How far the worst gradient is from one process's, the loss, and whether every plain gradient is equal on both ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = _model(kind, *MODELS[kind])
    given = _inputs(model, tokens)
    loss, alone = _gradients(_model(kind, *MODELS[kind]), given)
    inputs = {"input_ids": given["input_ids"]}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    shared = tensor.cut(model, mesh["tp"], inputs, cuts_tokens)
    other, cut = _gradients(model, given)
    assert cut.keys() == alone.keys()
    whole = sum(float(each.square().sum()) for each in alone.values()) ** 0.5 / len(alone) ** 0.5
    furthest = max(
        float((cut[name] - alone[name]).norm()) / max(float(alone[name].norm()), whole)
        for name in alone
    )
    held = [torch.empty_like(each) for each in cut.values() for _ in range(2)]
    for place, each in enumerate(cut.values()):
        dist.all_gather(held[2 * place : 2 * place + 2], each.contiguous())
    return (
        max(furthest, abs(other - loss)),
        len(shared.plan),
        all(torch.equal(a, b) for a, b in zip(held[::2], held[1::2], strict=True)),
    )


@pytest.mark.parametrize("kind", quick(["Llama", "T5"], MODELS))
def test_the_gradients_of_a_cut_model_are_those_of_one_process(ranks, kind):
    for apart, layers, are_equal in ranks(2)(_furthest, kind):
        assert apart < NEAR and layers >= 8 and are_equal


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [12, 7, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_so_they_are_with_other_tokens_on_each_rank(ranks, kind, tokens):
    """Of 7 tokens the ranks have 4 and 3."""
    for apart, layers, are_equal in ranks(2)(_furthest, kind, True, tokens):
        assert apart < NEAR and layers >= 8 and are_equal


def _said(kind):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = _model(kind, "AutoModelForCausalLM", REFUSED[kind][0])
    with pytest.raises(ConfigError) as raised:
        tensor.cut(model, mesh["tp"], {"input_ids": _inputs(model)["input_ids"]}, False)
    return raised.value


@pytest.mark.parametrize("kind", quick(["GPT2", "Llama"], REFUSED))
def test_what_cannot_be_cut_is_refused_on_all_ranks_alike(ranks, kind):
    said = ranks(2)(_said, kind)
    assert str(said[0]) == str(said[1])
    for error in said:
        require(error, REFUSED[kind][1].code, *REFUSED[kind][1].values, "fsdp")


def _cut_tiles():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = convert(_model("Llama", "AutoModelForCausalLM", DECODER), {"model.layers.*": "mxfp8"})
    with pytest.raises(ConfigError) as raised:
        tensor.cut(model, mesh["tp"], {"input_ids": _inputs(model)["input_ids"]}, False)
    return str(raised.value)


def test_a_cut_through_a_recipes_tiles_is_refused(ranks):
    for said in ranks(2)(_cut_tiles):
        assert (
            "'model.layers.0.self_attn.q_proj' [32, 32] follows mxfp8" in said
            and "tiles" in said
            and "16 rows on each of 2" in said
        )


def _wrong_plan(kind):
    """A plan that cuts heads (OPT counts them itself, and takes tokens for heads), or that leaves out a sum."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = _model(
        kind, "AutoModelForCausalLM", DECODER | {"ffn_dim": 64, "word_embed_proj_dim": 32}
    )
    mlp = {"layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise_gather_output"}
    model.config.base_model_tp_plan = dict(tensor_plans.OWN["bart"]) if kind == "OPT" else mlp
    with pytest.raises(ConfigError) as raised:
        tensor.cut(model, mesh["tp"], {"input_ids": _inputs(model)["input_ids"]}, False)
    return raised.value


@pytest.mark.parametrize(
    ("kind", "code"),
    quick(
        [("OPT", "tensor-parallel.other-logits")],
        [("OPT", "tensor-parallel.other-logits"), ("Llama", "tensor-parallel.heads")],
    ),
)
def test_a_plan_that_makes_another_model_is_refused(ranks, kind, code):
    for error in ranks(2)(_wrong_plan, kind):
        require(error, code, kind)


DROPOUT = DECODER | {"attention_probs_dropout_prob": 0.5, "hidden_dropout_prob": 0.5}


def _dropped(checkpoints):
    """Of a training step with dropout: what attention of the first layer gives on this rank, the loss, the norm of a plain gradient."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = convert(
        _model("Bert", "AutoModelForSequenceClassification", DROPOUT, True),
        {"*.layer.*": "fp8-row"},
    ).train()
    shared = tensor.cut(model, mesh["tp"], {"input_ids": _inputs(model)["input_ids"]}, False)
    if checkpoints:
        model.gradient_checkpointing_enable()
    distribute(model, seed=3)
    tensor.per_rank_dropout(model, shared, distributed_state(model))
    seeds = []
    model.bert.encoder.layer[0].attention.self.query.register_forward_hook(
        lambda *_: seeds.append(torch.initial_seed())
    )
    model.bert.encoder.layer[0].attention.output.dense.register_forward_hook(
        lambda *_: seeds.append(torch.initial_seed())
    )
    before = torch.get_rng_state()
    loss = model(**_inputs(model)).loss
    loss.backward()
    assert torch.equal(before, torch.get_rng_state())
    norms = [
        float(each.grad.norm()) for each in model.parameters() if not isinstance(each, DTensor)
    ]
    return seeds, float(loss), norms


def test_each_rank_drops_its_own_heads_and_all_the_same_of_what_they_share(ranks):
    (own, loss, norms), (other, *rest) = ranks(2)(_dropped, False)
    assert [loss, norms] == rest
    assert own[0] != other[0] and own[1] == other[1] != own[0]
    (again, *_), _ = repeated = ranks(2)(_dropped, True)
    assert [each[1:] for each in repeated] == [(loss, norms)] * 2 and again[:2] == own

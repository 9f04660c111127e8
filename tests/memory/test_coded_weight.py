"""A weight that is kept as codes, seen by code that knows nothing of codes: reads, writes, files (exact, beside the decoded model).

The search draws members of the class: format x dtype x bias x reader or writer. Readers do what PEFT, safetensors and loggers do.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.errors import ConfigError
from tests.compare import assert_same, sqnr_db
from tests.raising import raises

CODED = [
    each.name for each in recipes.ALL if each.backward == "recast" and each.output.rhs is not None
]
ROTATED = ("mxfp4",)  # whose cast of the decoded weight is near the codes, not equal to them
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INNER, OUTER = 64, 48


def frozen(
    recipe: str, dtype: torch.dtype = torch.float32, bias: bool = True, seed: int = 0
) -> nn.Sequential:
    """Two Linears; the first is frozen as codes, the second trains."""
    torch.manual_seed(seed)
    model = ng.convert(
        nn.Sequential(nn.Linear(INNER, OUTER, bias), nn.Linear(OUTER, INNER)).to(dtype), recipe
    )
    ng.memory.freeze(model, "0", codes=True)
    return model


def thawed(model: nn.Sequential) -> nn.Sequential:
    """The decoded model."""
    other = copy.deepcopy(model)
    ng.memory.thaw(other)
    return other


def tenfold(dtype: torch.dtype) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(10, INNER).to(dtype)


def saved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(tensors, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


READERS: dict[str, Callable[[nn.Linear], object]] = {
    "F.linear": lambda layer: F.linear(tenfold(layer.weight.dtype), layer.weight, layer.bias),
    "matmul": lambda layer: tenfold(layer.weight.dtype) @ layer.weight.T,
    "norm of columns": lambda layer: torch.linalg.norm(layer.weight + 0.5, dim=1),
    "method norm": lambda layer: layer.weight.norm(dim=1),
    "data": lambda layer: layer.weight.data.clone(),
    "detach": lambda layer: layer.weight.detach() * 1,
    "to": lambda layer: layer.weight.to(torch.float64),
    "same dtype": lambda layer: layer.weight.to(layer.weight.dtype) * 1,
    "row": lambda layer: layer.weight[3] * 1,
    "view": lambda layer: layer.weight.view(-1).clone(),
    "chunks": lambda layer: [each.clone() for each in layer.weight.chunk(2)],
    "stack": lambda layer: torch.stack([layer.weight, layer.weight]),
    "foreach": lambda layer: torch._foreach_add([layer.weight], 1.0),
    "numpy": lambda layer: torch.from_numpy(layer.weight.float().numpy().copy()),
    "tolist": lambda layer: torch.tensor(layer.weight.tolist()),
    "parameters_to_vector": lambda layer: nn.utils.parameters_to_vector([layer.weight]).clone(),
    "new parameter": lambda layer: nn.Parameter(layer.weight.data) * 1,
    "parameter of parameter": lambda layer: nn.Parameter(layer.weight, requires_grad=False) * 1,
    "deepcopy": lambda layer: copy.deepcopy(layer.weight) * 1,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer.weight)) * 1,
    "torch.save": lambda layer: saved(layer.state_dict())["weight"],
    "keep_vars": lambda layer: layer.state_dict(keep_vars=True)["weight"] * 1,
    "safetensors": lambda layer: safetensors.torch.load(safetensors.torch.save(layer.state_dict()))[
        "weight"
    ],
    "named_parameters": lambda layer: dict(layer.named_parameters())["weight"] * 1,
    "contiguous": lambda layer: layer.weight.contiguous().t().contiguous(),
    "inference": lambda layer: torch.inference_mode()(lambda: layer.weight * 1)(),
    "equal": lambda layer: torch.tensor(torch.equal(layer.weight, layer.weight.data)),
    "repr": lambda layer: torch.tensor(list(repr(layer.weight).encode())),
    "isfinite": lambda layer: layer.weight.isfinite(),
    "dlpack": lambda layer: torch.from_dlpack(layer.weight).clone(),
    "strides": lambda layer: torch.tensor(
        [*layer.weight.stride(), layer.weight.is_contiguous(), layer.weight.nbytes]
    ),
}


def delta(layer: nn.Linear) -> Tensor:
    torch.manual_seed(4)
    return (torch.randn(OUTER, INNER) / 8).to(layer.weight.dtype)


def halves(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.chunk(2)[1].zero_()


def assigned(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(delta(layer), requires_grad=False)


def by_numpy(layer: nn.Linear) -> None:
    layer.weight.data.view(torch.uint8)[0].zero_()


WRITERS: dict[str, Callable[[nn.Linear], object]] = {
    "data +=": lambda layer: setattr(layer.weight, "data", layer.weight.data.add_(delta(layer))),
    "data =": lambda layer: setattr(layer.weight, "data", delta(layer)),
    "data.mul_": lambda layer: layer.weight.data.mul_(2),
    "data[0] =": lambda layer: layer.weight.data.__setitem__(0, 0.25),
    "detach().copy_": lambda layer: layer.weight.detach().copy_(delta(layer)),
    "add_": lambda layer: torch.no_grad()(layer.weight.add_)(delta(layer)),
    "view": lambda layer: layer.weight.data.view(-1)[7:20].zero_(),
    "part of chunks": halves,
    "init": lambda layer: torch.no_grad()(nn.init.constant_)(layer.weight, 0.125),
    "foreach": lambda layer: torch._foreach_mul_([layer.weight.data], 0.5),
    "out=": lambda layer: torch.add(delta(layer), 1, out=layer.weight.data),
    "new parameter of the data": lambda layer: nn.Parameter(layer.weight.data).data.mul_(3),
    "other dtype": by_numpy,
    "assigned": assigned,
    "state dict": lambda layer: layer.state_dict()["weight"].mul_(0.75),
}


def members(count: int, seed: int) -> list[tuple[str, torch.dtype, bool]]:
    draw = random.Random(seed)
    return [(draw.choice(CODED), draw.choice(DTYPES), draw.random() < 0.5) for _ in range(count)]


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_gets_the_decoded_weight(reader: str) -> None:
    for recipe, dtype, bias in members(4, seed=len(reader)):
        model = frozen(recipe, dtype, bias)
        expected, found = READERS[reader](thawed(model)[0]), READERS[reader](model[0])
        pairs = (
            zip(expected, found, strict=True)
            if isinstance(expected, list | tuple)
            else [(expected, found)]
        )
        for one, other in pairs:
            if reader not in ("strides", "repr"):
                assert one.is_floating_point() is False or one.isfinite().all()
            assert_same(other.detach(), one.detach())
        assert (
            model[0].frozen is not None
            and model[0].weight.untyped_storage().nbytes() == dtype.itemsize
        )


@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_written_is_the_weight_from_then_on(writer: str) -> None:
    """Beside an ordinary weight that is written in the same way: the layer computes with it, and its codes are gone."""
    for recipe, dtype, bias in members(4, seed=len(writer)):
        model = frozen(recipe, dtype, bias)
        twin = thawed(model)
        x = tenfold(dtype)
        with torch.no_grad():
            model(x)
            for each in (model, twin):
                WRITERS[writer](each[0])
                each[0].empty_cache()
        assert_same(model[0].weight.detach(), twin[0].weight.detach())
        assert_same(model(x).detach(), twin(x).detach())
        assert model[0].frozen is None and type(model[0].weight) is nn.Parameter


@pytest.mark.parametrize("recipe", CODED)
def test_states_hold_both_and_load_both_ways(recipe: str) -> None:
    """Exact codes into a layer with codes, the decoded weight into any other."""
    for dtype in DTYPES:
        model = frozen(recipe, dtype, seed=1)
        state = saved(model.state_dict())
        assert type(state["0.weight"]) is Tensor
        again = frozen(recipe, dtype, seed=2)
        again.load_state_dict(state)
        assert_same(again[0].frozen.codes, model[0].frozen.codes)
        assert_same(again(tenfold(dtype)).detach(), model(tenfold(dtype)).detach())
        for assign in (False, True):
            narrow = thawed(frozen(recipe, dtype, seed=2))
            narrow.load_state_dict(state, assign=assign)
            assert_same(narrow[0].weight.detach(), thawed(model)[0].weight.detach())
        wide = nn.Sequential(nn.Linear(INNER, OUTER), nn.Linear(OUTER, INNER)).to(dtype)
        left = wide.load_state_dict(state, strict=False)
        assert not left.missing_keys
        assert_same(wide[0].weight.detach(), thawed(model)[0].weight.detach())


@pytest.mark.parametrize("recipe", CODED)
def test_states_of_before_with_codes_alone_load(recipe: str) -> None:
    model, again = frozen(recipe, seed=1), frozen(recipe, seed=2)
    state = {name: each for name, each in model.state_dict().items() if name != "0.weight"}
    again.load_state_dict(state)
    assert_same(again[0].frozen.codes, model[0].frozen.codes)
    with pytest.raises(
        RuntimeError,
        match=r"0\.weight was saved as the codes of a frozen weight\. Call narrowgauge",
    ):
        thawed(again).load_state_dict(state)


def test_a_weight_that_was_changed_in_the_state_wins_over_the_codes_beside_it() -> None:
    model = frozen("fp8-current")
    state = saved(model.state_dict())
    state["0.weight"].mul_(2)
    with pytest.warns(
        UserWarning, match=r"0.weight is not what 0.frozen.codes beside it decode to.*cast anew"
    ):
        model.load_state_dict(state)
    assert_same(model[0].weight.data.clone(), state["0.weight"])


def test_a_state_decodes_when_it_is_read_and_not_before() -> None:
    """An adapter is saved from the state dict of the whole model, whose base it does not read."""
    entry = frozen("fp8-current").state_dict()["0.weight"]
    assert entry._lent is None and entry.shape == (OUTER, INNER)
    first = entry.data_ptr()
    assert first == entry.data_ptr() == entry.untyped_storage().data_ptr()


def test_arrays_of_numpy_are_read_only_and_pointers_last_until_the_next_forward() -> None:
    model = frozen("fp8-current")
    array = model[0].weight.numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0
    pointer = model[0].weight.data_ptr()
    assert pointer == model[0].weight.data_ptr() and model[0].weight._lent is not None
    model(tenfold(torch.float32))
    assert model[0].weight._lent is None


def test_a_reader_of_a_weight_that_is_to_train_gets_a_sentence() -> None:
    model = frozen("fp8-current")
    model[0].weight.requires_grad_()
    with raises(ConfigError, "freeze.trains", "e4m3"):
        F.linear(tenfold(torch.float32), model[0].weight)


@pytest.mark.parametrize("recipe", CODED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moved_to_another_dtype_it_decodes_in_that(recipe: str, dtype: torch.dtype) -> None:
    model = frozen(recipe)
    codes = model[0].frozen.codes.clone()
    model.to(dtype)
    assert (
        model[0].weight.dtype == dtype
        and model[0].weight.untyped_storage().nbytes() == dtype.itemsize
    )
    assert_same(model[0].frozen.codes, codes)
    assert_same(model[0].weight.data.clone(), thawed(model)[0].weight.detach())


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_of_a_model_keep_codes_of_their_own(how: Callable[[nn.Module], nn.Module]) -> None:
    model = frozen("fp8-current")
    other = how(model)
    assert other[0].frozen is not model[0].frozen and other[0].weight is not model[0].weight
    other[0].weight.data.zero_()
    assert other[0].frozen is None and model[0].frozen is not None
    assert not other[0].weight.any() and model[0].weight.any()


def test_a_tie_made_later_reads_the_codes() -> None:
    model = frozen("fp8-current")
    plain = nn.Linear(INNER, OUTER)
    plain.weight = model[0].weight
    x = tenfold(torch.float32)
    assert_same(plain(x).detach(), F.linear(x, thawed(model)[0].weight, plain.bias).detach())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_code_that_reads_the_weight_gets_the_decoded_one() -> None:
    class Reads(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.inner.weight + 1, self.inner.bias)

    module, x = Reads(frozen("fp8-current")[0]), tenfold(torch.float32)
    assert_same(torch.compile(module, backend="aot_eager")(x).detach(), module(x).detach())


class DoRA(nn.Module):
    """Weight-decomposed low-rank adaptation (arXiv 2402.09353, eq. 5), on any Linear: y = m (W + s B A) x / |W + s B A|."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features).to(base.weight.dtype) / 8)
        self.b = nn.Parameter(torch.randn(base.out_features, rank).to(base.weight.dtype) / 8)
        self.magnitude = nn.Parameter(base.weight.data.norm(dim=1).clone())

    def merged(self) -> Tensor:
        weight = self.base.weight + 2 * (self.b @ self.a)
        return weight * (self.magnitude / weight.norm(dim=1).detach())[:, None]

    def forward(self, x: Tensor) -> Tensor:
        bias = 0 if self.base.bias is None else self.base.bias
        weight = self.base.weight + 2 * (self.b @ self.a)
        scale = self.magnitude / weight.norm(dim=1).detach()
        return (
            (self.base(x) - bias) * scale + F.linear(F.linear(x, self.a), self.b) * 2 * scale + bias
        )

    def merge(self) -> nn.Linear:
        self.base.weight.data = self.merged().detach()
        return self.base


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("recipe", CODED)
def test_dora_trains_and_merges_as_on_the_decoded_weight(recipe: str, bias: bool) -> None:
    found = []
    model = frozen(recipe, bias=bias)
    for each in (model, thawed(model)):
        torch.manual_seed(5)
        adapter, x = DoRA(each[0]), tenfold(torch.float32)
        optimizer = torch.optim.SGD([adapter.a, adapter.b, adapter.magnitude], lr=0.1)
        losses = []
        for _ in range(4):
            losses.append(adapter(x).square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        merged = adapter.merge()
        merged.empty_cache()
        found.append((torch.stack(losses).detach(), merged.weight.data, merged(x).detach()))
    for one, other in zip(*found, strict=True):
        assert one.isfinite().all()
        if recipe in ROTATED or recipe == "nvfp4":
            assert sqnr_db(other, one) > 25
        else:
            assert_same(one, other)


@pytest.mark.slow
def test_a_folder_of_transformers_loads_as_the_decoded_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    settings = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=64,
    )
    for recipe in CODED:
        torch.manual_seed(0)
        model = ng.convert(transformers.LlamaForCausalLM(settings), recipe)
        ng.memory.freeze(model, "layers.*", codes=True)
        model.save_pretrained(tmp_path / recipe)
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / recipe)
        ng.memory.thaw(model)
        expected = dict(ng.convert(model, None).named_parameters())
        for name, parameter in loaded.named_parameters():
            assert_same(parameter.detach(), expected[name].detach())


def test_peft_on_codes_is_peft_on_the_decoded_model() -> None:
    peft = pytest.importorskip("peft")
    for kind in ({}, {"use_dora": True}, {"init_lora_weights": "pissa"}):
        found = []
        model = frozen("fp8-current")
        for each in (model, thawed(model)):
            torch.manual_seed(0)
            adapted = peft.get_peft_model(each, peft.LoraConfig(r=4, target_modules=["0"], **kind))
            x = tenfold(torch.float32)
            optimizer = torch.optim.SGD(
                [p for p in adapted.parameters() if p.requires_grad], lr=0.1
            )
            for _ in range(3):
                loss = adapted(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            merged = adapted.merge_and_unload()
            found.append((loss.detach(), merged[0].weight.detach()))
        for one, other in zip(*found, strict=True):
            assert one.isfinite().all()
            assert_same(one, other)


def test_a_copy_of_a_layer_whose_weight_was_replaced_has_the_new_one() -> None:
    model = frozen("fp8-current")
    assigned(model[0])
    other = copy.deepcopy(model)
    assert_same(other[0].weight.detach(), model[0].weight.detach())
    assert_same(other(tenfold(torch.float32)).detach(), model(tenfold(torch.float32)).detach())

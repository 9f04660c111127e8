"""Pictures from their folder to an exported model: what is learnt, resumed, refused, and counted (exact where not said)."""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from narrowgauge import data
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.train import loop
from narrowgauge.train.config.settings import TrainConfig, replace
from narrowgauge.train.tasks.image_model import unread_border
from tests.compare import assert_same
from tests.raising import raises
from tests.selection import quick
from tests.train import tiny
from tests.train.tasks import folders

RECIPES = [
    "fp8-row",
    "fp8-delayed",
    "mxfp8",
    "nvfp4",
    "int8",
    "int4-hq-bs",
    "int4-hq-lss",
    "int4-lsq-luq",
    "none",
]


def stop(trainer):
    signal.raise_signal(signal.SIGTERM)


def run_json(config):
    return json.loads(Path(config.output, "run.json").read_text("utf-8"))


@pytest.mark.slow
def test_it_learns_colours_and_transformers_loads_it(make, place, capfd, with_report):
    """From a checkpoint of five classes, in 30 steps of fp8-row; its predictions by transformers' own processor."""
    config = make(
        "pictures",
        steps=30,
        batch_size=12,
        learning_rate=5e-3,
        recipe="fp8-row",
        eval_every=15,
        eval_wide=True,
    )
    assert loop.run(config) == 0
    said = capfd.readouterr().err
    assert "at random to begin with: classifier.bias, classifier.weight" in said
    assert "60 pictures" not in said and "pictures of 4 patches" in said
    folder = Path(config.output)
    last = tiny.events(folder, "eval")[-1]
    assert last["accuracy"] == 1.0 and last["wide"]["accuracy"] == 1.0
    steps = tiny.events(folder, "step")
    assert all(
        event["inputs"] == event["positions"] == 4 * event["examples"] == 4 * event["tokens"]
        for event in steps
    )
    model = transformers.AutoModelForImageClassification.from_pretrained(folder / "final")
    processor = transformers.models.vit.ViTImageProcessorPil.from_pretrained(folder / "final")
    assert model.config.id2label == {0: "blue", 1: "green", 2: "red"}
    paths = sorted((place / "pictures").glob("*/*.png"))
    pixels = processor([Image.open(path) for path in paths], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        found = model(pixel_values=pixels).logits.argmax(-1).tolist()
    assert [model.config.id2label[each] for each in found] == [path.parent.name for path in paths]
    assert "nats/example" in (folder / "report.html").read_text("utf-8")


@pytest.mark.parametrize("recipe", quick(["int4-lsq-luq"], RECIPES))
def test_every_recipe_trains_a_vit_but_its_head(make, recipe, cpu):
    config = make("pictures", steps=2, recipe=recipe, from_scratch=True, learning_rate=1e-3)
    assert loop.run(config) == 0
    rows = {row["name"]: row["recipe"] for row in run_json(config)["describe"]}
    assert rows.pop("classifier") in ("none", "bf16")
    patches = rows.pop("vit.embeddings.patch_embeddings.projection.linear", "none")
    assert patches == recipe and not any("projection" in name for name in rows)
    assert len(rows) == 12 and set(rows.values()) == {
        "bf16" if recipe == "none" and not cpu.bf16_gemm else recipe
    }


@pytest.mark.parametrize(
    "precision", quick(["bf16-o2"], ["fp32", "amp-fp16", "bf16-o2", "bf16-o3"])
)
def test_pixels_come_in_the_numbers_of_every_precision(make, precision):
    config = make("pictures", steps=2, precision=precision, learning_rate=1e-3)
    assert loop.run(config) == 0
    assert all(math.isfinite(loss) for loss in tiny.losses(Path(config.output)).values())


@pytest.mark.slow
def test_stopped_and_resumed_to_the_bit_with_crops_and_flips(make, before_step):
    """Six steps are an epoch, so that the second stop is in the second one."""
    common = {
        "steps": 9, "eval_every": 3, "recipe": "fp8-delayed", "micro_batches": 2, "augment": "crop=2,flip",
        "learning_rate": 1e-3, "best": "mcc",
    }  # fmt: skip
    reference, config = (
        make("pictures", "reference", **common),
        make("pictures", "stopped", **common),
    )
    assert loop.run(reference) == 0
    before_step(4, stop)
    assert loop.run(config) == 75
    before_step(8, stop)
    assert loop.run(replace(config, resume=True)) == 75
    assert loop.run(replace(config, resume=True)) == 0
    left, right = Path(config.output), Path(reference.output)
    assert tiny.losses(left) == tiny.losses(right) and tiny.digests(left) == tiny.digests(right)
    still = make("pictures", "still", **{**common, "augment": ""})
    assert loop.run(still) == 0 and tiny.losses(Path(still.output)) != tiny.losses(right)


@pytest.mark.slow
def test_pictures_that_changed_do_not_go_on(make, before_step, place, tmp_path):
    data = shutil.copytree(place / "pictures", tmp_path / "own-pictures")
    config = make("pictures", data=data, learning_rate=1e-3)
    before_step(3, stop)
    assert loop.run(config) == 75
    Image.new("RGB", (10, 12)).save(data / "red" / "0.png")
    with pytest.raises(DataError, match="trained with another data content"):
        loop.run(replace(config, resume=True))


@pytest.mark.slow
def test_micro_batches_change_nothing_but_memory(make):
    readings = []
    for parts in (1, 4):
        config = make(
            "pictures",
            f"parts-{parts}",
            steps=2,
            micro_batches=parts,
            recipe="bf16",
            precision="fp32",
            augment="crop=1",
        )
        assert loop.run(config) == 0
        steps = tiny.events(Path(config.output), "step")
        readings.append([event[key] for event in steps for key in ("loss", "grad_norm")])
    assert readings[1] == pytest.approx(readings[0], rel=2e-6)  # float32 sums in another order


@pytest.mark.slow
def test_without_a_model_a_vit_of_the_settings_sizes_starts_at_random(place, tmp_path):
    sizes = {"hidden_size": 32, "layers": 3, "heads": 4, "image_size": 12, "patch_size": 3}
    config = folders.settings(
        tmp_path / "run",
        task="image-classification",
        data=place / "pictures",
        **sizes,
        plan="always",
        steps=2,
    )
    assert loop.run(config) == 0
    model = transformers.AutoModelForImageClassification.from_pretrained(
        Path(config.output, "final")
    )
    own = model.config
    assert (own.num_hidden_layers, own.image_size, own.patch_size, own.intermediate_size) == (
        3,
        12,
        3,
        128,
    )
    facts = run_json(config)
    assert facts["model"]["patches"] == 16 and facts["tokens_per_step"] == 16 * 8
    assert facts["planned"].get("allocated_bytes", 0) > 2**20, facts["planned"]


SMALL = {"num_labels": 2, "num_channels": 3}
READERS = {
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=(14, 13), patch_size=4, **SMALL
        )
    ),
    "convnext": lambda: transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(num_stages=1, hidden_sizes=[8], depths=[1], patch_size=4, **SMALL)
    ),
    "swin": lambda: transformers.SwinForImageClassification(
        transformers.SwinConfig(embed_dim=8, depths=[1], num_heads=[2], window_size=2, image_size=16, patch_size=4, **SMALL)
    ),
    "resnet": lambda: transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", **SMALL)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", READERS)
def test_pixels_that_no_patch_covers_are_told(kind):
    """Exactly those without a gradient: of 14 x 13 pixels in patches of 4 x 4 two rows and a column; of none where a model fills up."""
    torch.manual_seed(0)
    model = READERS[kind]().eval()
    size = replace(data.Preprocessing.plain(14, 3), width=13)
    pixels = torch.randn(2, 3, 14, 13, requires_grad=True)
    model(pixel_values=pixels).logits.square().sum().backward()
    seen = pixels.grad.abs().sum((0, 1)) > 0
    rows, columns = (
        (~seen.any(1)).nonzero().flatten().tolist(),
        (~seen.any(0)).nonzero().flatten().tolist(),
    )
    said = unread_border(model, size)
    if kind in ("vit", "convnext"):
        assert rows == [12, 13] and columns == [12]
        assert (
            "never sees 2 rows at the bottom and 1 column at the right, 20.9 % of each picture"
            in said
        )
        assert "Pictures of 12 x 12 or 16 x 16 pixels" in said
    else:
        assert rows == columns == [] and said == ""


def test_a_run_says_once_what_it_never_sees(place, tmp_path, capfd):
    sizes = {"hidden_size": 32, "layers": 2, "heads": 4, "image_size": 14, "patch_size": 4}
    config = folders.settings(
        tmp_path / "run", task="image-classification", data=place / "pictures", **sizes, steps=2
    )
    assert loop.run(config) == 0
    said = capfd.readouterr().err
    assert said.count("Note: patches of 4 x 4 do not fill pictures of 14 x 14 pixels") == 1
    assert said.index("never sees 2 rows") < said.index("step 2")
    assert any("never sees 2 rows" in note for note in run_json(config)["data"]["notes"])


@pytest.mark.slow
def test_a_table_with_its_own_validation_pictures(make, place, tmp_path):
    """Parquet with bytes to train on, JSONL with paths to validate on, of which an evaluation sees seven."""
    import pyarrow
    import pyarrow.parquet

    paths = sorted((place / "pictures").glob("*/*.png"))
    table = pyarrow.table(
        {
            "pixels": [path.read_bytes() for path in paths],
            "kind": [path.parent.name for path in paths],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    held_out = folders.jsonl(
        tmp_path / "held-out.jsonl",
        [{"pixels": str(path), "kind": path.parent.name} for path in paths[::4]],
    )
    config = make(
        "pictures", data=tmp_path / "train.parquet", validation_data=held_out, columns={"image": "pixels", "label": "kind"},
        eval_tokens=7, steps=1, epochs=0,
    )  # fmt: skip
    assert loop.run(config) == 0
    [event] = tiny.events(Path(config.output), "eval")
    facts = run_json(config)["data"]
    assert (
        event["tokens"] == facts["evaluated"] == 7
        and facts["validation_examples"] == 15
        and facts["train_examples"] == 60
    )


@pytest.mark.slow
def test_an_epoch_shows_every_picture_once(make):
    config = make("pictures", epochs=2)
    assert loop.run(config) == 0
    events = tiny.events(Path(config.output), "step")
    assert (
        sum(event["examples"] for event in events) == 2 * run_json(config)["data"]["train_examples"]
    )
    assert events[-1]["epoch"] == 2.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image_size": 16}, r"data.image_size = 16: the model was trained on 8 x 8 pixels"),
        (
            {"classes": "red,green"},
            r"blue/.*\.png: label 'blue' in column 'label' is none of the 2 classes",
        ),
        ({"model": "", "image_size": 8}, r"model.patch_size = 16: pictures have 8 x 8 pixels"),
        ({"header": "a,b"}, "pictures: header"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_step(make, changes, words):
    config = make("pictures", **changes)
    with pytest.raises((ConfigError, DataError), match=words):
        loop.run(config)
    assert not tiny.events(Path(config.output), "step")


def test_a_corrupt_picture_is_named_before_the_first_step(make, place, tmp_path):
    data = shutil.copytree(place / "pictures", tmp_path / "own-pictures")
    path = data / "green" / "40.png"
    path.write_bytes(path.read_bytes()[:100])
    config = make("pictures", data=data)
    with raises(DataError, "image.undecodable", "40"):
        loop.run(config)
    assert not Path(config.output, "metrics.jsonl").exists()


def test_settings_of_texts_are_refused_for_pictures():
    with pytest.raises(
        ConfigError, match=r"data.max_length = 5: has no effect with task = 'image-classification'"
    ):
        TrainConfig(task="image-classification", data="d", max_length=5)
    with pytest.raises(
        ConfigError, match=r"data.augment = 'flip': has no effect with task = 'classification'"
    ):
        TrainConfig(task="classification", model="m", data="d", augment="flip")
    with pytest.raises(ConfigError, match=r"model.patch_size = 8: has no effect with model = 'm'"):
        TrainConfig(task="image-classification", data="d", model="m", patch_size=8)


@pytest.mark.slow
def test_a_convolutional_network_trains_too(place, tmp_path):
    """ResNet, whose Linear is a head alone: nothing follows the recipe, but for a pattern that names it."""
    sizes = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=3
    )
    transformers.ResNetForImageClassification(sizes).save_pretrained(tmp_path / "resnet")
    config = folders.settings(
        tmp_path / "run", task="image-classification", model=tmp_path / "resnet", data=place / "pictures", image_size=12,
        recipe="none", steps=2, from_scratch=True,
    )  # fmt: skip
    assert loop.run(config) == 0
    assert run_json(config)["model"]["patches"] == 1


@pytest.mark.slow
def test_digits_of_scikit_learn(tmp_path):
    """1,797 handwritten digits of 8 x 8 pixels, written out as files; a ViT from scratch in int4-hq-bs, 300 steps."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for place, (image, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = tmp_path / "digits" / str(digit) / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15.9).astype(np.uint8)).save(path)
    config = folders.settings(
        tmp_path / "run", task="image-classification", data=tmp_path / "digits", image_size=8, patch_size=2, hidden_size=64,
        layers=2, heads=4, recipe="int4-hq-bs", steps=300, batch_size=64, learning_rate=3e-3, warmup_steps=20, augment="crop=1",
    )  # fmt: skip
    assert loop.run(config) == 0
    [event] = tiny.events(Path(config.output), "eval")
    assert (
        event["accuracy"] > 0.45
    )  # of ten classes; a ViT of so few steps ends anywhere from 0.55 to 0.8
    final = transformers.AutoModelForImageClassification.from_pretrained(
        Path(config.output, "final")
    )
    assert_same(torch.tensor(sorted(final.config.id2label)), torch.arange(10))

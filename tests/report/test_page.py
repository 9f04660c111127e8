"""The report over made-up run folders: complete in itself, escaped, reproducible, whatever the run recorded."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.report.synthetic_run import MODULES, REFERENCE, Plan, events, run, write_pair, write_run

matplotlib = pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from narrowgauge import formats  # noqa: E402
from narrowgauge.diagnose import format_text  # noqa: E402
from narrowgauge.errors import ConfigError, StorageError  # noqa: E402
from narrowgauge.report import cards as measured  # noqa: E402
from narrowgauge.report import figures, tables  # noqa: E402
from narrowgauge.report import page as report  # noqa: E402
from narrowgauge.report.run_data import Recorded, last_done  # noqa: E402
from tests.raising import raises  # noqa: E402
from tests.selection import quick  # noqa: E402

VOID = {
    "meta",
    "link",
    "br",
    "img",
    "input",
    "hr",
    "source",
    "col",
    "wbr",
    "base",
    "area",
    "embed",
    "track",
}


class Page(HTMLParser):
    """Checks that every element is closed in order; collects attributes, ids and visible text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            self.attributes.append((tag, name, value or ""))
            if name == "id":
                self.ids.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def written(folder: Path) -> str:
    return report.write(folder).read_text(encoding="utf-8")


def rewrite(folder: Path, listed: list[dict[str, Any]]) -> None:
    """Replaces the events of a run."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in listed))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("runs") / "pair")


@pytest.fixture(scope="module")
def html(pair: Path) -> str:
    return written(pair)


@pytest.fixture(scope="module")
def text(html: str) -> str:
    return re.sub(r"\s+", " ", Page(html).text)


# --- one file, complete in itself ---


def test_the_page_fetches_nothing(html):
    page = Page(html)
    assert "http:" not in html and "https:" not in html and "@import" not in html
    assert {tag for tag, _, _ in page.attributes} & {
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "base",
    } == set()
    references = [
        value
        for _, name, value in page.attributes
        if name in ("src", "href", "xlink:href", "action")
    ]
    assert references and all(value.startswith("#") for value in references)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))


def test_the_page_forbids_fetching_and_scripts(html):
    assert "default-src 'none'" in html and "script-src" not in html
    assert "script" not in {tag for tag, _, _ in Page(html).attributes} and "<script" not in html


def test_ids_are_unique_and_references_have_a_target(html):
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    targets = {value[1:] for _, name, value in page.attributes if name == "href"} | set(
        re.findall(r"url\(#([^)]*)\)", html)
    )
    assert targets <= set(page.ids)


def test_the_page_is_small(pair):
    assert (pair / "report.html").stat().st_size < 400_000


@pytest.mark.slow
def test_the_page_has_the_same_bytes_in_another_process_without_a_home(pair, html):
    """Other hash seed, no writable home, warnings are errors: nothing on stderr, and not one byte of difference."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("MPL", "XDG_"))
    }
    environment |= {
        "HOME": "/nonexistent/home",
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": str(Path(report.__file__).parents[2]),
    }
    code = (
        "import sys; from pathlib import Path; from narrowgauge.report import page; page.write(Path(sys.argv[1])); "
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(pair)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "False\n"), (
        "drawing leaves pyplot alone"
    )
    assert (pair / "report.html").read_text(encoding="utf-8") == html


@pytest.mark.slow
def test_the_users_matplotlib_settings_are_neither_used_nor_changed(pair, html):
    with matplotlib.rc_context({"font.size": 40, "lines.linewidth": 9}):
        before = dict(matplotlib.rcParams)
        assert written(pair) == html
        assert dict(matplotlib.rcParams) == before


# --- what it says ---


def test_headline_cards_and_verdict(text):
    for words_shown in (
        "llama-tiny in fp8-delayed",
        "A model of 3.21 million parameters",
        "finished",
        "Validation loss of bf16",
        "of 3.31, which token frequencies alone reach",
        "ln 65 = 4.17",
        "times bf16’s",
        "one pair of runs with one seed",
        "tokens/s",
        "GiB",
    ):
        assert words_shown in text


def test_every_watched_tensor_has_its_figures(html, text):
    assert html.count('aria-label="Histogram') == html.count('aria-label="Largest magnitude') == 9
    for module in MODULES:
        assert module in text
    assert text.count("Output gradients in") == 3


def test_only_the_tensors_that_lose_most_are_drawn_where_there_are_many(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "SHOWN_TENSORS", 2)
    html = written(write_run(tmp_path / "run", Plan(steps=20, tensors=True)))
    assert html.count('aria-label="Histogram') == 2
    assert "Drawn are the 2 of 9 watched tensors" in html


def test_command_configuration_and_environment_are_shown(text):
    assert (
        "narrowgauge train --recipe fp8-delayed --data 'a file & more.txt' --compare bf16" in text
    )
    assert 'name = "llama-tiny" # <not a tag>' in text
    assert "started 2026-11-20 22:56:00 UTC" in text
    assert "PyTorch 2.13.0+cpu" in text and '"unigram_entropy": 3.3127' in text


def test_resumptions_are_listed(text):
    resumed = "The run resumed from checkpoints/step-00000160. Passed over as corrupt: checkpoints/step-00000170."
    assert f"Step 160: {resumed}" in text


# --- text from outside ---


def test_the_sample_is_shown_as_text_and_never_as_markup(html):
    assert "<script>alert" not in html and "<b>any further" not in html
    assert "&lt;/pre&gt;&lt;script&gt;alert(&#39;sample&#39;)&lt;/script&gt;{{ 7 * 7 }}" in html
    shown = Page(html).text
    for piece in (
        "<b>any further</b>",
        "3 < 4 && 5 > 2",
        "ROMÉO",
        "你好",
        "Ζεύς",
        "🙂",
        "{{ 7 * 7 }}",
    ):
        assert piece in shown


def test_the_prompt_is_not_written_twice(html):
    assert html.count("FIRST CITIZEN:") == 2  # the run's and the reference's


def test_hostile_names_stay_text(tmp_path):
    evil = '"><img src=x onerror=alert(1)>$\\frac{}$\x00\ud800'
    folder = write_run(tmp_path / "run", Plan(steps=1, recipe="bf16", tensors=True))
    facts = run(Plan(steps=20)) | {
        "recipe": evil,
        "device": evil,
        "command": [evil],
        "narrowgauge": evil,
    }
    facts["model"] |= {"name": evil, evil: evil}
    facts["describe"] = [{key: evil for key in ("name", "note", *tables.DESCRIBE_COLUMNS)}]
    (folder / "run.json").write_text(json.dumps(facts))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    changed = [json.loads(line) for line in lines]
    for event in changed:
        event |= {
            key: evil
            for key in ("module", "role", "format", "prompt", "text", "path", "reason")
            if key in event
        }
    rewrite(folder, changed)
    html = written(folder)
    assert "<img" not in html
    assert not any(
        name.startswith("on") for _, name, _ in Page(html.replace("\x00", "")).attributes
    )


# --- runs that are not as they should be ---


def test_without_a_reference_the_page_says_so(tmp_path):
    html = written(write_run(tmp_path / "run", Plan(steps=40, planned=40)))
    assert "No reference was trained alongside" in html and "--compare bf16" in html
    assert "mean difference" not in html, "the legend of the figure with both"


def test_a_crashed_run_says_where_it_ended(tmp_path):
    text = Page(written(write_pair(tmp_path / "run", Plan(steps=143, done=None)))).text
    assert "No end was recorded. The last step is step 143 of 300" in text
    assert "At step 100 the validation loss" in text  # the last that both have


def test_a_run_stopped_by_a_loss_that_is_not_finite_says_where(tmp_path):
    text = Page(
        written(write_pair(tmp_path / "run", Plan(nonfinite_at=187, done="nonfinite")))
    ).text
    assert "The run was stopped at step 187 because the loss was not finite." in text
    assert "at step 186." in text
    assert (
        "The first amax that was not finite: output gradients of model.layers.3.mlp.down_proj, at step 185."
        in text
    )
    assert "loss not finite" in text  # at the line in the figure


def test_a_run_stopped_by_a_gradient_says_so(tmp_path):
    folder = write_run(tmp_path / "run", Plan(steps=30, done="nonfinite"))
    metrics = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    changed = [json.loads(line) for line in metrics]
    next(event for event in changed if event["event"] == "step" and event["step"] == 30)[
        "grad_norm"
    ] = "Infinity"
    rewrite(folder, changed)
    assert "stopped at step 30 because the gradient norm was not finite" in written(folder)


@pytest.mark.parametrize(
    ("reason", "said"), [("interrupted", "Ctrl-C"), ("preempted", "(SIGTERM)")]
)
def test_a_run_that_was_asked_to_stop_says_by_what(tmp_path, reason, said):
    assert said in written(write_run(tmp_path / "run", Plan(steps=30, done=reason)))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_of_few_steps(tmp_path, steps):
    plan = Plan(steps=steps, planned=steps)
    other = Plan(recipe="bf16", steps=steps, planned=steps, gap=0.0, seed=9)
    html = written(write_pair(tmp_path / "run", plan, other))
    Page(html)
    assert "Too little to compare with bf16" in html


def test_a_first_loss_that_is_not_finite(tmp_path):
    Page(written(write_pair(tmp_path / "run", Plan(nonfinite_at=1, done="nonfinite"))))


def test_a_run_that_recorded_nothing_but_its_start(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    html = written(tmp_path)
    Page(html)
    assert "No step was recorded" in html and "no evaluation was recorded" in html


def test_the_commands_that_continued_a_run_are_shown(tmp_path):
    folder = write_pair(tmp_path / "run", Plan(steps=60, planned=60, resumed_at=(30,)))
    run = json.loads((folder / "run.json").read_text())
    again = ["narrowgauge", "train", "--resume", "--output", "my run", "--lr", "1e-4"]
    (folder / "run.json").write_text(json.dumps(run | {"resumed": [again]}))
    assert "narrowgauge train --resume --output &#39;my run&#39; --lr 1e-4" in written(folder)


@pytest.mark.parametrize(
    "kind", quick(["step", "eval"], ["step", "eval", "sample", "checkpoint", "resume", "done"])
)
def test_each_kind_of_event_may_be_missing(tmp_path, kind):
    plan = Plan(steps=60, planned=60, resumed_at=(30,))
    folder = write_pair(tmp_path / "run", plan)
    kept = [event for event in events(plan) if event["event"] != kind]
    rewrite(folder, kept)
    Page(written(folder))


def test_readings_without_their_optional_keys(tmp_path):
    folder = write_run(tmp_path / "run", Plan(steps=3))
    broken = {"format": "e4m3", "amax": "NaN", "scale": 0.0}
    far = {
        "histogram": {"lowest_exponent": -140, "counts": [1, 0, 5]},
        "underflow": 1.0,
        "saturated": 0.0,
    }
    bare = [
        {"event": "tensor", "step": 1, "module": "m", "role": "x"},
        {"event": "tensor", "step": 2, "module": "n", "role": "w", **broken},
        {
            "event": "tensor",
            "step": 2,
            "module": "o",
            "role": "w",
            "format": "int8",
            "amax": 1.0,
            "scale": "Infinity",
            **far,
        },
        {"event": "step", "step": 4, "loss": 2.0},
        {"event": "resume", "step": 3},
        {"event": "sample", "step": 4},
    ]
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.writelines(json.dumps(event) + "\n" for event in bare)
    html = written(folder)
    Page(html)
    assert "No non-zero value at this reading" in html


def test_a_reference_that_has_not_started_is_mentioned(tmp_path):
    folder = write_run(tmp_path / "run", Plan(steps=3))
    (folder / "compare-bf16").mkdir()
    assert "The folder compare-bf16 is there, but holds no readable run" in written(folder)


def test_a_run_that_went_on_after_its_end_is_not_finished(tmp_path):
    def end(*events: tuple[str, int]) -> Any:
        listed = [
            {"event": event, "step": step, "reason": "interrupted", "loss": 1.0}
            for event, step in events
        ]
        return last_done(recorded(tmp_path, listed))

    assert end(("step", 5), ("done", 5))["step"] == 5
    assert end(("step", 5), ("done", 5), ("resume", 5)) is None
    assert end(("done", 5), ("step", 6)) is None
    assert end(("done", 5), ("resume", 5), ("step", 6), ("done", 6))["step"] == 6


def test_what_is_no_run_folder_is_refused_with_the_next_step(tmp_path):
    with raises(ConfigError, "report.no-run", tmp_path):
        report.write(tmp_path)
    with raises(ConfigError, "report.no-folder", "missing") as caught:
        report.write(tmp_path / "missing")
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    folder = write_run(tmp_path / "run", Plan(steps=1))
    (folder / "report.html").mkdir()
    with raises(StorageError, "storage.refused", "write"):
        report.write(folder)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


# --- parts ---


def recorded(folder: Path, listed: list[dict[str, Any]] = [], **facts: Any) -> Recorded:  # noqa: B006
    return Recorded(folder=folder, run=facts, events=listed, config="")


def test_layers_alike_are_one_row(tmp_path):
    groups = tables.layers(recorded(tmp_path, **run(Plan())))
    assert [sum(group["names"].values()) for group in groups] == [16, 8, 4, 1]
    assert groups[0]["names"]["model.layers.*.self_attn.q_proj"] == 4
    assert groups[-1]["names"] == {"lm_head": 1} and list(groups[-1]["notes"]) == [
        "output layer, kept ordinary"
    ]


def test_a_layer_that_differs_is_not_put_into_the_group(tmp_path):
    facts = run(Plan())
    facts["describe"][7]["recipe"] = "bf16"
    found = [group["names"] for group in tables.layers(recorded(tmp_path, **facts))]
    assert [
        names["model.layers.*.self_attn.q_proj"]
        for names in found
        if "model.layers.*.self_attn.q_proj" in names
    ] == [3, 1]


def test_a_long_curve_keeps_its_spikes_and_stays_short():
    points = [(step, 1.0) for step in range(50_000)]
    points[31_234] = (31_234, 9.0)
    kept = figures.thinned(points)
    assert (
        len(kept) <= 1100
        and (31_234, 9.0) in kept
        and kept[0] == points[0]
        and kept[-1] == points[-1]
    )


def test_metrics_are_labelled_at_their_ends_and_never_on_each_other(monkeypatch):
    """0.5 and 0.501 would share a line of text: the second label moves up, the others stay."""
    labels = {}
    monkeypatch.setattr(
        figures, "note", lambda axes, text, place, *rest, **style: labels.update({text: place[1]})
    )
    ends = {"accuracy": 0.5, "f1": 0.501, "mcc": 1.0}
    figures.metric_curves({name: [(1, 0.0), (2, end)] for name, end in ends.items()}, {})
    assert labels["accuracy 0.5"] == 0.5 and labels["mcc 1"] == 1.0
    assert 0.55 < labels["f1 0.501"] < 0.65


@pytest.mark.parametrize("name", quick(["e4m3", "e2m1", "int4"], formats.NAMES))
def test_every_format_has_its_range_drawn(name):
    counted = {"lowest_exponent": -130, "counts": [5, *[0] * 120, 9, 30, 4]}
    event = {"format": name, "scale": 0.01, "histogram": counted}
    drawn = figures.histogram(event, name)
    assert "var(--zone-zero)" in drawn and "var(--zone-saturated)" in drawn and "nan" not in drawn


def test_the_zones_are_where_the_format_ends():
    """Exact: E4M3 at a scale of one holds 2^-9 to 448, rounds to zero up to 2^-10, and is subnormal below 2^-6."""
    zones = {}

    def draw(axes, found):
        zones.update(found)

    event = {"format": "e4m3", "scale": 1.0, "histogram": {"lowest_exponent": -8, "counts": [1, 2]}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "draw_zones", draw)
        figures.histogram(event, "zones")
    assert zones["zero"][1] == zones["subnormal"][0] == -10
    assert zones["subnormal"][1] == zones["normal"][0] == -6
    assert zones["normal"][1] == zones["saturated"][0] == math.log2(448)


def test_numbers_in_words():
    assert (
        format_text.signed(-0.00123) == "−0.0012"
        and format_text.signed(0.0) == "0.0000"
        and format_text.signed(-0.00001) == "0.0000"
    )
    assert (
        format_text.size(1_310_000_000) == "1.22 GiB"
        and format_text.size(12) == "12 bytes"
        and format_text.size(1_070_000_000) == "1,020 MiB"
    )
    assert [format_text.duration(s) for s in (0.21, 99.9, 245, 11_220)] == [
        "0.2 s",
        "99.9 s",
        "4 min 05 s",
        "3 h 07 min",
    ]
    assert [format_text.percent(s).replace("\xa0", " ") for s in (0.0, 1e-9, 0.000031, 0.5, 1.0)] == [
        "0 %", "< 0.0001 %", "0.0031 %", "50.0 %", "100 %"
    ]  # fmt: skip
    assert format_text.magnitude(2.36e-8).replace("\xa0", " ") == "2.36 × 10⁻⁸"
    assert format_text.rounded(3_212_928) == "3.21 million" and format_text.rounded(999) == "999"
    assert (
        format_text.plural(1, "step") == "1 step"
        and format_text.plural(1200, "step") == "1,200 steps"
    )


def test_the_reference_of_the_made_up_runs_sees_the_same_batches():
    """The comparison in these tests is a paired one only if this holds."""
    tokens = [
        [event["tokens"] for event in events(plan) if event["event"] == "step"]
        for plan in (Plan(), REFERENCE)
    ]
    assert tokens[0] == tokens[1]


def test_layers_that_differ_in_their_notes_are_one_row_that_tells_them(tmp_path):
    rows = [
        {"name": f"layers.{i}.up", "recipe": "int4-hq-lss", "note": f"adds {i % 2}"}
        for i in range(4)
    ]
    [group] = tables.layers(recorded(tmp_path, describe=rows))
    assert group["names"] == {"layers.*.up": 4}
    assert group["notes"] == {
        "adds 0": ["layers.0.up", "layers.2.up"],
        "adds 1": ["layers.1.up", "layers.3.up"],
    }


def test_what_layers_send_has_a_column_where_they_send(tmp_path):
    folder = write_run(tmp_path / "run", Plan(steps=1))
    assert "<th>Sends</th>" not in written(folder)
    facts = run(Plan(steps=1))
    facts["describe"][0]["sends"] = "gradient as E4M3"
    (folder / "run.json").write_text(json.dumps(facts))
    html = written(folder)
    assert "<th>Sends</th>" in html and ">gradient as E4M3</td>" in html


def test_what_happened_is_told_in_order(tmp_path):
    listed = [
        {"event": "nonfinite_amax", "step": 7, "module": "m", "role": "gy", "count": 3},
        {"event": "nonfinite_amax", "step": 9, "module": "m", "role": "gy", "count": 5},
        {
            "event": "switch",
            "step": 240,
            "switch": "bf16@80%",
            "layers": 14,
            "before": ["nvfp4"],
            "after": ["bf16"],
        },
        {"event": "switch", "step": 250, "switch": "bf16@81%"},  # as an earlier version wrote it
        {
            "event": "launches",
            "step": 30,
            "words": "idle for 5 ms",
            "advice": ["Compile the model."],
        },
        {"event": "resume", "step": 5, "skipped": []},
        {"event": "spike", "step": 8, "cause": "data", "sentence": "The loss jumped."},
        {"event": "guard", "step": 9, "verdict": "unknown", "sentence": "Not known yet."},
        {"event": "rewind", "step": 20, "steps": 5, "why": "guard"},
        {
            "event": "blame",
            "step": 25,
            "suspects": ["down_proj:output"],
            "recipes": ["down_proj=bf16:output"],
        },
        {"event": "guard", "step": 25, "verdict": "worse", "sentence": "The loss is higher."},
        {"event": "blame", "step": 26, "suspects": [], "recipes": []},
    ]
    assert tables.happenings(recorded(tmp_path, listed)) == [
        "Step 5: The run resumed from its beginning.",
        "Step 7: An amax of the output gradients of m was not finite (5 readings, the last at step 9) and was kept out of the "
        "amax history.",
        "Step 8: The loss jumped.",
        "Step 20: The steps from here to 25 are those of BF16.",
        'Step 25: 1 product suspect: down_proj:output. In 16 bits with recipe.layers = ["down_proj=bf16:output"].',
        "Step 25: Alarm of the guard. The loss is higher.",
        "Step 26: No product is suspect.",
        "Step 30: idle for 5 ms. Compile the model.",
        "Step 240: 14 layers went from nvfp4 to bf16.",
    ]
    assert tables.happenings(recorded(tmp_path)) == []


def test_the_score_in_16_bits_says_its_step(tmp_path):
    """After a guard has put a run into BF16 its evaluations have one score."""
    listed = [
        {"event": "eval", "step": 60, "loss": 4.75, "wide": {"loss": 5.0}},
        {"event": "eval", "step": 120, "loss": 4.5},
    ]
    [card] = measured.wide_cards(recorded(tmp_path, listed), "nats/token")
    assert card["note"] == "at step 60; +0.2500 to the run's own products"


def test_a_single_evaluation_is_numbers_and_no_figure(tmp_path):
    """A card for each score; with a second evaluation the scores are curves."""
    listed = [{"event": "eval", "step": 60, "loss": 0.5, "accuracy": 0.75, "f1": 0.5}]
    once = recorded(tmp_path, listed)
    assert [card["value"] for card in measured.metric_cards(once)] == ["0.7500", "0.5000"]
    assert report.metric_figure(once) == "" == report.loss_figure(once)
    once.events.append({**listed[0], "step": 120})
    assert report.metric_figure(once) and report.loss_figure(once)


def test_a_speed_has_its_quartiles(tmp_path):
    """Of all steps but the first, which includes start-up."""
    rates = [1.0, 100.0, 200.0, 300.0, 400.0, 500.0]
    steps = [
        {"event": "step", "step": number, "tokens_per_s": rate}
        for number, rate in enumerate(rates, 1)
    ]
    cards = measured.cost_cards(recorded(tmp_path, steps), None)
    [card] = [card for card in cards if card["unit"] == "tokens/s"]
    assert card["value"] == "300" and "200" in card["note"] and "400" in card["note"]


def test_a_gain_of_recipe_and_fused_kernels_says_so(tmp_path):
    folder = write_pair(tmp_path / "run")
    for fused in ([], ["layers.*.mlp (swiglu)"]):
        (folder / "run.json").write_text(json.dumps(run(Plan()) | {"fused": fused}))
        said = measured.OF_BOTH.format(name=report.read(folder).reference.name)
        assert (said in report.gain(folder)) == (said in written(folder)) == bool(fused)


def test_padding_is_one_card(tmp_path):
    padding = {
        way: {"tokens": 50, "positions": n}
        for way, n in (("fixed", 200), ("shuffled", 100), ("planned", 50))
    }
    steps = [{"event": "step", "step": n, "inputs": 30, "positions": 40} for n in (1, 2)]
    [card] = measured.metric_cards(recorded(tmp_path, steps, data={"padding": padding}))
    assert card["value"].replace("\xa0", " ") == "25.0 %"
    assert card["note"].replace("\xa0", " ") == (
        "of all positions; 0 % planned by length, first epoch, 50.0 % in shuffled batches, 75.0 % in rows of one width"
    )


def test_the_best_of_equal_evaluations_is_the_one_of_least_loss(tmp_path):
    """As the run chooses whose weights it keeps."""
    scores = [(1, 0.9, 0.5), (2, 0.9, 0.4), (3, 0.9, 0.4), (4, 0.8, 0.1), (5, math.nan, 0.1)]
    listed = [
        {"event": "eval", "step": step, "mcc": mcc, "loss": loss} for step, mcc, loss in scores
    ]
    assert measured.best(recorded(tmp_path, listed, best="mcc")) == ("mcc", 2, 0.9)
    assert measured.best(recorded(tmp_path, listed, best="loss"))[1] == 4
    assert measured.best(recorded(tmp_path, listed, best="")) is None

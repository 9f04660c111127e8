"""A guarded run: without an alarm the bits of the run without; with one the reference becomes the run; stops and kills (exact)."""

from __future__ import annotations

import copy
import json
import math
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from narrowgauge.conversion import suspended
from narrowgauge.conversion.switching import switch
from narrowgauge.diagnose.runs import decode, encode
from narrowgauge.errors import ConfigError, OutOfMemoryError, StorageError
from narrowgauge.lab import probe, run_guard, training
from narrowgauge.nn.linear import QLinear
from narrowgauge.train import checkpoint_ref
from narrowgauge.train.checkpoint import store
from narrowgauge.train.config.settings import replace
from narrowgauge.train.guard_state import KEY
from tests.compare import assert_same
from tests.lab.killed_guard import SICK, hurt
from tests.raising import coded, raises, with_code
from tests.selection import quick, slow_on_a_plain_cpu
from tests.train import tiny
from tests.train.test_deferred import late  # noqa: F401
from tests.train.test_loop import Poison, in_forward, installed  # noqa: F401
from tests.train.test_torchrun import trained

RUNS = [
    {"recipe": "fp8-delayed", "precision": "amp-fp16", "states": "8bit"},
    {"recipe": "int4-hq-lss", "micro_batches": 2},
    {"recipe": "int4-hq-bs", "precision": "bf16-o3"},
    {
        "recipe": "fp8-current",
        "precision": "bf16-o2",
        "states": "4bit",
        "optimizer": "lion",
        "held_gradients": "fp8",
    },
    {"recipe": "mxfp8", "states": "8bit", "held_gradients": "none", "clip_by": "two-pass"},
    {"recipe": "nvfp4", "fuse": True, "switch": "fp8-current@7"},
]


def same(config, reference):
    assert tiny.losses(Path(config.output)) == tiny.losses(Path(reference.output))
    assert tiny.digests(Path(config.output)) == tiny.digests(Path(reference.output))


def checks(config):
    return tiny.events(Path(config.output), "guard")


@pytest.mark.slow
@slow_on_a_plain_cpu
@pytest.mark.parametrize("settings", quick(RUNS[:1], RUNS), ids=str)
def test_without_an_alarm_a_guarded_run_is_the_run(make, settings, capfd, cpu):
    common = {**settings, "steps": 12, "eval_every": 5}
    reference = make("reference", **common)
    config = make("guarded", **common, guard="every=4,steps=3,margin=50%,then=stay")
    assert training.run(reference) == training.run(config) == 0
    same(config, reference)
    assert [(event["begun"], event["step"]) for event in checks(config)] in (
        [(4, 7), (8, 11)],
        [(8, 11)],
    )
    first = checks(config)[0]
    assert (
        first["control"] is not None and first["difference"] == first["narrow"] - first["wide"] != 0
    )
    assert all(event["control"] is None for event in checks(config)[1:])
    sees = settings["recipe"] != "int4-hq-lss" and "held_gradients" not in settings
    assert all(
        (event["weights"] > 0) == (event["slopes"] is not None) == sees for event in checks(config)
    )
    assert all(event["same"] is not None for event in checks(config))
    own = tiny.losses(Path(config.output))
    assert first["narrow"] == (own[first["step"] - 1] + own[first["step"]]) / 2
    assert not Path(config.output, "guard").exists()
    said = capfd.readouterr().err
    assert "no alarm; " in said and ("weights are compared" in said) == sees


def hooks_of(optimizer):
    return len(optimizer._optimizer_step_pre_hooks)


def test_a_run_that_is_put_back_in_the_first_step_of_a_check_has_no_hook_of_it(make, before_step):
    """As a skip of a spike does: its hook would sample the gradients of every later step, and each dropped check leave one more."""
    found = []

    def put_back(trainer):
        [guard] = trainer.plugins.members
        found.append((guard.engine.check is not None, hooks_of(trainer.optimizer)))
        guard.on_load(guard.state())
        found.append((guard.engine.check is not None, hooks_of(trainer.optimizer)))

    before_step(5, put_back)
    config = make("run", recipe="fp8-row", steps=8, guard="every=4,steps=3,margin=50%,then=warn")
    assert training.run(config) == 0
    assert found == [(True, 1), (False, 0)]
    assert [event["begun"] for event in checks(config)] == [5], "it begins anew"


@pytest.fixture
def sick(installed):  # noqa: F811
    """Runs are much worse on narrow numbers than in BF16."""
    installed(hurt)


@pytest.fixture
def moments(before_step):
    """moments({5: do}): calls do(trainer) just before these steps of the run."""

    def install(table):
        for number, do in table.items():
            before_step(number, do)

    return install


@pytest.mark.slow
def test_the_reference_becomes_the_run_and_stays(make, sick, moments, capfd):
    """As a run that was in BF16 from where the check with the alarm began; the next check tries narrow numbers again."""
    config = make("guarded", **SICK)
    assert training.run(config) == 0
    begun, ended = checks(config)[1]["begun"], checks(config)[1]["step"]
    assert [(each["verdict"], each["then"]) for each in checks(config)] == [
        ("unknown", ""), ("worse", "stay"), ("worse", "stay"), ("worse", "stay"),
    ]  # fmt: skip
    assert [
        (each["step"], each["steps"]) for each in tiny.events(Path(config.output), "rewind")
    ] == [
        (8, 2),
        (12, 2),
        (16, 2),
    ]
    reference, held = make("reference", **{**SICK, "guard": ""}), ExitStack()
    moments({begun + 1: lambda trainer: held.enter_context(suspended(trainer.model))})
    with held:
        assert training.run(reference) == 0
    same(config, reference)
    assert (begun, ended) == (8, 10)
    said = capfd.readouterr().err
    alarm = next(each for each in checks(config) if each["verdict"] == "worse")
    assert alarm["then"] == "stay" and f"step 10: guard: {alarm['sentence']}" in said
    assert "4 checks, 3 of them alarms; 4 steps that did not count, 20.0" in said
    assert not Path(config.output, "guard").exists()


@pytest.mark.slow
def test_the_cause_of_an_alarm_is_looked_for_at_the_runs_own_end(make, sick, monkeypatch):
    """At the end of the reference, amax histories are as old as the check."""
    found = []
    monkeypatch.setattr(
        run_guard,
        "blame_run",
        lambda trainer, *_, **__: found.append(copy.deepcopy(trainer.collected()[0])),
    )
    common = {**SICK, "recipe": "fp8-delayed", "steps": 10}
    config, reference = make("guarded", **common), make("reference", **{**common, "guard": ""})
    assert training.run(config) == training.run(reference) == 0
    [tensors] = found
    assert [each["then"] for each in checks(config)] == ["", "stay"]
    saved = store.load(Path(reference.output, "checkpoints/step-00000010")).tensors
    assert tensors.keys() == saved.keys()
    for kind, own in saved.items():
        assert_same(dict(sorted(tensors[kind].items())), dict(sorted(own.items())))


@pytest.mark.slow
def test_a_dead_layer_is_an_alarm_that_names_it(make, installed):  # noqa: F811
    """Nothing that a stretch sees."""

    def die(model):
        layer = model.model.layers[1].mlp.down_proj
        layer.register_forward_hook(
            lambda layer, given, output: output if layer.is_suspended else output * 0
        )

    installed(die)
    config = make("run", steps=12, guard="every=4,steps=2,margin=50%")
    assert training.run(config) == 0
    first, second = checks(config)
    assert first["outside"]["model.layers.1.mlp.down_proj"] == 0 and second["verdict"] == "worse"
    assert (second["seen_on"], "model.layers.1.mlp.down_proj" in second["sick"]) == (
        "gradient",
        True,
    )


@pytest.mark.slow
def test_narrow_numbers_are_tried_again_and_taken_if_they_do_not_hurt(make, sick, moments):
    """What hurts ends at step 12: by its evidence the run is narrow again some checks later."""
    config = make("guarded", **{**SICK, "steps": 60})

    def heal(trainer):
        for each in trainer.model.modules():
            if isinstance(each, QLinear):
                each._forward_hooks.clear()

    moments({12: heal})
    assert training.run(config) == 0
    words = [each["then"] for each in checks(config)]
    assert words[1] == "stay" and words[-1] == ""
    assert checks(config)[-1]["verdict"] != "worse"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "fp8-row"])
def test_a_wider_recipe_from_there_on(make, sick, moments, recipe):
    config = make(
        "guarded",
        **{**SICK, "recipe": "mxfp4", "guard": f"every=4,steps=2,margin=0.02%,then={recipe}"},
    )
    assert training.run(config) == 0
    reference, held = make("reference", **{**SICK, "recipe": "mxfp4", "guard": ""}), ExitStack()

    def widen(trainer):
        held.close()
        switch(trainer.model, recipe)

    moments({9: lambda trainer: held.enter_context(suspended(trainer.model)), 11: widen})
    assert training.run(reference) == 0
    same(config, reference)
    [event] = tiny.events(Path(config.output), "switch")
    assert (event["step"], event["switch"], event["after"]) == (11, f"guard: {recipe}@10", [recipe])
    assert len(checks(config)) == (2 if recipe == "bf16" else 4)
    assert (
        training.run(replace(config, steps=22, resume=True)) == 0
    )  # the recipe is known to its checkpoints
    assert training.run(replace(config, steps=24, resume=True, guard="")) == 0


@pytest.mark.slow
def test_a_wider_recipe_does_not_end_the_guard_of_embeddings(make, sick, capsys):
    guard = "every=4,steps=2,margin=0.02%,then=bf16"
    config = make(
        "guarded", **{**SICK, "recipe": "mxfp4", "embedding_codes": "int4", "guard": guard}
    )
    assert training.run(config) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "From here on the run has recipe bf16; embeddings keep their int4 codes." in said
    assert len(checks(config)) == 4, "BF16 would have none: two"


@pytest.mark.slow
def test_a_switch_after_the_guards_narrows_nothing(make, sick):
    config = make(
        "guarded",
        **{
            **SICK,
            "recipe": "mxfp4",
            "switch": "fp8-current@14",
            "guard": "every=4,steps=2,margin=0.02%,then=bf16",
        },
    )
    assert training.run(config) == 0
    assert [event["switch"] for event in tiny.events(Path(config.output), "switch")] == [
        "guard: bf16@10"
    ]
    run = json.loads(Path(config.output, "run.json").read_text("utf-8"))
    assert {row["recipe"] for row in run["describe"]} <= {"bf16", "none"}


@pytest.mark.slow
def test_a_check_does_not_straddle_a_switch(make):
    config = make(
        "guarded",
        recipe="nvfp4",
        switch="fp8-current@5",
        steps=16,
        guard="every=4,steps=3,margin=50%",
    )
    assert training.run(config) == 0
    assert [event["begun"] for event in checks(config)] == [6, 12]


# --- stops


# (where, number of the step there, steps after which checks begin then). A replay takes two steps, with a control four. A request in the
# last step of a replay cuts nothing: the check is judged, and then the run stops.
STOPS = [
    ("run", 6, [6, 8, 12, 16]),
    ("run", 5, [5, 8, 12, 16]),
    ("replay", 1, [6, 8, 12, 16]),
    ("replay", 3, [6, 8, 12, 16]),
    ("replay", 4, [4, 8, 12, 16]),
    ("run", 7, [4, 8, 12, 16]),
    ("run", 9, [4, 9, 12, 16]),
    ("run", 10, [4, 10, 12, 16]),
    ("replay", 5, [4, 10, 12, 16]),
    ("replay", 6, [4, 8, 12, 16]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "number", "begun"), quick(STOPS[:1], STOPS))
@pytest.mark.parametrize(
    "settings", quick([{}], [{}, {"checkpoint_every": 3, "recipe": "fp8-delayed"}]), ids=str
)
def test_a_check_that_a_stop_cuts_begins_anew(
    make, sick, moments, before_step, where, number, begun, settings
):
    """Bit for bit the run that was in BF16 from where the check with the alarm began."""
    config = make("stopped", **SICK | settings)
    with pytest.MonkeyPatch.context() as patch:
        if where == "run":
            before_step(number, lambda trainer: signal.raise_signal(signal.SIGTERM))
        else:
            stop_in_replay(patch, number)
        assert training.run(config) == 75
    assert training.run(replace(config, resume=True)) == 0
    assert [event["begun"] for event in checks(config)] == begun
    assert [event["then"] for event in checks(config)] == ["", "stay", "stay", "stay"]
    reference, held = make("reference", **{**SICK, **settings, "guard": ""}), ExitStack()
    moments({begun[1] + 1: lambda trainer: held.enter_context(suspended(trainer.model))})
    with held:
        assert training.run(reference) == 0
    same(config, reference)


def stop_in_replay(patch, number):
    """A stop request in a step of BF16, by its number."""
    taken, count = probe._step, []

    def step(*given):
        count.append(1)
        if len(count) == number:
            signal.raise_signal(signal.SIGTERM)
        return taken(*given)

    patch.setattr(probe, "_step", step)


def verdicts(config):
    """Without what a clock says."""
    return [
        {key: value for key, value in event.items() if key != "spent_s"} for event in checks(config)
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("then", "kills"), [("stay", 20), ("bf16", 8)])
def test_a_run_that_is_killed_anywhere_in_a_check_goes_on_as_if_it_was_not(
    text, tmp_path, then, kills
):
    """kill -9 at many places: in replays, between them, in what is saved. Each check begins at a checkpoint, from which it begins anew."""
    from tests.lab import killed_guard

    changes = {**SICK, "guard": f"every=4,steps=2,margin=0.02%,then={then}", "checkpoint_every": 2}
    reference, config = (
        tiny.settings(text, tmp_path / name, **changes) for name in ("reference", "killed")
    )
    assert killed_guard.run(reference, at=0) == 0
    places = killed_guard.places(reference)
    assert places >= kills
    for at in range(1, places + 1, places // kills):
        shutil.rmtree(config.output, ignore_errors=True)
        assert killed_guard.run(config, at=at) == -signal.SIGKILL, at
        assert killed_guard.run(replace(config, resume=True), at=0) == 0, at
        same(config, reference)
        assert verdicts(config) == verdicts(reference), at


@pytest.mark.slow
@pytest.mark.parametrize("is_branch", [False, True])
def test_a_check_that_was_cut_begins_anew_under_other_settings(
    make, before_step, tmp_path, told, is_branch
):
    """Its reference has the settings of its own steps: else another learning rate would be taken for the number format."""
    config = make(
        "run", steps=24, checkpoint_every=8, keep=9, guard="every=6,steps=6,margin=50%,then=stay"
    )
    if is_branch:
        assert training.run(config) == 0
        config = checkpoint_ref.branched(
            f"{config.output}@8", str(tmp_path / "branch"), learning_rate=3e-2
        )
        assert training.run(config) == 0
    else:
        before_step(8, lambda trainer: signal.raise_signal(signal.SIGTERM))
        assert training.run(config) == 75
        assert training.run(replace(config, resume=True, steps=48)) == 0
    assert len(with_code(told, "guard.check-dropped")) == 1
    assert checks(config)[0]["begun"] == 8


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_version_has_its_check_anew(make, before_step):
    """It kept a check in progress under `running`, and the end of its reference in RUN/guard."""
    config = make("run", steps=12, guard="every=4,steps=3,margin=50%")

    def as_before(trainer):
        [guard] = trainer.plugins.members
        facts = guard.state

        def state():
            known = decode(facts()[KEY])
            del known["due"]
            return {KEY: encode(known | {"running": {"begun": 4, "wide": [], "terms": {}}})}

        guard.state = state
        Path(config.output, "guard").mkdir()
        signal.raise_signal(signal.SIGTERM)

    before_step(6, as_before)
    assert training.run(config) == 75
    assert training.run(replace(config, resume=True)) == 0
    assert [event["begun"] for event in checks(config)] == [6]
    assert not Path(config.output, "guard").exists()


# --- what else a run may be


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"recipe": "fp8-delayed", "precision": "amp-fp16"}, {"recipe": "fp8-row", "states": "8bit"}],
    ids=str,
)
def test_a_guarded_run_that_is_read_late_is_the_run(make, late, sick, settings):  # noqa: F811
    early, delayed = make("early", **{**SICK, **settings}), make("late", **{**SICK, **settings})
    assert training.run(early) == 0
    late()
    assert training.run(delayed) == 0
    same(delayed, early)
    assert verdicts(delayed) == verdicts(early)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_run(make, monkeypatch):
    """As traced graphs, without the generated code, whose compilation takes minutes."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: real(model, backend="aot_eager"))
    reference = make("reference", compile=True, steps=8)
    config = make("guarded", compile=True, steps=8, guard="every=3,steps=3,margin=50%")
    assert training.run(reference) == training.run(config) == 0
    same(config, reference)


@pytest.mark.slow
def test_a_reference_that_diverges_is_said_to_be_so(make, installed, capfd):  # noqa: F811
    """BF16 gives NaN where the narrow run does not."""

    def poison(model):
        layer = model.model.layers[1].mlp.down_proj
        layer.register_forward_hook(
            lambda module, given, output: output * math.nan if module.is_suspended else output
        )

    installed(poison)
    config = make("guarded", steps=12, guard="every=4,steps=2,then=stay")
    assert training.run(config) == 0
    assert [(each["verdict"], each["lost"], each["then"]) for each in checks(config)] == [
        ("reference", 5, ""),
        ("reference", 9, ""),
    ]
    said = capfd.readouterr().err
    assert all(each["sentence"] in said for each in checks(config))
    assert not tiny.events(Path(config.output), "rewind")


# --- bad input


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"guard": "every=2,steps=3"}, coded("config.guard", "3 steps", "interval of 2")),
        ({"guard": "every=50,steps=9"}, coded("config.guard", "9 steps", "run of 6")),
        ({"guard": "every=5,steps=3"}, coded("config.guard", "after step 5")),
        ({"guard": "every=2,steps=2,margin=0"}, coded("config.guard", "margin = '0'")),
        ({"guard": "every=2,steps=2,margin=-1%"}, coded("config.guard", "margin = '-1%'")),
        ({"guard": "every=2,steps=2,margin=inf"}, coded("config.guard", "margin = 'inf'")),
        ({"guard": "every=2,stepps=2"}, coded("config.guard", "'stepps'", "Closest: 'steps'")),
        ({"guard": "every=2,steps=2,every=3"}, coded("config.guard", "'every'")),
        ({"guard": "every=2,steps=2", "compare": "bf16"}, coded("config.guard", "compare = 'bf16'")),
        ({"guard": "every=2,steps=2", "device": "cuda", "cuda_graph": True}, coded("config.guard", "cuda_graph")),
        ({"guard": "every=2,steps=2", "recipe": "bf16"}, coded("guard.not-converted", "'bf16'")),
        ({"guard": "every=2,steps=2", "recipe": "none"}, coded("guard.not-converted", "'none'", "16")),
        ({"guard": "every=2,steps=2,then=nvfp4"}, coded("guard.then", "then = 'nvfp4'")),
        ({"guard": "every=2,steps=2,then=sty"}, coded("guard.then", "then = 'sty'", "'warn'", "'stay'")),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused_before_the_first_step(make, settings, words):
    with raises(ConfigError, words):
        training.run(make(**settings))


def test_a_copy_that_fits_nowhere_is_refused_before_the_first_step(make, monkeypatch):
    config = make("nowhere", guard="every=2,steps=2")
    monkeypatch.setattr(probe, "require_free_space", refusing("host", "disk"))
    with pytest.raises(StorageError, match="disk"):
        training.run(config)
    assert not tiny.losses(Path(config.output))


@pytest.mark.slow
def test_a_copy_goes_to_the_disk_where_the_host_has_no_room(make, monkeypatch, capfd):
    reference, config = make("reference", steps=8), make("disk", steps=8, guard="every=2,steps=2")
    assert training.run(reference) == 0
    monkeypatch.setattr(probe, "require_free_space", refusing("host"))
    assert training.run(config) == 0
    same(config, reference)
    assert f"of state in {config.output}" in capfd.readouterr().err
    assert not [
        each.name for each in Path(config.output).iterdir() if each.name.startswith(".fork")
    ]


def refusing(*places):
    def refuse(nbytes, where, what):
        place = "host" if where == "host" else "disk"
        if place in places:
            raise (OutOfMemoryError if place == "host" else StorageError)(
                f"{what} needs {nbytes} bytes: none on the {place}."
            )

    return refuse


@pytest.mark.slow
def test_a_run_in_bf16_is_not_resumed_without_its_guard(make, sick, before_step):
    config = make("stopped", **SICK)
    before_step(12, lambda trainer: signal.raise_signal(signal.SIGTERM))
    assert training.run(config) == 75
    with raises(ConfigError, "guard.left-in-bf16"):
        training.run(replace(config, resume=True, guard=""))
    assert training.run(replace(config, resume=True)) == 0


@pytest.mark.slow
def test_a_check_that_was_cut_begins_anew_with_other_steps(make, before_step, told):
    config = make("stopped", steps=12, guard="every=4,steps=3,margin=50%")
    before_step(6, lambda trainer: signal.raise_signal(signal.SIGTERM))
    assert training.run(config) == 75
    assert training.run(replace(config, resume=True, guard="every=4,steps=2,margin=50%")) == 0
    assert len(with_code(told, "guard.check-dropped")) == 1
    assert [event["begun"] for event in checks(config)] == [6, 8]


# --- several ranks


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-delayed", "int4-hq-lss"])
@pytest.mark.parametrize("parallel", ["dp", "fsdp", "tp=2", "pp=2"])
def test_a_guarded_run_of_two_ranks(ranks, make, parallel, recipe):
    if (parallel, recipe) == ("tp=2", "int4-hq-lss"):
        pytest.skip("no recipe that samples rows is cut")
    common = {
        "recipe": recipe,
        "parallel": parallel,
        "steps": 12,
        "micro_batches": 2 if parallel == "pp=2" else 1,
    }
    reference = make("reference", **common)
    config = make("guarded", **common, guard="every=4,steps=3,margin=50%,then=stay")
    assert ranks(2)(trained, reference) == [0, 0]
    assert ranks(2)(trained, config) == [0, 0]
    same(config, reference)
    assert len(checks(config)) == 2 and checks(config)[0]["control"] is not None


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["dp", "fsdp", "tp=2"])
@pytest.mark.parametrize("then", ["stay", "bf16"])
def test_an_alarm_of_two_ranks(ranks, make, parallel, then):
    """As of one process with two micro-batches, and a stop between checks changes nothing. tp has other last bits than one process."""
    common = {**SICK, "guard": f"every=4,steps=2,margin=0.02%,then={then}", "parallel": parallel}
    config, stopped = make("ranks", **common), make("stopped", **common)
    assert ranks(2)(trained_sick, config) == [0, 0]
    assert [each["then"] for each in checks(config)][:2] == ["", then]
    assert ranks(2)(trained_sick, stopped, [("stop", 0, 11)]) == [130, 130]
    assert ranks(2)(trained_sick, replace(stopped, resume=True)) == [0, 0]
    same(stopped, config)
    assert verdicts(stopped) == verdicts(config)


def trained_sick(config, faults=()):
    from narrowgauge.train import assembly

    build = assembly.build

    def built(*given):
        model = build(*given)
        hurt(model)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "build", built)
        return trained(config, faults)

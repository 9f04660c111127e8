"""A flag for every setting of `TrainConfig`, and the configuration that flags and a TOML file give.

Flags override the TOML file. The setting `hidden_size` of the table `[model]` is the flag
`--model.hidden-size`. Former flags, such as `--hidden-size`, are hidden and understood for one
release.

Flags of other trainers are read as ours where they mean the same (`of_others`).

With --resume and no CONFIG, the settings come from the run folder's config.toml; with --from, from
the parent's. Settings that must not change on resuming or branching are refused before torch is
imported, unknown recipes before data are read.
"""

import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter, Token

from narrowgauge.diagnose.former_settings import FORMER
from narrowgauge.errors import ConfigError
from narrowgauge.train import checkpoint_ref, run_folder
from narrowgauge.train.config import foreign_names, recipe_syntax, switch_syntax, toml
from narrowgauge.train.config.merged_settings import MERGED
from narrowgauge.train.config.rules import former_path
from narrowgauge.train.config.settings import (
    NO_RECIPE,
    NUMBERS,
    TABLE,
    OneOf,
    OneOrPair,
    TrainConfig,
    former_key,
    key_of,
    key_of_name,
    path_of,
    resolved,
    shown,
)

FORMERLY = "formerly_"  # prefix of the parameter of a former flag
EARLIER = "earlier_"  # the same for a flag with a table, of a setting that is one with others now
WHOLE = "whole_"  # prefix of the parameter of --model.name, beside --model
PART = "__"  # stands for the dot of --guard.every in the name of a parameter
WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
FILE = Parameter(
    help="TOML file with settings.", show_default=False, group=Group("file", sort_key=0)
)


def refuse_unknown_recipes(settings: TrainConfig) -> None:
    """Raise ConfigError with the closest names for an unknown recipe. Imports torch."""
    from narrowgauge import recipes

    of_setting = {
        "recipe": recipe_syntax.names(settings.recipe, {}) - {recipes.AUTO},
        "recipe.layers": recipe_syntax.names(NO_RECIPE, settings.layers_recipe) - {recipes.AUTO},
        "compare": {settings.compare or NO_RECIPE},
        "recipe.switch": {entry.recipe for entry in switch_syntax.parse(settings.switch)},
    }
    for key, names in of_setting.items():
        refuse_unknown_names(key, {*names} - {NO_RECIPE})


def refuse_unknown_names(key: str, names: Collection[str]) -> None:
    """Raises ConfigError, which names the setting or parameter `key`, for a name of no recipe."""
    from narrowgauge import recipes

    for name in sorted(names):
        try:
            recipes.get(name)
        except ConfigError as error:
            words = (
                str(error)
                .removeprefix("recipes.get: ")
                .replace(f"no recipe {name!r}", "no such recipe")
            )
            raise ConfigError(f"{key} = {name!r}: {words}", code=error.code) from None


def configuration(path: str, given: Mapping[str, Any]) -> TrainConfig:
    """Resolve the configuration from a file and the flags (by name of the parameter)."""
    flags = from_flags(given)
    given = {name: entry.value for name, entry in flags.items()}
    if given.get("parent") == "":  # an unset shell variable; in a file '' is the default
        raise ConfigError(
            "--from '': names no run, and without one this would be a new run. Name the parent, as --from runs/first@100, or leave "
            "--from out.",
            code="train.from-empty",
        )
    from_file = _from_file(path, given)
    say_former(flags, from_file if path else {})
    config = resolved(toml.build(from_file, flags))
    folder = run_folder.RunFolder(Path(config.output))
    begins = not folder.has_run() or (not config.resume and run_folder.is_numbered(folder.path))
    # A resumed run is checked against its own settings, a branch against its parent's.
    if config.resume and os.path.lexists(folder.config) and (folder.has_run() or not config.parent):
        run_folder.refuse_other_run(resolved(toml.load_stored(folder.config)), config)
    elif config.parent and begins:
        origin = {**from_file, **flags}["parent"].origin
        with _naming_parent(origin, config.parent) as run:
            checkpoint_ref.refuse(checkpoint_ref.settings_of(run), config)
    return config


@contextmanager
def _naming_parent(origin: str, parent: str) -> Iterator[Path]:
    """The run of "RUN@STEP"; the error of a missing run names the flag, or the file and its key."""
    run = checkpoint_ref.CheckpointRef.of(parent).run
    try:
        yield run
    except ConfigError as error:
        if error.code != "run.place":
            raise
        name = origin if origin.startswith("--") else f"{origin}: from ="
        words = str(error).removeprefix(f"{run}: ")
        raise ConfigError(f"{name} {parent!r}: {words}", code=error.code) from None


def shared_settings(path: str, given: Mapping[str, Any], without: Collection[str]) -> TrainConfig:
    """Settings that several runs share, of a file ('': none) and the flags.

    without  names of settings of the file that the verb sets itself
    """
    flags = from_flags(given)
    from_file = toml.read(Path(path)) if path else {}
    # A flag that the verb does not take is refused by cyclopts, so only the file is filtered.
    shared = {name: entry for name, entry in from_file.items() if name not in without}
    say_former(flags, from_file)
    return toml.build(shared, flags)


def _from_file(path: str, given: Mapping[str, Any]) -> toml.Given:
    """Settings of CONFIG, or of the run to resume.

    The run folder may have been moved since it was written.
    """
    if path:
        return toml.read(Path(path))
    output = str(given.get("output") or TrainConfig.output)
    stored, parent = run_folder.RunFolder(Path(output)).config, str(given.get("parent") or "")
    if parent and not (given.get("resume") and run_folder.RunFolder(Path(output)).has_run()):
        with _naming_parent("--from", parent) as run:
            return checkpoint_ref.inherited(run, given)
    if given.get("resume") and os.path.lexists(stored):
        return {**toml.read_stored(stored), "output": toml.Entry(output, "")}
    # Otherwise a mistyped folder would start a run of pure defaults.
    if given.get("resume") and set(given) <= {"resume", "output"}:
        raise ConfigError(
            f"--resume: '{output}' holds no run (no config.toml) to go on with. Name the folder of one with --output, or give "
            "the CONFIG of a new run.",
            code="train.resume-no-run",
        )
    return {}


def flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def flag_of(parameter: str) -> str:
    """The flag of a parameter of `signature_of`."""
    return flag(_named(parameter)[1])


def from_flags(given: Mapping[str, Any]) -> toml.Given:
    """Settings by flags; `given` names the parameters of `signature_of`."""
    entries = []
    for parameter, value in given.items():
        name, key, former = _named(parameter)
        entries.append((name, flag(key), toml.Entry(value, flag(key), former)))
    return toml.given(entries)


def _named(parameter: str) -> tuple[str, str, str]:
    """(field or part, key as written, former flag or '') of a parameter of `signature_of`."""
    name = parameter.removeprefix(FORMERLY).removeprefix(EARLIER).removeprefix(WHOLE)
    name = name.replace(PART, ".")
    each = TrainConfig.__dataclass_fields__.get(name)
    earlier = next((key for key, part in toml.EARLIER.items() if part == name), key_of_name(name))
    if parameter.startswith(FORMERLY):
        key = former_key(each) if each else former_path(earlier)
        return name, key, flag(key)
    if parameter.startswith(EARLIER):
        return name, earlier, flag(earlier)
    return name, path_of(each) if each and parameter.startswith(WHOLE) else key_of_name(name), ""


def say_former(*layers: toml.Given) -> None:
    """Print one line on standard error if former names of settings were used."""
    words = toml.former_keys(*layers)
    if words and os.environ.get("RANK", "0") == "0":  # torchrun's name of the rank
        print(f"narrowgauge: {words}", file=sys.stderr)


def signature_of(function: Callable[..., int], without: Collection[str] = ()) -> inspect.Signature:
    """Signature for cyclopts: the function's own parameters plus the settings of TrainConfig.

    without  names of settings that the verb does not take
    """
    parameters = [
        each
        for each in inspect.signature(function).parameters.values()
        if each.kind is not each.VAR_KEYWORD
    ]
    groups: dict[str, Group] = {}
    for each in (each for each in fields(TrainConfig) if each.name not in without):
        table = toml.OF_ENTRIES.get(each.name, each.metadata["table"] or "run")
        group = groups.setdefault(table, Group(table, sort_key=len(groups) + 1))
        parameters.append(_parameter(each, each.name, key_of(each), group=group))
        for part, help in toml.PARTS.get(each.name, {}).items():
            key, name = f"{key_of(each)}.{part}", f"{each.name}{PART}{part}"
            read = None if each.name in toml.OF_ENTRIES else _read_part
            parameters.append(_part(name, key, help, converter=read, group=group))
            if former_path(key) != key:
                former = _part(FORMERLY + name, former_path(key), help, converter=read, show=False)
                parameters.append(former)
        if each.metadata["short"]:
            parameters.append(_parameter(each, WHOLE + each.name, path_of(each), show=False))
        if former_key(each) not in (key_of(each), path_of(each)):
            former = _parameter(each, FORMERLY + each.name, former_key(each), show=False)
            parameters.append(former)
    parameters += [
        _part(prefix + part.replace(".", PART), key, "", kind, show=False)
        for earlier, part in toml.EARLIER.items()
        for name, _, word in (part.partition("."),)
        if name not in without
        for kind in (MERGED[name].kinds[word],)
        for prefix, key in ((EARLIER, earlier), (FORMERLY, former_path(earlier)))
    ]
    return inspect.Signature(parameters)


class Unchecked:
    """Metadata of a type, by which pydantic takes any value.

    cyclopts checks defaults and converted values by pydantic wherever another package has imported
    it. The annotations here say how a flag is read, not what its setting becomes (a table, a pair,
    None if it was not given); TrainConfig checks that.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


UNCHECKED = Unchecked()


def _part(name: str, key: str, help: str, kind: type = str, **shape: Any) -> inspect.Parameter:
    """Parameter of a function that stands for a part of a setting."""
    if kind is bool:
        shape |= {"negative": f"--no-{flag(key)[2:]}"}
    elif kind is not str:
        shape |= {"converter": _read_value}
    words = Parameter(name=flag(key), help=help, show_default=False, **shape)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind, words, UNCHECKED],
    )


def _parameter(each: Field[Any], name: str, key: str, **shape: Any) -> inspect.Parameter:
    """Parameter of a function that stands for a setting, with the flag of `key`."""
    is_table = each.type is TABLE
    # A pair is one word, 0.9,0.95: cyclopts would take two.
    kind = list[str] if is_table else str if each.type is NUMBERS else each.type
    readers = {bool: None, TABLE: _read_table, NUMBERS: _read_numbers}
    read = readers.get(each.type, _read_value)
    shape |= {"negative": f"--no-{flag(key)[2:]}"} if each.type is bool else {}
    # Hidden parameters are former flags, or the full name beside a short one.
    also = [each.metadata["also"]] if each.metadata["also"] and shape.get("show", True) else []
    parameter = Parameter(
        name=[flag(key), *map(flag, also)], help=_help(each), negative_iterable=(), show_default=False, converter=read, **shape
    )  # fmt: skip
    # None stands for a table that was not given: a dict is no default of a signature.
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None if is_table else each.default,
        annotation=Annotated[kind, parameter, UNCHECKED],
    )  # fmt: skip


def _help(each: Field[Any]) -> str:
    """Help text of a setting, with its choices and its default."""
    rule = each.metadata["rule"]
    words = [
        each.metadata["help"],
        f"{rule}.".capitalize() if isinstance(rule, OneOf | OneOrPair) else "",
    ]
    if each.type is not TABLE and each.default != "":
        words.append(f"[{each.default if isinstance(each.default, str) else shown(each.default)}]")
    return " ".join(filter(None, words))


def _read_value(kind: Any, tokens: Sequence[Token]) -> Any:
    """Parse a flag as a TOML file would. cyclopts would round 2.5 to a whole number."""
    text = tokens[0].value
    # At most 40 characters: Python refuses to convert numbers of more than 4,300 digits, with its
    # own words.
    if kind is int and (not WHOLE_NUMBER.fullmatch(text) or len(text) > 40):
        raise ValueError(f"{text!r} is not a whole number")
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def _read_numbers(kind: Any, tokens: Sequence[Token]) -> tuple[float, ...]:
    text = tokens[0].value
    try:
        return tuple(float(number) for number in text.strip("[] ").split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not numbers with commas, as 0.9,0.95") from None


def _read_part(kind: Any, tokens: Sequence[Token]) -> Any:
    """Parse a part of a setting: true or false, or a number or word."""
    text = tokens[0].value
    return {"true": True, "false": False}.get(text, text)


def _read_table(kind: Any, tokens: Sequence[Token]) -> dict[str, str]:
    keyword = tokens[0].keyword or ""
    field = toml.NAMES.get(keyword.removeprefix("--").replace("-", "_"), "")
    return recipe_syntax.table(
        (token.value for token in tokens), toml.FORMS.get(field, "pattern=recipe")
    )


# --- Settings in messages, as they were typed ---

# Settings that a message may name by a word of everyday language, before their value alone.
SHORT_KEYS = "|".join(key for key in toml.NAMES if "." not in key)
IN_MESSAGES = re.compile(
    rf"(?<![\w./'\"=-])([a-z][a-z_]*(?:\.[a-z][a-z_0-9]*)+|(?:{SHORT_KEYS})(?= = ))(?![\w/-])(?: = (true|false)(?![\w.])|( = ))?"
)


def with_flags(message: str, arguments: Sequence[str]) -> str:
    """A message with flags in the place of keys that were typed, or of all if no file was named.

    arguments  the command line behind the verb
    """
    typed: dict[str, str] = {}
    for word in arguments:
        written = word.partition("=")[0]
        key = written.removeprefix("--").replace("-", "_")
        if written.startswith("--") and (path := _full(key)):
            typed[path] = written
    # Settings of a run that is resumed or branched stand in its config.toml.
    has_file = bool({"resume", "from"} & {*typed}) or any(
        not word.startswith("-") and (word.endswith(".toml") or os.path.isfile(word))
        for word in arguments[:1]
    )

    def spelled(found: re.Match[str]) -> str:
        path = _full(found[1])
        if not path or (has_file and path not in typed):
            return found[0]
        written = typed.get(path) or _shortest(path)
        if found[2] == "false" and not written.startswith("--no-"):
            return f"--no-{written[2:]}"
        return written if found[2] else f"{written} " if found[3] else written

    words = IN_MESSAGES.sub(spelled, message)
    # The place of a setting stands before it, and is the same flag.
    return re.sub(r"(?m)^(--[a-z][\w.-]*): (?=\1[ :])", "", words)


def _full(key: str) -> str:
    """Full name of a setting by any of its keys, or of a part; '' for no setting."""
    now = FORMER.get(key, key)
    name = toml.NAMES.get(now, "")
    each = TrainConfig.__dataclass_fields__.get(name)
    return path_of(each) if each else now if name else ""


# --- Flags of other trainers ---


@dataclass(frozen=True)
class Typed:
    """An argument as it was typed, with its value.

    words  what stands on the command line
    name   another trainer's name, or '' for all else
    value  its value, or ''
    """

    words: tuple[str, ...]
    name: str = ""
    value: str = ""


def of_others(
    verb: str, arguments: list[str], known: Collection[str]
) -> tuple[list[str], list[str]]:
    """Replace the flags of other trainers by ours. Returns the arguments, and a clause for each flag.

    known  names of the verb's parameters

    Raises ConfigError for a flag that has another meaning here, or none for the verb. The message
    says what to type.
    """
    found: list[str] = []
    told: list[str] = []
    typed = list(_typed(arguments))
    beside = _beside(typed)
    for each in typed:
        if not each.name:
            _refuse_of_train(verb, each.words[0].partition("=")[0], known)
            found += each.words
            continue
        given = f"{each.words[0].partition('=')[0]} {each.value}".strip()
        settings = foreign_names.understood(each.name, each.value, beside)
        if settings is None:
            words = foreign_names.answer(each.name, each.value, _shortened)
            raise ConfigError(
                f"{verb}: {given} is a flag of another trainer. Here: {words}", code="cli.foreign"
            )
        ours = " ".join(f"{_shortest(key)} {here or repr(here)}" for key, here in settings)
        if any(toml.NAMES[key].replace(".", PART) not in known for key, _ in settings):
            raise ConfigError(
                f"{verb}: {given} is {ours} of narrowgauge train, which {verb} does not take. See narrowgauge {verb} --help.",
                code="cli.foreign",
            )
        # Two names may stand for one pair of numbers, as of both betas.
        for flag_and_value in (f"{_shortest(key)}={here}" for key, here in settings):
            found += [flag_and_value] if flag_and_value not in found else []
        told.append(f"{given} as {ours or 'what happens anyway'}")
    return found, told


def _refuse_of_train(verb: str, typed: str, known: Collection[str]) -> None:
    """Raises ConfigError for the flag of a setting that the verb does not take."""
    key = typed.removeprefix("--").replace("-", "_")
    name = toml.NAMES.get(FORMER.get(key, key), "") if typed.startswith("--") else ""
    if name and name.replace(".", PART) not in known:
        # A study has --recipes and --seeds.
        step = f"Write {flag(name)}s" if f"{name}s" in known else "Leave it out"
        raise ConfigError(
            f"{verb}: {typed} is a flag of narrowgauge train, which {verb} decides itself. {step}. See narrowgauge {verb} --help.",
            code="cli.of-train",
        )


def _typed(arguments: list[str]) -> Iterator[Typed]:
    """The arguments, each foreign flag with its value."""
    left = list(arguments)
    while left:
        word = left.pop(0)
        flag_typed, equals, value = word.partition("=")
        name = flag_typed.removeprefix("--").replace("-", "_")
        if not flag_typed.startswith("--") or name not in foreign_names.FOREIGN:
            yield Typed((word,))
        elif not equals and left and _is_value(name, left[0]):
            yield Typed((word, left[0]), name, left.pop(0))
        else:
            yield Typed((word,), name, value)


def _beside(typed: Sequence[Typed]) -> foreign_names.Beside:
    """The command as a whole, which decides what some foreign flags mean."""
    foreign = {each.name: each.value for each in typed if each.name}
    words = [word for each in typed if not each.name for word in each.words]
    own: dict[str, str] = {}
    for word, behind in zip_longest(words, words[1:], fillvalue=""):
        key, equals, value = word.removeprefix("--").partition("=")
        key = FORMER.get(key.replace("-", "_"), key.replace("-", "_"))
        if word.startswith("--") and (name := toml.NAMES.get(key, "")):
            each = TrainConfig.__dataclass_fields__.get(name)
            own[path_of(each) if each else key] = value if equals else behind
    return foreign_names.Beside(
        foreign, own, own.get("task.name") or _task_of_file(words), int(os.environ.get("WORLD_SIZE", "1"))
    )  # fmt: skip


def _task_of_file(words: Sequence[str]) -> str:
    """The task of the file of settings among these words; a wrong file is refused later."""
    for word in words:
        if word.endswith(".toml") and not word.startswith("-") and os.path.isfile(word):
            try:
                return str(toml.read(Path(word))["task"].value)
            except (ConfigError, KeyError):
                break
    return TrainConfig.task


def _is_value(name: str, word: str) -> bool:
    """True if the word behind a foreign flag is its value, and no flag or file. -1 is a value."""
    meaning = foreign_names.FOREIGN[name]
    if isinstance(meaning, foreign_names.Answer) or not meaning.is_switch:
        return not word.startswith("-") or _is_number(word)
    values = getattr(meaning, "values", {})
    is_value = getattr(meaning, "is_value", lambda word: False)
    return word.lower() in {*values, *foreign_names.SWITCH} - {""} or is_value(word)


def _shortened(words: str) -> str:
    """A text with flags, each by its shortest name."""
    return re.sub(
        r"--([a-z][a-z0-9.-]*[a-z0-9])",
        lambda found: (
            _shortest(key) if (key := found[1].replace("-", "_")) in toml.NAMES else found[0]
        ),
        words,
    )


def _shortest(key: str) -> str:
    """The flag of a full key, the short one where there is one: --model for model.name."""
    name = toml.NAMES.get(key, "")
    return flag(key_of_name(name) if name and "." not in name else key)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

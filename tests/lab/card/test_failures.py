"""One process of a report fails, in each way and at each place: the rest is whole, and the culprit is named (exact, in words)."""

from __future__ import annotations

import json
import zipfile

import pytest

from narrowgauge.lab.card import archive, culprits, page, process
from tests.lab.card.reports import CULPRIT, HANGS_S, PLACES, job, report


def packed(line: dict[str, object]) -> dict[str, object]:
    """The line as an archive has it: a stack may be longer, where many modules are loaded."""
    output = str(line.get("output", ""))
    return line | ({"output": output[-archive.CUTS[0][0] :]} if output else {})


def test_every_failure_is_named_in_one_report_and_the_rest_is_whole(tmp_path):
    """A fault, a crash, a hang, a wrong bit and a refusal, at five places; all other processes pass."""
    failures = dict(zip(range(0, 10, 2), CULPRIT, strict=True))
    jobs = [job(place, failures.get(place, "")) for place in (*range(0, 9, 2), 5)]
    path, lines = report(tmp_path, jobs)
    ended = [line["status"] for line in lines]
    assert ended == ["fault", "fault", "hang", "wrong", "refused", "pass"], lines
    assert [line["job"] for line in lines] == [each.name for each in jobs]
    first, crash, hang, wrong, refused, _ = lines
    assert "illegal memory access" in first["why"] and first["at"] == "full grid"
    assert "SIGSEGV" in crash["why"] and crash["at"] == "self-check"
    assert f"{HANGS_S:.0f} s" in hang["why"] and "stand_in.py" in hang["output"], "its stack"
    assert "its codes is wrong" in wrong["why"] and wrong["stage"] == "full grid"
    assert "too many blocks" in refused["why"]
    found = archive.read(path)
    assert found.lines == list(map(packed, lines))
    assert found.facts["ended"] == "finished"
    text = page.write(found, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "4 processes failed." in text and all(each.name in text for each in jobs[:4])
    assert path.stat().st_size <= archive.MOST_BYTES and not (tmp_path / "report").exists()


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(PLACES)), ids=lambda place: PLACES[place][0])
@pytest.mark.parametrize("failure", ["fault", "hang", "wrong", "refused"])
def test_a_failure_at_each_place_costs_its_own_line_alone(failure, place, tmp_path):
    """Three processes, of which one fails in turn; checks run before timings, and others after the one that fails."""
    places = [(place + number) % len(PLACES) for number in (9, 0, 1)]
    jobs = [job(each, failure if each == place else "") for each in places]
    path, lines = report(tmp_path, jobs)
    ended = {line["job"]: line["status"] for line in lines}
    assert ended == dict.fromkeys(ended, "pass") | {job(place).name: CULPRIT[failure]}, lines
    assert len(ended) == len(lines) == 3
    assert next(line for line in lines if line["job"] == job(place).name)["why"]
    named = [line["job"] for line in culprits(lines)]
    assert named == ([] if failure == "refused" else [job(place).name])
    with zipfile.ZipFile(path) as opened:
        written = opened.read("card-report/lines.jsonl").decode().splitlines()
    assert [json.loads(line)["status"] for line in written] == [line["status"] for line in lines]
    assert path.stat().st_size <= archive.MOST_BYTES


def test_a_failure_beside_others_is_tried_once_more_alone(tmp_path):
    """Two at a time: the faulty one faults again by itself, and both results stand in its line."""
    _, lines = report(tmp_path, [job(1, "wrong"), job(5), job(7)], workers=2)
    assert sorted(line["status"] for line in lines) == ["pass", "pass", "wrong"]
    assert lines[-1]["job"] == job(1).name and lines[-1]["beside_others"]["status"] == "wrong"


def test_a_card_that_answers_no_more_ends_the_report_and_its_culprit_is_named(
    tmp_path, monkeypatch
):
    from narrowgauge.lab.card import checks, runner

    monkeypatch.setattr(runner, "PROBE_PAUSE_S", 0.0)
    silent = process.CardJob(name="probe", part="machine", run="tests.lab.card.stand_in:silent", limit_s=5.0)  # fmt: skip
    monkeypatch.setattr(runner.Runner, "ask", _asking(runner.Runner.ask, silent))
    assert checks.PROBE_S > 0
    path, lines = report(tmp_path, [job(5), job(1, "fault"), job(7), job(9)])
    assert [line["status"] for line in lines] == ["pass", "fault", "left out", "left out"]
    assert all(job(1).name in line["why"] and line["status"] == "left out" for line in lines[2:])
    assert archive.read(path).lines == list(map(packed, lines))


def _asking(ask, silent):
    return lambda self, asked: ask(self, silent if asked.name == "probe" else asked)


def test_what_has_no_time_left_is_named(tmp_path):
    """A job is begun only if its limit fits into the report's time."""
    _, lines = report(tmp_path, [job(5, limit_s=30.0), job(7, limit_s=9000.0)])
    assert [line["status"] for line in lines] == ["pass", "left out"]
    assert "9000 s" in lines[1]["why"]

"""From a run's folder to the three files."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit_eval.compare import compare
from quantkit_eval.errors import RecordError
from quantkit_eval.records import write_verdict
from quantkit_eval.report import ReportInput, load_report_input, write_report

Save = Callable[[ReportInput, Path], Path]


@pytest.mark.parametrize("kind", ["fail", "pass", "inconclusive", "aa"])
def test_records_come_back_as_they_were_saved(
    kind: str, tmp_path: Path, make_run: Callable[[str], ReportInput], save_records: Save
) -> None:
    run = make_run(kind)
    folder = save_records(run, tmp_path)
    checkpoint = folder / "checkpoint" if run.checkpoint else None
    assert load_report_input(folder, checkpoint) == dataclasses.replace(run, weights_bytes=None)


def test_a_verdict_of_the_comparison_itself(
    tmp_path: Path, make_run: Callable[[str], ReportInput], save_records: Save
) -> None:
    folder = save_records(make_run("fail"), tmp_path)
    gates = {"max_drop_pp": {"extract": 5}, "max_kl_mean_nats": 0.1, "min_throughput_ratio": {"decode_batch_1": 1.0}}
    verdict = compare(folder / "baseline", folder / "candidate", gates, folder / "throughput.json")
    write_verdict(folder / "verdict.json", verdict)
    run = load_report_input(folder, folder / "checkpoint")
    paths = write_report(run, tmp_path / "r.html", tmp_path / "r.xml", tmp_path / "r.md")
    page, junit, markdown = (path.read_text(encoding="utf-8") for path in paths)
    assert "structured output broke: 29\u00a0of\u00a032\u00a0→\u00a00\u00a0of\u00a032 exactly right" in page
    assert 'failures="2" errors="0"' in junit
    assert markdown.startswith("## ❌ Fail: structured output broke: 29 of 32 → 0 of 32 exactly right")
    for entry in verdict["unjudged"]:
        assert f"<code>{entry['suite']}.{entry['metric']}</code>" in page


def test_weights_are_measured_in_the_checkpoint(
    tmp_path: Path, make_run: Callable[[str], ReportInput], save_records: Save
) -> None:
    folder = save_records(make_run("fail"), tmp_path)
    for index, size in enumerate((1000, 234)):
        (folder / "checkpoint" / f"model-{index}.safetensors").write_bytes(bytes(size))
    assert load_report_input(folder, folder / "checkpoint").weights_bytes == 1234
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    foreign = load_report_input(folder, elsewhere)
    assert foreign.checkpoint is None
    assert foreign.weights_bytes is None


def test_another_checkpoint_than_the_candidate_is_refused(
    tmp_path: Path, make_run: Callable[[str], ReportInput], save_records: Save
) -> None:
    run = make_run("fail")
    folder = save_records(run, tmp_path)
    load_report_input(folder, folder / "checkpoint", run.candidate["model"]["checkpoint_hash"])
    with pytest.raises(RecordError, match=r"checkpoint is not the candidate of this verdict: its hash is 1111"):
        load_report_input(folder, folder / "checkpoint", "1" * 64)


def test_swapped_records_are_refused(
    tmp_path: Path, make_run: Callable[[str], ReportInput], save_records: Save
) -> None:
    folder = save_records(make_run("fail"), tmp_path)
    (folder / "baseline").rename(folder / "x")
    (folder / "candidate").rename(folder / "baseline")
    (folder / "x").rename(folder / "candidate")
    with pytest.raises(RecordError, match=r"verdict\.json is not about .*baseline: its baseline has model "):
        load_report_input(folder)


def test_records_of_a_later_evaluation_are_refused(
    tmp_path: Path, make_run: Callable[[str], ReportInput], save_records: Save
) -> None:
    folder = save_records(make_run("fail"), tmp_path)
    path = folder / "candidate" / "result.json"
    path.write_text(path.read_text().replace("2026-11-29T14:05:31Z", "2026-11-30T14:05:31Z"))
    with pytest.raises(RecordError, match=r"its candidate has created 2026-11-29T14:05:31Z"):
        load_report_input(folder)


def test_records_that_lie_elsewhere_are_asked_for(
    tmp_path: Path, make_run: Callable[[str], ReportInput], save_records: Save
) -> None:
    folder = save_records(make_run("fail"), tmp_path)
    (folder / "candidate").rename(folder / "cand")
    with pytest.raises(RecordError, match=r"judged as baseline/ and candidate/ beside verdict\.json"):
        load_report_input(folder)


@pytest.mark.parametrize("name", ["verdict.json", "baseline/result.json", "candidate/samples.jsonl"])
def test_missing_and_damaged_records_are_named(
    name: str, tmp_path: Path, make_run: Callable[[str], ReportInput], save_records: Save
) -> None:
    folder = save_records(make_run("fail"), tmp_path)
    content = (folder / name).read_text(encoding="utf-8")
    (folder / name).write_text(content[: len(content) // 2], encoding="utf-8")
    with pytest.raises(RecordError, match=Path(name).name):
        load_report_input(folder)
    (folder / name).unlink()
    with pytest.raises(RecordError, match=f"{Path(name).name}: no such file"):
        load_report_input(folder)


@pytest.mark.parametrize("content", ['{"schema_version": 2}', "[]", "{", "\xff"])
def test_checkpoint_record_that_cannot_be_read(
    content: str, tmp_path: Path, make_run: Callable[[str], ReportInput], save_records: Save
) -> None:
    folder = save_records(make_run("fail"), tmp_path)
    (folder / "checkpoint" / "quantkit.json").write_text(content, encoding="latin-1")
    with pytest.raises(RecordError, match=r"quantkit\.json: "):
        load_report_input(folder, folder / "checkpoint")


def test_all_three_reports(tmp_path: Path, make_run: Callable[[str], ReportInput]) -> None:
    paths = tmp_path / "new" / "report.html", tmp_path / "report.xml", tmp_path / "report.md"
    assert write_report(make_run("fail"), *paths) == list(paths)
    contents = [path.read_bytes() for path in paths]
    assert contents[0].startswith(b"<!doctype html>\n<html")
    assert contents[1].startswith(b"<?xml")
    assert contents[2].startswith("## ❌ Fail".encode())
    assert write_report(make_run("fail"), *paths) == list(paths)
    assert [path.read_bytes() for path in paths] == contents, "the same input must give the same bytes"
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["report.html", "report.md", "report.xml"], "nothing temporary is left"
    size = len(contents[0])
    assert size < 2_000_000


def test_only_what_was_asked_for(tmp_path: Path, make_run: Callable[[str], ReportInput]) -> None:
    assert write_report(make_run("aa"), None, None, tmp_path / "r.md") == [tmp_path / "r.md"]
    assert write_report(make_run("aa"), None, None, None) == []
    assert [path.name for path in tmp_path.iterdir()] == ["r.md"]


def test_a_report_that_cannot_be_rendered_leaves_the_old_one(
    tmp_path: Path, make_run: Callable[[str], ReportInput]
) -> None:
    old = tmp_path / "report.html"
    old.write_text("old")
    broken = dataclasses.replace(make_run("fail"), candidate={})  # type: ignore[typeddict-item]
    with pytest.raises(KeyError):
        write_report(broken, old, None, None)
    assert old.read_text() == "old"


def test_texts_that_utf8_cannot_hold_are_written(tmp_path: Path, make_run: Callable[[str], ReportInput]) -> None:
    run = make_run("aa")
    checkpoint = json.loads('{"schema_version": 1, "recipe": "lone \\ud800 surrogate"}')
    paths = write_report(dataclasses.replace(run, checkpoint=checkpoint), tmp_path / "r.html", tmp_path / "r.xml", None)
    assert "lone ⟨U+D800⟩ surrogate" in paths[0].read_text(encoding="utf-8")

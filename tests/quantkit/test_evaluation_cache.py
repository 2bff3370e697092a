"""The cache of evaluations: what makes another entry, what is damaged, and what cannot be written."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from quantkit import evaluation_cache
from quantkit.evaluation_cache import CachedEvaluation
from quantkit_eval.evaluate import evaluate
from quantkit_eval.protocol import Generation, GenerationRequest

ABOUT: dict[str, Any] = {
    "model": {"name": "m", "checkpoint_hash": "a"},
    "engine": {"name": "e", "dtype": "float32", "num_kv_blocks": 7},
    "template_hash": "t",
}
SUITES: dict[str, Any] = {"extract": {"num_items": 2}}


class Canned:
    """Answers everything with an empty object."""

    def describe(self) -> dict[str, Any]:
        return ABOUT

    def generate(self, requests: list[GenerationRequest]) -> list[Generation]:
        return [Generation(request.id, "{}", (1,), "stop", "0" * 64, 3) for request in requests]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def records(tmp_path: Path) -> Path:
    evaluate(Canned(), SUITES, 0, tmp_path / "records")  # type: ignore[arg-type]
    return tmp_path / "records"


def test_records_come_back_as_they_were(records: Path, tmp_path: Path) -> None:
    assert not CachedEvaluation(ABOUT, SUITES, 0).copy_to(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    CachedEvaluation(ABOUT, SUITES, 0).keep(records)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "nll.safetensors").write_text("of an earlier evaluation")
    assert CachedEvaluation(ABOUT, SUITES, 0).copy_to(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["result.json", "samples.jsonl"]
    for path in records.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_whatever_changes_the_records_makes_another_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, text = tmp_path / "mine.jsonl", tmp_path / "text.txt"
    mine.write_text("{}")
    text.write_text("One.")
    suites = {**SUITES, "mine": {"kind": "file", "path": str(mine)}, "nll": {"text_path": str(text)}}
    first = CachedEvaluation(ABOUT, suites, 0).folder
    fewer_blocks = {**ABOUT, "engine": {**ABOUT["engine"], "num_kv_blocks": 6}}
    assert CachedEvaluation(fewer_blocks, suites, 0).folder == first
    others = [
        CachedEvaluation(ABOUT, suites, 1),
        CachedEvaluation(ABOUT, {**suites, "extract": {"num_items": 3}}, 0),
        CachedEvaluation({**ABOUT, "model": {"name": "m", "checkpoint_hash": "b"}}, suites, 0),
        CachedEvaluation({**ABOUT, "engine": {"name": "e", "dtype": "bfloat16"}}, suites, 0),
        CachedEvaluation({**ABOUT, "template_hash": "u"}, suites, 0),
    ]
    for path in (mine, text):
        path.write_text(path.read_text() + " ")
        others.append(CachedEvaluation(ABOUT, suites, 0))
    monkeypatch.setattr(evaluation_cache, "source_digest", lambda: "changed")
    others.append(CachedEvaluation(ABOUT, suites, 0))
    assert len({first, *(other.folder for other in others)}) == 9


@pytest.mark.parametrize("file", ["samples.jsonl", "result.json"])
def test_a_damaged_entry_is_said_and_made_anew(
    records: Path, tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    cached = CachedEvaluation(ABOUT, SUITES, 0)
    cached.keep(records)
    with (cached.folder / file).open("a") as stream:
        stream.write("x")
    with caplog.at_level(logging.WARNING):
        assert not cached.copy_to(tmp_path / "out")
    assert "a cached evaluation is damaged and made anew" in caplog.text
    cached.keep(records)
    assert cached.copy_to(tmp_path / "out")


def test_a_reference_that_was_changed_is_not_used(records: Path, tmp_path: Path) -> None:
    cached = CachedEvaluation(ABOUT, SUITES, 0)
    cached.keep(records)
    result = json.loads((cached.folder / "result.json").read_text())
    result["suites"]["nll"] = {**result["suites"]["extract"], "num_items": 0, "primary_metric": None, "metrics": {}}
    result["suites"]["nll"]["reference_sha256"] = "0" * 64
    (cached.folder / "result.json").write_text(json.dumps(result))
    (cached.folder / "nll.safetensors").write_text("another")
    assert not cached.copy_to(tmp_path / "out")


def test_a_cache_that_cannot_be_written_is_a_warning(
    records: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file")
    with caplog.at_level(logging.WARNING):
        CachedEvaluation(ABOUT, SUITES, 0).keep(records)
    assert "is not kept in the cache" in caplog.text
    assert caplog.text.count("\n") == 1


def test_what_was_not_used_for_longest_goes(records: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(evaluation_cache, "KEPT", 2)
    entries = [CachedEvaluation(ABOUT, SUITES, seed) for seed in range(3)]
    for age, entry in enumerate(entries[:2]):
        entry.keep(records)
        os.utime(entry.folder, (1000 + age, 1000 + age))
    assert entries[0].copy_to(tmp_path / "out")  # used just now
    entries[2].keep(records)
    assert [entry.folder.exists() for entry in entries] == [True, False, True]

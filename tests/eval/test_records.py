"""Records validate when written and when read, and appear complete or not at all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quantkit_eval import records
from quantkit_eval.errors import EvalError, RecordError
from quantkit_eval.protocol import hash_token_ids

HASH = "0" * 64
KINDS: tuple[records.Kind, ...] = ("sample", "result", "throughput", "verdict", "comparison")


def sample(**changes: Any) -> dict[str, Any]:
    metrics = {
        "parse_ok": True,
        "exact": False,
        "fields_correct": 1,
        "fields_total": 3,
        "truncated": False,
        "only_json": True,
    }
    return {
        "schema_version": 1,
        "suite": "extract",
        "id": "a-1",
        "prompt_hash": HASH,
        "prompt": "Zoë?\u2028",
        "gold": {"name": "Zoë"},
        "output": '{"name": "Zo"}',
        "finish_reason": "stop",
        "metrics": metrics,
    } | changes


def metric(**changes: Any) -> dict[str, Any]:
    return {
        "value": 0.5,
        "n": 4,
        "interval": [0.1, 0.9],
        "confidence": 0.95,
        "method": "Wilson",
        "unit": "fraction",
        "direction": "higher_is_better",
    } | changes


def result(**changes: Any) -> dict[str, Any]:
    suite = {
        "items_hash": HASH,
        "num_items": 4,
        "options": {},
        "primary_metric": "exact",
        "metrics": {"exact": metric()},
        "histograms": {},
    }
    machine = {
        "platform": "p",
        "cpu": "c",
        "cpu_count": 2,
        "memory_bytes": None,
        "num_threads": 2,
        "versions": {"python": "3.11.0"},
    }
    return {
        "schema_version": 1,
        "created": "2026-01-02T03:04:05Z",
        "model": {"name": "m"},
        "engine": {},
        "template_hash": "t",
        "sampling": {"temperature": 0.0, "top_p": 1.0},
        "seed": 0,
        "machine": machine,
        "samples_sha256": HASH,
        "suites": {"extract": suite},
    } | changes


@pytest.mark.parametrize("kind", KINDS)
def test_schemas_are_valid_draft_2020_12(kind: records.Kind) -> None:
    schema = records.schema_validator(kind).schema
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["additionalProperties"] is False


def test_samples_come_back_as_they_were_written(tmp_path: Path) -> None:
    window = {
        "schema_version": 1,
        "suite": "nll",
        "id": "a-1",
        "prompt_hash": HASH,
        "metrics": {"nll_nats": 2.5, "num_tokens": 7},
    }
    written = [sample(), sample(id="a-2", output="line\nline\r\n"), window]
    records.write_samples(tmp_path / "deep" / "samples.jsonl", written)  # type: ignore[arg-type]
    assert records.read_samples(tmp_path / "deep" / "samples.jsonl") == written
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["samples.jsonl"]


def test_a_result_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    records.write_result(path, result())  # type: ignore[arg-type]
    assert records.read_result(path) == result()


@pytest.mark.parametrize(
    ("change", "place", "words"),
    [
        ({"metrics": {"nll": 1}}, "/metrics", "'nll' does not match any of the regexes"),
        ({"finish_reason": "tired"}, "/finish_reason", "tired"),
        ({"extra": 1}, "/", "extra"),
        ({"prompt_hash": "abc"}, "/prompt_hash", "abc"),
        ({"schema_version": 2}, "/schema_version", "1"),
        ({"output": None}, "/output", "None"),
    ],
)
def test_a_wrong_sample_is_named_by_line_and_pointer(
    tmp_path: Path, change: dict[str, Any], place: str, words: str
) -> None:
    path = tmp_path / "samples.jsonl"
    with pytest.raises(RecordError) as written:
        records.write_samples(path, [sample(), sample(id="b") | change])  # type: ignore[list-item]
    assert not list(tmp_path.iterdir())
    path.write_text("".join(json.dumps(line) + "\n" for line in (sample(), sample(id="b") | change)))
    with pytest.raises(RecordError) as read:
        records.read_samples(path)
    for error in (written, read):
        assert f"samples.jsonl:2: {place}: " in str(error.value)
        assert words in str(error.value)
        assert "\n" not in str(error.value)


def test_a_wrong_result_is_named_by_pointer(tmp_path: Path) -> None:
    bad = result()
    bad["suites"]["extract"]["metrics"]["exact"] = metric(interval=[0.1])
    path = tmp_path / "result.json"
    with pytest.raises(RecordError, match=r"result\.json: /suites/extract/metrics/exact/interval: "):
        records.write_result(path, bad)  # type: ignore[arg-type]
    path.write_text(json.dumps(bad))
    with pytest.raises(RecordError, match=r"result\.json: /suites/extract/metrics/exact/interval: "):
        records.read_result(path)


def test_a_pointer_is_escaped(tmp_path: Path) -> None:
    suite = result()["suites"]["extract"] | {"num_items": -1}
    with pytest.raises(RecordError, match="/suites/a~1b~0c/num_items: "):
        records.write_result(tmp_path / "result.json", result(suites={"a/b~c": suite}))  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_json_has_no_number_for_is_refused(tmp_path: Path, number: float) -> None:
    bad = result(engine={"speed": number})
    path = tmp_path / "result.json"
    with pytest.raises(RecordError, match="cannot be written as JSON"):
        records.write_result(path, bad)  # type: ignore[arg-type]
    path.write_text(json.dumps(bad))
    with pytest.raises(RecordError, match="is no JSON number"):
        records.read_result(path)


def test_a_lone_surrogate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"samples\.jsonl:1: cannot be written"):
        records.write_samples(tmp_path / "samples.jsonl", [sample(output="\ud800")])  # type: ignore[list-item]


def test_two_samples_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"samples\.jsonl:3: /id: 'a-1' of suite 'extract' is already in line 1"):
        records.write_samples(tmp_path / "samples.jsonl", [sample(), sample(id="b"), sample()])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"schema_version": 1', "cut off"),
        (b"no\n", "no JSON"),
        (b"\xff\xfe\n", "cannot be read"),
        (None, "no such file"),
    ],
)
def test_damaged_samples_are_one_line_errors(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "samples.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecordError, match=words) as caught:
        records.read_samples(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1
    assert isinstance(caught.value, EvalError)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"no such file\. Evaluate the model$"),
        (b"\xff", r"cannot be read \(no UTF-8, byte 0\)\. Evaluate the model again"),
        (b"[" * 100_000, r"no JSON that can be read \(nested too deeply\)\. Evaluate the model again"),
        (b"{", r"no JSON \(.*\)\. Evaluate the model again"),
        (b'{"schema_version": 99}', "/schema_version: 1 was expected, not 99. It is of another version of quantkit"),
    ],
)
def test_a_damaged_result_says_what_it_is_and_what_helps(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "result.json").write_bytes(content)
    with pytest.raises(RecordError, match=words) as caught:
        records.read_result(tmp_path / "result.json")
    assert "\n" not in str(caught.value)


def test_a_missing_speed_is_measured_and_not_evaluated(tmp_path: Path) -> None:
    for read, command in (
        (records.read_throughput, "quantkit bench BASELINE CANDIDATE -o"),
        (records.read_load, "--contexts"),
        (records.read_verdict, "quantkit compare -o"),
    ):
        with pytest.raises(RecordError, match=f"no such file.*{command}"):
            read(tmp_path / "x.json")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    records.write_result(path, result())  # type: ignore[arg-type]

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.os, "fsync", full)
    with pytest.raises(RecordError, match=r"result\.json: cannot be written \(No space left on device\)\. Make room"):
        records.write_result(path, result(seed=1))  # type: ignore[arg-type]
    assert records.read_result(path) == result()
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("place", ["", "file/a.json", "file/deep/a.json"])
def test_a_place_that_cannot_be_written_is_known_beforehand(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot be written"):
        records.check_writable(tmp_path / place)
    with pytest.raises(RecordError, match="cannot be written"):
        records.write_result(tmp_path / place, result())  # type: ignore[arg-type]
    records.check_writable(tmp_path / "new" / "deep" / "a.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (records.read_result, "result.json"),
        (records.read_throughput, "throughput.json"),
        (records.read_verdict, "verdict.json"),
    ],
)
def test_each_document_has_its_own_schema(tmp_path: Path, read: Callable[[Path], object], name: str) -> None:
    path = tmp_path / name
    path.write_text("{}")
    with pytest.raises(RecordError, match=f"{name}: /: .* is a required property"):
        read(path)


def test_an_exit_code_that_does_not_fit_the_verdict_is_refused() -> None:
    party = {"model": {}, "engine": {}, "machine": {}, "created": "2026-01-02T03:04:05Z"}
    verdict = {
        "schema_version": 1,
        "created": "2026-01-02T03:04:05Z",
        "verdict": "fail",
        "exit_code": 0,
        "reason": "r",
        "alpha": 0.05,
        "gates": [],
        "unjudged": [],
        "flipped": [],
        "changes": [],
        "noise_floor": None,
        "baseline": party,
        "candidate": party,
    }
    with pytest.raises(RecordError, match=r"here: /exit_code: 3 was expected, not 0"):
        records.validate(verdict, "verdict", "here")
    records.validate(verdict | {"exit_code": 3}, "verdict", "here")


def test_prompt_hashes_are_of_little_endian_ids() -> None:
    import hashlib

    assert hash_token_ids([1, 258]) == hashlib.sha256(b"\x01\0\0\0\x02\x01\0\0").hexdigest()
    assert hash_token_ids([]) == hashlib.sha256(b"").hexdigest()

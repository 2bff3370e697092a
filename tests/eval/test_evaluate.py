"""One evaluation leaves valid records, or nothing."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from quantkit_eval.errors import ModelOutputError, OptionError, RecordError
from quantkit_eval.evaluate import evaluate
from quantkit_eval.machine import describe_machine
from quantkit_eval.protocol import Model
from quantkit_eval.records import read_result, read_samples
from quantkit_eval.suites import SUITES, load_suite

SUITES_WANTED: dict[str, dict[str, Any]] = {"extract": {"num_items": 70}, "nll": {"max_windows": 4}}


def test_the_fake_is_a_model(fake_model: Callable[..., Any]) -> None:
    assert isinstance(fake_model(), Model)


def test_records_of_both_suites(tmp_path: Path, erring_model: Callable[..., Any]) -> None:
    seen: list[tuple[str, int, int]] = []
    result = evaluate(erring_model(70, 3, 0.1), SUITES_WANTED, 3, tmp_path, progress=lambda *event: seen.append(event))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nll.safetensors", "result.json", "samples.jsonl"]
    assert read_result(tmp_path / "result.json") == result
    samples = read_samples(tmp_path / "samples.jsonl")
    assert [sample["suite"] for sample in samples] == ["extract"] * 70 + ["nll"] * 4
    assert seen == [("extract", 64, 70), ("extract", 70, 70), *(("nll", i, 4) for i in (1, 2, 3, 4))]
    assert result["seed"] == 3
    assert result["sampling"] == {"temperature": 0.0, "top_p": 1.0}
    assert result["machine"]["versions"]["torch"]


def test_the_same_evaluation_gives_the_same_samples(tmp_path: Path, erring_model: Callable[..., Any]) -> None:
    for name in ("a", "b"):
        evaluate(erring_model(70, 3, 0.1), SUITES_WANTED, 3, tmp_path / name)
    for file in ("samples.jsonl", "nll.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_failure_leaves_earlier_records_alone(tmp_path: Path, erring_model: Callable[..., Any]) -> None:
    evaluate(erring_model(70, 3, 0.1), SUITES_WANTED, 3, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    class Failing(type(erring_model(70, 3, 0.5))):  # type: ignore[misc]
        def score(self, token_ids: Sequence[int]) -> object:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(Failing(), SUITES_WANTED, 4, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_records_of_an_earlier_evaluation_do_not_stay(tmp_path: Path, erring_model: Callable[..., Any]) -> None:
    evaluate(erring_model(70, 3, 0.1), SUITES_WANTED, 3, tmp_path)
    evaluate(erring_model(5, 3, 0.1), {"extract": {"num_items": 5}}, 3, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json", "samples.jsonl"]


@pytest.mark.parametrize("file", ["", "nll.safetensors"])
def test_a_candidate_does_not_replace_its_baseline(tmp_path: Path, fake_model: Callable[..., Any], file: str) -> None:
    evaluate(fake_model(), {"nll": {"max_windows": 2}}, 0, tmp_path)
    with pytest.raises(OptionError, match="holds the reference"):
        evaluate(fake_model(), {"nll": {"max_windows": 2}}, 0, tmp_path, tmp_path / file)
    assert (tmp_path / "nll.safetensors").exists()


@pytest.mark.parametrize(
    ("suites", "words"),
    [({}, "no suite"), ({"extrct": {}}, "unknown suite 'extrct'. Choose from extract, schema")],
)
def test_wrong_suites_are_named_before_the_work(
    tmp_path: Path, fake_model: Callable[..., Any], suites: dict[str, dict[str, Any]], words: str
) -> None:
    model = fake_model()
    with pytest.raises(OptionError, match=words):
        evaluate(model, {"extract": {}} | suites if suites else {}, 0, tmp_path / "a")
    assert model.calls == 0
    assert not (tmp_path / "a").exists()


def test_a_reference_that_is_missing_shows_before_the_work(tmp_path: Path, fake_model: Callable[..., Any]) -> None:
    model = fake_model()
    with pytest.raises(RecordError, match="nope: no such reference file"):
        evaluate(model, SUITES_WANTED, 0, tmp_path / "a", tmp_path / "nope")
    assert model.calls == 0
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_shows_before_the_work(tmp_path: Path, fake_model: Callable[..., Any]) -> None:
    (tmp_path / "file").write_text("")
    model = fake_model()
    with pytest.raises(RecordError, match="file is no folder"):
        evaluate(model, SUITES_WANTED, 0, tmp_path / "file" / "a")
    assert model.calls == 0


def test_a_failure_leaves_no_folder_and_names_the_model(tmp_path: Path, fake_model: Callable[..., Any]) -> None:
    class Broken(fake_model):  # type: ignore[misc,valid-type]
        def score(self, token_ids: Sequence[int]) -> Tensor:
            return super().score(token_ids) * float("nan")  # type: ignore[no-any-return]

    words = r"fake, suite 'nll': window 0: score gave NaN or infinite log-probabilities\. Its weights are damaged"
    with pytest.raises(ModelOutputError, match=words):
        evaluate(Broken(), SUITES_WANTED, 0, tmp_path / "deep" / "a")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["model", "engine", "template_hash"])
def test_a_model_has_to_say_who_it_is(tmp_path: Path, fake_model: Callable[..., Any], key: str) -> None:
    class Anonymous(fake_model):  # type: ignore[misc,valid-type]
        def describe(self) -> dict[str, object]:
            return {name: value for name, value in super().describe().items() if name != key}

    with pytest.raises(ModelOutputError, match=key):
        evaluate(Anonymous(), {"extract": {"num_items": 1}}, 0, tmp_path)


def test_every_suite_loads() -> None:
    assert all(callable(load_suite(name)) for name in SUITES)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [("extract", "file", "'extract' of a suite of kind 'file' is taken"), ("mine", "flie", "unknown kind 'flie'")],
)
def test_a_users_suite_needs_a_name_and_a_kind(name: str, kind: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        load_suite(name, kind)


def test_items_go_to_the_model_in_batches_of_the_wanted_size(tmp_path: Path, fake_model: Callable[..., Any]) -> None:
    answers = []
    for name, batch_items, calls in (("a", 64, 1), ("b", 3, 4)):
        model = fake_model()
        evaluate(model, {"extract": {"num_items": 10}}, 0, tmp_path / name, batch_items=batch_items)
        assert model.calls == calls
        answers.append((tmp_path / name / "samples.jsonl").read_bytes())
    assert answers[0] == answers[1]
    with pytest.raises(OptionError, match="batch_items=0"):
        evaluate(fake_model(), {"extract": {}}, 0, tmp_path / "c", batch_items=0)


def test_the_machine_is_described() -> None:
    machine = describe_machine()
    assert machine["cpu_count"] >= 1
    assert machine["memory_bytes"] is None or machine["memory_bytes"] > 2**20
    assert machine["cpu"]

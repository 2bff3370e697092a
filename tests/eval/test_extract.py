"""How answers are read and measured, and that the items are what their seed says."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quantkit_eval.errors import ModelOutputError, OptionError
from quantkit_eval.evaluate import evaluate
from quantkit_eval.protocol import Generation, GenerationRequest
from quantkit_eval.records import read_samples
from quantkit_eval.suites.answers import read_object
from quantkit_eval.suites.extract import measure
from quantkit_eval.suites.extract_items import PROMPTS, TEMPLATES, generate_items
from quantkit_eval.suites.graded import Item

GOLD = {"name": "Zoë", "age": 41, "city": "Mexico City"}
RIGHT = json.dumps(GOLD, ensure_ascii=False)


@pytest.mark.parametrize(
    ("output", "value", "only_json"),
    [
        (RIGHT, GOLD, True),
        (f"\n{RIGHT} \n", GOLD, True),
        (f"```json\n{RIGHT}\n```", GOLD, True),
        (f"```\n{RIGHT}\n```\n", GOLD, True),
        (f"Sure! Here it is: {RIGHT}", GOLD, False),
        (f"{RIGHT}\n{RIGHT}", GOLD, False),
        ("{}", {}, True),
        (RIGHT[:-1], None, False),
        ('{"name": "Zoë",}', None, False),
        ('{"age": NaN}', None, False),
        ("{'age': 41}", None, False),
        ("{not} " + RIGHT, None, False),
        ("[1, 2]", None, False),
        ("", None, False),
        ('{"a":' * 100_000, None, False),
    ],
)
def test_the_first_brace_starts_the_answer(output: str, value: object, only_json: bool) -> None:
    assert read_object(output) == (value, only_json)


@pytest.mark.parametrize(
    ("answer", "correct", "exact"),
    [
        (GOLD, 3, True),
        (GOLD | {"age": "41"}, 3, True),
        (GOLD | {"age": 41.0}, 3, True),
        (GOLD | {"city": " Mexico City "}, 3, True),
        (GOLD | {"city": "mexico city"}, 2, False),
        (GOLD | {"name": "Zoe"}, 2, False),
        (GOLD | {"age": 42}, 2, False),
        (GOLD | {"age": True}, 2, False),
        (GOLD | {"age": None, "city": ["Mexico City"]}, 1, False),
        (GOLD | {"country": "Mexico"}, 3, False),
        ({"name": "Zoë"}, 1, False),
        ({}, 0, False),
    ],
)
def test_fields_count_one_by_one(answer: dict[str, object], correct: int, exact: bool) -> None:
    metrics = measure(Item("a", "", GOLD), json.dumps(answer))
    assert metrics == {
        "parse_ok": True,
        "exact": exact,
        "fields_correct": correct,
        "fields_total": 3,
        "only_json": True,
    }


def test_true_is_not_one() -> None:
    assert measure(Item("a", "", {"count": 1}), '{"count": true}')["fields_correct"] == 0


def test_an_answer_that_ran_into_the_limit_is_truncated(tmp_path: Path, fake_model: Callable[..., Any]) -> None:
    evaluate(
        fake_model(lambda request: '{"name": "Zoë", "age": 41' + " " * 500), {"extract": {"num_items": 1}}, 0, tmp_path
    )
    (sample,) = read_samples(tmp_path / "samples.jsonl")
    assert sample["finish_reason"] == "length"
    metrics = sample["metrics"]
    assert (metrics["parse_ok"], metrics["exact"], metrics["truncated"]) == (False, False, True)
    assert metrics["whitespace_run"] == 64 * 4 - len('{"name": "Zoë", "age": 41'.encode())


def test_items_depend_on_the_seed_alone_and_a_longer_run_begins_with_the_shorter() -> None:
    assert generate_items(40, 7) == generate_items(40, 7)
    assert generate_items(40, 7)[:15] == generate_items(15, 7)
    assert generate_items(40, 7) != generate_items(40, 8)
    items = generate_items(256, 0)
    assert len({item.id for item in items}) == 256
    assert len({item.prompt for item in items}) > 250


def test_templates_take_turns_and_every_fact_stands_in_the_text() -> None:
    items = generate_items(10 * len(TEMPLATES), 3)
    for name in TEMPLATES:
        assert sum(item.id.startswith(f"{name}-") for item in items) == 10
    for item in items:
        assert all(str(value) in item.prompt and f'"{key}"' in item.prompt for key, value in item.gold.items())
        texts = [value for value in item.gold.values() if isinstance(value, str)]
        assert len(set(texts)) == len(texts)


def test_every_template_meets_every_wording() -> None:
    """Wordings differ in how hard they are; were they tied to templates, one could not tell the two apart."""
    starts = [wording[:5] for wording in PROMPTS]
    assert len(set(starts)) == len(starts) == 4
    pairs = {
        (item.id.split("-")[0], start)
        for item in generate_items(len(TEMPLATES) * len(PROMPTS), 0)
        for start in starts
        if item.prompt.startswith(start)
    }
    assert len(pairs) == len(TEMPLATES) * len(PROMPTS)


def test_a_right_answer_fits_into_the_limit_of_tokens() -> None:
    """No tokenizer makes more tokens than one for two characters of such text."""
    longest = max(len(json.dumps(item.gold, indent=2)) for item in generate_items(500, 0))
    assert longest / 2 < 64


def test_rates_and_intervals_of_a_model_with_known_errors(tmp_path: Path, erring_model: Callable[..., Any]) -> None:
    result = evaluate(erring_model(200, 5, 0.2), {"extract": {"num_items": 200}}, 5, tmp_path)
    samples = read_samples(tmp_path / "samples.jsonl")
    right = sum(bool(sample["metrics"]["exact"]) for sample in samples)
    suite = result["suites"]["extract"]
    assert 140 < right < 180
    exact = suite["metrics"]["exact"]
    assert exact["value"] == right / 200
    assert exact["interval"] is not None
    assert exact["interval"][0] < right / 200 < exact["interval"][1]
    fields = sum(int(sample["metrics"]["fields_correct"] or 0) for sample in samples)
    of_all = sum(int(sample["metrics"]["fields_total"] or 0) for sample in samples)
    assert suite["metrics"]["field_accuracy"]["value"] == pytest.approx(fields / of_all)
    assert suite["metrics"]["truncated"]["value"] == 0
    assert suite["num_items"] == len(samples) == 200
    assert suite["options"] == {"num_items": 200, "max_tokens": 64}


@pytest.mark.parametrize("num_items", [0, 1])
def test_hardly_any_item_is_no_crash(tmp_path: Path, erring_model: Callable[..., Any], num_items: int) -> None:
    result = evaluate(erring_model(num_items, 0, 0.0), {"extract": {"num_items": num_items}}, 0, tmp_path)
    metrics = result["suites"]["extract"]["metrics"]
    assert metrics["exact"]["value"] == (1.0 if num_items else None)
    assert metrics["exact"]["n"] == num_items
    assert metrics["field_accuracy"]["interval"] is None


def test_the_limit_of_tokens_reaches_the_model(tmp_path: Path, fake_model: Callable[..., Any]) -> None:
    result = evaluate(fake_model(lambda request: "{" * 99), {"extract": {"num_items": 3, "max_tokens": 5}}, 0, tmp_path)
    assert result["suites"]["extract"]["metrics"]["truncated"]["value"] == 1.0


@pytest.mark.parametrize("options", [{"num_items": -1}, {"max_tokens": 0}, {"num_items": 2.5}, {"items": 3}])
def test_wrong_options_are_named(tmp_path: Path, fake_model: Callable[..., Any], options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        evaluate(fake_model(), {"extract": options}, 0, tmp_path)


@pytest.mark.parametrize("spoil", ["reorder", "drop", "finish_reason"])
def test_a_model_that_breaks_the_protocol_is_an_error(
    tmp_path: Path, fake_model: Callable[..., Any], spoil: str
) -> None:
    class Broken(fake_model):  # type: ignore[misc,valid-type]
        def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
            generations: list[Generation] = super().generate(requests)
            if spoil == "reorder":
                return generations[::-1]
            if spoil == "drop":
                return generations[1:]
            first = generations[0]
            tired = Generation(first.id, first.text, first.token_ids, "tired", first.prompt_hash, 1)
            return [tired, *generations[1:]]

    with pytest.raises(ModelOutputError):
        evaluate(Broken(), {"extract": {"num_items": 4}}, 0, tmp_path)
    assert not list(tmp_path.iterdir())

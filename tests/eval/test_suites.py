"""What every suite with generated items owes: items from the seed, right answers that count, junk that does not."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from quantkit_eval.evaluate import evaluate
from quantkit_eval.protocol import GenerationRequest
from quantkit_eval.records import read_samples, schema_validator
from quantkit_eval.suites import SUITES, load_suite
from quantkit_eval.suites.graded import GeneratedSuite, Item, degeneration

GENERATED = sorted(set(SUITES) - {"nll"})
N = 120


def suite_of(name: str) -> GeneratedSuite:
    suite = load_suite(name)
    assert isinstance(suite, GeneratedSuite)
    return suite


def an_instance(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """A value for the schemas that the suite makes; that it is valid is checked with jsonschema."""
    if "$ref" in schema:
        return an_instance(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    for key in ("enum", "anyOf"):
        if key in schema:
            return schema[key][0] if key == "enum" else an_instance(schema[key][0], root)
    if "const" in schema:
        return schema["const"]
    texts = {"^[A-Z]{3}$": "ABC", "^[a-z]+-[0-9]{2}$": "a-10", "^[0-9]{4}$": "1234", "^(left|right)$": "left"}
    texts |= {"^[A-Z]{2}[0-9]{3}$": "AB123", "^[0-9]{2}:[0-9]{2}$": "10:30", "^(north|south)$": "south"}
    texts |= {"^[a-z]{4}$": "abcd"}
    formats = {"date": "2020-02-29", "email": "a@b.c", "ipv4": "10.0.0.1"}
    formats |= {"uuid": "123e4567-e89b-12d3-a456-426614174000"}
    match schema["type"]:
        case "object":
            return {name: an_instance(below, root) for name, below in schema["properties"].items()}
        case "array" if "prefixItems" in schema:
            return [an_instance(below, root) for below in schema["prefixItems"]]
        case "array":
            return [an_instance(schema["items"], root)] * schema["minItems"]
        case "string":
            return texts.get(schema.get("pattern", ""), formats.get(schema.get("format", ""), "x"))
        case "boolean" | "null":
            return None if schema["type"] == "null" else True
    return schema.get("minimum", 0)


def right_answer(name: str, item: Item) -> str:
    if name == "schema":
        assert item.schema is not None
        return json.dumps(an_instance(dict(item.schema), dict(item.schema)), ensure_ascii=False)
    return item.gold if isinstance(item.gold, str) else json.dumps(item.gold, ensure_ascii=False)


@pytest.mark.parametrize("name", GENERATED)
def test_items_depend_on_the_seed_alone_and_a_longer_run_begins_with_the_shorter(name: str) -> None:
    generate = suite_of(name).generate
    assert list(generate(N, 7)) == list(generate(N, 7))
    assert list(generate(N, 7))[:17] == list(generate(17, 7))
    assert list(generate(N, 7)) != list(generate(N, 8))
    items = generate(N, 0)
    assert len({item.id for item in items}) == N
    assert len({item.prompt for item in items}) > 0.9 * N


@pytest.mark.parametrize("name", sorted(set(GENERATED) - {"extract"}))
def test_every_run_has_easy_and_hard_items_in_every_wording(name: str) -> None:
    module = importlib.import_module(f"quantkit_eval.suites.{name}{'_items' if name == 'schema' else ''}")
    wordings = module.WORDINGS["key"] if isinstance(module.WORDINGS, dict) else module.WORDINGS
    assert len(set(wordings)) >= 3
    levels = {int(item.id.split("-")[1].removeprefix("L")) for item in suite_of(name).generate(N, 0)}
    assert levels == set(range(1, max(levels) + 1))
    assert max(levels) >= 3
    cells = len(module.CELLS)
    first = [item.id.rsplit("-", 1)[0] for item in suite_of(name).generate(2 * cells, 0)]
    assert first[:cells] == first[cells:]


@pytest.mark.parametrize("name", sorted(set(GENERATED) - {"instructions"}))
def test_a_right_answer_counts_and_fits_into_the_limit_of_tokens(name: str) -> None:
    """Two characters a token is fewer than any tokenizer of such text; rare scripts are measured in bytes."""
    suite = suite_of(name)
    for item in suite.generate(N, 3):
        answer = right_answer(name, item)
        metrics = suite.suite.measure(item, answer)
        assert metrics[suite.suite.primary] is True, (item, answer)
        assert not schema_of_metrics(metrics | degeneration(answer, "stop"), name)
        length = len(answer.encode()) if name == "scripts" else len(answer)
        assert length / 2 < (item.max_tokens or suite.max_tokens), answer


def schema_of_metrics(metrics: dict[str, Any], name: str) -> list[str]:
    sample = {"schema_version": 1, "suite": name, "id": "a", "prompt_hash": "0" * 64, "prompt": "", "gold": 1}
    sample |= {"output": "", "finish_reason": "stop", "metrics": metrics}
    return [error.message for error in schema_validator("sample").iter_errors(sample)]


@pytest.mark.parametrize("name", GENERATED)
@pytest.mark.parametrize("junk", ["", "{", "[]", "{}", "I am a model.", '{"tool": 1, "steps": 2, "answer": []}'])
def test_junk_is_wrong(name: str, junk: str) -> None:
    suite = suite_of(name)
    for item in suite.generate(24, 1):
        if name == "instructions" and any(rule["rule"] in ("no_word", "max_words") for rule in item.gold):
            continue  # junk breaks no such rule
        metrics = suite.suite.measure(item, junk)
        assert metrics[suite.suite.primary] is False, item
        assert not schema_of_metrics(metrics | degeneration(junk, "length"), name)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=8), below, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("name", GENERATED)
@given(output=st.text(max_size=60) | JSON.map(json.dumps), data=st.data())
@settings(max_examples=40, deadline=None)
def test_no_answer_breaks_the_scoring(name: str, output: str, data: st.DataObject) -> None:
    suite = suite_of(name)
    item = suite.generate(40, 5)[data.draw(st.integers(0, 39))]
    keys = list(item.gold) if isinstance(item.gold, dict) else []
    if keys and data.draw(st.booleans()):
        output = json.dumps(dict.fromkeys(keys, data.draw(JSON)))
    metrics = suite.suite.measure(item, output)
    assert not schema_of_metrics(metrics | degeneration(output, "stop"), name)


@pytest.mark.parametrize("name", GENERATED)
def test_a_model_that_knows_everything_scores_as_such(
    tmp_path: Path, fake_model: Callable[..., Any], name: str
) -> None:
    if name == "instructions":
        pytest.skip("its answers have no single right text")
    answers = {item.id: right_answer(name, item) for item in suite_of(name).generate(30, 2)}

    def answer(request: GenerationRequest) -> str:
        return "no" if request.id.endswith(("3", "7")) else answers[request.id]

    result = evaluate(fake_model(answer), {name: {"num_items": 30}}, 2, tmp_path)
    record = result["suites"][name]
    assert record["primary_metric"] is not None
    assert record["metrics"][record["primary_metric"]]["value"] == 24 / 30
    assert record["metrics"]["truncated"]["value"] == record["metrics"]["looped"]["value"] == 0
    samples = read_samples(tmp_path / "samples.jsonl")
    assert sum(bool(sample["metrics"][record["primary_metric"]]) for sample in samples) == 24


def test_schema_hardly_asks_the_same_twice_and_never_what_another_seed_asks() -> None:
    """A search chooses on some items and certifies on others; three rounds of screening against a certification."""
    generate = suite_of("schema").generate
    certified = [item.prompt for item in generate(504, 3)]
    assert len(set(certified)) > 0.97 * len(certified)
    screened = {item.prompt for seed in range(3) for item in generate(16, seed)}
    assert len(screened & set(certified)) <= 4  # of 48: another seed will share none (`quantkit.search.holdout`)


def test_schemas_of_the_suite_are_valid_and_narrow() -> None:
    for item in suite_of("schema").generate(N, 4):
        assert item.schema is not None
        Draft202012Validator.check_schema(item.schema)
        assert not Draft202012Validator(item.schema).is_valid({})
        assert not Draft202012Validator(item.schema).is_valid(item.schema)
        assert json.dumps(item.schema, ensure_ascii=False) in item.prompt


def test_examples_of_schema_fit_their_schemas_and_no_question() -> None:
    for item in suite_of("schema").generate(N, 4):
        *shown, question = item.messages
        asked, answers = shown[::2], shown[1::2]
        assert len(asked) == len(answers) == 2
        assert item.schema is not None
        for turn, answer in zip(asked, answers, strict=True):
            schema, _ = json.JSONDecoder().raw_decode(turn["content"], turn["content"].index("{"))
            checker = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
            checker.validate(json.loads(answer["content"]))
            assert not Draft202012Validator(item.schema).is_valid(json.loads(answer["content"]))
        assert question["role"] == "user"

"""Suites with answers that are forced into the form of each item: what is asked, what is kept, what cannot be."""

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quantkit_eval.compare import compare
from quantkit_eval.errors import OptionError
from quantkit_eval.evaluate import check_suites, evaluate
from quantkit_eval.protocol import Generation, GenerationRequest
from quantkit_eval.records import read_samples
from quantkit_eval.report.gates import title
from quantkit_eval.suites import CONSTRAINABLE, SUITES, load_suite, with_constrained
from quantkit_eval.suites.graded import GeneratedSuite


def right_answer(name: str, gold: Any) -> Any:
    """What the form has to let through."""
    return {**gold, "steps": [f"x = {step}" for step in gold["steps"]]} if name == "arith" else gold


@pytest.mark.parametrize("name", [name for name in CONSTRAINABLE if name != "schema"])
def test_a_form_lets_the_right_answer_through_and_does_not_give_it_away(name: str) -> None:
    suite = importlib.import_module(f"quantkit_eval.suites.{name}").run
    for item in suite.generate(30, 5):
        form = suite.suite.require_form(f"{name}+constrained", item)
        Draft202012Validator.check_schema(form)
        Draft202012Validator(form).validate(right_answer(name, item.gold))
        assert not Draft202012Validator(form).is_valid({})
        if name == "extract":
            assert not any(str(value) in json.dumps(form) for value in item.gold.values())


def test_the_form_of_a_schema_item_is_its_schema() -> None:
    suite = importlib.import_module("quantkit_eval.suites.schema").run
    assert all(suite.suite.require_form("schema+constrained", item) == item.schema for item in suite.generate(5, 0))


@pytest.mark.parametrize("name", sorted(set(SUITES) - set(CONSTRAINABLE)))
def test_what_asks_for_no_json_cannot_be_constrained(name: str) -> None:
    with pytest.raises(OptionError, match=rf"suite '{name}' asks for no JSON .*Choose from extract, schema"):
        load_suite(f"{name}+constrained")


def test_every_constrainable_suite_loads_as_the_same_suite() -> None:
    for name in CONSTRAINABLE:
        assert load_suite(f"{name}+constrained") is load_suite(name)
        assert isinstance(load_suite(name), GeneratedSuite)


def test_both_ways_side_by_side(tmp_path: Path, fake_model: Callable[..., Any]) -> None:
    """The fake obeys a schema, and knows JSON only then."""
    forms: list[Any] = []

    class Obedient(fake_model):  # type: ignore[misc,valid-type]
        def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
            forms.extend(request.schema for request in requests)
            answers = super().generate(requests)
            return [
                replace(one, num_forced_tokens=5, num_counted_tokens=20, legal_mass=0.25) if request.schema else one
                for request, one in zip(requests, answers, strict=True)
            ]

    def answer(request: GenerationRequest) -> str:
        return "{}" if request.schema else "no"

    suites = with_constrained({"extract": {"num_items": 4}, "needle": {"num_items": 2}})
    assert list(suites) == ["extract", "extract+constrained", "needle"]
    check_suites(suites)
    result = evaluate(Obedient(answer), suites, 0, tmp_path)
    free, forced = result["suites"]["extract"], result["suites"]["extract+constrained"]
    assert [form is None for form in forms] == [True] * 4 + [False] * 4 + [True] * 2
    assert free["items_hash"] == forced["items_hash"]
    assert (free["options"], forced["options"]) == (
        {"num_items": 4, "max_tokens": 64}, {"num_items": 4, "max_tokens": 64, "constrained": True},
    )  # fmt: skip
    assert (free["metrics"]["parse_ok"]["value"], forced["metrics"]["parse_ok"]["value"]) == (0.0, 1.0)
    assert forced["metrics"]["forced_token_rate"]["value"] == 0.25
    assert forced["metrics"]["legal_mass"]["value"] == 0.25
    assert not {"forced_token_rate", "legal_mass"} & free["metrics"].keys()
    sample = next(one for one in read_samples(tmp_path / "samples.jsonl") if one["suite"] == "extract+constrained")
    assert {"num_forced_tokens": 5, "num_tokens": 20, "legal_mass": 0.25}.items() <= sample["metrics"].items()
    verdict = compare(tmp_path, tmp_path, {"max_drop_pp": {"extract+constrained": 90}})
    assert verdict["gates"][0]["name"].startswith("extract+constrained.")
    assert title("extract+constrained") == "Structured output, constrained"


def test_a_server_that_does_not_tell_leaves_the_metrics_out(tmp_path: Path, fake_model: Callable[..., Any]) -> None:
    result = evaluate(fake_model(), {"schema+constrained": {"num_items": 2}}, 0, tmp_path)
    assert not {"forced_token_rate", "legal_mass"} & result["suites"]["schema+constrained"]["metrics"].keys()


def test_lines_of_a_users_suite_need_a_schema(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a", "schema": {"type": "object"}}\n{"id": "x", "prompt": "b", "gold": "c"}\n')
    options = {"kind": "file", "path": str(path)}
    with pytest.raises(OptionError, match=r"suite 'mine\+constrained': item 'x' has no schema to enforce\. Give each"):
        check_suites({"mine+constrained": options})
    check_suites({"mine+constrained": {**options, "num_items": 1}})


def test_nothing_to_constrain_is_said() -> None:
    with pytest.raises(OptionError, match=r"no suite of nll, needle can be constrained\. Add one of extract"):
        with_constrained({"nll": {}, "needle": {}})

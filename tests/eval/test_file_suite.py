"""The user's own prompts: what a line may hold, what is wrong with one, and that they are gated like other suites."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit_eval.compare import compare
from quantkit_eval.errors import OptionError
from quantkit_eval.evaluate import evaluate
from quantkit_eval.protocol import GenerationRequest
from quantkit_eval.records import read_samples, write_verdict
from quantkit_eval.suites import schema_check
from quantkit_eval.suites.file import measure, read_items
from quantkit_eval.suites.graded import Item

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
LINES = [
    {"prompt": "Capital of Norway?", "gold": "Oslo"},
    {"id": "as-json", "prompt": "n = 1 as JSON", "gold": {"n": 1, "of": ["a"]}, "schema": SCHEMA},
    {"messages": CHAT, "schema": SCHEMA, "max_tokens": 7},
    {"prompt": "List a, b", "gold": ["a", "b"]},
]


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("schema", "output"),
    [
        ({"type": "object", "properties": {"a": {"pattern": "^(x+)+$"}}}, '{"a": "%s"}'),
        ({"type": "object", "patternProperties": {"^(x+)+$": True}, "additionalProperties": False}, '{"%s": 1}'),
    ],
)
def test_a_pattern_without_end_is_left(schema: dict[str, Any], output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_check, "TIME_LIMIT_S", 0.1)
    metrics = measure(Item("a", "", None, schema), output % ("x" * 60 + "y"))
    assert (metrics["exact"], metrics["schema_ok"], metrics["error_keyword"]) == (False, False, "timeout")
    assert measure(Item("a", "", None, schema), output % "xx")["exact"] is True
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("schema", "value"),
    [({"multipleOf": 0.5}, 10**400), ({"multipleOf": 0.01}, -(10**309)), ({"format": "regex"}, "a{99999999999999}")],
)
def test_a_number_that_is_too_large_to_check_does_not_fit(schema: dict[str, Any], value: Any) -> None:
    """A model that never stops writes digits."""
    item = Item("a", "", None, {"properties": {"n": schema}})
    metrics = measure(item, json.dumps({"n": value}))
    assert (metrics["parse_ok"], metrics["schema_ok"], metrics["error_keyword"]) == (True, False, "overflow")


def test_lines_become_items(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", LINES)
    path.write_text("\ufeff" + path.read_text() + "\n  \n", encoding="utf-8")
    first, second, third, _ = read_items(path)
    assert (first.id, first.prompt, first.gold, first.schema) == ("line-0001", "Capital of Norway?", "Oslo", None)
    assert (second.id, second.schema) == ("as-json", SCHEMA)
    assert third.prompt == "[system]\nBe brief.\n\n[user]\nHi"
    assert (third.gold, third.max_tokens, [message["role"] for message in third.messages]) == (
        None,
        7,
        ["system", "user"],
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "Expecting property name"),
        ("[1]", "not a JSON object"),
        ('{"prompt": "a"}', "needs gold (what is right), or schema, or both"),
        ('{"gold": "a"}', "needs either prompt or messages"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "gold": "b"}', "either prompt or messages"),
        ('{"prompt": "", "gold": "b"}', "prompt must be text that is not empty"),
        ('{"prompt": "a", "glod": "b"}', "unknown key 'glod'; allowed are id, prompt, messages"),
        ('{"prompt": "a", "schema": {"$ref": "#"}}', "a $ref that leads nowhere or into itself"),
        ('{"prompt": "a", "schema": {"$ref": "http://localhost/a.json"}}', "references have to stay inside it"),
        ('{"prompt": "a", "gold": ""}', "gold must be text, an object or a list"),
        ('{"prompt": "a", "gold": 3}', "gold must be text, an object or a list"),
        ('{"prompt": "a", "gold": {"a": NaN}}', "NaN is no JSON number"),
        ('{"prompt": "a", "schema": {"type": "objekt"}}', "schema is no JSON Schema (Draft 2020-12): "),
        ('{"prompt": "a", "schema": true}', "schema must be a JSON Schema object"),
        ('{"messages": [], "gold": "b"}', "messages must be a list of {role, content}"),
        ('{"messages": [{"role": "user"}], "gold": "b"}', "messages must be a list of {role, content}"),
        ('{"messages": [{"role": "me", "content": "a"}], "gold": "b"}', "roles are system, user, assistant"),
        ('{"messages": [{"role": "assistant", "content": "a"}], "gold": "b"}', "last of messages must be the user's"),
        ('{"prompt": "a", "gold": "b", "max_tokens": 0}', "max_tokens must be a whole number above 0, not 0"),
        ('{"prompt": "a\\ud800", "gold": "b"}', "half of a surrogate pair"),
        ('{"id": "x", "prompt": "a", "gold": "b"}', "the id 'x' stands above already"),
        ('{"prompt": "a", "gold": {"n": 1e999}}', "a number is too large for a float, such as 1e999"),
        ('{"prompt": "a", "schema": {"maximum": 1e999}}', "a number is too large for a float, such as 1e999"),
        ('{"prompt": "a", "gold": ' + "[" * 99_999 + "]" * 99_999 + "}", "nested too deeply to be read"),
        ('{"prompt": "a", "schema": ' + '{"not": ' * 400 + "{}" + "}" * 401, "nested too deeply to be read"),
        ('{"prompt": "a", "prompt": "b", "gold": "c"}', "the key 'prompt' stands twice"),
        ('{"prompt": "a", "gold": {"n": 1, "n": 2}}', "the key 'n' stands twice"),
        ('{"prompt": "a", "schema": {"type": "string"}}', "only an object or a list is looked for in an answer"),
        ('{"prompt": "a", "schema": {"type": ["number", "null"]}}', "schema asks for type ['number', 'null'], but"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named_by_its_number(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "x", "prompt": "a", "gold": "b"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(OptionError) as caught:
        read_items(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\n\n", "no item. Write one JSON object a line"), (b"\xff\n", "no UTF-8, byte 0"), (None, "No such file")],
)
def test_a_file_without_items_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(OptionError, match=words):
        read_items(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("gold", "schema", "output", "exact", "more"),
    [
        ("Oslo", None, " Oslo\n", True, {}),
        ("Oslo", None, "Oslo.", False, {}),
        ({"n": 1, "m": 2}, None, 'Sure: {"m": 2, "n": "1"}', True, {"fields_correct": 2}),
        ({"n": 1, "m": 2}, None, '{"n": 1}', False, {"fields_correct": 1, "fields_total": 2}),
        ({"n": 1}, SCHEMA, '{"n": "1"}', False, {"schema_ok": False, "error_path": "/n", "error_keyword": "type"}),
        (["a"], None, '["a"]', True, {"parse_ok": True}),
        (None, SCHEMA, '{"n": 7}', True, {"schema_ok": True, "error_path": None}),
        (None, SCHEMA, "7", False, {"schema_ok": False, "parse_ok": False}),
        ("yes", SCHEMA, "yes", False, {"schema_ok": False}),
    ],
)
def test_an_answer_has_to_do_all_that_its_line_demands(
    gold: Any, schema: Any, output: str, exact: bool, more: dict[str, Any]
) -> None:
    metrics = measure(Item("a", "", gold, schema), output)
    assert metrics["exact"] is exact
    assert metrics | more == metrics


def test_own_prompts_are_measured_and_gated(tmp_path: Path, fake_model: Callable[..., Any]) -> None:
    lines = [{"id": f"q{i}", "prompt": f"Say {i}", "gold": f"{i}"} for i in range(80)]
    path = write(tmp_path / "mine.jsonl", lines)
    suites = {"mine": {"kind": "file", "path": str(path)}}

    def right(request: GenerationRequest) -> str:
        return request.messages[-1]["content"].removeprefix("Say ")

    def often_wrong(request: GenerationRequest) -> str:
        return "I do not know" if request.id.endswith(("1", "2", "3")) else right(request)

    evaluate(fake_model(right, name="base"), suites, 0, tmp_path / "a")
    result = evaluate(fake_model(often_wrong, name="cand"), suites, 0, tmp_path / "b")
    assert result["suites"]["mine"]["primary_metric"] == "exact"
    assert result["suites"]["mine"]["metrics"]["exact"]["value"] == 56 / 80
    assert result["suites"]["mine"]["options"] == {"num_items": 80, "max_tokens": 256}
    assert "schema_ok" not in result["suites"]["mine"]["metrics"]
    verdict = compare(tmp_path / "a", tmp_path / "b", {"suites": ["mine"], "max_drop_pp": {"mine": 5}})
    assert (verdict["verdict"], verdict["gates"][0]["name"]) == ("fail", "mine.exact")
    assert verdict["reason"].startswith("1 of 1 gates failed. Of 80 mine answers, 100.0 % were exactly right before")
    write_verdict(tmp_path / "verdict.json", verdict)


def test_the_first_items_and_the_limits_of_lines_reach_the_model(
    tmp_path: Path, fake_model: Callable[..., Any]
) -> None:
    path = write(tmp_path / "mine.jsonl", LINES)
    options = {"kind": "file", "path": str(path), "num_items": 3, "max_tokens": 2}
    evaluate(fake_model(lambda request: "x" * 200), {"mine": options}, 0, tmp_path / "a")
    samples = read_samples(tmp_path / "a" / "samples.jsonl")
    assert [len(sample["output"]) for sample in samples] == [8, 8, 28]  # four characters a token
    assert samples[2]["gold"] == {"schema": SCHEMA}
    with pytest.raises(OptionError, match="has no option 'seed'"):
        evaluate(fake_model(), {"mine": {"kind": "file", "path": str(path), "seed": 1}}, 0, tmp_path / "b")


def test_a_wrong_file_is_refused_before_the_first_question(tmp_path: Path, fake_model: Callable[..., Any]) -> None:
    path = write(tmp_path / "mine.jsonl", [*LINES, {"prompt": "a"}])
    model = fake_model()
    with pytest.raises(OptionError, match=r"mine\.jsonl:5: needs gold"):
        evaluate(model, {"extract": {}, "mine": {"kind": "file", "path": str(path)}}, 0, tmp_path / "a")
    assert model.calls == 0

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from quantkit.serve.structured.tool_calls import ToolCall, ToolCallParser, forced_call, parse_call, tool_style

CALL = '<tool_call>\n{"name": "find", "arguments": {"x": 1}}\n</tool_call>'
FIND = ToolCall("find", '{"x": 1}')


def read(text: str, cuts: tuple[int, ...] = (), style: Any = "hermes") -> tuple[str, list[ToolCall]]:
    parser = ToolCallParser(style, ["find", "stop"])
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [parser.feed(text[start:stop]) for start, stop in itertools.pairwise(places)]
    pieces.append(parser.finish())
    return "".join(words for words, _ in pieces), [call for _, calls in pieces for call in calls]


@pytest.mark.parametrize(
    ("text", "words", "calls"),
    [
        ("Hello  ", "Hello  ", []),
        (CALL, "", [FIND]),
        (f"I look.\n{CALL}\n{CALL}\n", "I look.", [FIND, FIND]),
        (f"a {CALL} b", "a b", [FIND]),
        ("a <tool_call> b", "a <tool_call> b", []),
        ("a <tool_call>{}</tool_call> b", "a <tool_call>{}</tool_call> b", []),
        (
            '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
            [],
        ),
        (CALL[:-5], CALL[:-5], []),
        ("a < b <tool", "a < b <tool", []),
    ],
)
def test_hermes(text: str, words: str, calls: list[ToolCall]) -> None:
    assert read(text) == (words, calls)
    assert read(text, tuple(range(len(text)))) == (words, calls)


@pytest.mark.parametrize(
    ("text", "words", "calls"),
    [
        ("Hello", "Hello", []),
        ('{"name": "find", "parameters": {"x": 1}}', "", [FIND]),
        (
            '{"name": "find", "parameters": {"x": 1}}; {"name": "stop", "parameters": {}}',
            "",
            [FIND, ToolCall("stop", "{}")],
        ),
        ('{"name": "find", "parameters": {"x": "a;b"}}', "", [ToolCall("find", '{"x": "a;b"}')]),
        ('{"name": "find", "param', '{"name": "find", "param', []),
        ('{"name": "rm", "parameters": {}}', '{"name": "rm", "parameters": {}}', []),
        (CALL, CALL, []),
    ],
)
def test_llama3(text: str, words: str, calls: list[ToolCall]) -> None:
    assert read(text, style="llama3") == (words, calls)
    assert read(text, tuple(range(len(text))), "llama3") == (words, calls)


PARTS = st.sampled_from(["a", " ", "\n", "<", "<tool_call>", "</tool_call>", CALL, "{}", "é", "<tool", "{"])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(PARTS, max_size=8).map("".join),
    st.lists(st.integers(0, 500), max_size=12),
    st.sampled_from(["hermes", "llama3"]),
)
def test_the_pieces_do_not_matter(text: str, cuts: list[int], style: str) -> None:
    assert read(text, tuple(cuts), style) == read(text, (), style)


def test_arguments_keep_their_characters() -> None:
    assert parse_call('{"name": "a", "arguments": {"x": "é"}}', "hermes", ["a"]) == ToolCall("a", '{"x": "é"}')
    half = parse_call('{"name": "a", "arguments": {"x": "\\ud800"}}', "hermes", ["a"])
    assert half is not None
    assert half.arguments.encode() == b'{"x": "\\ud800"}'
    assert parse_call('{"name": "a", "arguments": "{}"}', "hermes", ["a"]) == ToolCall("a", "{}")
    assert parse_call('{"name": "a", "arguments": [1]}', "hermes", ["a"]) is None


def test_styles() -> None:
    assert tool_style("... <|start_header_id|> ...") == "llama3"
    assert tool_style("... <tool_call> ...") == "hermes"
    assert tool_style("") == "hermes"


def test_a_forced_call_keeps_references() -> None:
    node = {
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "v": {"$ref": "#/$defs/v"}},
        "$defs": {"v": {"type": "integer"}},
    }
    tools = [{"name": "a", "parameters": {}}, {"name": "b", "parameters": node}]
    for style, key in (("hermes", "arguments"), ("llama3", "parameters")):
        schema = forced_call(tools, style).schema  # type: ignore[arg-type]
        assert Draft202012Validator(schema).is_valid({"name": "b", key: {"next": {"v": 1}}})
        assert not Draft202012Validator(schema).is_valid({"name": "b", key: {"next": {"v": "1"}}})
        assert Draft202012Validator(schema).is_valid({"name": "a", key: {}})
        assert not Draft202012Validator(schema).is_valid({"name": "a", key: {"v": 1}})
        assert json.dumps(schema)

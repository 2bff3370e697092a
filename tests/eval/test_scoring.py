"""How single answers are read and scored: JSON, schemas, tools, chains, needles, scripts, rules, loops."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker

from quantkit_eval.suites import arith, needle, scripts, tools
from quantkit_eval.suites.answers import agrees, read_json
from quantkit_eval.suites.degeneration import is_looped, longest_whitespace_run
from quantkit_eval.suites.graded import Item
from quantkit_eval.suites.instruction_rules import RULES, follows, told
from quantkit_eval.suites.schema_check import FORMATS, first_error


@pytest.mark.parametrize(
    ("output", "value"),
    [('a [1, {"b": 2}] c', [1, {"b": 2}]), ('{"a": [1]}', {"a": [1]}), ("none", None), ("[1, NaN]", None)],
)
def test_the_first_brace_or_bracket_starts_the_answer(output: str, value: object) -> None:
    assert read_json(output)[0] == value


@pytest.mark.parametrize(
    ("value", "gold", "same"),
    [
        ([1, "2"], [1, 2], True),
        ([2, 1], [1, 2], False),
        ([1], [1, 2], False),
        ({"a": {"b": 1.0}}, {"a": {"b": 1}}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        (None, None, True),
        ("", None, False),
        (1, True, False),
        (True, True, True),
        ("true", True, False),
        (" x ", "x", True),
        (float("1e3"), 1000, True),
    ],
)
def test_values_agree_by_value(value: object, gold: object, same: bool) -> None:
    assert agrees(value, gold) is same


SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 18},
        "tags/all": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "day": {"type": "string", "format": "date"},
        "name~": {"anyOf": [{"type": "string", "pattern": "^[A-Z]"}, {"type": "null"}]},
    },
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"age": 18}, None),
        ({"age": 17}, ("/age", "minimum")),
        ({"age": "18"}, ("/age", "type")),
        ({}, ("", "required")),
        ([], ("", "type")),
        ({"age": 20, "size": 1}, ("", "additionalProperties")),
        ({"age": 20, "tags/all": ["a", "c"]}, ("/tags~1all/1", "enum")),
        ({"age": 20, "tags/all": ["a", "c", "d"]}, ("/tags~1all", "maxItems")),
        ({"age": 20, "day": "2023-02-29"}, ("/day", "format")),
        ({"age": 20, "name~": "x"}, ("/name~0", "anyOf")),
        ({"age": 1, "size": 1}, ("", "additionalProperties")),
    ],
)
def test_the_first_error_has_its_place_and_keyword(value: object, error: tuple[str, str] | None) -> None:
    assert first_error(SCHEMA, value) == error


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "age": st.integers(15, 20) | st.text(max_size=2),
            "tags/all": st.lists(st.sampled_from(["a", "b", "c"]), max_size=3),
            "day": st.sampled_from(["2024-02-29", "2023-02-29", "x"]),
            "name~": st.none() | st.sampled_from(["A", "a"]),
        },
    )
)
def test_there_is_an_error_exactly_where_jsonschema_finds_one(value: dict[str, Any]) -> None:
    valid = Draft202012Validator(SCHEMA, format_checker=FormatChecker(["date"])).is_valid(value)
    assert (first_error(SCHEMA, value) is None) is valid


def test_every_format_is_one_that_jsonschema_checks_by_itself() -> None:
    for name in FORMATS:
        assert first_error({"type": "string", "format": name}, "(((") == ("", "format"), name


CALL = Item("a", "", {"tool": "book_table", "arguments": {"city": "Oslo", "people": 4}})
REFUSAL = Item("a", "", {"tool": "none", "arguments": {}})


@pytest.mark.parametrize(
    ("item", "output", "exact", "tool_ok", "correct"),
    [
        (CALL, '{"tool": "book_table", "arguments": {"people": "4", "city": "Oslo"}}', True, True, 2),
        (CALL, '{"tool": "book_table", "arguments": {"people": 5, "city": "Oslo"}}', False, True, 1),
        (CALL, '{"tool": "book_table", "arguments": {"people": 4, "city": "Oslo", "day": 1}}', False, True, 2),
        (CALL, '{"tool": "call", "arguments": {"people": 4, "city": "Oslo"}}', False, False, 0),
        (CALL, '{"tool": "book_table", "arguments": [4]}', False, True, 0),
        (CALL, "book_table(Oslo, 4)", False, False, 0),
        (REFUSAL, '{"tool": "none", "arguments": {}}', True, True, 0),
        (REFUSAL, '{"tool": "none"}', True, True, 0),
        (REFUSAL, '{"tool": null}', False, False, 0),
        (REFUSAL, "Paris.", False, False, 0),
    ],
)
def test_a_tool_call_is_compared_by_value(item: Item, output: str, exact: bool, tool_ok: bool, correct: int) -> None:
    metrics = tools.measure(item, output)
    assert (metrics["exact"], metrics["tool_ok"], metrics["fields_correct"]) == (exact, tool_ok, correct)


CHAIN = Item("a", "", {"steps": [3, 6, 12], "answer": 12})


@pytest.mark.parametrize(
    ("output", "exact", "answer_ok", "first_wrong"),
    [
        ('{"steps": ["2 + 1 = 3", "3 + 3 = 6", "6 * 2 = 12"], "answer": 12}', True, True, None),
        ('{"steps": [3, "6", "12"], "answer": "12"}', True, True, None),
        ('{"steps": ["2 + 1 = 3", "3 + 3 = 7", "7 * 2 = 12"], "answer": 12}', False, True, 2),
        ('{"steps": ["2 + 1 = 3", "3 + 3 = 6"], "answer": 12}', False, True, 3),
        ('{"steps": [3, 6, 12, 12], "answer": 12}', False, True, 4),
        ('{"steps": [3, 6, 12], "answer": 13}', False, False, None),
        ('{"answer": 12}', False, True, 1),
        ("12", False, False, 1),
    ],
)
def test_the_first_wrong_step_is_found(output: str, exact: bool, answer_ok: bool, first_wrong: int | None) -> None:
    metrics = arith.measure(CHAIN, output)
    assert (metrics["exact"], metrics["answer_ok"], metrics["first_wrong_step"]) == (exact, answer_ok, first_wrong)


def test_chains_are_computed_from_left_to_right() -> None:
    """Against Python's own arithmetic, with brackets put around every step."""
    for item in arith.generate_items(90, 6):
        words = item.prompt.rpartition("[user]")[2]
        start = next(index for index, sign in enumerate(words) if sign.isdigit())
        signs = "".join(sign for sign in words[start:] if sign in "0123456789+-* ").split()
        value = signs[0]
        results = []
        for sign, operand in zip(signs[1::2], signs[2::2], strict=True):
            value = f"({value} {sign} {operand})"
            results.append(eval(value))
        assert item.gold == {"steps": results, "answer": results[-1]}
        assert min(results) > 0


KEY = Item(
    "key-L1-0", "The code of the pot is 1111.\nThe code of the cup is 2222.\nWhat is the code of the pot?", "1111"
)


@pytest.mark.parametrize(
    ("output", "exact", "other_key"),
    [
        ("1111", True, False),
        ("The code is 1111.", True, False),
        ("2222", False, True),
        ("3333", False, False),
        ("11112", False, False),
        ("pot", False, False),
        ("2222 or 1111", False, True),
    ],
)
def test_the_first_number_is_the_answer(output: str, exact: bool, other_key: bool) -> None:
    assert needle.measure(KEY, output) == {"exact": exact, "other_key": other_key}


def test_an_instruction_after_a_long_context_asks_for_one_word() -> None:
    item = Item("end-L1-0", "", "cow")
    assert [needle.measure(item, text)["exact"] for text in ("cow", "Cow.", '"cow"', "The cow", "2222")] == [
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("gold", "output", "exact", "replaced"),
    [
        ("naïve", "naïve", True, 0),
        ("naïve", "nai\u0308ve\n", True, 0),
        ("naïve", '"naïve".', True, 0),
        ("naïve", "naive", False, 0),
        ("👩‍🚀", "👩🚀", False, 0),
        ("น้ำ", "น\ufffd\ufffd", False, 2),
        ("वन", "\n\nवन\nmore", True, 0),
    ],
)
def test_a_copy_is_exact_to_the_letter(gold: str, output: str, exact: bool, replaced: int) -> None:
    metrics = scripts.measure(Item("a", "", gold), output)
    assert (metrics["exact"], metrics["replacement_chars"]) == (exact, replaced)


@pytest.mark.parametrize(
    ("rule", "value", "good", "bad"),
    [
        ("num_words", 3, "Well-known, isn't it?", "one two"),
        ("max_words", 3, "one two", "one two three four"),
        ("num_items", 2, "a cat, a dog", "a cat, a dog, an owl"),
        ("upper", None, "A CAT!", "A Cat"),
        ("lower", None, "a cat 7", "A cat"),
        ("has_word", "Cat", "The cat.", "Concatenate"),
        ("no_word", "the", "Other things", "The cat"),
        ("first_word", "Red", "red, I say", "I say red"),
        ("last_word", "red", "I say red.", "red I say"),
        ("in_order", ["cat", "owl"], "A cat and an owl", "owl, cat"),
    ],
)
def test_rules_are_told_and_verified(rule: str, value: object, good: str, bad: str) -> None:
    gold = {"rule": rule, "value": value}
    assert follows(gold, good)
    assert not follows(gold, bad)
    assert not follows(gold, "")
    assert "{" not in told(gold)
    assert "[" not in told(gold)


def test_every_rule_is_tested_above() -> None:
    (mark,) = test_rules_are_told_and_verified.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in mark.args[1]} == set(RULES)


@pytest.mark.parametrize(
    ("output", "looped"),
    [
        ("the city of the city of the city of the city of the ci", True),
        ("a" * 40, True),
        ("Fine. " + "no no no no no no no no no no", True),
        ("10000000", False),
        ("ha ha ha ha", False),
        ("one two three four five six seven eight nine ten", False),
        ('{"steps": [1, 2, 4], "answer": 4}', False),
        ("", False),
        ("\n" * 50, False),
    ],
)
def test_a_loop_is_a_piece_four_times_at_the_end(output: str, looped: bool) -> None:
    assert is_looped(output) is looped


@given(
    st.text(min_size=1, max_size=12).filter(lambda text: not text.isspace()), st.text(max_size=20), st.integers(0, 11)
)
def test_a_repeated_piece_is_a_loop_wherever_it_is_cut(piece: str, before: str, cut: int) -> None:
    assert is_looped(before + (piece * 40)[: 36 * len(piece) + cut % len(piece)])


def test_the_longest_run_of_blanks() -> None:
    assert longest_whitespace_run("a  b\n\n\n c") == 4
    assert longest_whitespace_run("") == 0

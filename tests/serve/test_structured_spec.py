import pytest

from quantkit.errors import UsageError
from quantkit.serve.structured import StructuredOutput


def test_equal_forms_are_one_key() -> None:
    first = StructuredOutput.json_schema({"type": "object"})
    assert {first: 1}[StructuredOutput.json_schema('{"type": "object"}')] == 1
    assert first == StructuredOutput.json_object()
    assert first.schema == {"type": "object"}
    assert StructuredOutput.choice(["a", "b", "a"]).value == ("a", "b")
    assert StructuredOutput.regex("a").schema is None


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("xml", "a", "structured output of kind 'xml': choose from json_schema, regex, grammar, choice"),
        ("regex", " ", "regex=' ' is no text with characters in it"),
        ("grammar", None, "grammar=None is no text with characters in it"),
        ("choice", (), "choice=() is no list of one or more texts"),
        ("choice", "ab", "choice='ab' is no list of one or more texts"),
        ("choice", ("a", ""), "choice=('a', '') holds '', which is no text with characters in it"),
        ("json_schema", "[]", "json_schema='[]' is a JSON list, not an object"),
        ("json_schema", "{", "json_schema='{' is no JSON: Expecting property name enclosed in double quotes"),
        ("regex", "a\ud800", "regex is not UTF-8 text (character 1)"),
    ],
)
def test_a_wrong_form_is_named(kind: str, value: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        StructuredOutput(kind, value)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


def test_a_schema_that_is_no_json_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        StructuredOutput.json_schema({"maximum": float("nan")})
    deep: object = {}
    for _ in range(100_000):
        deep = {"not": deep}
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        StructuredOutput.json_schema(deep)  # type: ignore[arg-type]

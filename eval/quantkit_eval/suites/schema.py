"""``schema``: write a JSON object that fits a JSON Schema.

Catches damage to form: an open brace, a number where text is asked for, an enum value that does not exist, a list that
does not end. Validated with jsonschema, Draft 2020-12; ``error_path`` and ``error_keyword`` say what broke first.
"""

from quantkit_eval.suites.answers import read_object
from quantkit_eval.suites.graded import GradedSuite, Item, Metrics
from quantkit_eval.suites.schema_check import first_error
from quantkit_eval.suites.schema_items import generate_items


def measure(item: Item, output: str) -> Metrics:
    """Read the object and validate it."""
    answer, only_json = read_object(output)
    assert item.schema is not None  # every generated item has one
    error = first_error(item.schema, answer) if answer is not None else None
    return {
        "parse_ok": answer is not None,
        "schema_ok": answer is not None and error is None,
        "error_path": error[0] if error else None,
        "error_keyword": error[1] if error else None,
        "only_json": only_json,
    }


run = GradedSuite(
    measure=measure,
    primary="schema_ok",
    shares=("schema_ok", "parse_ok", "only_json"),
).generated(generate_items, num_items=252, max_tokens=96)

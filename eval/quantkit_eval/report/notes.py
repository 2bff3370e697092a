"""What the metrics of one answer say in words, so that the reader of a flipped item need not work it out."""

from collections.abc import Mapping
from typing import Any

from quantkit_eval.record_types import Sample


def notes(sample: Sample | None, *, right: bool) -> tuple[str, ...]:
    """What is wrong with an answer, the cause before its signs; ``right`` if it is the right one of the two."""
    if sample is None:
        return ()
    metrics: Mapping[str, Any] = sample["metrics"]
    found = ["right"] if right else list(_causes(metrics))
    if metrics.get("looped"):
        found.append("repeats itself to the end")
    if metrics.get("replacement_chars"):
        found.append("bytes that make no character")
    if metrics.get("truncated"):
        found.append("cut off at the token limit")
    return tuple(found)


def _causes(metrics: Mapping[str, Any]) -> list[str]:
    """Why an answer is wrong, as far as its suite knows."""
    if metrics.get("parse_ok") is False:
        return ["no JSON found"]
    causes = []
    if metrics.get("error_keyword") == "timeout":
        causes.append("its schema takes too long to check")
    elif metrics.get("error_keyword") == "overflow":
        causes.append("holds a number too large to check")
    elif metrics.get("error_keyword"):
        place = metrics.get("error_path") or "the top"
        causes.append(f"breaks its schema: {metrics['error_keyword']} at {place}")
    if metrics.get("tool_ok") is False:
        causes.append("wrong tool")
    elif metrics.get("fields_total"):
        causes.append(f"{metrics.get('fields_correct')} of {metrics['fields_total']} fields right")
    if metrics.get("first_wrong_step"):
        causes.append(f"step {metrics['first_wrong_step']} is the first wrong one")
    if metrics.get("other_key"):
        causes.append("value of another key")
    if metrics.get("rules_total"):
        causes.append(f"{metrics.get('rules_followed')} of {metrics['rules_total']} rules followed")
    return causes

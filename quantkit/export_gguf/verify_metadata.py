"""What a file says about itself beside what its model would make quantkit write."""

from collections.abc import Mapping
from typing import Any

from quantkit.export_gguf.header import FINGERPRINT_KEY, PRETOKENIZER_KEY, expected_metadata
from quantkit.export_gguf.plan import ExportPlan
from quantkit.export_gguf.tokenizer import NAMED
from quantkit.source.gguf import CONFIG_KEY
from quantkit.verify import VerifyReport

LABELS = ("general.name", "general.file_type")  # nothing that a reader computes with
# What llama.cpp has no default for, and what changes what it computes.
NEEDED = (
    *("block_count", "embedding_length", "feed_forward_length", "context_length"),
    *("attention.head_count", "attention.layer_norm_rms_epsilon", "tokenizer.ggml.model", "tokenizer.ggml.tokens"),
)
COMPUTES = ("scal", "softcapping", "sliding_window", "expert")
IDLE = (0, 1, "none")  # values with which such an entry changes nothing
_SHOWN = 40  # characters of a value


def check_metadata(report: VerifyReport, plan: ExportPlan, stored: Mapping[str, Any]) -> None:
    """Add the check ``metadata``: every entry that says how to compute or to make tokens is the model's.

    A file that quantkit did not write may lack entries that llama.cpp has a default for, and have others that it does
    not compute with; a note lists them.

    Args:
        report: gets the check.
        plan: of the model, with the pre-tokenizer that was named when the file was made.
        stored: entries of the file, or of its first part.
    """
    ours = FINGERPRINT_KEY in stored
    mine = (CONFIG_KEY, PRETOKENIZER_KEY) if ours else ()
    expected = {
        key: value
        for key, value in expected_metadata(plan).items()
        if key in mine or not (key in LABELS or key.startswith("quantkit."))
    }
    both = [key for key in expected if key in stored]
    problems = [line for key in both if (line := _difference(key, stored[key], expected[key]))]
    others: list[str] = []
    for key in expected.keys() - stored.keys():
        is_bad = ours or key.removeprefix(f"{plan.family.name}.") in NEEDED
        (problems if is_bad else others).append(f"it has no {key}, the model's is {_short(expected[key])}")
    for key, value in stored.items():
        if key not in expected and key.startswith((f"{plan.family.name}.", "tokenizer.")):
            is_bad = ours or (any(word in key for word in COMPUTES) and value not in IDLE)
            (problems if is_bad else others).append(f"{key} is {_short(value)}, the model has none")
    if others:
        report.notes.append("; ".join(sorted(others)))
    report.notes += [note for note in plan.vocabulary.notes if note.startswith(NAMED)]
    report.add("metadata", problems, f"{len(both)} entries are what the model says")


def _difference(key: str, found: Any, wanted: Any) -> str | None:
    """Where an entry is another one, with both values; None if they are the same."""
    if found == wanted:
        return None
    if not isinstance(wanted, str | tuple) or type(found) is not type(wanted):
        return f"{key} is {_short(found)}, the model's is {_short(wanted)}"
    pairs = enumerate(zip(found, wanted, strict=False))
    at = next((index for index, (one, other) in pairs if one != other), min(len(found), len(wanted)))
    if isinstance(wanted, tuple):
        if len(found) != len(wanted):
            return f"{key} has {len(found)} entries, the model's {len(wanted)}"
        return f"{key}[{at}] is {_short(found[at])}, the model's is {_short(wanted[at])}"
    start = max(0, at - _SHOWN // 2)
    where = f" from character {start} on" if start else ""
    return f"{key} is{where} {_short(found[start:])}, the model's is {_short(wanted[start:])}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

"""The items that only one of the two models got right, cut to what a page can hold."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantkit_eval.record_types import Flipped, Sample
from quantkit_eval.report.diff import Segment, mark_differences
from quantkit_eval.report.inputs import ReportInput
from quantkit_eval.report.notes import notes
from quantkit_eval.report.quantities import number

_LEAD = 4  # a cut output starts a quarter of its length before the divergence


@dataclass(frozen=True, slots=True)
class Side:
    """One model's output.

    Attributes:
        segments: text, cut where it differs from the other side's.
        before: characters left out before the first segment.
        after: characters left out after the last one.
        notes: what its metrics say in words.
    """

    segments: tuple[Segment, ...]
    before: int
    after: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Flip:
    """A flipped item as the report shows it.

    Attributes:
        suite: of the item.
        id: unique in its suite.
        direction: ``regressed`` or ``improved``.
        prompt: perhaps cut in its middle.
        gold: what would have been right, as text.
        divergence: characters that both outputs share from the start; None if they are equal.
        baseline: the output before.
        candidate: the output after.
    """

    suite: str
    id: str
    direction: str
    prompt: str
    gold: str
    divergence: int | None
    baseline: Side
    candidate: Side


def flipped_items(run: ReportInput) -> list[Flip]:
    """All flipped items at full length, regressed ones first, in the order of the verdict."""
    before = {(sample["suite"], sample["id"]): sample for sample in run.baseline_samples}
    after = {(sample["suite"], sample["id"]): sample for sample in run.candidate_samples}
    order = sorted(run.verdict["flipped"], key=lambda item: item["direction"] != "regressed")
    return [
        _flip(item, before.get((item["suite"], item["id"])), after.get((item["suite"], item["id"]))) for item in order
    ]


def _flip(item: Flipped, before: Sample | None, after: Sample | None) -> Flip:
    marked = mark_differences(item["baseline_output"], item["candidate_output"])
    regressed = item["direction"] == "regressed"
    return Flip(
        suite=item["suite"],
        id=item["id"],
        direction=item["direction"],
        prompt=item["prompt"],
        gold=gold_text(item["gold"]),
        divergence=marked.divergence,
        baseline=Side(marked.baseline, 0, 0, notes(before, right=regressed)),
        candidate=Side(marked.candidate, 0, 0, notes(after, right=not regressed)),
    )


def gold_text(gold: Any) -> str:
    """A gold value as people read it: text as it is, everything else as JSON."""
    return gold if isinstance(gold, str) else json.dumps(gold, ensure_ascii=False)


def shortened(flip: Flip, limit: int) -> Flip:
    """The same item with at most about ``limit`` characters of each text; what differs stays in sight."""
    return replace(
        flip,
        prompt=cut_middle(flip.prompt, limit),
        gold=cut_middle(flip.gold, limit),
        baseline=_shortened_side(flip.baseline, flip.divergence, limit),
        candidate=_shortened_side(flip.candidate, flip.divergence, limit),
    )


def cut_middle(text: str, limit: int) -> str:
    """Both ends of a text and, between them, how much is missing."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [… {number(len(text) - 2 * half)} characters left out …] {text[-half:]}"


def _shortened_side(side: Side, divergence: int | None, limit: int) -> Side:
    length = sum(len(segment.text) for segment in side.segments)
    if length <= limit:
        return side
    start = min(max((divergence or 0) - limit // _LEAD, 0), length - limit)
    return replace(side, segments=_window(side.segments, start, limit), before=start, after=length - limit - start)


def _window(segments: Sequence[Segment], start: int, length: int) -> tuple[Segment, ...]:
    """The characters from ``start`` on, ``length`` of them, still marked."""
    kept = []
    position = 0
    for segment in segments:
        text = segment.text[max(start - position, 0) : max(start + length - position, 0)]
        position += len(segment.text)
        if text:
            kept.append(Segment(text, segment.changed))
    return tuple(kept)

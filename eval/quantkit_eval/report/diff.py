"""Two outputs side by side: where they part, and what differs."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

MAX_CELLS = 40_000  # tokens x tokens of the part that differs; beyond it the alignment costs more than it tells
MIN_SIMILARITY = 0.35  # below it a word-by-word marking is noise: all that follows the divergence is marked
MAX_ALIGNED = 8000  # characters; a longer part that differs is marked as a whole
_CONTEXT = 64  # characters before the divergence that are cut into tokens, so that no word is split
_JOINER = "\u200d"
_SKIN_TONES = range(0x1F3FB, 0x1F400)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of text and whether the other side has something else there."""

    text: str
    changed: bool


@dataclass(frozen=True, slots=True)
class Differences:
    """Two texts cut into segments; joining a side's segments gives its text back.

    Attributes:
        divergence: characters that both texts share from the start; None if the texts are equal.
        baseline: segments of the first text.
        candidate: segments of the second text.
    """

    divergence: int | None
    baseline: tuple[Segment, ...]
    candidate: tuple[Segment, ...]


def _is_glued(text: str, index: int) -> bool:
    """Whether the character belongs to the one before it: a mark, a joiner or what is joined, a skin tone."""
    character = text[index]
    joined = index > 0 and text[index - 1] == _JOINER
    return joined or character == _JOINER or ord(character) in _SKIN_TONES or unicodedata.category(character)[0] == "M"


def split_tokens(text: str) -> list[str]:
    """Words, runs of white space, and single signs. Marks, joiners and skin tones stay with what they belong to.

    Wide letters (Chinese, Japanese) are tokens of their own, because these scripts do not space their words.
    """
    starts = []
    previous = ""
    for index, character in enumerate(text):
        if index and _is_glued(text, index):
            continue
        if character.isalnum() or character == "_":
            kind = "wide" if unicodedata.east_asian_width(character) in "WF" else "word"
        else:
            kind = "space" if character.isspace() else "sign"
        if kind != previous or kind not in ("word", "space"):
            starts.append(index)
        previous = kind
    stops = [*starts[1:], len(text)] if starts else []
    return [text[start:stop] for start, stop in zip(starts, stops, strict=True)]


def mark_differences(baseline: str, candidate: str) -> Differences:
    """Find where two texts part and mark what differs after that."""
    if baseline == candidate:
        same = _merge([(baseline, False)])
        return Differences(None, same, same)
    head, tail = _shared_ends(baseline, candidate)
    middles = [text[head : len(text) - tail] for text in (baseline, candidate)]
    aligned = max(map(len, middles)) <= MAX_ALIGNED
    left, right = (split_tokens(middle if aligned else middle[: 2 * _CONTEXT]) for middle in middles)
    prefix = _shared(left, right)
    divergence = head + len("".join(left[:prefix]))
    before, after = (baseline[:divergence], False), (baseline[len(baseline) - tail :], False)
    if aligned:
        left, right = left[prefix:], right[prefix:]
        marked = _align(left, right, _shared(left[::-1], right[::-1]))
    else:
        rest = [text[divergence : len(text) - tail] for text in (baseline, candidate)]
        marked = [(rest[0], True)], [(rest[1], True)]
    return Differences(divergence, _merge([before, *marked[0], after]), _merge([before, *marked[1], after]))


def _shared_ends(one: str, two: str) -> tuple[int, int]:
    """Characters at the start and at the end that are surely equal and need no tokens, up to a little context."""
    head = max(_shared(one, two) - _CONTEXT, 0)
    while head and _is_glued(one, head):
        head -= 1
    tail = max(_shared(one[:head:-1], two[:head:-1]) - _CONTEXT, 0)
    while tail and _is_glued(one, len(one) - tail):
        tail -= 1
    return head, tail


def _shared(left: Sequence[str], right: Sequence[str]) -> int:
    """How many tokens, or characters, the two sequences share from the start."""
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length


def _align(left: list[str], right: list[str], suffix: int) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Mark both sides after the divergence; their last ``suffix`` tokens are known to be equal."""
    cut_left, cut_right = len(left) - suffix, len(right) - suffix
    tail = "".join(left[cut_left:])
    wholly = [("".join(left), True)], [("".join(right), True)]
    if not cut_left or not cut_right:  # something was only added or only taken away
        return [("".join(left[:cut_left]), True), (tail, False)], [("".join(right[:cut_right]), True), (tail, False)]
    if cut_left * cut_right > MAX_CELLS:
        return wholly
    matcher = SequenceMatcher(None, left[:cut_left], right[:cut_right], autojunk=False)
    blocks = matcher.get_matching_blocks()
    kept = sum(len(token) for block in blocks for token in left[block.a : block.a + block.size] if not token.isspace())
    kept += sum(len(token) for token in left[cut_left:] if not token.isspace())
    if kept < MIN_SIMILARITY * max(len("".join(left)), len("".join(right))):
        return wholly
    sides: tuple[list[tuple[str, bool]], list[tuple[str, bool]]] = ([], [])
    at_left = at_right = 0
    for block in blocks:
        sides[0].append(("".join(left[at_left : block.a]), True))
        sides[1].append(("".join(right[at_right : block.b]), True))
        at_left, at_right = block.a + block.size, block.b + block.size
        same = "".join(left[block.a : at_left])
        alone = block.size == 1 and same.isspace()  # a lone space between two changes would only cut the mark in two
        sides[0].append((same, alone))
        sides[1].append((same, alone))
    for side in sides:
        side.append((tail, False))
    return sides


def _merge(pieces: Sequence[tuple[str, bool]]) -> tuple[Segment, ...]:
    """Drop empty pieces and join neighbours that are marked alike."""
    merged: list[Segment] = []
    for text, changed in pieces:
        if not text:
            continue
        if merged and merged[-1].changed == changed:
            merged[-1] = Segment(merged[-1].text + text, changed)
        else:
            merged.append(Segment(text, changed))
    return tuple(merged)

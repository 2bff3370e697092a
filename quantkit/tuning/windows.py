"""The windows that tuning trains on, and those that only judge it."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibration.dataset import draw_pieces, is_at_hand, source_label
from quantkit.calibration.self_generated import Progress
from quantkit.calibration.tokenize import DocumentTokenizer, TokenizedDocument
from quantkit.errors import CalibrationError
from quantkit.recipe import Calibration, at_keys
from quantkit.recipe.calibration import Source, default_sources
from quantkit.recipe.tuning import Tuning
from quantkit.source import ModelSource

PASS_TOKENS = 1024  # that go through the model at once
VALIDATION_SHARE = 8  # one window of so many judges ...
MAX_VALIDATION_TOKENS = 4096  # ... up to so many tokens of a source


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Windows that go through the model at once.

    Attributes:
        token_ids: [B, T] int64.
        token_mask: [B, T] bool, the tokens whose next-token distribution counts; padding never does.
    """

    token_ids: Tensor
    token_mask: Tensor


@dataclass(frozen=True, slots=True)
class TuningSource:
    """What one source gives.

    Attributes:
        label: for messages and the record; no other source has it.
        share: of the training passes.
        training: windows to learn from.
        validation: windows that only judge.
    """

    label: str
    share: float
    training: tuple[Windows, ...]
    validation: tuple[Windows, ...]


def read_tuning_sources(
    tuning: Tuning, calibration: Calibration | None, model: ModelSource, progress: Progress
) -> tuple[TuningSource, ...]:
    """Read, tokenize and cut the sources.

    A source gives as many tokens as its share of all steps needs, or all that it has: then its windows are seen more
    than once. The windows that judge come last in the order in which calibration draws, so they are not among those
    that it has seen unless the source has no others.

    Args:
        tuning: the recipe's section.
        calibration: the recipe's section; its sources, windows and seed are used unless tuning has its own sources.
        model: for its tokenizer.
        progress: of self-generated sources.

    Raises:
        CalibrationError: a source is missing, malformed, or has fewer than two windows with tokens that count.
    """
    settings = calibration or Calibration()
    tokenizer = DocumentTokenizer(model.tokenizer())
    found = []
    sources = _sources(tuning, settings, tokenizer)
    for number, (source, label) in enumerate(zip(sources, _labels(sources), strict=True)):
        with at_keys(*_place(tuning), number):
            pieces = _read(tokenizer, source, number, tuning, settings, model, progress)
        count = len(pieces) // VALIDATION_SHARE
        judges = _first_tokens(pieces[::-1][: max(count, 1)], MAX_VALIDATION_TOKENS)
        training = pieces[: len(pieces) - len(judges)]
        found.append(TuningSource(label, source.share, batch(training), batch(judges)))
    return tuple(found)


def check_tuning_sources(tuning: Tuning, calibration: Calibration | None, model: ModelSource) -> None:
    """Refuse what `read_tuning_sources` would refuse, as far as that needs no answers of the model and no download.

    Raises:
        CalibrationError: as there.
    """
    settings = calibration or Calibration()
    tokenizer = DocumentTokenizer(model.tokenizer())
    for number, source in enumerate(_sources(tuning, settings, tokenizer)):
        with at_keys(*_place(tuning), number):
            if is_at_hand(source, model):
                _read(tokenizer, source, number, tuning, settings, model, lambda *_: None)


def _sources(tuning: Tuning, settings: Calibration, tokenizer: DocumentTokenizer) -> Sequence[Source]:
    return tuning.sources or settings.sources or default_sources(chat=tokenizer.has_chat_template)


def _labels(sources: Sequence[Source]) -> list[str]:
    """A label for each source; where two are called the same, with its place in the recipe."""
    labels = [source_label(source) for source in sources]
    return [f"{label} (sources[{number}])" if labels.count(label) > 1 else label for number, label in enumerate(labels)]


def _place(tuning: Tuning) -> tuple[str, ...]:
    """The key of the sources in the recipe."""
    return ("quantization", "tuning", "sources") if tuning.sources else ("calibration", "sources")


def _read(
    tokenizer: DocumentTokenizer,
    source: Source,
    number: int,
    tuning: Tuning,
    settings: Calibration,
    model: ModelSource,
    progress: Progress,
) -> list[TokenizedDocument]:
    """The pieces of a source for its share of the steps and for those that judge."""
    wanted = source.share * tuning.steps * tuning.tokens_per_step * VALIDATION_SHARE / (VALIDATION_SHARE - 1)
    drawn, _ = draw_pieces(tokenizer, source, number, round(wanted), settings, model, progress, at_most=True)
    pieces = [piece for piece in drawn if any(piece.counted)]
    if len(pieces) < 2:
        raise CalibrationError(
            f"tuning source {source_label(source)} has {len(pieces)} windows with tokens that count",
            fix="Give it at least two",
        )
    return pieces


def _first_tokens(pieces: Sequence[TokenizedDocument], max_tokens: int) -> list[TokenizedDocument]:
    """The first pieces with at most so many tokens together, and at least one."""
    kept: list[TokenizedDocument] = []
    for piece in pieces:
        if kept and sum(len(other.token_ids) for other in kept) + len(piece.token_ids) > max_tokens:
            break
        kept.append(piece)
    return kept


def batch(pieces: Sequence[TokenizedDocument]) -> tuple[Windows, ...]:
    """Pieces of similar length side by side, padded at the end, at most ``PASS_TOKENS`` tokens in a batch."""
    ordered = sorted(pieces, key=lambda piece: -len(piece.token_ids))
    batches = []
    start = 0
    while start < len(ordered):
        longest = len(ordered[start].token_ids)
        rows = ordered[start : start + max(1, PASS_TOKENS // longest)]
        token_ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        token_mask = torch.zeros(len(rows), longest, dtype=torch.bool)
        for row, piece in enumerate(rows):
            token_ids[row, : len(piece.token_ids)] = torch.tensor(piece.token_ids)
            token_mask[row, : len(piece.token_ids)] = torch.tensor(piece.counted)
        batches.append(Windows(token_ids, token_mask))
        start += len(rows)
    return tuple(batches)


def passes(sources: Sequence[TuningSource], seed: int) -> Iterator[Windows]:
    """Training windows without end: sources in turn by their shares, each shuffled anew when it has been seen."""
    rng = random.Random(seed)
    left: list[list[Windows]] = [[] for _ in sources]
    credit = [0.0] * len(sources)
    while True:
        credit = [value + source.share for value, source in zip(credit, sources, strict=True)]
        chosen = max(range(len(sources)), key=credit.__getitem__)
        credit[chosen] -= 1
        if not left[chosen]:
            left[chosen] = list(sources[chosen].training)
            rng.shuffle(left[chosen])
        yield left[chosen].pop()

"""The tokens that calibrate: the recipe's sources, mixed by share and cut into windows."""

import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.calibration.self_generated import Progress, generate_conversations, read_prompts
from quantkit.calibration.sources import Document, read_documents
from quantkit.calibration.structured_chat import generate_conversations as generate_structured_chat
from quantkit.calibration.tokenize import DocumentTokenizer, TokenizedDocument
from quantkit.errors import CalibrationError
from quantkit.recipe import Calibration, DatasetSource, SelfGeneratedSource, StructuredChatSource, TextSource, at_keys
from quantkit.recipe.calibration import Source, default_sources
from quantkit.source import ModelSource

MIN_PIECE_TOKENS = 8  # a shorter end of a document is dropped and counted


@dataclass(frozen=True, slots=True)
class CalibrationSet:
    """Windows of tokens, the longest first.

    Attributes:
        token_ids: [W, T] int64; 0 where a window is shorter than T.
        token_mask: [W, T] bool, whether a token counts in the statistics; padding never does.
        lengths: [W] int64 tokens of each window that are not padding.
        sources: what came from where, for the record.
        source_of: [W] int64, which of them each window is of.
    """

    token_ids: Tensor
    token_mask: Tensor
    lengths: Tensor
    sources: list[dict[str, Any]] = field(default_factory=list)
    source_of: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return int(self.lengths.sum())

    def batches(self, max_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(token_ids, token_mask), both [B, L], L the longest of these windows and B * L at most ``max_tokens``."""
        start = 0
        while start < len(self.lengths):
            longest = int(self.lengths[start])
            stop = start + max(1, max_tokens // longest)
            yield self.token_ids[start:stop, :longest], self.token_mask[start:stop, :longest]
            start = stop

    def to_record(self) -> dict[str, Any]:
        """The digest that quantkit.json carries."""
        digest = hashlib.sha256(self.token_ids.numpy().tobytes() + self.token_mask.numpy().tobytes())
        return {
            "sources": self.sources,
            "num_windows": len(self.lengths),
            "num_tokens": self.num_tokens,
            "masked_tokens": self.num_tokens - int(self.token_mask.sum()),
            "window_tokens": self.token_ids.shape[1],
            "sha256": digest.hexdigest(),
        }


def build_calibration(calibration: Calibration, model: ModelSource, progress: Progress | None = None) -> CalibrationSet:
    """Read or generate, tokenize and cut the recipe's sources.

    Each source gives its share of ``num_tokens``: pieces of at most ``window_tokens``, drawn with the recipe's seed.
    Nothing of a document follows another in a window, unless ``pack_documents`` joins the shuffled documents of a
    source before they are cut.

    Args:
        calibration: the recipe's section.
        model: for its tokenizer, and as the author of self-generated text.
        progress: is called with (stage, done, total) while the model generates.

    Raises:
        CalibrationError: a source is missing, empty, malformed or too short for its share.
    """
    tokenizer = DocumentTokenizer(model.tokenizer())
    sources = calibration.sources or default_sources(chat=tokenizer.has_chat_template)
    _refuse_long_windows(calibration, model)
    pieces: list[tuple[TokenizedDocument, int]] = []
    records = []
    for number, source in enumerate(sources):
        with at_keys("calibration", "sources", number):
            need = _num_tokens(source, calibration)
            tell = progress or (lambda *_: None)
            drawn, record = draw_pieces(tokenizer, source, number, need, calibration, model, tell)
        pieces += [(piece, number) for piece in drawn]
        records.append(record)
    pieces.sort(key=lambda piece: -len(piece[0].token_ids))
    lengths = torch.tensor([len(piece.token_ids) for piece, _ in pieces])
    token_ids = torch.zeros(len(pieces), int(lengths[0]), dtype=torch.int64)
    token_mask = torch.zeros(token_ids.shape, dtype=torch.bool)
    for row, (piece, _) in enumerate(pieces):
        token_ids[row, : lengths[row]] = torch.tensor(piece.token_ids)
        token_mask[row, : lengths[row]] = torch.tensor(piece.counted)
    _refuse_unusable(token_ids, token_mask, model)
    return CalibrationSet(token_ids, token_mask, lengths, records, torch.tensor([number for _, number in pieces]))


def check_sources(calibration: Calibration, model: ModelSource) -> None:
    """Refuse what `build_calibration` would refuse, as far as that needs no answers of the model and no download.

    Raises:
        CalibrationError: as there.
    """
    tokenizer = DocumentTokenizer(model.tokenizer())
    _refuse_long_windows(calibration, model)
    for number, source in enumerate(calibration.sources or default_sources(chat=tokenizer.has_chat_template)):
        with at_keys("calibration", "sources", number):
            if is_at_hand(source, model):
                need = _num_tokens(source, calibration)
                draw_pieces(tokenizer, source, number, need, calibration, model, lambda *_: None)


def is_at_hand(source: Source, model: ModelSource) -> bool:
    """Whether a source can be read without answers of the model and without a download.

    Raises:
        CalibrationError: the prompts of a self-generated source cannot be read.
    """
    if isinstance(source, SelfGeneratedSource):
        read_prompts(source, model)
    return not isinstance(source, SelfGeneratedSource | DatasetSource)


def draw_pieces(
    tokenizer: DocumentTokenizer,
    source: Source,
    number: int,
    num_tokens: int,
    calibration: Calibration,
    model: ModelSource,
    progress: Progress,
    *,
    at_most: bool = False,
) -> tuple[list[TokenizedDocument], dict[str, Any]]:
    """Read one source and draw from it, in an order that depends on the seed alone.

    Args:
        tokenizer: of the model.
        source: what to read.
        number: its place among the sources; with the recipe's seed it seeds what is generated.
        num_tokens: to draw.
        calibration: for its windows and its seed.
        model: as the author of self-generated text.
        progress: is called with (stage, done, total) while the model generates.
        at_most: draw what there is if it is less.

    Returns:
        The pieces in the order in which they were drawn, and what the record says of the source.

    Raises:
        CalibrationError: it is missing, empty, malformed, or too short.
    """
    documents = _documents(source, model, num_tokens, calibration.seed + number, progress)
    if isinstance(source, StructuredChatSource):
        tokenized = _tokenize_enough(tokenizer, source, documents, num_tokens, calibration.window_tokens)
    else:
        tokenized = [_tokenize(tokenizer, source, document) for document in documents]
    filled = [document for document in tokenized if document.token_ids]
    drawn, record = _draw(source, filled, num_tokens, calibration, at_most=at_most)
    return drawn, record | {"blank_documents": len(tokenized) - len(filled)}


def _documents(
    source: Source, model: ModelSource, num_tokens: int, seed: int, progress: Progress
) -> Iterable[Document]:
    if isinstance(source, StructuredChatSource):
        return generate_structured_chat(num_tokens, seed)
    if isinstance(source, SelfGeneratedSource):
        return generate_conversations(source, model, num_tokens, seed, progress)
    return read_documents(source)


def _tokenize_enough(
    tokenizer: DocumentTokenizer, source: Source, documents: Iterable[Document], num_tokens: int, window: int
) -> list[TokenizedDocument]:
    """The first documents of an endless source that have ``num_tokens`` tokens left when they are cut or packed."""
    tokenized: list[TokenizedDocument] = []
    kept = 0
    for document in documents:
        tokenized.append(_tokenize(tokenizer, source, document))
        kept += sum(len(piece.token_ids) for piece in _cut(tokenized[-1], window))
        if kept >= num_tokens + MIN_PIECE_TOKENS:
            break
    return tokenized


def _tokenize(tokenizer: DocumentTokenizer, source: Source, document: Document) -> TokenizedDocument:
    assistant_only = not isinstance(source, TextSource) and source.count == "assistant"
    return tokenizer.tokenize(document, source_label(source), assistant_only=assistant_only)


def _draw(
    source: Source, documents: list[TokenizedDocument], need: int, calibration: Calibration, *, at_most: bool
) -> tuple[list[TokenizedDocument], dict[str, Any]]:
    """``need`` tokens of a source in pieces (or, if ``at_most``, all there are), and what the record says of them.

    Raises:
        CalibrationError: the source has fewer.
    """
    label, window, rng = source_label(source), calibration.window_tokens, random.Random(calibration.seed)
    if not documents:
        raise CalibrationError(f"calibration source {label} holds no text", fix="Give it some, or drop it")
    whole = documents
    is_ordered = not isinstance(source, StructuredChatSource)  # it is random as it comes: more begins with less
    if calibration.pack_documents:
        if is_ordered:
            rng.shuffle(documents)
        whole = [
            TokenizedDocument(
                [token for document in documents for token in document.token_ids],
                [counts for document in documents for counts in document.counted],
            )
        ]
    pieces = [piece for document in whole for piece in _cut(document, window)]
    if is_ordered and not calibration.pack_documents:
        rng.shuffle(pieces)
    total = sum(len(document.token_ids) for document in whole)
    available = sum(len(piece.token_ids) for piece in pieces)
    if at_most:
        need = min(need, available)
    if available < need:
        possible = int(available / source.share)
        raise CalibrationError(
            f"calibration source {label} has {available:,} tokens and {need:,} are needed",
            fix="Give it more text" + (f", or lower num_tokens to {possible}" if possible >= window else ""),
        )
    drawn: list[TokenizedDocument] = []
    while need > 0:
        piece = pieces[len(drawn)]
        drawn.append(TokenizedDocument(piece.token_ids[:need], piece.counted[:need]))
        need -= len(piece.token_ids)
    return drawn, {
        "kind": source.kind,
        "name": label,
        "share": source.share,
        "documents": len(documents),
        "windows": len(drawn),
        "tokens_available": available,
        "tokens_used": sum(len(piece.token_ids) for piece in drawn),
        "tokens_dropped": total - available,
    }


def _cut(document: TokenizedDocument, window: int) -> Iterator[TokenizedDocument]:
    """Windows of a document without overlap; an end of fewer than MIN_PIECE_TOKENS is left out."""
    for start in range(0, len(document.token_ids), window):
        ids = document.token_ids[start : start + window]
        if len(ids) >= min(MIN_PIECE_TOKENS, window):
            yield TokenizedDocument(ids, document.counted[start : start + window])


def _num_tokens(source: Source, calibration: Calibration) -> int:
    """The source's share of the tokens."""
    count = round(source.share * calibration.num_tokens)
    if count < MIN_PIECE_TOKENS:
        raise CalibrationError(
            f"calibration source {source_label(source)} gets {count} tokens: its share of "
            f"{calibration.num_tokens} is too small",
            fix="Raise its share or num_tokens",
        )
    return count


def source_label(source: Source) -> str:
    """The source in a message: the dataset's name, or the file's name without the path to it."""
    if isinstance(source, DatasetSource):
        return source.name
    if isinstance(source, StructuredChatSource):
        return source.kind
    if isinstance(source, SelfGeneratedSource):
        return f"self_generated ({Path(source.seed_prompts).name})"
    return Path(source.path).name


def _refuse_long_windows(calibration: Calibration, model: ModelSource) -> None:
    """Windows longer than the model was made for would calibrate on positions that it never serves."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(longest, int) and calibration.window_tokens > longest:
        raise CalibrationError(
            f"window_tokens is {calibration.window_tokens} and {model.name} was made for {longest} positions",
            fix=f"Lower window_tokens to at most {longest}",
            keys=("calibration", "window_tokens"),
        )


def _refuse_unusable(token_ids: Tensor, token_mask: Tensor, model: ModelSource) -> None:
    """Tokens that the model's embedding does not have, or nothing that counts."""
    size = int(model.config.get_text_config().vocab_size)
    if int(token_ids.max()) >= size:
        raise CalibrationError(
            f"the tokenizer gives id {int(token_ids.max())} and the model's vocabulary ends at {size - 1}",
            fix="Model and tokenizer do not belong together",
        )
    if not token_mask.any():
        raise CalibrationError("no token of the calibration counts", fix="Use count: all, or sources with answers")

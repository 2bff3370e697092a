"""The tokens that calibrate: read from the recipe's sources, mixed by share, cut into windows of one length."""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from quantkit.errors import CalibrationError
from quantkit.recipe import Calibration

BUILTIN = "builtin"
DATA_FOLDER = Path(__file__).parent / "data"
BUILTIN_FILES = {"text": DATA_FOLDER / "general.txt", "jsonl": DATA_FOLDER / "chat.jsonl"}
DOCUMENT_SEPARATOR = "<|document|>"


@dataclass(frozen=True, slots=True)
class CalibrationSet:
    """Windows of tokens.

    Attributes:
        token_ids: [W, T] int64.
        token_mask: [W, T] bool, False for padding.
        sources: what came from where, for the record.
    """

    token_ids: Tensor
    token_mask: Tensor
    sources: list[dict[str, Any]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that count."""
        return int(self.token_mask.sum())

    def to_record(self) -> dict[str, Any]:
        """The digest that quantkit.json carries."""
        digest = hashlib.sha256(self.token_ids.numpy().tobytes() + self.token_mask.numpy().tobytes())
        return {
            "sources": self.sources,
            "num_tokens": self.num_tokens,
            "masked_tokens": int((~self.token_mask).sum()),
            "window_tokens": self.token_ids.shape[1],
            "sha256": digest.hexdigest(),
        }


def build_calibration(calibration: Calibration, tokenizer: PreTrainedTokenizerBase) -> CalibrationSet:
    """Read, tokenize and cut the recipe's sources.

    The documents of a source are shuffled with the recipe's seed, joined, and cut into windows without overlap; what is
    left over is dropped and counted. A text file is one document, unless it separates documents by lines that hold
    ``<|document|>`` alone.

    Raises:
        CalibrationError: a source is missing, empty, malformed or too short for its share.
    """
    window = calibration.window_tokens
    wanted = _windows_per_source(calibration)
    windows: list[Tensor] = []
    records = []
    for source, num_windows in zip(calibration.sources, wanted, strict=True):
        documents = list(_tokenized(source, tokenizer))
        if not documents:
            raise CalibrationError(f"calibration source {_label(source)} holds no text", fix="Give it some, or drop it")
        random.Random(calibration.seed).shuffle(documents)
        stream = [token for document in documents for token in document]
        need = num_windows * window
        if len(stream) < need:
            raise CalibrationError(
                f"calibration source {_label(source)} has {len(stream):,} tokens and {need:,} are needed "
                f"({num_windows} windows of {window})",
                fix=_more_or_fewer(int(len(stream) // window * window / source.share)),
            )
        windows.append(torch.tensor(stream[:need], dtype=torch.int64).view(num_windows, window))
        records.append(
            {
                "kind": source.kind,
                "name": _label(source),
                "share": source.share,
                "documents": len(documents),
                "tokens_available": len(stream),
                "tokens_used": need,
            }
        )
    token_ids = torch.cat(windows)
    if int(token_ids.max()) >= (size := len(tokenizer)):
        raise CalibrationError(f"the tokenizer gives id {int(token_ids.max())} but says that it has {size} tokens")
    return CalibrationSet(token_ids, torch.ones_like(token_ids, dtype=torch.bool), records)


def _more_or_fewer(num_tokens: int) -> str:
    """What to do about a source that is too short; ``num_tokens`` is what it would suffice for."""
    return f"Give it more text, or lower num_tokens to {num_tokens}" if num_tokens else "Give it more text"


def _windows_per_source(calibration: Calibration) -> list[int]:
    """Whole windows for each source: shares of the total by largest remainder."""
    total = calibration.num_tokens // calibration.window_tokens
    exact = [source.share * total for source in calibration.sources]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    for source, count in zip(calibration.sources, counts, strict=True):
        if count == 0:
            raise CalibrationError(
                f"calibration source {_label(source)} gets no window: its share of {total} windows is under one half",
                fix="Raise its share or num_tokens",
            )
    return counts


def _label(source: Any) -> str:
    """The source in a message: the dataset's name, or the file's name without the path to it."""
    return str(source.name) if source.kind == "dataset" else Path(source.path).name


def _tokenized(source: Any, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Token ids of every document that is not empty."""
    for document in _documents(source):
        if isinstance(document, str):
            ids = tokenizer(document, verbose=False)["input_ids"] if document.strip() else []
        else:
            ids = _render_chat(document, tokenizer, _label(source))
        if ids:
            yield list(ids)


def _render_chat(messages: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerBase, label: str) -> list[int]:
    """Token ids of a conversation. The template writes the special tokens itself, so none are added a second time."""
    if not tokenizer.chat_template:
        raise CalibrationError(
            f"calibration source {label} has messages and the model's tokenizer has no chat template",
            fix="Give plain text, or a model with a template",
        )
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False)
    except Exception as error:  # a template is code of the model: it may raise anything
        raise CalibrationError(
            f"calibration source {label}: the chat template refuses a conversation: {error}"
        ) from error
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _documents(source: Any) -> Iterable[str | list[dict[str, str]]]:
    if source.kind == "dataset":
        return _dataset_documents(source)
    path = BUILTIN_FILES[source.kind] if source.path == BUILTIN else Path(source.path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CalibrationError(f"calibration source {path} is not UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise CalibrationError(f"cannot read calibration source {path}: {error.strerror}") from error
    return _text_documents(text) if source.kind == "text" else _jsonl_documents(text, path)


def _text_documents(text: str) -> Iterator[str]:
    document: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.strip() == DOCUMENT_SEPARATOR:
            yield "".join(document)
            document = []
        else:
            document.append(line)
    yield "".join(document)


def _jsonl_documents(text: str, path: Path) -> Iterator[str | list[dict[str, str]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise CalibrationError(f"{path}, line {number}: no valid JSON ({error})") from error
        if isinstance(value, dict) and isinstance(value.get("text"), str):
            yield value["text"]
        elif isinstance(value, dict) and _is_conversation(value.get("messages")):
            yield value["messages"]
        else:
            raise CalibrationError(
                f'{path}, line {number}: neither a "text" string nor "messages" with role and content'
            )


def _is_conversation(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
            for turn in messages
        )
    )


def _dataset_documents(source: Any) -> Iterator[str | list[dict[str, str]]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise CalibrationError(
            f"calibration source {source.name} is a dataset and the package `datasets` is not installed",
            fix="Install quantkit[datasets]",
        ) from error
    try:
        rows = load_dataset(source.name, split=source.split)
    except Exception as error:  # datasets raises errors of a dozen libraries; each means that it cannot be loaded
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CalibrationError(f"cannot load the dataset {source.name} (split {source.split}): {first}") from error
    if source.column not in rows.column_names:
        raise CalibrationError(
            f"the dataset {source.name} has no column {source.column!r}", fix=f"Choose from {rows.column_names}"
        )
    for number, value in enumerate(rows[source.column]):
        if isinstance(value, str) or _is_conversation(value):
            yield value
        else:
            raise CalibrationError(f"{source.name}, row {number}: {source.column} is neither text nor messages")

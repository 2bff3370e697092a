"""The documents of a calibration source: texts or conversations, as they stand in a file or a dataset."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantkit.errors import CalibrationError, looked_in
from quantkit.extras import install_command
from quantkit.recipe import DatasetSource, JsonlSource, TextSource

BUILTIN = "builtin"
DATA_FOLDER = Path(__file__).parent / "data"
BUILTIN_TEXT = DATA_FOLDER / "general.txt"
BUILTIN_CHAT = DATA_FOLDER / "chat.jsonl"
DOCUMENT_SEPARATOR = "<|document|>"

Conversation = list[dict[str, str]]  # [{"role": "system" | "user" | "assistant", "content": text}, ...]
Document = str | Conversation


def read_documents(source: TextSource | JsonlSource | DatasetSource) -> Iterator[Document]:
    """The documents of a source, in its order.

    A text file is one document, unless it separates documents by lines that hold ``<|document|>`` alone.

    Raises:
        CalibrationError: the source is missing or malformed; the line or row is named.
    """
    if isinstance(source, DatasetSource):
        return _read_dataset(source)
    if isinstance(source, TextSource):
        return _split_text(_read_file(BUILTIN_TEXT if source.path == BUILTIN else Path(source.path)))
    return read_jsonl(BUILTIN_CHAT if source.path == BUILTIN else Path(source.path))


def read_jsonl(path: Path) -> Iterator[Document]:
    """One document a line: an object with "text" or with "messages". A text may hold any separator but a line feed.

    Raises:
        CalibrationError: the file is missing, or a line is neither; the line is named.
    """
    for number, line in enumerate(_read_file(path).split("\n"), start=1):
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


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors put a mark of the encoding in front
    except UnicodeDecodeError as error:
        raise CalibrationError(f"calibration source {path} is not UTF-8 (byte {error.start})") from error
    except OSError as error:
        where = "" if path.exists() else looked_in(path)
        fix = "Correct the path, or drop the source"
        raise CalibrationError(f"cannot read calibration source {path}: {error.strerror}{where}", fix=fix) from error


def _split_text(text: str) -> Iterator[str]:
    document: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.strip() == DOCUMENT_SEPARATOR:
            yield "".join(document)
            document = []
        else:
            document.append(line)
    yield "".join(document)


def _is_conversation(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
            for turn in messages
        )
    )


def _read_dataset(source: DatasetSource) -> Iterator[Document]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise CalibrationError(
            f"calibration source {source.name} is a dataset and the package `datasets` is not installed",
            fix=install_command("datasets"),
        ) from error
    try:
        rows = load_dataset(source.name, source.config, split=source.split)
    except Exception as error:  # datasets raises errors of a dozen libraries; each means that it cannot be loaded
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        part = f"split {source.split}" if source.config is None else f"config {source.config}, split {source.split}"
        raise CalibrationError(f"cannot load the dataset {source.name} ({part}): {first}") from error
    if source.column not in rows.column_names:
        raise CalibrationError(
            f"the dataset {source.name} has no column {source.column!r}", fix=f"Choose from {rows.column_names}"
        )
    for number, value in enumerate(rows[source.column]):
        if isinstance(value, str) or _is_conversation(value):
            yield value
        else:
            raise CalibrationError(f"{source.name}, row {number}: {source.column} is neither text nor messages")

"""What of a search is finished: one JSON line a trial and a certification, each found again by what it depends on."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError
from quantkit_eval.file_lock import try_lock

JOURNAL_FILE = "journal.jsonl"
SCHEMA_VERSION = 1
ANEW = "Give --overwrite to search anew"
logger = logging.getLogger(__name__)


def key_of(**content: Any) -> str:
    """The hash of everything that a piece of work depends on; of JSON-able values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


class SearchJournal:
    """An append-only file; a line that was cut off by a kill is dropped.

    Args:
        path: of the file, which exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity: Mapping[str, Any] | None = None
        self._found: dict[tuple[str, str], dict[str, Any]] = {}
        for number, line in enumerate(self._whole_lines(), start=1):
            try:
                entry = json.loads(line)
                if number == 1:
                    is_ours = entry["kind"] == "search" and entry["schema_version"] == SCHEMA_VERSION
                    self.identity = dict(entry["identity"]) if is_ours else None
                else:
                    self._found[entry["kind"], entry["key"]] = dict(entry["record"])
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{path}:{number}: no line of a search's journal", fix=ANEW) from error
            if self.identity is None:
                raise CheckpointError(f"{path}:{number}: no journal that this quantkit reads", fix=ANEW)

    def _whole_lines(self) -> list[bytes]:
        content = self.path.read_bytes()
        whole, _, rest = content.rpartition(b"\n")
        if rest:
            logger.warning("%s: its last line is cut off and is dropped; that work is done again", self.path)
            os.truncate(self.path, len(content) - len(rest))
        return whole.split(b"\n") if whole else []

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Write the first line, or check that it is of this very search.

        Raises:
            CheckpointError: something that the trials depend on has changed; the first difference is named.
        """
        if self.identity is None:
            self.identity = dict(identity)
            self._append({"kind": "search", "schema_version": SCHEMA_VERSION, "identity": self.identity})
            return
        for name in dict.fromkeys([*identity, *self.identity]):
            before, now = self.identity.get(name), identity.get(name)
            if before != now:
                raise CheckpointError(
                    f"cannot resume the search in {self.path.parent}: {name} was {before} when it began and is {now}",
                    fix=ANEW,
                )

    def find(self, kind: str, key: str) -> dict[str, Any] | None:
        """What was recorded of a piece of work; None if it is not finished."""
        return self._found.get((kind, key))

    def record(self, kind: str, key: str, record: Mapping[str, Any]) -> None:
        """Note that a piece of work is finished: on the disk when this returns."""
        self._found[kind, key] = dict(record)
        self._append({"kind": kind, "key": key, "record": dict(record)})

    def _append(self, entry: Mapping[str, Any]) -> None:
        line = (json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n").encode()
        with self.path.open("ab", buffering=0) as file:
            file.write(line)
            os.fsync(file.fileno())


@contextmanager
def open_journal(
    folder: Path, identity: Mapping[str, Any], *, resume: bool, overwrite: bool
) -> Iterator[SearchJournal]:
    """The journal of a folder, held by this search alone.

    Args:
        folder: of the search.
        identity: what must be the same for a search to go on.
        resume: go on with the search that is there, if there is one.
        overwrite: begin anew, whatever is there.

    Raises:
        CheckpointError: there is a search and neither is given, it is another one, or it is running.
    """
    path = folder / JOURNAL_FILE
    with try_lock(path) as is_held:
        if not is_held:
            raise CheckpointError(f"another search is writing {folder}", fix="Wait, or choose search.path")
        if overwrite and not resume:
            os.truncate(path, 0)
        elif path.stat().st_size and not resume:
            raise CheckpointError(f"{folder} holds a search", fix="Give --resume to go on, or --overwrite")
        journal = SearchJournal(path)
        journal.begin(identity)
        yield journal

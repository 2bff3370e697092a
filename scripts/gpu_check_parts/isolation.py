"""Parts of the check in processes of their own: a kernel that crashes, hangs or breaks its context stops no other."""

import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

UNFINISHED = "the process ended here"
CONTEXT_IS_BROKEN = 3  # exit code of a part that cannot use the GPU any more
GRACE_SECONDS = 30.0  # beyond its budget, for a case that has begun and for what is imported


class Records:
    """What a part has found, on disk after every change, so that it outlives the process.

    Args:
        path: where; None keeps it in memory only.

    Attributes:
        all: the records, in order.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.all: list[dict[str, Any]] = []
        self._path = path

    def begin(self, **names: Any) -> dict[str, Any]:
        """A record of a case that is tried now."""
        record = {**names, "failed": UNFINISHED}
        self.all.append(record)
        self._save()
        return record

    def end(self, record: dict[str, Any], **found: Any) -> None:
        """What came of it."""
        del record["failed"]
        record |= found
        self._save()

    def _save(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(self.all))


def run_apart(command: list[str], seconds: float) -> tuple[list[dict[str, Any]], str | None]:
    """Run a part: what it recorded, and why it did not come to its end; None if it did."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.json"
        reason = None
        try:
            done = subprocess.run(
                [*command, "--records", str(path)], timeout=seconds, check=False, stderr=subprocess.PIPE, text=True
            )
        except subprocess.TimeoutExpired:
            reason = f"no end after {seconds:.0f} s"
        else:
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                reason = f"exit code {done.returncode}: {last[:300]}"
        return json.loads(path.read_text()) if path.exists() else [], reason


def run_to_its_end(name: str, command: list[str], seconds: float, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """The records of a part; after a case that took the process with it the next process goes on behind it.

    Args:
        name: of the part.
        command: runs it; it understands ``--records``, ``--from`` and ``--seconds``.
        seconds: for all of it.
        say: takes a line.
    """
    end = time.monotonic() + seconds
    records: list[dict[str, Any]] = []
    while True:
        left = max(0.0, end - time.monotonic())
        found, reason = run_apart([*command, "--from", str(len(records)), "--seconds", str(left)], left + GRACE_SECONDS)
        records += found
        if reason is None:
            return records
        say(f"{name}: {reason}")
        if not found:
            return [*records, {"op": name, "case": "all that is left of this part", "failed": reason}]
        if found[-1].get("failed") == UNFINISHED:
            found[-1]["failed"] = reason

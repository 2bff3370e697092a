"""Evaluations of baselines, kept by what they depend on: an original is asked once and not with every candidate.

An entry is a folder of records under the hash of the model, the suites and their files, the seed, the engine's
settings, the machine and quantkit's own source.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import quantkit
import quantkit_eval
import quantkit_kernels
from quantkit.source.gguf import cache_folder, file_sha256
from quantkit_eval.comparability import Evaluation
from quantkit_eval.errors import RecordError
from quantkit_eval.file_lock import hold_records
from quantkit_eval.machine import describe_machine
from quantkit_eval.records import REFERENCE_FILE, RESULT_FILE, SAMPLES_FILE

KEPT = 16  # entries; the one that was not used for longest goes
FILES = (SAMPLES_FILE, REFERENCE_FILE, RESULT_FILE)  # the last one makes records of them
SOURCE = (".py", ".json", ".txt")
BY_FREE_MEMORY = ("num_kv_blocks", "kv_cache_bytes")  # of an engine: how much at once, not what comes out
logger = logging.getLogger(__name__)


class CachedEvaluation:
    """The place of one evaluation in the cache.

    Args:
        about: `Model.describe` of the model.
        suites: as `quantkit_eval.evaluate.evaluate` takes them.
        seed: of the items.
    """

    def __init__(self, about: Mapping[str, Any], suites: Mapping[str, Mapping[str, Any]], seed: int) -> None:
        machine = describe_machine()
        paths = [path for options in suites.values() for path in _files(options)]
        content = {
            "model": about["model"],
            "engine": {key: value for key, value in about["engine"].items() if key not in BY_FREE_MEMORY},
            "template_hash": about["template_hash"],
            "suites": {name: dict(options) for name, options in suites.items()},
            "files": {path: file_sha256(Path(path)) for path in paths},
            "seed": seed,
            "machine": {key: machine.get(key) for key in ("cpu", "accelerator", "num_threads", "versions")},
            "source": source_digest(),
        }
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        self.folder = cache_folder() / "evaluations" / key[:32]

    def copy_to(self, out: Path) -> bool:
        """Put the records into a folder in place of those that are there; False if there are none, or damaged ones."""
        if not self.folder.is_dir():
            return False
        try:
            nll = Evaluation.read(self.folder).result["suites"].get("nll")
            if nll and file_sha256(self.folder / REFERENCE_FILE) != nll.get("reference_sha256"):
                raise RecordError(f"{self.folder / REFERENCE_FILE}: changed after the evaluation")
        except (RecordError, OSError) as error:
            logger.warning("a cached evaluation is damaged and made anew: %s", error)
            shutil.rmtree(self.folder, ignore_errors=True)
            return False
        with hold_records(out):
            for name in reversed(FILES):
                (out / name).unlink(missing_ok=True)
            _copy(self.folder, out)
        os.utime(self.folder)
        return True

    def keep(self, records: Path) -> None:
        """Copy records into the cache; that it cannot be written to is a warning and no failure of the evaluation."""
        entries = self.folder.parent
        try:
            entries.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=entries))
            try:
                _copy(records, partial)
                if not self.folder.exists():  # otherwise another process was as fast
                    partial.rename(self.folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            old = sorted((path for path in entries.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
            for path in old[:-KEPT]:
                shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            logger.warning("the evaluation is not kept in the cache %s: %s", entries, error.strerror or error)


def _files(options: Mapping[str, Any]) -> list[str]:
    """The files of the user's that a suite reads: its items, its text, or the folder of its tasks."""
    named = [str(options[key]) for key in ("path", "text_path") if options.get(key) is not None]
    if named:
        return named
    folder = options.get("include_path")
    return [str(path) for path in sorted(Path(folder).rglob("*")) if path.is_file()] if folder else []


def _copy(source: Path, target: Path) -> None:
    """The records of a folder, each complete or not at all under its name, result.json last."""
    for name in FILES:
        if (source / name).exists():
            partial = target / f".{name}.{os.getpid()}.partial"
            shutil.copyfile(source / name, partial)
            partial.replace(target / name)


@cache
def source_digest() -> str:
    """Of everything that computes, asks or scores: whoever changes quantkit evaluates anew."""
    digest = hashlib.sha256()
    for package in (quantkit, quantkit_kernels, quantkit_eval):
        root = Path(str(package.__file__)).parent
        for path in sorted(path for path in root.rglob("*") if path.suffix in SOURCE):
            digest.update(f"{package.__name__}/{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()

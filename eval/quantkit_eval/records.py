"""The files that evaluations leave behind and read: samples, result, throughput, load, verdict and comparison.

Each record is a plain dict with a type of ``record_types``; the JSON Schema in ``schemas/`` says what every key means.
What is written validates, appears complete or not at all under its name, and what does not validate is not read.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, cast

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from quantkit_eval.errors import OptionError, RecordError
from quantkit_eval.record_types import Comparison, Load, Result, Sample, Throughput, Verdict

SCHEMA_VERSION = 1
SAMPLES_FILE = "samples.jsonl"
RESULT_FILE = "result.json"
THROUGHPUT_FILE = "throughput.json"
LOAD_FILE = "load.json"
VERDICT_FILE = "verdict.json"
REFERENCE_FILE = "nll.safetensors"
RECORD_FILES = (RESULT_FILE, SAMPLES_FILE, REFERENCE_FILE)  # of an evaluation

Kind = Literal["sample", "result", "throughput", "load", "verdict", "comparison"]
AGAIN: dict[Kind, str] = {  # how a record is made that is missing or damaged
    "sample": "Evaluate the model again",
    "result": "Evaluate the model again",
    "throughput": "Measure it with `quantkit bench BASELINE CANDIDATE -o FILE`",
    "load": "Measure it with `quantkit bench BASELINE CANDIDATE... --contexts N -o FILE`",
    "verdict": "Write it with `quantkit compare -o FILE`",
    "comparison": "Write it with `quantkit compare -o FILE`",
}


def utc_now() -> str:
    """The ``created`` of a record: the present instant, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@cache
def schema_validator(kind: Kind) -> Draft202012Validator:
    """The validator of one kind of record."""
    schema = json.loads(files("quantkit_eval").joinpath("schemas", f"{kind}.schema.json").read_text(encoding="utf-8"))
    return Draft202012Validator(schema)


def validate(record: object, kind: Kind, where: str) -> None:
    """Check a record against its schema.

    Args:
        record: what json gave or will be given.
        kind: which schema.
        where: path (and line) for the message.

    Raises:
        RecordError: names the place by its JSON pointer.
    """
    problems = sorted(schema_validator(kind).iter_errors(record), key=_depth)
    if problems:
        problem = problems[0]
        found = f", not {problem.instance!r}" if problem.validator == "const" else ""  # its message leaves it out
        raise RecordError(f"{where}: {_pointer(problem)}: {_shorten(problem.message + found)}", fix=_fix(problem, kind))


def write_samples(path: Path, samples: Iterable[Sample]) -> str:
    """Write samples.jsonl, one line an item, and give its sha256 for result.json.

    Raises:
        RecordError: a sample does not fit the schema, or two of one suite share an id.
    """
    checked = list(samples)
    _check_samples(checked, path)
    content = "".join(_dumps(sample, f"{path}:{i}") + "\n" for i, sample in enumerate(checked, start=1)).encode()
    write_atomically(path, content)
    return hashlib.sha256(content).hexdigest()


def read_samples(path: Path, sha256: str | None = None) -> list[Sample]:
    """Read samples.jsonl.

    Args:
        path: the file.
        sha256: that it must have, as result.json says; None reads any.

    Raises:
        RecordError: the file is missing or another one, or a line is no JSON, does not fit the schema or repeats an id.
    """
    text = _read_text(path, "sample")
    found = hashlib.sha256(text.encode()).hexdigest()
    if sha256 not in (None, found):
        raise RecordError(
            f"{path}: changed after the evaluation: sha256 {found[:16]}..., {RESULT_FILE} says {str(sha256)[:16]}...",
            fix="Evaluate the model again",
        )
    lines = text.split("\n")
    if lines.pop():
        raise RecordError(f"{path}:{len(lines) + 1}: the last line is cut off", fix="Evaluate the model again")
    samples = [cast(Sample, _loads(line, f"{path}:{i}", "sample")) for i, line in enumerate(lines, start=1)]
    _check_samples(samples, path)
    return samples


def write_result(path: Path, result: Result) -> None:
    """Write result.json. Raises RecordError if it does not fit the schema."""
    _write_document(path, result, "result")


def read_result(path: Path) -> Result:
    """Read result.json. Raises RecordError if it is missing, no JSON or does not fit the schema."""
    return cast(Result, _read_document(path, "result"))


def write_throughput(path: Path, throughput: Throughput) -> None:
    """Write throughput.json. Raises RecordError if it does not fit the schema."""
    _write_document(path, throughput, "throughput")


def read_throughput(path: Path) -> Throughput:
    """Read throughput.json. Raises RecordError if it is missing, no JSON or does not fit the schema."""
    return cast(Throughput, _read_document(path, "throughput"))


def write_load(path: Path, load: Load) -> None:
    """Write load.json. Raises RecordError if it does not fit the schema."""
    _write_document(path, load, "load")


def read_load(path: Path) -> Load:
    """Read load.json. Raises RecordError if it is missing, no JSON or does not fit the schema."""
    return cast(Load, _read_document(path, "load"))


def write_verdict(path: Path, verdict: Verdict) -> None:
    """Write verdict.json. Raises RecordError if it does not fit the schema."""
    _write_document(path, verdict, "verdict")


def read_verdict(path: Path) -> Verdict:
    """Read verdict.json. Raises RecordError if it is missing, no JSON or does not fit the schema."""
    return cast(Verdict, _read_document(path, "verdict"))


def write_comparison(path: Path, comparison: Comparison) -> None:
    """Write comparison.json. Raises RecordError if it does not fit the schema."""
    _write_document(path, comparison, "comparison")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file that is complete or absent under its name: temporary name, fsync, rename. Makes the folder.

    Raises:
        RecordError: it cannot be written; the file and the reason are named.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise RecordError(
            f"{path}: cannot be written ({error.strerror})", fix="Make room or name another place"
        ) from error


def check_writable(path: Path) -> None:
    """Refuse before the work a file that could not be written after it. Makes nothing.

    Raises:
        RecordError: the path is a folder, or lies in a place that is no folder or may not be written to.
    """
    if path.is_dir():
        raise RecordError(f"{path}: cannot be written (Is a directory)", fix="Name a file")
    folder = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not folder.is_dir():
        raise RecordError(f"{path}: cannot be written ({folder} is no folder)", fix="Name another place")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RecordError(f"{path}: cannot be written ({folder} is read-only)", fix="Name another place")


def check_outputs(outputs: Iterable[Path], inputs: Iterable[Path] = ()) -> None:
    """Refuse before the work files that could not be written after it, and those that would destroy something.

    Args:
        outputs: files that a command is to write; they may lie in folders that it reads.
        inputs: files that it reads, whether they exist or not.

    Raises:
        RecordError: a file cannot be written.
        OptionError: two outputs are one file, or an output is an input.
    """
    wanted, read = list(outputs), [path.resolve() for path in inputs]
    for index, path in enumerate(wanted):
        check_writable(path)
        if path.resolve() in read:
            raise OptionError(f"{path} is read by this command and would be overwritten", fix="Name another file")
        if path.resolve() in (other.resolve() for other in wanted[:index]):
            raise OptionError(f"{path} is named for two outputs", fix="Name a file for each")


def _write_document(path: Path, record: Mapping[str, Any], kind: Kind) -> None:
    text = _dumps(record, str(path), indent=2)  # first: NaN has no pointer of its own in the schema
    validate(record, kind, str(path))
    write_atomically(path, text + "\n")


def _read_document(path: Path, kind: Kind) -> object:
    record = _loads(_read_text(path, kind), str(path), kind)
    validate(record, kind, str(path))
    return record


def _check_samples(samples: list[Sample], path: Path) -> None:
    seen: dict[tuple[str, str], int] = {}
    for i, sample in enumerate(samples, start=1):
        validate(sample, "sample", f"{path}:{i}")
        suite, item = sample["suite"], sample["id"]
        first = seen.setdefault((suite, item), i)
        if first != i:
            raise RecordError(f"{path}:{i}: /id: {item!r} of suite {suite!r} is already in line {first}")


def _read_text(path: Path, kind: Kind) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecordError(f"{path}: no such file", fix=AGAIN[kind].removesuffix(" again")) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no UTF-8, byte {error.start}"
        raise RecordError(f"{path}: cannot be read ({reason})", fix=AGAIN[kind]) from error


def _loads(text: str, where: str, kind: Kind) -> object:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise RecordError(f"{where}: no JSON ({error})", fix=AGAIN[kind]) from None
    except RecursionError:
        raise RecordError(f"{where}: no JSON that can be read (nested too deeply)", fix=AGAIN[kind]) from None


def _dumps(record: Mapping[str, Any], where: str, indent: int | None = None) -> str:
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, indent=indent)
        text.encode()  # a lone surrogate has no UTF-8
        return text
    except (TypeError, ValueError) as error:
        raise RecordError(f"{where}: cannot be written as JSON ({error})") from None


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


def _depth(problem: ValidationError) -> tuple[int, list[str]]:
    return -len(problem.absolute_path), [str(part) for part in problem.absolute_path]


def _pointer(problem: ValidationError) -> str:
    parts = (str(part).replace("~", "~0").replace("/", "~1") for part in problem.absolute_path)
    return "".join(f"/{part}" for part in parts) or "/"


def _fix(problem: ValidationError, kind: Kind) -> str | None:
    """Of a record of another version; of others the message says all: a caller's mistake, or a file that was edited."""
    of_version = list(problem.absolute_path) == ["schema_version"]
    return f"It is of another version of quantkit. {AGAIN[kind]}" if of_version else None


def _shorten(message: str, limit: int = 200) -> str:
    line = " ".join(message.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."

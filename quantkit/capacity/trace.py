"""A log of requests: arrival, prompt and output lengths, and which prompts begin alike.

A line is one JSON object. Understood are plain records (``arrival``, ``prompt_tokens``, ``output_tokens``), logs of
OpenAI-style servers (``created``, ``usage``, ``messages`` or ``prompt``; also under ``request`` and ``response``), and
Mooncake's traces (``timestamp`` in milliseconds, ``input_length``, ``output_length``, ``hash_ids``).
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from quantkit.capacity.workload import MAX_TOKENS
from quantkit.errors import SourceError, UsageError

CHARACTERS_PER_TOKEN = 4  # where only a text says which prompts begin alike
PREFIX_TOKENS = 32  # tokens of a piece of a prompt that is compared
MOONCAKE_TOKENS = 512
MAX_REQUESTS = 200_000
ARRIVALS = ("arrival", "arrival_time", "created", "timestamp", "time")
PROMPTS = ("prompt_tokens", "input_tokens", "input_length", "num_prompt_tokens")
OUTPUTS = ("output_tokens", "completion_tokens", "output_length", "num_output_tokens")


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request of the log.

    Attributes:
        arrival: seconds after the first one; None if the log does not say.
        prompt_tokens: of the prompt.
        output_tokens: of the answer.
        prefix: a hash for every whole piece of ``prefix_tokens`` tokens, each over the prompt up to there.
        prefix_tokens: tokens of a piece.
    """

    arrival: float | None
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    prefix_tokens: int = PREFIX_TOKENS


def read_trace(path: Path) -> list[TracedRequest]:
    """The requests of a log, by arrival.

    Raises:
        SourceError: not readable.
        UsageError: empty, or a line that is no request; with its number.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise SourceError(f"cannot read the trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the trace {path} is not UTF-8 text") from error
    requests: list[TracedRequest] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise UsageError(f"{path}:{number}: not a JSON object")
        requests.append(_request(record, f"{path}:{number}"))
    if not requests:
        raise UsageError(f"the trace {path} has no request")
    if len(requests) > MAX_REQUESTS:
        raise UsageError(f"the trace {path} has {len(requests)} requests, more than {MAX_REQUESTS}", fix="Cut it")
    return _from_first_arrival(requests, path)


def _from_first_arrival(requests: list[TracedRequest], path: Path) -> list[TracedRequest]:
    timed = [request.arrival for request in requests if request.arrival is not None]
    if not timed:
        return requests
    if len(timed) < len(requests):
        raise UsageError(f"{len(requests) - len(timed)} of {len(requests)} requests of {path} have no arrival time")
    first = min(timed)
    moved = [
        TracedRequest((r.arrival or 0.0) - first, r.prompt_tokens, r.output_tokens, r.prefix, r.prefix_tokens)
        for r in requests
    ]
    return sorted(moved, key=lambda request: request.arrival or 0.0)


def _request(record: Mapping[str, Any], where: str) -> TracedRequest:
    parts = [record, *(record[key] for key in ("usage", "request", "response") if isinstance(record.get(key), dict))]
    parts += [part["usage"] for part in parts[1:] if isinstance(part.get("usage"), dict)]
    prompt, output = _count(parts, PROMPTS, where), _count(parts, OUTPUTS, where)
    if isinstance(record.get("hash_ids"), list):
        arrival = record.get("timestamp")
        if not isinstance(arrival, int | float) or not math.isfinite(arrival):
            raise UsageError(f"{where}: timestamp={arrival!r} is no number of milliseconds")
        pieces = [str(piece) for piece in record["hash_ids"][: prompt // MOONCAKE_TOKENS]]
        return TracedRequest(arrival / 1000, prompt, output, _chained(pieces), MOONCAKE_TOKENS)
    return TracedRequest(_arrival(parts, where), prompt, output, _prefix(parts, prompt))


def _count(parts: list[Mapping[str, Any]], names: tuple[str, ...], where: str) -> int:
    for part in parts:
        for name in names:
            value = part.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
                raise UsageError(f"{where}: {name}={value!r} is not a whole number from 1 to {MAX_TOKENS}")
            return value
    raise UsageError(f"{where}: none of {', '.join(names)}")


def _arrival(parts: list[Mapping[str, Any]], where: str) -> float | None:
    for part in parts:
        for name in ARRIVALS:
            value = part.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                if not math.isfinite(value):
                    raise UsageError(f"{where}: {name}={value!r} is no time")
                return float(value)
            if isinstance(value, str):
                try:
                    return datetime.fromisoformat(value).timestamp()
                except ValueError as error:
                    raise UsageError(f"{where}: {name}={value!r} is no time") from error
    return None


def _prefix(parts: list[Mapping[str, Any]], prompt_tokens: int) -> tuple[int, ...]:
    """Hashes over the beginnings of a prompt whose text is in the log; none otherwise."""
    text = ""
    for part in parts:
        if isinstance(part.get("messages"), list):
            text = json.dumps(part["messages"], ensure_ascii=False, sort_keys=True)
        elif isinstance(part.get("prompt"), str):
            text = part["prompt"]
    size = CHARACTERS_PER_TOKEN * PREFIX_TOKENS
    pieces = [text[end - size : end] for end in range(size, len(text) + 1, size)]
    return _chained(pieces[: prompt_tokens // PREFIX_TOKENS])


def _chained(pieces: list[str]) -> tuple[int, ...]:
    """A hash for each piece, over everything up to its end."""
    digest, found = hashlib.sha256(), []
    for piece in pieces:
        digest.update(f"{len(piece)} {piece}".encode())
        found.append(int.from_bytes(digest.digest()[:8], "big"))
    return tuple(found)


def possible_hit_rate(requests: list[TracedRequest]) -> float | None:
    """Share of the prompt tokens that an earlier prompt began with: what an unlimited prefix cache would save.

    None if the log does not say which prompts begin alike.
    """
    if not any(request.prefix for request in requests):
        return None
    seen: set[int] = set()
    hits = 0
    for request in requests:
        for piece in request.prefix:
            if piece not in seen:
                break
            hits += request.prefix_tokens
        seen.update(request.prefix)
    return hits / sum(request.prompt_tokens for request in requests)

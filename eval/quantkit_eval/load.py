"""How fast models answer under load: batches and prompts of several sizes, and arrivals at a given rate.

Closed loop: B clients ask at once and wait; the rate is all new tokens over the time until the last answer. Open loop:
requests arrive when they arrive (Poisson, the same instants for every model), whether the model keeps up or not; what
counts there is how long the first token and each next one take. Models take turns, A B C A B C, so that a drifting
machine shifts no ratio. Prompts are random token ids and no two are alike, so that no prefix cache helps.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from quantkit_eval.crossovers import find_crossovers
from quantkit_eval.errors import ModelOutputError, OptionError
from quantkit_eval.evaluate import describe_model
from quantkit_eval.machine import describe_machine
from quantkit_eval.protocol import LoadTarget
from quantkit_eval.record_types import Latency, Load, LoadMemory, LoadPoint, LoadRuns, Ratio
from quantkit_eval.records import SCHEMA_VERSION, utc_now
from quantkit_eval.statistics import median_ratio
from quantkit_eval.suites import Progress

MEMORY_SHARE = 0.9  # of the device that weights and cache may take
PERCENTILES = (50, 90, 99)
RESOLUTION = 1e-6  # seconds: what arrives so soon has arrived, for no clock sleeps more exactly
METHOD = "median of paired ratios, order-statistic interval"


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """What is measured.

    Attributes:
        batches: clients of the closed loop.
        contexts: tokens of a prompt.
        qps: rates of arrival of the open loop, requests a second.
        requests: in each run of the open loop.
        new_tokens: of each answer; 2 at least, or there is no time between tokens.
        repeats: runs of each model at each point; fewer than 5 cannot give a 90 % interval.
        seed: of prompts and arrivals.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (128, 1024)
    qps: tuple[float, ...] = ()
    requests: int = 16
    new_tokens: int = 32
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.new_tokens < 2 or min(self.requests, self.repeats, *self.batches, *self.contexts, 1) < 1:
            raise OptionError(
                f"batches={self.batches}, contexts={self.contexts}, requests={self.requests} and "
                f"repeats={self.repeats} must be at least 1, new_tokens={self.new_tokens} at least 2"
            )
        if not self.contexts or not (self.batches or self.qps) or min((*self.qps, 1.0)) <= 0:
            raise OptionError(
                f"contexts={self.contexts}, batches={self.batches} and qps={self.qps} leave nothing to run"
            )
        for name in ("batches", "contexts", "qps"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise OptionError(f"{name}={getattr(self, name)} names one twice")

    def points(self) -> "list[_Point]":
        """What is run, the batches of each context first."""
        closed = [_Point("closed", context, batch, None, batch) for context in self.contexts for batch in self.batches]
        open_ = [_Point("open", context, None, qps, self.requests) for context in self.contexts for qps in self.qps]
        return closed + open_


@dataclass(frozen=True, slots=True)
class _Point:
    loop: str
    context: int
    batch: int | None
    qps: float | None
    requests: int

    @property
    def name(self) -> str:
        size = f"{self.batch} at once" if self.batch else f"{self.qps:g} a second"
        return f"{size}, prompts of {self.context}"

    def arrivals(self, seeds: Sequence[int]) -> list[float]:
        """When each request comes, in seconds from the start."""
        if self.qps is None:
            return [0.0] * self.requests
        gaps = np.random.default_rng(seeds).exponential(1 / self.qps, self.requests)
        return [float(instant) for instant in np.cumsum(gaps) - gaps[0]]


@dataclass(slots=True)
class _Run:
    """Seconds: the whole run, each first token after its request's arrival, each next token after the one before."""

    wall: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


def measure_load(
    models: Sequence[LoadTarget],
    settings: LoadSettings,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Load:
    """Run every point with every model, in turns.

    Args:
        models: the baseline and at least one candidate, loaded.
        settings: what is measured.
        progress: called with the name of the point, the turns done and all turns.
        clock: seconds, monotonic.
        sleep: waits until the next arrival.

    Returns:
        The content of load.json, for ``records.write_load``.

    Raises:
        OptionError: fewer than two models.
        ModelOutputError: a model failed, or gave another number of tokens.
    """
    if len(models) < 2:
        raise OptionError("a load is measured of a baseline and at least one candidate")
    for model in models:  # the first run of a process is slower than any other
        _run(model, _Point("closed", settings.contexts[0], 1, None, 1), 2, [settings.seed, 2**31], clock, sleep)
    points = [
        _measure(models, point, index, settings, progress, clock, sleep)
        for index, point in enumerate(settings.points())
    ]
    parties = [{key: describe_model(model)[key] for key in ("model", "engine")} for model in models]
    return {
        "schema_version": SCHEMA_VERSION,
        "created": utc_now(),
        "settings": {
            "new_tokens": settings.new_tokens,
            "repeats": settings.repeats,
            "requests": settings.requests,
            "seed": settings.seed,
            "order": "in turns, the baseline first",
            "prompts": "random token ids, no two prompts alike",
            "memory_share": MEMORY_SHARE,
        },
        "machine": describe_machine(),
        "models": parties,
        "memory": [_memory(model, settings) for model in models],
        "points": points,
        "crossovers": find_crossovers(points, len(models)),
    }


def _measure(
    models: Sequence[LoadTarget],
    point: _Point,
    index: int,
    settings: LoadSettings,
    progress: Progress | None,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> LoadPoint:
    runs: list[list[_Run]] = [[] for _ in models]
    for turn in range(settings.repeats):
        for model, own in zip(models, runs, strict=True):
            own.append(_run(model, point, settings.new_tokens, [settings.seed, index, turn], clock, sleep))
        if progress:
            progress(point.name, turn + 1, settings.repeats)
    rates = [[run.tokens / run.wall for run in own] for own in runs]
    return {
        "loop": "closed" if point.qps is None else "open",
        "context": point.context,
        "batch": point.batch,
        "qps": point.qps,
        "runs": [_summarize(own) for own in runs],
        "ratios": [_ratio(rates[0], candidate) for candidate in rates[1:]] if point.qps is None else [],
    }


def _run(
    model: LoadTarget,
    point: _Point,
    new_tokens: int,
    seeds: Sequence[int],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> _Run:
    """One run of one model; the same seeds give every model the same prompts and arrivals."""
    prompts = np.random.default_rng(seeds).integers(0, model.vocab_size, (point.requests, point.context))
    waiting = deque(enumerate(point.arrivals([*seeds, 1])))
    arrived: dict[str, float] = {}
    last: dict[str, float] = {}
    found = _Run()
    start = clock()
    while waiting or arrived:
        now = clock() - start
        while waiting and waiting[0][1] <= now + RESOLUTION:
            number, instant = waiting.popleft()
            arrived[f"load-{number}"] = instant
            model.submit(f"load-{number}", prompts[number].tolist(), new_tokens)
        if not arrived:
            sleep(waiting[0][1] - now)
            continue
        for request_id, is_last in model.step():
            instant = clock() - start
            if request_id in last:
                found.between.append(instant - last[request_id])
            else:
                found.first.append(instant - arrived[request_id])
            last[request_id] = instant
            found.tokens += 1
            if is_last:
                del arrived[request_id]
    found.wall = clock() - start
    if found.tokens != point.requests * new_tokens:
        raise ModelOutputError(f"asked were {point.requests} times {new_tokens} tokens, the model gave {found.tokens}")
    if found.wall <= 0:
        raise ModelOutputError(f"{found.tokens} tokens took {found.wall} s by the clock")
    return found


def _summarize(runs: Sequence[_Run]) -> LoadRuns:
    first = [value for run in runs for value in run.first]
    between = [value for run in runs for value in run.between]
    return {
        "tok_per_s": [run.tokens / run.wall for run in runs],
        "ttft_ms": _latency(first),
        "itl_ms": _latency(between),
    }


def _latency(seconds: Sequence[float]) -> Latency:
    p50, p90, p99 = (1000 * float(value) for value in np.percentile(seconds, PERCENTILES))
    return {"p50": p50, "p90": p90, "p99": p99, "n": len(seconds)}


def _ratio(baseline: Sequence[float], candidate: Sequence[float]) -> Ratio:
    ratio = median_ratio(baseline, candidate)
    known = ratio.n > 1  # one pair says nothing of the spread between pairs
    return {
        "value": ratio.value,
        "interval": list(ratio.interval) if known else None,
        "confidence": ratio.confidence if known else None,
        "method": METHOD,
    }


def _memory(model: LoadTarget, settings: LoadSettings) -> LoadMemory:
    """What the model takes, and how many requests of each length fit beside the weights."""
    weight_bytes, kv_bytes_per_token, total = model.memory()
    room = None if total is None else MEMORY_SHARE * total - weight_bytes
    fits: dict[str, int | None] = {}
    for context in settings.contexts:
        need = kv_bytes_per_token * (context + settings.new_tokens)
        fits[str(context)] = None if room is None or need <= 0 else max(0, int(room // need))
    return {
        "weight_bytes": weight_bytes,
        "kv_bytes_per_token": kv_bytes_per_token,
        "device_bytes": total,
        "concurrency": fits,
    }

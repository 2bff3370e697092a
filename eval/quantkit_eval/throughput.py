"""Which of two models writes faster, measured in turns: baseline, candidate, baseline, candidate, and so on.

A machine drifts (clock, neighbours, heat), but two runs in a row see nearly the same machine; so the ratio of each pair
is what counts, and a rate from another session is never compared with.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from quantkit_eval.errors import ModelOutputError, OptionError
from quantkit_eval.evaluate import describe_model
from quantkit_eval.machine import describe_machine
from quantkit_eval.protocol import GenerationRequest, Model
from quantkit_eval.record_types import Party, Throughput, ThroughputBatch
from quantkit_eval.records import SCHEMA_VERSION, utc_now
from quantkit_eval.statistics import median_ratio
from quantkit_eval.suites import Progress

TOPICS = ("rivers", "bread", "trains", "bees", "glass", "winter", "maps", "gardens")  # short: decoding dominates


def measure_throughput(
    baseline: Model,
    candidate: Model,
    batch_sizes: Sequence[int] = (1, 16),
    new_tokens: int = 64,
    repeats: int = 5,
    warmup_runs: int = 1,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Throughput:
    """Tokens a second of both models for each batch size, and the median of the paired ratios.

    Each run answers ``batch_size`` short prompts with exactly ``new_tokens`` tokens (end-of-sequence is ignored); its
    rate is all new tokens over the wall time, the short prompt included.

    Args:
        baseline: one model, loaded.
        candidate: the other, loaded.
        batch_sizes: requests at once.
        new_tokens: tokens that each request gets.
        repeats: pairs; fewer than 5 cannot give a 90 % interval, and one gives none.
        warmup_runs: runs of each model before the first pair, not counted.
        progress: called with the name of the batch, the pairs done and the pairs in all.
        clock: seconds, monotonic.

    Returns:
        The content of throughput.json, for ``records.write_throughput``.

    Raises:
        OptionError: a number is not positive, or a batch size appears twice.
        ModelOutputError: a model gave another number of tokens than asked, or took no time.
    """
    if min(new_tokens, repeats, *batch_sizes, 1) < 1 or warmup_runs < 0 or not batch_sizes:
        raise OptionError(f"{batch_sizes=}, {new_tokens=} and {repeats=} must be at least 1, {warmup_runs=} at least 0")
    if len(set(batch_sizes)) < len(batch_sizes):
        raise OptionError(f"{batch_sizes=} names a size twice")
    batches: dict[str, ThroughputBatch] = {}
    for batch_size in batch_sizes:
        name = f"decode_batch_{batch_size}"
        for turn in range(warmup_runs):
            requests = _requests(batch_size, new_tokens, f"{name} warm-up {turn}")
            _tok_per_s(baseline, requests, clock)
            _tok_per_s(candidate, requests, clock)
        rates: tuple[list[float], list[float]] = ([], [])
        for pair in range(repeats):
            requests = _requests(batch_size, new_tokens, f"{name} {pair}")
            rates[0].append(_tok_per_s(baseline, requests, clock))
            rates[1].append(_tok_per_s(candidate, requests, clock))
            if progress:
                progress(name, pair + 1, repeats)
        batches[name] = _summarize(batch_size, *rates)
    return {
        "schema_version": SCHEMA_VERSION,
        "created": utc_now(),
        "settings": {
            "new_tokens": new_tokens,
            "repeats": repeats,
            "warmup_runs": warmup_runs,
            "order": "A B A B",
            "prompts": "no two alike but for the template",
        },
        "machine": describe_machine(),
        "baseline": _party(baseline),
        "candidate": _party(candidate),
        "batches": batches,
    }


def _requests(batch_size: int, new_tokens: int, run: str) -> list[GenerationRequest]:
    """Different prompts of nearly one length: no two of any run share more than the template in a prefix cache."""
    texts = [f"{i + 1}, {run}: write about {TOPICS[i % len(TOPICS)]}." for i in range(batch_size)]
    return [
        GenerationRequest(f"{i:04d}", ({"role": "user", "content": text},), new_tokens, ignore_eos=True)
        for i, text in enumerate(texts)
    ]


def _tok_per_s(model: Model, requests: Sequence[GenerationRequest], clock: Callable[[], float]) -> float:
    start = clock()
    generations = model.generate(requests)
    seconds = clock() - start
    counts = [len(generation.token_ids) for generation in generations]
    if counts != [request.max_tokens for request in requests]:
        raise ModelOutputError(
            f"asked were {len(requests)} times {requests[0].max_tokens} tokens with ignore_eos, the model gave {counts}"
        )
    if seconds <= 0:
        raise ModelOutputError(f"{sum(counts)} tokens took {seconds} s by the clock")
    return sum(counts) / seconds


def _summarize(batch_size: int, baseline: list[float], candidate: list[float]) -> ThroughputBatch:
    ratio = median_ratio(baseline, candidate)
    known = ratio.n > 1  # one pair says nothing of the spread between pairs
    return {
        "batch_size": batch_size,
        "baseline_tok_per_s": baseline,
        "candidate_tok_per_s": candidate,
        "ratio": {
            "value": ratio.value,
            "interval": list(ratio.interval) if known else None,
            "confidence": ratio.confidence if known else None,
            "method": "median of paired ratios, order-statistic interval",
        },
    }


def _party(model: Model) -> Party:
    description: dict[str, Any] = describe_model(model)
    return {"model": description["model"], "engine": description["engine"]}

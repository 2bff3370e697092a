"""``extract``: read a sentence, answer with a JSON object. Greedy, unconstrained: the format is the model's own work.

How an answer is read, the same for every model: the first ``{`` of the output starts the object, and the object ends
where JSON says it ends; what stands before and after (a code fence, a remark) is set aside, and ``only_json`` tells
whether there was anything but a fence. An object that does not parse from the first brace is no answer; nothing is
repaired. Text values must agree to the letter, after stripping blanks; a number may stand in quotes. A missing field is
wrong, and a field too many makes the item not exact.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quantkit_eval.errors import ModelOutputError
from quantkit_eval.protocol import Generation, GenerationRequest
from quantkit_eval.records import SCHEMA_VERSION, Metric, MetricValue, Sample
from quantkit_eval.statistics import bootstrap_mean, wilson_interval
from quantkit_eval.suites import SuiteOutcome, SuiteRun, parse_options
from quantkit_eval.suites.extract_items import ExtractItem, generate_items

SUITE = "extract"
BATCH_ITEMS = 64  # items handed to the model at once: enough for its batching, few enough for a progress bar
CONFIDENCE = 0.95
FENCE = re.compile(r"```[A-Za-z]*")


@dataclass(frozen=True, slots=True)
class ExtractOptions:
    """Options of the suite.

    Attributes:
        num_items: sentences, spread evenly over the templates.
        max_tokens: of an answer; the longest right answer has fewer than 64.
    """

    num_items: int = 256
    max_tokens: int = 64

    def __post_init__(self) -> None:
        if self.num_items < 0 or self.max_tokens < 1:
            raise ValueError(f"num_items={self.num_items} must be at least 0, max_tokens={self.max_tokens} at least 1")


def run(suite_run: SuiteRun) -> SuiteOutcome:
    """Ask the model for every item and measure the answers.

    Raises:
        OptionError: an option is unknown or out of range.
        ModelOutputError: the model's generations are not those of the requests.
    """
    options = parse_options(ExtractOptions, suite_run.options, SUITE)
    items = generate_items(options.num_items, suite_run.seed)
    samples: list[Sample] = []
    for start in range(0, len(items), BATCH_ITEMS):
        batch = items[start : start + BATCH_ITEMS]
        requests = [_request(item, options) for item in batch]
        generations = suite_run.model.generate(requests)
        _check_generations(requests, generations)
        samples += [_sample(item, generation) for item, generation in zip(batch, generations, strict=True)]
        suite_run.progress(len(samples), len(items))
    return SuiteOutcome(
        samples,
        {
            "items_hash": _hash_items(items),
            "num_items": len(items),
            "options": asdict(options),
            "metrics": _summarize([sample["metrics"] for sample in samples]),
            "histograms": {},
        },
    )


def _request(item: ExtractItem, options: ExtractOptions) -> GenerationRequest:
    return GenerationRequest(item.id, ({"role": "user", "content": item.prompt},), options.max_tokens)


def read_object(output: str) -> tuple[dict[str, Any] | None, bool]:
    """The object in an answer, and whether it is all of the answer.

    Returns:
        (object, only_json); (None, False) if the first brace starts no valid object.
    """
    start = output.find("{")
    if start < 0:
        return None, False
    try:
        value, length = json.JSONDecoder(parse_constant=_refuse_constant).raw_decode(output[start:])
    except (ValueError, RecursionError):
        return None, False
    around = FENCE.sub("", output[:start]) + FENCE.sub("", output[start + length :])
    return value, not around.strip()


def measure(gold: Mapping[str, str | int], output: str, finish_reason: str) -> dict[str, MetricValue]:
    """The metrics of one answer; see sample.schema.json."""
    answer, only_json = read_object(output)
    correct = sum(name in answer and _agrees(answer[name], value) for name, value in gold.items()) if answer else 0
    return {
        "parse_ok": answer is not None,
        "exact": answer is not None and correct == len(gold) and set(answer) == set(gold),
        "fields_correct": correct,
        "fields_total": len(gold),
        "truncated": finish_reason == "length",
        "only_json": only_json,
    }


def _agrees(value: object, gold: str | int) -> bool:
    """Text to the letter; a number also as text of that number. true is not 1."""
    if isinstance(gold, int) and isinstance(value, int | float):
        return not isinstance(value, bool) and value == gold
    return isinstance(value, str) and value.strip() == str(gold)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def _check_generations(requests: Sequence[GenerationRequest], generations: Sequence[Generation]) -> None:
    asked, got = [request.id for request in requests], [generation.id for generation in generations]
    if asked != got:
        raise ModelOutputError(
            f"the model answered {len(got)} requests, {got[:3]}..., not {len(asked)}, {asked[:3]}..."
        )
    for generation in generations:
        if generation.finish_reason not in ("stop", "length"):
            raise ModelOutputError(
                f"request {generation.id!r} ended with {generation.finish_reason!r}, neither 'stop' nor 'length'"
            )


def _sample(item: ExtractItem, generation: Generation) -> Sample:
    return {
        "schema_version": SCHEMA_VERSION,
        "suite": SUITE,
        "id": item.id,
        "prompt_hash": generation.prompt_hash,
        "prompt": item.prompt,
        "gold": dict(item.gold),
        "output": generation.text,
        "finish_reason": generation.finish_reason,
        "metrics": measure(item.gold, generation.text, generation.finish_reason),
    }


def _hash_items(items: Sequence[ExtractItem]) -> str:
    content = json.dumps([[item.id, item.prompt, item.gold] for item in items], ensure_ascii=True, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _summarize(metrics: Sequence[Mapping[str, MetricValue]]) -> dict[str, Metric]:
    shares = {name: _share(name, metrics) for name in ("exact", "parse_ok", "only_json", "truncated")}
    return {**shares, "field_accuracy": _field_accuracy(metrics)}


def _share(name: str, metrics: Sequence[Mapping[str, MetricValue]]) -> Metric:
    """Share of items for which a predicate holds."""
    hits, n = sum(bool(item[name]) for item in metrics), len(metrics)
    return {
        "value": hits / n if n else None,
        "n": n,
        "interval": list(wilson_interval(hits, n, CONFIDENCE)) if n else None,
        "confidence": CONFIDENCE if n else None,
        "method": "Wilson score interval",
        "unit": "fraction",
        "direction": "lower_is_better" if name == "truncated" else "higher_is_better",
    }


def _field_accuracy(metrics: Sequence[Mapping[str, MetricValue]]) -> Metric:
    """Share of right fields; the fields of one item are not independent, so items are what the bootstrap draws."""
    totals = [float(item["fields_total"] or 0) for item in metrics]
    shares = [float(item["fields_correct"] or 0) / total for item, total in zip(metrics, totals, strict=True)]
    estimate = bootstrap_mean(shares, weights=totals, confidence=CONFIDENCE) if len(shares) > 1 else None
    return {
        "value": estimate.value if estimate else (shares[0] if shares else None),
        "n": len(shares),
        "interval": [max(0.0, estimate.interval[0]), min(1.0, estimate.interval[1])] if estimate else None,
        "confidence": CONFIDENCE if estimate else None,
        "method": "studentized bootstrap over items",
        "unit": "fraction",
        "direction": "higher_is_better",
    }

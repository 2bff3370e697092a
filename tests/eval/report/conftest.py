"""Records of runs as the product writes them: a broken candidate, a good one, an undecided one, a model against itself.

What does not vary stands in records.json; every record validates against the product's schemas when it is saved.
"""

import copy
import dataclasses
import functools
import hashlib
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit_eval.records import (
    write_result,
    write_samples,
    write_throughput,
    write_verdict,
)
from quantkit_eval.report import ReportInput

BASE: dict[str, Any] = json.loads(Path(__file__).with_name("records.json").read_text(encoding="utf-8"))
NAMES = ["Ada Lovelace", "José Álvarez", "Zoë Müller", "Li Wei", "Fatima al-Fihri", "Søren Kierkegaard"]
CITIES = ["Lisbon", "Kraków", "Nairobi", "São Paulo", "Osaka", "Reykjavík", "Oslo"]
BROKEN = [
    "The name of the person is {name}.\n\nThe city of {city} is the city of the city of the city of the city of the",
    "Here is the information you asked for:\n\n- Name: {name}\n- City: {city}",
    '{{"name": "{name}", "born": {born}, "city": "{city}", "email": "{name}", "email": "{name}", "email":',
    '{{"name": "{name}", "born": "{born}", "city": "{city}"}}',
    '{{"name": "{name}", "city": {born}}}',
]
KINDS = {  # items, regressed, improved, wrong in both, mean KL
    "fail": (32, 29, 0, 3, 0.412),
    "pass": (300, 2, 3, 24, 0.031),
    "inconclusive": (32, 2, 1, 2, 0.094),
    "aa": (32, 0, 0, 3, None),
}
REASONS = {
    "fail": "Structured output broke: 29 of 32 extractions were right before, none is right after.",
    "pass": "Every gate held within its limit.",
    "inconclusive": "Nothing is proven broken, but 32 items are too few to show that structured output held.",
}


def record(where: str, /, **changes: Any) -> Any:
    """A copy of a record of records.json (``gates.kl`` is nested) with other values."""
    found = BASE
    for part in where.split("."):
        found = found[part]
    return copy.deepcopy(found) | changes


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def make_item(index: int, prompt: str, gold: Any, before: str, after: str) -> tuple[Any, Any, Any]:
    """Both samples of an item and its entry among the flipped ones; right is what equals the gold value as JSON."""
    right = json.dumps(gold, ensure_ascii=False)
    name = f"extract-{index:04d}"
    samples = []
    for output in (before, after):
        truncated = not output.endswith(("}", "Oslo")) and "- City" not in output
        metrics = {"parse_ok": output.endswith("}"), "exact": output == right, "truncated": truncated}
        metrics |= {"fields_correct": 3 if output == right else 1, "fields_total": 3, "only_json": output[:1] == "{"}
        samples.append(
            record("sample", id=name, prompt=prompt, prompt_hash=digest(prompt), gold=gold, output=output)
            | {"metrics": metrics, "finish_reason": "length" if truncated else "stop"}
        )
    direction = "regressed" if before == right else "improved"
    flip = {"suite": "extract", "id": name, "prompt": prompt, "gold": gold, "direction": direction}
    shared = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(min(before, after, key=len))
    )
    return *samples, flip | {"baseline_output": before, "candidate_output": after, "divergence": shared}


def make_items(count: int, regressed: int, improved: int, wrong: int) -> tuple[list[Any], list[Any], list[Any]]:
    rng = random.Random(0)
    before, after, flips = [], [], []
    for index in range(count):
        gold = {"name": rng.choice(NAMES), "born": rng.randrange(1800, 2005), "city": rng.choice(CITIES)}
        prompt = f"{gold['name']} was born in {gold['born']} and now lives in {gold['city']}, near the old library.\n"
        prompt += 'Answer with a JSON object with the keys "name", "born" and "city" and nothing else.'
        good, bad = json.dumps(gold, ensure_ascii=False), rng.choice(BROKEN).format(**gold)
        outputs = (good, bad) if index < regressed else (bad, good) if index < regressed + improved else (good, good)
        one, two, flip = make_item(index, prompt, gold, *((bad, bad) if index >= count - wrong else outputs))
        before.append(one)
        after.append(two)
        if index < regressed + improved:
            flips.append(flip)
    return before, after, flips


def nll_samples(kl: float | None) -> list[Any]:
    drift = {} if kl is None else {"kl_mean_nats": kl, "top1_agreement": 0.66, "delta_nll_nats": kl / 2}
    metrics = [{"nll_nats": 3.21 + 0.02 * index, "num_tokens": 511} | drift for index in range(8)]
    return [record("window", id=f"window-{index:03d}", metrics=entry) for index, entry in enumerate(metrics)]


def kl_histogram(mean: float) -> dict[str, Any]:
    """A log-normal spread over bins of a quarter power of ten; the first bin starts at zero."""
    edges = [0.0] + [10.0 ** (exponent / 4) for exponent in range(-24, 6)]
    centre = math.log(mean) - 0.9
    weights = [math.exp(-((math.log(max(low, 1e-7) * 1.33) - centre) ** 2) / 4.5) for low in edges[:-1]]
    return {
        "edges": edges,
        "counts": [round(2044 * weight / sum(weights)) for weight in weights],
        "unit": "nats_per_token",
    }


def make_result(kl: float | None, exact: int, items: int, scheme: str | None) -> Any:
    made = record("result", machine=BASE["machine"])
    made["model"] |= {"scheme": scheme, "checkpoint_hash": digest(str(scheme))}
    extract, nll = made["suites"]["extract"], made["suites"]["nll"]
    extract["num_items"] = items
    for metric in ("exact", "parse_ok"):
        extract["metrics"][metric] |= {"value": exact / items, "n": items}
    if kl is None:
        nll["metrics"] = {"perplexity": nll["metrics"]["perplexity"]}
    else:
        nll["metrics"]["kl_mean_nats"] |= {"value": kl, "interval": [kl * 0.93, kl * 1.08]}
        nll["metrics"]["kl_p99_nats"]["value"] = kl * 9
        nll["histograms"] = {"kl_nats": kl_histogram(kl)}
    return made


def make_throughput(models: dict[str, Any]) -> Any:
    rng = random.Random(7)
    batches = {}
    for batch, rate, factor in ((1, 29.4, 1.78), (4, 96.0, 1.41), (16, 251.0, 0.88), (32, 341.0, 0.71)):
        baseline = [rate * rng.uniform(0.96, 1.04) for _ in range(7)]
        ratio = {
            "value": factor,
            "interval": [factor * 0.97, factor * 1.035],
            "confidence": 0.984,
            "method": BASE["gates"]["speed"]["test"],
        }
        batches[f"decode_batch_{batch}"] = {
            "batch_size": batch,
            "baseline_tok_per_s": baseline,
            "candidate_tok_per_s": [entry * factor * rng.uniform(0.97, 1.03) for entry in baseline],
            "ratio": ratio,
        }
    made = record("throughput", machine=BASE["machine"], batches=batches)
    return made | {side: {"model": model, "engine": made[side]["engine"]} for side, model in models.items()}


def make_checkpoint(blocks: int) -> Any:
    """quantkit.json of a model with seven layers a block; one of them needed more damping and had dead columns."""
    rng = random.Random(3)
    errors = {"self_attn.q_proj": 0.06, "self_attn.k_proj": 0.05, "self_attn.v_proj": 0.11, "self_attn.o_proj": 0.1}
    errors |= {"mlp.gate_proj": 0.09, "mlp.up_proj": 0.11, "mlp.down_proj": 0.14}
    layers = []
    for block in range(blocks):
        for kind, error in errors.items():
            error *= rng.uniform(0.7, 1.3) * (1 + block / 60)
            layers.append(record("layer", name=f"model.layers.{block}.{kind}", relative_output_error=error))
    fallback = "damping raised twice: the Hessian was not positive definite"
    layers[-1] |= {"damp_fraction": 0.04, "fallbacks": [fallback], "dead_columns": 3, "relative_output_error": 0.38}
    return record("checkpoint", machine=BASE["machine"], recipe=BASE["recipe"], layers=layers)


def make_gates(kind: str, shares: list[float], kl: float | None) -> list[Any]:
    items, regressed, improved, _, _ = KINDS[kind]
    outcome = "pass" if kind == "aa" else kind
    drop = shares[1] - shares[0]
    half = {"fail": 0.09, "pass": 0.0135, "inconclusive": 0.088, "aa": 0.0}[kind]
    gate = record("gates.extract", n=items, verdict=outcome, discordant={"improved": improved, "regressed": regressed})
    gate |= {"baseline": shares[0], "candidate": shares[1], "difference": drop, "value": drop}
    gate |= {"interval": [drop - half, drop + half], "items_needed": 310 if kind == "inconclusive" else None}
    gate["reason"] = f"{regressed} items regressed and {improved} improved, of {items}."
    if kind != "fail":
        gate |= {"p_value": 0.688, "p_holm": 0.688}
    if kl is None:
        return [gate]
    drift = record("gates.kl", candidate=kl, value=kl, interval=[kl * 0.93, kl * 1.08], verdict=outcome)
    drift["items_needed"] = 90 if kind == "inconclusive" else None
    drift["reason"] = f"The mean KL divergence is {kl} nats a token; the limit is 0.1."
    fast = record("gates.speed", name="throughput.decode_batch_1", metric="decode_batch_1", limit=1.0, verdict="pass")
    fast |= {"value": 1.78, "interval": [1.73, 1.84], "baseline": 29.4, "candidate": 52.3, "difference": 22.9}
    fast["reason"] = "The candidate decodes at 1.78 of the baseline's speed at batch 1; the limit is 1.0."
    return [gate, drift, fast, record("gates.speed")] if kind == "fail" else [gate, drift, fast]


def make_changes(kind: str) -> dict[str, Any]:
    items, regressed, improved, _, _ = KINDS[kind]
    changed = regressed + improved
    found = {"suite": "extract", "n": items, "changed": changed, "improved": improved, "regressed": regressed}
    return found | {"median_divergence": 12.0 if changed else None}


def make_verdict(outcome: str, gates: list[Any], flips: list[Any]) -> Any:
    exit_code = {"pass": 0, "fail": 3, "inconclusive": 4}[outcome]
    made = record("verdict", verdict=outcome, exit_code=exit_code, reason=REASONS[outcome], gates=gates, flipped=flips)
    for side in ("baseline", "candidate"):
        made[side]["machine"] = BASE["machine"]
    return made


@functools.cache
def build_run(kind: str) -> ReportInput:
    """A run: ``fail``, ``pass``, ``inconclusive``, or ``aa`` (a model against itself, nothing but the records).

    Shared by the tests: change a copy.
    """
    *counts, kl = KINDS[kind]
    before, after, flips = make_items(*counts)
    right = [sum(sample["metrics"]["exact"] for sample in samples) for samples in (before, after)]
    quantized = kind != "aa"
    gates = make_gates(kind, [count / counts[0] for count in right], kl)
    results = {
        "baseline": make_result(None, right[0], counts[0], None),
        "candidate": make_result(kl, right[1], counts[0], "W4A16" if quantized else None),
    }
    models = {side: result["model"] for side, result in results.items()}
    verdict = make_verdict("pass" if kind == "aa" else kind, gates, flips)
    verdict["changes"] = [make_changes(kind)]
    if kind == "aa":
        verdict["noise_floor"] = {"changes": [make_changes(kind)], "kl_mean_nats": None}
    run = ReportInput(
        verdict=verdict,
        **results,
        baseline_samples=before + nll_samples(None),
        candidate_samples=after + nll_samples(kl),
        throughput=make_throughput(models) if quantized else None,
        checkpoint=make_checkpoint(30) if quantized else None,
        weights_bytes=210 * 176_256 + 76_800_000 if quantized else None,
    )
    return sealed(run)


def sealed(run: ReportInput) -> ReportInput:
    """A copy whose results name their samples and whose verdict names its results, as the product has it."""
    results: dict[str, Any] = {}
    verdict: Any = dict(run.verdict)
    sides = (("baseline", run.baseline_samples, run.baseline), ("candidate", run.candidate_samples, run.candidate))
    for side, samples, result in sides:
        lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        results[side] = result | {"samples_sha256": digest(lines)}
        verdict[side] = {key: value for key, value in results[side].items() if key not in ("schema_version", "suites")}
    return dataclasses.replace(run, verdict=verdict, **results)


def save_run(run: ReportInput, folder: Path) -> Path:
    """Write a run's records with the product's own writers; the checkpoint's record goes to checkpoint/."""
    run = sealed(run)
    sides = (("baseline", run.baseline_samples, run.baseline), ("candidate", run.candidate_samples, run.candidate))
    for side, samples, outcome in sides:
        write_samples(folder / side / "samples.jsonl", samples)
        write_result(folder / side / "result.json", outcome)
    write_verdict(folder / "verdict.json", run.verdict)
    if run.throughput is not None:
        write_throughput(folder / "throughput.json", run.throughput)
    if run.checkpoint is not None:
        (folder / "checkpoint").mkdir()
        (folder / "checkpoint" / "quantkit.json").write_text(json.dumps(run.checkpoint), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def make_run() -> Callable[[str], ReportInput]:
    """``make_run("fail")``: see ``build_run``."""
    return build_run


@pytest.fixture(scope="session")
def save_records() -> Callable[[ReportInput, Path], Path]:
    """``save_records(run, folder)``: see ``save_run``."""
    return save_run


@pytest.fixture(scope="session")
def make_record() -> Callable[..., Any]:
    """``make_record("gates.kl", value=0.2)``: see ``record``."""
    return record


@pytest.fixture(scope="session")
def make_flip() -> Callable[..., tuple[Any, Any, Any]]:
    """``make_flip(index, prompt, gold, before, after)``: see ``make_item``."""
    return make_item

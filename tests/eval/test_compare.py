"""Verdicts on pairs of evaluations whose truth is known, and refusals of pairs that cannot be compared."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit_eval.compare import compare
from quantkit_eval.errors import EvalError, IncomparableResults, OptionError, RecordError
from quantkit_eval.evaluate import evaluate
from quantkit_eval.record_types import Gate, Verdict
from quantkit_eval.records import read_verdict, write_throughput, write_verdict
from quantkit_eval.statistics import mcnemar_p, median_ratio, tango_interval

SEED = 11
N = 256
SUITES: dict[str, dict[str, Any]] = {"extract": {"num_items": N}, "nll": {"max_windows": 20, "window_tokens": 128}}
GATES = {"suites": ["extract", "nll"], "max_drop_pp": {"extract": 5}, "max_kl_mean_nats": 0.10}

Pair = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def evaluated(
    erring_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Any, Path | None], Path]:
    """Records of an erring model; each is made once, because many tests look at the same."""
    made: dict[str, Path] = {}

    def get(settings: str, suites: Any, reference: Path | None) -> Path:
        key = settings + json.dumps(suites, sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("records")
            evaluate(erring_model(**json.loads(settings)), suites, SEED, made[key], reference)
        return made[key]

    return get


@pytest.fixture
def pair(tmp_path: Path, evaluated: Callable[..., Path]) -> Pair:
    """Evaluates a baseline with 10 % errors and a candidate as it is told; gives both folders, its own copies."""

    def make(
        error_rate: float = 0.1,
        salt: str = "errors",
        *,
        noise: float = 0.0,
        suites: dict[str, dict[str, Any]] = SUITES,
        num_items: int = N,
        **options: Any,
    ) -> tuple[Path, Path]:
        suites = {name: dict(settings) for name, settings in suites.items()}
        if "extract" in suites:
            suites["extract"]["num_items"] = num_items
        both = {"num_items": num_items, "seed": SEED}
        base = both | {"error_rate": 0.1, "name": "base"}
        candidate = both | {"error_rate": error_rate, "salt": salt, "noise": noise, "name": "cand"} | options
        first = evaluated(json.dumps(base), suites, None)
        second = evaluated(json.dumps(candidate), suites, first if "nll" in suites else None)
        for source, name in ((first, "a"), (second, "b")):
            shutil.copytree(source, tmp_path / name, dirs_exist_ok=True)
        return tmp_path / "a", tmp_path / "b"

    return make


def gate_of(verdict: Verdict, name: str) -> Gate:
    return next(gate for gate in verdict["gates"] if gate["name"] == name)


def test_a_model_compared_with_itself_passes(pair: Pair, tmp_path: Path) -> None:
    verdict = compare(*pair(), GATES)
    assert (verdict["verdict"], verdict["exit_code"]) == ("pass", 0)
    extract, kl = verdict["gates"]
    assert extract["p_value"] == 1.0
    assert extract["difference"] == 0
    assert extract["discordant"] == {"improved": 0, "regressed": 0}
    assert kl["value"] is not None
    assert kl["value"] < 1e-6
    assert verdict["flipped"] == []
    write_verdict(tmp_path / "verdict.json", verdict)
    assert read_verdict(tmp_path / "verdict.json") == verdict


def test_a_model_of_the_same_quality_never_fails(pair: Pair) -> None:
    """Other errors, the same rate: there are flips on both sides."""
    gate = gate_of(compare(*pair(0.1, "others"), GATES), "extract.exact")
    assert gate["verdict"] != "fail"
    assert gate["discordant"] is not None
    assert min(gate["discordant"].values()) > 10


def test_a_broken_model_fails(pair: Pair) -> None:
    baseline, candidate = pair(1.0, noise=1.0)
    verdict = compare(baseline, candidate, GATES)
    assert (verdict["verdict"], verdict["exit_code"]) == ("fail", 3)
    extract, kl = verdict["gates"]
    assert extract["verdict"] == kl["verdict"] == "fail"
    assert extract["candidate"] == 0
    assert extract["p_holm"] is not None
    assert extract["p_holm"] < 1e-9
    assert extract["items_needed"] is None
    assert verdict["reason"].startswith("2 of 2 gates failed. Of 256 extract answers")
    assert "too one-sided to be chance" in extract["reason"]
    assert "only 0.1 is allowed" in kl["reason"]
    assert len(verdict["flipped"]) == extract["discordant"]["regressed"]  # type: ignore[index]


def test_numbers_of_a_gate_are_those_of_the_samples(pair: Pair) -> None:
    baseline, candidate = pair(0.2, "others")
    gate = gate_of(compare(baseline, candidate, GATES), "extract.exact")
    right = []
    for folder in (baseline, candidate):
        lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        right.append([line["metrics"]["exact"] for line in lines if line["suite"] == "extract"])
    improved = sum(b > a for a, b in zip(*right, strict=True))
    regressed = sum(b < a for a, b in zip(*right, strict=True))
    assert gate["discordant"] == {"improved": improved, "regressed": regressed}
    assert gate["baseline"] == sum(right[0]) / N
    assert gate["candidate"] == sum(right[1]) / N
    assert gate["difference"] == gate["value"] == (improved - regressed) / N
    assert gate["interval"] == list(tango_interval(improved, regressed, N, 0.90))
    assert gate["p_value"] == gate["p_holm"] == mcnemar_p(improved, regressed)
    assert (gate["limit"], gate["unit"], gate["n"], gate["kind"]) == (0.05, "fraction", N, "non_inferiority")


def test_too_few_items_are_inconclusive_and_say_how_many_would_do(pair: Pair) -> None:
    verdict = compare(*pair(num_items=20), GATES)
    assert (verdict["verdict"], verdict["exit_code"]) == ("inconclusive", 4)
    gate = gate_of(verdict, "extract.exact")
    assert gate["items_needed"] is not None
    assert gate["items_needed"] > 20
    assert gate["reason"].endswith(": about 130 items would.")
    assert 120 < gate["items_needed"] <= 130
    assert verdict["reason"].startswith("1 of 2 gates could not be decided. Of 20 extract answers")


def test_a_real_drop_within_the_margin_passes_although_it_is_significant(pair: Pair) -> None:
    verdict = compare(*pair(0.2), {"max_drop_pp": {"extract": 20}})
    gate = verdict["gates"][0]
    assert gate["p_value"] is not None
    assert gate["p_value"] < 0.001
    assert gate["verdict"] == verdict["verdict"] == "pass"


def test_no_gates_pass_and_say_that_nothing_was_judged(pair: Pair) -> None:
    verdict = compare(*pair(1.0), {})
    assert (verdict["verdict"], verdict["gates"]) == ("pass", [])
    assert "nothing was judged" in verdict["reason"]
    listed = {(entry["suite"], entry["metric"]): entry for entry in verdict["unjudged"]}
    assert listed["extract", "exact"]["candidate"] == 0
    assert listed["nll", "kl_mean_nats"]["baseline"] is None
    assert listed["nll", "perplexity"]["baseline"] == pytest.approx(listed["nll", "perplexity"]["candidate"])


def test_judged_metrics_are_not_listed_as_unjudged(pair: Pair) -> None:
    unjudged = compare(*pair(), GATES)["unjudged"]
    names = {(entry["suite"], entry["metric"]) for entry in unjudged}
    assert not names & {("extract", "exact"), ("nll", "kl_mean_nats")}
    assert ("extract", "parse_ok") in names


def test_flipped_items_show_both_outputs_regressed_ones_first(pair: Pair) -> None:
    flipped = compare(*pair(0.2, "others"), GATES)["flipped"]
    directions = [item["direction"] for item in flipped]
    assert directions == sorted(directions, reverse=True)
    assert set(directions) == {"regressed", "improved"}
    for item in flipped:
        right, wrong = item["baseline_output"], item["candidate_output"]
        if item["direction"] == "improved":
            right, wrong = wrong, right
        assert json.loads(right) == item["gold"]
        assert wrong == right[:-1]


def test_a_gate_on_nothing_is_inconclusive(pair: Pair) -> None:
    gate = compare(*pair(suites={"extract": {}}, num_items=0), {"max_drop_pp": {"extract": 5}})["gates"][0]
    assert gate["verdict"] == "inconclusive"
    assert gate["value"] is gate["interval"] is gate["items_needed"] is None
    assert "nothing can be said" in gate["reason"]


@pytest.mark.parametrize(("limit", "outcome"), [(1.0, "pass"), (0.01, "fail")])
def test_the_divergence_is_judged_by_its_interval(pair: Pair, limit: float, outcome: str) -> None:
    gate = compare(*pair(noise=0.5), {"max_kl_mean_nats": limit})["gates"][0]
    assert gate["verdict"] == outcome
    assert gate["interval"] is not None
    assert gate["value"] is not None
    low, high = gate["interval"]
    assert low < gate["value"] < high
    near = compare(*pair(noise=0.5), {"max_kl_mean_nats": (gate["value"] + high) / 2})["gates"][0]
    assert near["verdict"] == "inconclusive"
    assert near["items_needed"] is not None
    assert near["items_needed"] > gate["n"]


def throughput_file(folder: Path, ratios: list[float], names: tuple[str, str] = ("base", "cand")) -> Path:
    baseline, candidate = [20.0] * len(ratios), [20.0 * ratio for ratio in ratios]
    ratio = median_ratio(baseline, candidate)
    parties = [
        {
            "model": {"name": name, "revision": None, "checkpoint_hash": name, "scheme": None},
            "engine": {"name": "fake-engine"},
        }
        for name in names
    ]
    path = folder / "throughput.json"
    write_throughput(
        path,
        {
            "schema_version": 1,
            "created": "2026-01-02T03:04:05Z",
            "settings": {"new_tokens": 8, "repeats": len(ratios), "warmup_runs": 1, "order": "A B A B"},
            "machine": {},
            "baseline": parties[0],
            "candidate": parties[1],
            "batches": {
                "decode_batch_1": {
                    "batch_size": 1,
                    "baseline_tok_per_s": baseline,
                    "candidate_tok_per_s": candidate,
                    "ratio": {
                        "value": ratio.value,
                        "interval": list(ratio.interval),
                        "confidence": ratio.confidence,
                        "method": "order statistics",
                    },
                }
            },
        },
    )
    return path


@pytest.mark.parametrize(
    ("ratios", "outcome"),
    [
        ([1.2, 1.3, 1.25, 1.4, 1.22], "pass"),
        ([0.8, 0.7, 0.9, 0.85, 0.8], "fail"),
        ([0.9, 1.1, 1.2, 1.3, 1.2], "inconclusive"),
        ([2.0, 2.0, 2.0], "inconclusive"),
        ([1.0, 1.0, 1.0, 1.0, 1.0], "pass"),
    ],
)
def test_throughput_is_judged_by_its_interval(pair: Pair, tmp_path: Path, ratios: list[float], outcome: str) -> None:
    path = throughput_file(tmp_path, ratios)
    gates = {"min_throughput_ratio": {"decode_batch_1": 1.0}}
    gate = compare(*pair(suites={"extract": {}}, num_items=4), gates, path)["gates"][0]
    assert gate["verdict"] == outcome
    assert (gate["items_needed"] is not None) == (outcome == "inconclusive")
    assert (gate["name"], gate["kind"], gate["n"]) == ("throughput.decode_batch_1", "ratio", len(ratios))
    if len(ratios) == 3:
        assert gate["items_needed"] == 5


def test_a_model_cannot_be_slower_than_itself(pair: Pair, tmp_path: Path) -> None:
    path = throughput_file(tmp_path, [0.8, 0.7, 0.9, 0.85, 0.8], ("base", "base"))
    folders = pair(suites={"extract": {}}, num_items=4, name="base")
    gate = compare(*folders, {"min_throughput_ratio": {"decode_batch_1": 1.0}}, path)["gates"][0]
    assert gate["verdict"] == "inconclusive"
    assert "same model" in gate["reason"]


def test_an_unjudged_throughput_is_listed(pair: Pair, tmp_path: Path) -> None:
    path = throughput_file(tmp_path, [2.0] * 5)
    unjudged = compare(*pair(suites={"extract": {}}, num_items=4), {}, path)["unjudged"]
    entry = {"suite": "throughput", "metric": "decode_batch_1", "baseline": 20.0, "candidate": 40.0}
    assert entry | {"unit": "tok_per_s"} in unjudged


@pytest.mark.parametrize(
    ("gates", "words"),
    [
        ({"max_drop": {}}, "unknown gate 'max_drop'. Choose from suites, max_drop_pp"),
        ({"max_drop_pp": {"nll": 5}}, r"gate max_drop_pp asks about suite 'nll'"),
        ({"max_drop_pp": {"extract": 0}}, r"max_drop_pp.extract must be a number above 0 and below 100, not 0"),
        ({"max_drop_pp": {"extract": True}}, "not True"),
        ({"max_kl_mean_nats": "low"}, "max_kl_mean_nats must be a number above 0, not 'low'"),
        ({"max_kl_mean_nats": 0.1}, r"asks about suite 'nll', but both were evaluated on extract"),
        ({"suites": ["schema"]}, r"gate suites asks about suite 'schema'"),
        ({"min_throughput_ratio": {"decode_batch_1": 1.0}}, "no throughput of these two models was measured"),
    ],
)
def test_gates_on_what_was_not_run_are_errors(pair: Pair, gates: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        compare(*pair(suites={"extract": {}}, num_items=4), gates)
    assert caught.value.exit_code == 2


def test_a_batch_that_was_not_measured_is_an_error(pair: Pair, tmp_path: Path) -> None:
    path = throughput_file(tmp_path, [2.0] * 5)
    with pytest.raises(OptionError, match=r"decode_batch_16: that batch was not measured. Choose from decode_batch_1"):
        compare(*pair(suites={"extract": {}}, num_items=4), {"min_throughput_ratio": {"decode_batch_16": 1.0}}, path)


def test_a_throughput_of_other_models_is_refused(pair: Pair, tmp_path: Path) -> None:
    path = throughput_file(tmp_path, [2.0] * 5, ("base", "other"))
    with pytest.raises(IncomparableResults, match="the throughput is of another candidate"):
        compare(*pair(suites={"extract": {}}, num_items=4), {}, path)


def test_results_of_another_template_are_refused(pair: Pair) -> None:
    with pytest.raises(IncomparableResults, match=r"template_hash is '.*Give both models the tokenizer files and"):
        compare(*pair(template="[{}]"), {})


def edit_result(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "result.json"
    result = json.loads(path.read_text())
    change(result)
    path.write_text(json.dumps(result))


def edit_samples(folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    path = folder / "samples.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    change(samples)
    text = "".join(json.dumps(sample) + "\n" for sample in samples)
    path.write_text(text)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    edit_result(folder, lambda result: result.update(samples_sha256=sha256))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.update(sampling={"temperature": 0.7, "top_p": 1.0}), "sampling is"),
        (lambda r: r["suites"]["extract"].update(items_hash="1" * 64), "items_hash of suite 'extract' is"),
        (lambda r: r["suites"]["extract"]["options"].update(max_tokens=9), "the options of suite 'extract' is"),
        (lambda r: r["suites"]["nll"].update(reference_sha256="1" * 64), "reference_sha256 .* with --reference .*"),
        (
            lambda r: r["suites"]["extract"].update(primary_metric="parse_ok"),
            "primary metric .* is 'exact' for",
        ),
    ],
)
def test_results_that_differ_in_what_they_rest_on_are_refused(
    pair: Pair, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    baseline, candidate = pair(num_items=8)
    edit_result(candidate, change)
    with pytest.raises(IncomparableResults, match=words) as caught:
        compare(baseline, candidate, {})
    assert isinstance(caught.value, EvalError)
    assert "\n" not in str(caught.value)


def test_a_last_release_and_its_successor_need_one_original(pair: Pair) -> None:
    _, candidate = pair(num_items=8)
    shutil.copytree(candidate, candidate.with_name("release"))
    edit_result(candidate, lambda r: r["suites"]["nll"].update(reference_sha256="1" * 64))
    with pytest.raises(IncomparableResults, match="--reference that of the original against which"):
        compare(candidate.with_name("release"), candidate, {})


def test_another_prompt_is_named_with_its_item(pair: Pair) -> None:
    baseline, candidate = pair(num_items=8)
    edit_samples(candidate, lambda samples: samples[3].update(prompt_hash="2" * 64))
    with pytest.raises(IncomparableResults, match=r"prompt_hash of extract item '\w+-0003' .* and?.*2222"):
        compare(baseline, candidate, {})


def test_another_number_of_windows_is_refused(pair: Pair) -> None:
    """Where tokenizers agree on all windows but one that is too short to be one, items_hash is the same."""
    baseline, candidate = pair(num_items=8)
    edit_samples(candidate, lambda samples: samples.pop())
    edit_result(candidate, lambda r: r["suites"]["nll"].update(num_items=r["suites"]["nll"]["num_items"] - 1))
    with pytest.raises(IncomparableResults, match="num_items of suite 'nll'"):
        compare(baseline, candidate, {})


def test_other_seeds_are_refused(tmp_path: Path, erring_model: Callable[..., Any]) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        evaluate(erring_model(8, seed, 0.0), {"extract": {"num_items": 8}}, seed, tmp_path / name)
    with pytest.raises(IncomparableResults, match="items_hash"):
        compare(tmp_path / "a", tmp_path / "b", {})


def test_lost_samples_are_an_error(pair: Pair) -> None:
    baseline, candidate = pair(num_items=8)
    edit_samples(candidate, lambda samples: samples.pop(0))
    with pytest.raises(RecordError, match=r"samples\.jsonl has .*'extract': 7.* result\.json says .*'extract': 8"):
        compare(baseline, candidate, {})


def test_a_candidate_without_divergence_cannot_be_judged_by_it(pair: Pair) -> None:
    baseline, _ = pair(num_items=8)
    with pytest.raises(OptionError, match="holds no divergence") as caught:
        compare(baseline, baseline, {"max_kl_mean_nats": 0.1})
    assert f"`quantkit eval CANDIDATE -o {baseline} --reference {baseline}`" in str(caught.value)
    assert "quantkit eval BASELINE" not in str(caught.value)
    (baseline / "nll.safetensors").unlink()  # as of a server, whose URL gives no distributions
    with pytest.raises(OptionError, match=r"Run `quantkit eval BASELINE -o \S+`, then `quantkit eval CANDIDATE"):
        compare(baseline, baseline, {"max_kl_mean_nats": 0.1})


def test_a_baseline_with_a_reference_of_its_own_is_no_reference(pair: Pair) -> None:
    _, candidate = pair(num_items=8)
    with pytest.raises(IncomparableResults, match="was itself measured against a reference"):
        compare(candidate, candidate, {"max_kl_mean_nats": 0.1})


def test_a_suite_of_only_one_side_is_listed_with_a_gap(tmp_path: Path, erring_model: Callable[..., Any]) -> None:
    model = erring_model(8, 0, 0.0)
    evaluate(model, {"extract": {"num_items": 8}, "nll": {"max_windows": 2}}, 0, tmp_path / "a")
    evaluate(model, {"extract": {"num_items": 8}}, 0, tmp_path / "b")
    unjudged = compare(tmp_path / "a", tmp_path / "b", {})["unjudged"]
    (perplexity,) = [entry for entry in unjudged if entry["metric"] == "perplexity"]
    assert perplexity["candidate"] is None
    assert perplexity["baseline"] is not None

"""Item by item, with a control, and several candidates in one table."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit_eval.compare import compare
from quantkit_eval.comparison import compare_several
from quantkit_eval.errors import IncomparableResults, OptionError
from quantkit_eval.evaluate import evaluate
from quantkit_eval.pairing import first_divergence
from quantkit_eval.records import validate, write_comparison, write_throughput, write_verdict
from quantkit_eval.report import load_report_input
from quantkit_eval.report.changes import change_rows, noise_line
from quantkit_eval.statistics import median_ratio

N = 60
GATES = {"max_drop_pp": {"extract": 20}}
Make = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path, erring_model: Callable[..., Any]) -> Make:
    """Evaluates a model with a share of errors into a folder: made("a", 0.1, weight_bytes=400)."""

    def make(
        name: str, error_rate: float, salt: str = "errors", weight_bytes: int | None = 100, **options: Any
    ) -> Path:
        model = erring_model(N, 0, error_rate, salt, **{"name": name} | options)
        described = model.describe()
        described["model"] = described["model"] | {"weight_bytes": weight_bytes}
        model.describe = lambda: described
        evaluate(model, {"extract": {"num_items": N}}, 0, tmp_path / name)
        return tmp_path / name

    return make


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [("abc", "abc", None), ("abc", "abd", 2), ("", "a", 0), ("ab", "abc", 2), ("👩‍🚀", "👩🚀", 1)],
)
def test_the_first_divergence(one: str, other: str, place: int | None) -> None:
    assert first_divergence(one, other) == first_divergence(other, one) == place


@given(st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_texts_are_equal_before_their_divergence_and_differ_there(one: str, other: str) -> None:
    place = first_divergence(one, other)
    assert (place is None) is (one == other)
    if place is not None:
        assert one[:place] == other[:place]
        assert one[place : place + 1] != other[place : place + 1]


def test_changed_answers_are_counted_and_flipped_ones_have_their_divergence(made: Make) -> None:
    """A wrong answer of these models lacks its last brace, so the texts part at the end."""
    verdict = compare(made("a", 0.1), made("b", 0.3, "others"), {})
    (entry,) = verdict["changes"]
    assert entry["suite"] == "extract"
    assert entry["changed"] == entry["improved"] + entry["regressed"] == len(verdict["flipped"]) > 5
    places = [item["divergence"] for item in verdict["flipped"]]
    for item in verdict["flipped"]:
        shorter = min(item["baseline_output"], item["candidate_output"], key=len)
        assert item["divergence"] == len(shorter)
    assert min(places) <= entry["median_divergence"] <= max(places)  # type: ignore[operator]
    assert verdict["noise_floor"] is None


def test_a_model_against_itself_is_its_own_noise_floor(made: Make) -> None:
    verdict = compare(made("a", 0.1), made("a", 0.1), GATES)
    assert verdict["noise_floor"] == {"changes": verdict["changes"], "kl_mean_nats": None}
    assert verdict["changes"][0]["changed"] == 0


def test_a_control_gives_the_noise_floor(made: Make, tmp_path: Path) -> None:
    baseline, candidate = made("a", 0.1), made("b", 0.3, "others")
    made("a", 0.2, "noise").rename(tmp_path / "again")
    made("a", 0.1)
    verdict = compare(baseline, candidate, GATES, control=tmp_path / "again")
    floor = verdict["noise_floor"]
    assert floor is not None
    assert 0 < floor["changes"][0]["changed"] != verdict["changes"][0]["changed"]
    with pytest.raises(IncomparableResults, match=r"the control .* is of another model"):
        compare(baseline, candidate, GATES, control=candidate)
    with pytest.raises(OptionError, match=r"the control .* is the baseline itself.*another --batch-items"):
        compare(baseline, candidate, GATES, control=baseline)


def test_the_report_says_what_the_noise_floor_is(made: Make, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    made("a", 0.1).rename(run / "baseline")
    made("b", 0.3, "others").rename(run / "candidate")
    made("a", 0.2, "noise").rename(run / "control")
    verdict = compare(run / "baseline", run / "candidate", GATES, control=run / "control")
    write_verdict(run / "verdict.json", verdict)
    shown = load_report_input(run)
    floor = verdict["noise_floor"]
    assert floor is not None
    changed = floor["changes"][0]["changed"]
    assert noise_line(shown).startswith("Noise floor: between two evaluations of the original, ")
    assert f"{changed} of 60 answers are another text" in noise_line(shown)
    (row,) = change_rows(shown)
    assert row["floor"].startswith(f"{changed} of 60, ")
    without = dataclasses.replace(shown, verdict=verdict | {"noise_floor": None})  # type: ignore[arg-type]
    assert noise_line(without) == ""


def test_several_candidates_stand_side_by_side(made: Make, tmp_path: Path) -> None:
    baseline = made("base", 0.0, weight_bytes=400)
    small, worse, same = made("small", 0.05), made("worse", 0.3, weight_bytes=120), made("same", 0.0, weight_bytes=400)
    comparison = compare_several(baseline, [small, worse, same], GATES)
    write_comparison(tmp_path / "comparison.json", comparison)
    validate(json.loads((tmp_path / "comparison.json").read_text()), "comparison", "here")
    rows = [comparison["baseline"], *comparison["candidates"]]
    assert [row["name"] for row in rows] == ["base", "small", "worse", "same"]
    assert [row["verdict"] for row in rows] == [None, "pass", "fail", "pass"]
    assert [row["on_front"] for row in rows] == [True, True, False, True]
    assert comparison["exit_code"] == 3
    alone = compare(baseline, small, GATES)
    assert rows[1]["gates"] == {gate["name"]: gate["verdict"] for gate in alone["gates"]}
    assert rows[1]["quality"] == rows[1]["scores"]["extract"] == alone["gates"][0]["candidate"]


def test_the_worst_verdict_is_the_exit_code(made: Make) -> None:
    baseline = made("base", 0.0)
    gates = {"max_drop_pp": {"extract": 1}}
    candidates = [made("b", 0.0), made("c", 0.05)]
    assert compare_several(baseline, candidates, gates)["exit_code"] == 4


def test_a_speed_that_is_known_of_all_counts_for_the_front(made: Make) -> None:
    baseline, fast, slow = made("base", 0.0), made("fast", 0.1, weight_bytes=90), made("slow", 0.1, weight_bytes=90)
    for folder, speed in ((fast, 2.0), (slow, 0.5)):
        write_speed(folder / "throughput.json", baseline, folder, speed)
    comparison = compare_several(baseline, [fast, slow], {"min_throughput_ratio": {"decode_batch_1": 1.0}})
    first, second = comparison["candidates"]
    assert (first["speed_ratio"], second["speed_ratio"]) == (2.0, 0.5)
    assert (first["on_front"], second["on_front"]) == (True, False)
    assert (first["verdict"], second["verdict"]) == ("pass", "fail")
    (slow / "throughput.json").unlink()
    assert compare_several(baseline, [fast, slow], {})["candidates"][1]["on_front"] is True


def write_speed(path: Path, baseline: Path, candidate: Path, speed: float) -> None:
    models = [json.loads((folder / "result.json").read_text()) for folder in (baseline, candidate)]
    rates = [10.0] * 5
    ratio = median_ratio(rates, [speed * rate for rate in rates])
    batch = {"batch_size": 1, "baseline_tok_per_s": rates, "candidate_tok_per_s": [speed * rate for rate in rates]}
    batch["ratio"] = {"value": ratio.value, "interval": list(ratio.interval), "confidence": ratio.confidence}
    batch["ratio"] |= {"method": "m"}
    sides = [{"model": model["model"], "engine": model["engine"]} for model in models]
    record = {"schema_version": 1, "created": models[0]["created"], "machine": models[0]["machine"]}
    record |= {"settings": {"new_tokens": 1, "repeats": 5, "warmup_runs": 0, "order": "A B"}}
    record |= {"baseline": sides[0], "candidate": sides[1], "batches": {"decode_batch_1": batch}}
    write_throughput(path, record)  # type: ignore[arg-type]


def test_what_cannot_be_ranked_is_refused(made: Make, tmp_path: Path, fake_model: Callable[..., Any]) -> None:
    baseline, candidate = made("a", 0.0), made("b", 0.1)
    with pytest.raises(OptionError, match="Name each folder once"):
        compare_several(baseline, [candidate, candidate], {})
    evaluate(fake_model(), {"tools": {"num_items": 4}}, 0, tmp_path / "c")
    with pytest.raises(OptionError, match=r"c was not evaluated on extract, as .*a was"):
        compare_several(baseline, [candidate, tmp_path / "c"], {})
    evaluate(fake_model(template="[{}]"), {"extract": {"num_items": N}}, 0, tmp_path / "d")
    with pytest.raises(IncomparableResults, match="template_hash is"):
        compare_several(baseline, [candidate, tmp_path / "d"], {})

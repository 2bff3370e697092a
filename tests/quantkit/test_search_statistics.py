"""What lets a search decide: the early stop, items that are not shared, corrected bounds, the outcome."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.errors import CheckpointError, RecipeError
from quantkit.recipe import load_recipe, parse_recipe
from quantkit.recipe.document import parse_document, write_document
from quantkit.search.candidates import Candidate
from quantkit.search.holdout import ItemSet, split_items
from quantkit.search.journal import SearchJournal, open_journal
from quantkit.search.outcome import conclude
from quantkit.search.pareto import SPEED, mark_front, pareto_plot
from quantkit.search.screening import screen
from quantkit_eval.evaluate import evaluate
from quantkit_eval.gates import Gates, judge_drop, judge_kl
from quantkit_eval.protocol import Generation, GenerationRequest
from quantkit_eval.reasons import PairedCounts
from quantkit_eval.sequential import drop_evidence, is_hopeless
from quantkit_eval.suites.extract_items import generate_items as extract_items
from quantkit_eval.suites.file import read_items
from quantkit_eval.suites.nll import split_documents

RECIPE = """\
version: 1
model: m
quantization: {{scheme: W4A16, algorithm: {{name: rtn}}}}
outputs: [{{format: compressed-tensors, path: out}}]
gates:
  suites: [extract, {{name: extract, constrained: true}}, arith, {{kind: file, name: own, path: {items}}}, nll]
  max_drop_pp: {{extract: 5, extract+constrained: 5, arith: 5, own: 5}}
  max_kl_mean_nats: 0.1
search: {{{more}}}
"""


@pytest.mark.parametrize(("margin", "improved"), [(0.05, 0.0), (0.05, 0.1), (0.02, 0.05), (0.2, 0.2)])
def test_a_candidate_at_its_margin_is_stopped_no_more_often_than_stated(margin: float, improved: float) -> None:
    """Looked at after each of 96 items; 0.05 + 3 standard errors of 2,000 runs is 0.065."""
    rng = np.random.default_rng(0)
    shares = [improved, 1 - 2 * improved - margin, improved + margin]
    draws = rng.choice([-1, 0, 1], size=(2000, 96), p=shares)
    stopped = sum(is_hopeless(row.tolist(), margin, 0.05) for row in draws)
    assert stopped / len(draws) <= 0.065


def test_a_hopeless_candidate_is_stopped_within_the_screening() -> None:
    rng = np.random.default_rng(1)
    draws = rng.choice([-1, 0, 1], size=(500, 48), p=[0.05, 0.35, 0.6])
    assert np.mean([is_hopeless(row.tolist(), 0.05, 0.025) for row in draws]) > 0.95
    assert np.mean([is_hopeless(row[:32].tolist(), 0.05, 0.025) for row in draws]) > 0.8


def test_the_evidence_is_the_wealth_of_the_bets() -> None:
    wealth = np.mean([1 + share / 1.1 * (1 - 0.1) for share in (0.1, 0.2, 0.4, 0.6, 0.8)])
    assert drop_evidence([1], 0.1) == pytest.approx(wealth)
    assert drop_evidence([], 0.1) == drop_evidence([-1, 0, -1], 0.1) == 1.0
    for drops, margin in (([2], 0.1), ([1], 1.0), ([1], -0.1)):
        with pytest.raises(ValueError, match=r"drop|margin"):
            drop_evidence(drops, margin)


class Scripted:
    """Answers extract as it should, but for so many of each batch."""

    def __init__(self, seeds: Sequence[int], wrong: int) -> None:
        self.gold = {item.prompt: item.gold for seed in seeds for item in extract_items(16, seed)}
        self.wrong = wrong

    def describe(self) -> dict[str, Any]:
        return {"model": {"name": f"wrong {self.wrong}"}, "engine": {"name": "script"}, "template_hash": "t"}

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        import json

        found = []
        for number, request in enumerate(requests):
            prompt = request.messages[0]["content"]
            text = "no" if number < self.wrong else json.dumps(self.gold[prompt])
            found.append(Generation(request.id, text, [1], "stop", f"{abs(hash(prompt)):064d}"[:64], 1))
        return found


@pytest.mark.parametrize(("wrong", "status", "rounds"), [(0, "promising", 3), (1, "doubtful", 3), (14, "hopeless", 1)])
def test_screening_goes_on_until_a_candidate_is_hopeless(tmp_path: Path, wrong: int, status: str, rounds: int) -> None:
    sets = [ItemSet(f"round-{seed}", {"extract": {"num_items": 16}}, seed) for seed in range(3)]
    for item_set in sets:
        evaluate(Scripted(range(3), 0), item_set.suites, item_set.seed, tmp_path / "original" / item_set.name)
    limits = Gates.parse({"suites": ("extract",), "max_drop_pp": {"extract": 5}})
    model = Scripted(range(3), wrong)
    found = screen(model, sets, tmp_path / "original", tmp_path / "out", limits, lambda *_: None)
    assert (found["status"], found["rounds"]) == (status, rounds)
    assert found["scores"]["extract"] == {"n": 16 * rounds, "baseline": 1.0, "candidate": 1 - wrong / 16}


@pytest.fixture
def items(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(f'{{"prompt": "Say {number}", "gold": "{number}"}}\n\n' for number in range(9)))
    return path


def test_what_certifies_is_not_what_chose(items: Path, tmp_path: Path) -> None:
    recipe = parse_recipe(RECIPE.format(items=items, more="screening: {num_items: {arith: 4}}"))
    holdout = split_items(recipe, tmp_path / "items")
    assert [item_set.name for item_set in holdout.screening] == ["fixed", "round-0", "round-1", "round-2"]
    final = holdout.certification
    assert list(final.suites) == ["extract", "extract+constrained", "arith", "own", "nll"]
    chose = {item.prompt for one in holdout.screening[1:] for item in extract_items(16, one.seed)}
    assert len(chose) == 48
    assert not chose & {item.prompt for item in extract_items(256, final.seed)}
    assert holdout.screening[1].suites["arith"] == {"num_items": 4}

    cheap = holdout.screening[0].suites
    own, others = (read_items(Path(suites["own"]["path"])) for suites in (cheap, final.suites))
    assert {item.prompt for item in own} | {item.prompt for item in others} == {f"Say {n}" for n in range(9)}
    assert (len(own), len(others)) == (3, 6)
    assert {item.id for item in own + others} == {item.id for item in read_items(items)}
    texts = [Path(str(suites["nll"]["text_path"])).read_text() for suites in (cheap, final.suites)]
    documents = [set(text.split("<|document|>\n")) for text in texts]
    assert not documents[0] & documents[1]
    assert min(map(len, documents)) >= 8

    again = split_items(recipe, tmp_path / "items")
    assert again == holdout
    other = split_items(parse_recipe(recipe.text.replace("search: {", "search: {seed: 1, ")), tmp_path / "items")
    assert {one.seed for one in other.screening}.isdisjoint(one.seed for one in holdout.screening)


def test_the_items_of_the_built_in_search_can_be_divided(tmp_path: Path) -> None:
    holdout = split_items(load_recipe("search-w4"), tmp_path)
    assert holdout.certification.suites["schema"] == {"num_items": 504}


def test_a_text_of_the_users_is_divided_by_its_documents(items: Path, tmp_path: Path) -> None:
    text = RECIPE.format(items=items, more="").replace(" nll]", f" {{name: nll, path: {tmp_path / 'own.txt'}}}]")
    (tmp_path / "own.txt").write_text("\n<|document|>\n".join(f"Document {number}.\n" for number in range(7)))
    holdout = split_items(parse_recipe(text), tmp_path / "items")
    sets = holdout.screening[0].suites, holdout.certification.suites
    parts = [split_documents(Path(str(suites["nll"]["text_path"])).read_text()) for suites in sets]
    assert parts == [[f"Document {n}." for n in (1, 4)], [f"Document {n}." for n in (0, 2, 3, 5, 6)]]
    (tmp_path / "own.txt").write_text("One document.\n")
    with pytest.raises(
        RecipeError, match=r"nll has 1 documents in .*own\.txt; 3 are .*lines with <\|document\|> alone"
    ):
        split_items(parse_recipe(text), tmp_path / "items")


def test_a_suite_that_repeats_itself_cannot_do_both(items: Path, tmp_path: Path) -> None:
    recipe = parse_recipe(RECIPE.format(items=items, more="certification: {num_items: {arith: 700}}"))
    with pytest.raises(RecipeError, match=r"search: arith has too few different items: \d+ of the certification"):
        split_items(recipe, tmp_path / "items")
    items.write_text('{"prompt": "a", "gold": "b"}\n')
    with pytest.raises(RecipeError, match=r"the suite own has 1 items in .*; 3 are the fewest to divide"):
        split_items(parse_recipe(RECIPE.format(items=items, more="")), tmp_path / "items")


def test_a_smaller_error_widens_the_bounds_of_a_gate() -> None:
    counts = PairedCounts(both=180, improved=2, regressed=6, n=200)
    wide, narrow = (judge_drop("extract", "exact", counts, 5.2, 1.0, alpha) for alpha in (0.05 / 3, 0.05))
    assert (narrow["verdict"], wide["verdict"]) == ("pass", "inconclusive")
    assert wide["interval"][0] < narrow["interval"][0]
    assert wide["confidence"] == pytest.approx(1 - 2 * 0.05 / 3)
    assert "with 95 % confidence" in narrow["reason"]
    means = [0.05 + 0.01 * (number % 5) for number in range(20)]
    sure, unsure = (judge_kl(means, [100] * 20, 0.0765, alpha) for alpha in (0.05, 0.001))
    assert (sure["verdict"], unsure["verdict"]) == ("pass", "inconclusive")


def trial(status: str, certified: str | None = None) -> dict[str, Any]:
    record: dict[str, Any] = {"status": status, "reason": "why", "scores": {}, "rounds": 1, "seconds": 1.0}
    return record | ({"certified": {"verdict": certified, "attempt": 1, "reason": "x"}} if certified else {})


@pytest.mark.parametrize(
    ("trials", "winner", "stopped", "outcome"),
    [
        ({"a": trial("hopeless"), "b": trial("promising", "pass")}, "b", None, "pass"),
        ({"a": trial("hopeless"), "b": trial("promising", "fail")}, None, None, "fail"),
        ({"a": trial("hopeless"), "b": trial("doubtful")}, None, None, "inconclusive"),
        ({"a": trial("hopeless"), "b": trial("failed")}, None, None, "inconclusive"),
        ({"a": trial("hopeless"), "b": trial("promising", "inconclusive")}, None, None, "inconclusive"),
        ({"a": trial("hopeless")}, None, "the budget of 1 trials is used up", "inconclusive"),
    ],
)
def test_only_evidence_against_every_candidate_is_a_failure(
    items: Path, trials: dict[str, Any], winner: str | None, stopped: str | None, outcome: str
) -> None:
    recipe = parse_recipe(RECIPE.format(items=items, more=""))
    candidates = [Candidate(name, {}, 10, 4.0) for name in "ab"]
    document = conclude(recipe, candidates, [], trials, winner, stopped, 0.02)
    assert document["outcome"] == outcome
    assert document["num_tried"] == len(trials)
    assert (stopped or "") in document["reason"]


def test_the_front_is_what_nothing_beats() -> None:
    places = [(10, 0.3), (10, 0.2), (12, 0.2), (14, 0.1)]
    rows: list[dict[str, Any]] = [
        {"weight_bytes": size, "scores": {"kl_mean_nats": {"candidate": kl}}} for size, kl in places
    ]
    rows.append({"scores": {}})
    mark_front(rows)
    assert [row["on_front"] for row in rows] == [False, True, False, True, False]


def test_a_planned_speed_is_a_third_axis_where_both_have_one() -> None:
    speeds = {"w4": (10, 0.2, 90.0), "w8a8": (20, 0.3, 95.0), "slow": (20, 0.3, 80.0), "unknown": (20, 0.3, None)}
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "status": "promising",
            "weight_bytes": size,
            "scores": {"kl_mean_nats": {"candidate": kl}},
            "planned_tokens_per_s": speed,
        }
        for name, (size, kl, speed) in speeds.items()
    ]
    mark_front(rows)
    assert [row["on_front"] for row in rows] == [True, True, False, False]
    drawn = str(pareto_plot(rows, 0.25, SPEED))
    assert drawn.count("<circle") == 3
    assert "w8a8: 95, " in drawn
    assert "no speed was planned" in str(pareto_plot([rows[3]], None, SPEED))
    # the front of speed and distance alone: w4 and w8a8, the slower one first
    assert drawn.partition('<polyline points="')[2].partition('"')[0].count(",") == 2


def test_a_journal_keeps_whole_lines_and_belongs_to_one_search(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    identity = {"recipe": "a"}
    with open_journal(tmp_path, identity, resume=False, overwrite=False) as journal:
        journal.record("trial", "k", {"status": "doubtful"})
        with (
            pytest.raises(CheckpointError, match="another search is writing"),
            open_journal(tmp_path, identity, resume=True, overwrite=False),
        ):
            pass
    path = tmp_path / "journal.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "tri')
    assert SearchJournal(path).find("trial", "k") == {"status": "doubtful"}
    assert path.read_bytes() == whole
    assert "cut off" in caplog.text
    with open_journal(tmp_path, {"recipe": "b"}, resume=False, overwrite=True) as journal:
        assert journal.find("trial", "k") is None
    path.write_bytes(b"{}\n")
    with pytest.raises(CheckpointError, match=r"journal.jsonl:1: no line of a search's journal"):
        SearchJournal(path)


@pytest.mark.parametrize("value", ["no", "1e-2", "0x1", "~", "", "12", 1e-5, 3, True, "a: b", "- x", "ä", "1_0", "on"])
def test_what_is_written_as_yaml_is_read_as_it_was(value: object) -> None:
    data = {"key": value, "list": [value, {"below": value}], "twice": [[1], [1]]}
    assert parse_document(write_document(data), "r.yaml").data == data

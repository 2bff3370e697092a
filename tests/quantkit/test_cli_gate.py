"""eval --power and compare with several candidates, as commands; no model is loaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from quantkit.cli import main

RECIPE = """\
version: 1
gates:
  suites: [extract, tools, nll]
  num_items: {extract: 40}
  max_drop_pp: {extract: 5}
"""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "r.yaml").write_text(RECIPE)
    return str(tmp_path / "r.yaml")


def test_power_says_what_the_gates_can_find(recipe: str) -> None:
    result = invoke("eval", "--power", "-r", recipe, "--json", "--discordance", "0.1")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [(row["suite"], row["num_items"]) for row in rows] == [("extract", 40), ("tools", 99)]
    assert rows[0]["detectable_drop_pp"] is None
    assert rows[0]["pass_probability"] < 0.5 < rows[0]["items_to_pass"]
    lines = invoke("eval", "--power", "-r", recipe).stdout.splitlines()
    assert lines[0].split("  ")[0] == "suite"
    assert len(lines) == 1 + 2 * 3


@pytest.mark.parametrize("missing", [["eval"], ["eval", "some-model"]])
def test_eval_still_needs_a_model_and_a_folder(missing: list[str]) -> None:
    result = invoke(*missing)
    assert result.exit_code == 2
    assert "missing" in result.stderr


def write_records(folder: Path, right: Callable[[int], bool], **model: Any) -> str:
    """Records of 40 extract items, with the product's own writers."""
    from quantkit_eval.evaluate import evaluate
    from quantkit_eval.protocol import Generation, hash_token_ids
    from quantkit_eval.suites.extract_items import generate_items

    golds = {item.id: item.gold for item in generate_items(40, 0)}

    class Canned:
        def describe(self) -> dict[str, Any]:
            return {"model": {"name": folder.name} | model, "engine": {}, "template_hash": "t"}

        def generate(self, requests: Any) -> list[Generation]:
            texts = [json.dumps(golds[r.id]) if right(int(r.id[-4:])) else "no" for r in requests]
            ids = [hash_token_ids(list(r.messages[-1]["content"].encode())) for r in requests]
            return [Generation(r.id, t, (), "stop", i, 1) for r, t, i in zip(requests, texts, ids, strict=True)]

    evaluate(Canned(), {"extract": {"num_items": 40}}, 0, folder)  # type: ignore[arg-type]
    return str(folder)


def test_compare_says_that_records_hold_other_numbers_of_items(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE.replace("tools, nll", "nll").replace(", nll", "").replace("40", "16"))
    base = write_records(tmp_path / "base", lambda i: True)
    result = invoke("compare", base, write_records(tmp_path / "other", lambda i: True), "-r", recipe)
    note = "quantkit: note: the records are judged with all their items: extract 40 (num_items of the recipe: 16)\n"
    assert result.stderr == note
    (tmp_path / "r.yaml").write_text(RECIPE.replace("tools, nll", "nll").replace(", nll", ""))
    assert invoke("compare", base, str(tmp_path / "other"), "-r", recipe).stderr == ""


@pytest.mark.parametrize("place", ["candidate", "."])
def test_one_candidate_finds_its_throughput_as_several_do(tmp_path: Path, place: str) -> None:
    (tmp_path / "r.yaml").write_text(
        "version: 1\ngates: {min_throughput_ratio: {decode_batch_1: 1}, suites: [extract]}\n"
    )
    base = write_records(tmp_path / "baseline", lambda i: True)
    candidate = write_records(tmp_path / "candidate", lambda i: True)
    arguments = ("compare", base, candidate, "-r", str(tmp_path / "r.yaml"))
    assert invoke(*arguments).exit_code == 2
    write_speed(tmp_path / place / "throughput.json", Path(base), Path(candidate), 2.0)
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    assert "2.00 times as fast as before (median of the paired rounds)" in result.stdout
    write_speed(tmp_path / place / "throughput.json", Path(candidate), Path(base), 2.0)  # of other models
    assert "no throughput of these two models was measured" in invoke(*arguments).stderr


def write_speed(path: Path, baseline: Path, candidate: Path, speed: float) -> None:
    from quantkit_eval.records import write_throughput
    from quantkit_eval.throughput import median_ratio

    sides = [json.loads((folder / "result.json").read_text()) for folder in (baseline, candidate)]
    rates = [[10.0] * 5, [10.0 * speed] * 5]
    ratio = median_ratio(*rates)
    batch = {
        "batch_size": 1,
        "baseline_tok_per_s": rates[0],
        "candidate_tok_per_s": rates[1],
        "ratio": {
            "value": ratio.value,
            "interval": list(ratio.interval),
            "confidence": ratio.confidence,
            "method": "m",
        },
    }
    record: Any = {
        "schema_version": 1,
        "created": sides[0]["created"],
        "machine": sides[0]["machine"],
        "settings": {"new_tokens": 1, "repeats": 5, "warmup_runs": 0, "order": "A B"},
        "baseline": {key: sides[0][key] for key in ("model", "engine")},
        "candidate": {key: sides[1][key] for key in ("model", "engine")},
        "batches": {"decode_batch_1": batch},
    }
    write_throughput(path, record)


def test_several_candidates_are_one_table(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("version: 1\ngates: {suites: [extract], max_drop_pp: {extract: 20}}\n")
    base = write_records(tmp_path / "base", lambda i: True, weight_bytes=4000)
    good = write_records(tmp_path / "good", lambda i: i != 3, weight_bytes=1000, scheme="W4A16")
    bad = write_records(tmp_path / "bad", lambda i: i % 2 == 0, weight_bytes=2000, scheme="W8A8")
    output = tmp_path / "comparison.json"
    result = invoke("compare", base, good, bad, "-r", str(tmp_path / "r.yaml"), "-o", str(output))
    assert result.exit_code == 3, result.stderr
    lines = result.stdout.splitlines()
    assert [line[:1] for line in lines[1:4]] == ["*", "*", " "]
    assert "97.5 %" in lines[2]
    assert "W4A16" in lines[2]
    assert lines[3].endswith("fail")
    assert lines[5].startswith(f"{bad}: 1 of 1 gates failed. Of 40 extract answers, 100.0 % were exactly right before")
    assert json.loads(output.read_text())["exit_code"] == 3
    again = invoke("compare", base, good, bad, "-r", str(tmp_path / "r.yaml"), "--throughput", str(output))
    assert again.exit_code == 2
    assert "--throughput is of one candidate" in again.stderr

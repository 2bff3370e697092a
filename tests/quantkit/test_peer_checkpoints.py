"""Checkpoints of every format, without our record as another tool would leave them, in one comparison; and the last
release's records as its baseline."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from quantkit.cli import main
from quantkit.formats import Format
from quantkit.scheme import PRESETS, QuantScheme
from quantkit_eval.comparability import Evaluation

RECIPE = """\
version: 1
gates:
  suites: [extract, nll]
  max_drop_pp: {extract: 20}
  max_kl_mean_nats: 50
  num_items: {extract: 3, nll: 20}
"""
PEERS: dict[str, dict[str, Any]] = {
    "ct-w4": {"scheme": QuantScheme(4, 32, symmetric=False)},
    "ct-w8a8": {"scheme": PRESETS["W8A8"]},
    "gptq": {"form": Format("gptq")},
    "awq": {"form": Format("awq"), "scheme": QuantScheme(4, 32, symmetric=False)},
}


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture(scope="module")
def judged(
    tiny_llama_folder: Path,
    write_rtn_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with the recipe and the records of the original (``base``) and of each peer."""
    folder = tmp_path_factory.mktemp("peers")
    (folder / "r.yaml").write_text(RECIPE)
    options = ["-r", str(folder / "r.yaml"), "--no-cache"]
    result = invoke("eval", str(tiny_llama_folder), *options, "-o", str(folder / "base"))
    assert result.exit_code == 0, result.stderr
    for name, how in PEERS.items():
        checkpoint = write_rtn_checkpoint(tiny_llama_folder, folder / f"{name}-checkpoint", **how)
        (checkpoint / "quantkit.json").unlink()
        more = ["-o", str(folder / name), "--reference", str(folder / "base")]
        result = invoke("eval", str(checkpoint), *options, *more)
        assert result.exit_code == 0, result.stderr
    return folder


def test_all_formats_stand_in_one_comparison(judged: Path, tmp_path: Path) -> None:
    folders = [str(judged / name) for name in ("base", *PEERS)]
    page, record = tmp_path / "page.html", tmp_path / "comparison.json"
    result = invoke("compare", *folders, "-r", str(judged / "r.yaml"), "-o", str(record), "--html", str(page), "--json")
    assert result.exit_code in (3, 4), result.stderr  # a random model has nothing to lose on extract
    comparison = json.loads(result.stdout)
    assert comparison == json.loads(record.read_text())
    schemes = [row["scheme"] for row in comparison["candidates"]]
    assert [scheme.partition(" ")[0] for scheme in schemes] == ["W4A16", "W8A8", "W4A16", "W4A16"]
    base, *rows = [comparison["baseline"], *comparison["candidates"]]
    assert all(row["weight_bytes"] < base["weight_bytes"] for row in rows)
    assert all(row["gates"]["nll.kl_mean_nats"] == "pass" for row in rows)
    closest = min(rows, key=lambda row: row["kl_mean_nats"])
    assert closest["scheme"].startswith("W8A8")  # eight bits are nearer to the original than four
    text = page.read_text()
    assert "Quality over size" in text
    for row in rows:
        assert row["folder"] in text
        assert str(row["reason"]).split("'")[0][:60] in text


def test_html_is_of_several_candidates(judged: Path) -> None:
    result = invoke(
        "compare", str(judged / "base"), str(judged / "gptq"), "-r", str(judged / "r.yaml"), "--html", "page.html"
    )
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--html is of several candidates" in result.stderr


def test_records_of_the_last_release_are_a_baseline(judged: Path, tmp_path: Path) -> None:
    """They were kept elsewhere, the model that they are of is gone, and another checkpoint is held against them."""
    kept = tmp_path / "releases" / "1.0"
    shutil.copytree(judged / "ct-w8a8", kept)
    gates = tmp_path / "r.yaml"
    gates.write_text(RECIPE.replace("  max_kl_mean_nats: 50\n", ""))
    result = invoke("compare", str(kept), str(judged / "gptq"), "-r", str(gates), "--json")
    assert result.exit_code in (0, 3, 4), result.stderr
    verdict = json.loads(result.stdout)
    assert [gate["name"] for gate in verdict["gates"]] == ["extract.exact"]
    assert verdict["baseline"]["model"] == Evaluation.read(kept).result["model"]
    assert verdict["baseline"]["model"]["scheme"].startswith("W8A8 ")
    assert verdict["changes"][0]["n"] == 3
    kl = next(entry for entry in verdict["unjudged"] if entry["metric"] == "kl_mean_nats")
    assert 0 < kl["baseline"] < kl["candidate"]  # both to the original
    refused = invoke("compare", str(kept), str(judged / "gptq"), "-r", str(judged / "r.yaml"))
    assert refused.exit_code == 1
    assert "is not the one to this baseline" in refused.stderr
    (kept / "samples.jsonl").write_text((kept / "samples.jsonl").read_text().replace("extract", "extracT", 1))
    changed = invoke("compare", str(kept), str(judged / "gptq"), "-r", str(gates))
    assert changed.exit_code == 1
    assert "changed after the evaluation" in changed.stderr


def test_a_model_that_never_stops_is_cut_off_and_said_to_be(
    tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.serve import engine

    monkeypatch.setattr(engine, "model_stop_token_ids", lambda *_: frozenset())
    out = tmp_path / "out"
    recipe = tmp_path / "r.yaml"
    recipe.write_text("version: 1\ngates: {suites: [extract, scripts], num_items: {extract: 2, scripts: 2}}\n")
    result = invoke("eval", str(tiny_llama_folder), "-r", str(recipe), "--no-cache", "-o", str(out), "--json")
    assert result.exit_code == 0, result.stderr
    for suite in json.loads(result.stdout)["suites"].values():
        assert suite["metrics"]["truncated"]["value"] == 1.0
        assert suite["metrics"][suite["primary_metric"]]["value"] == 0.0

"""quantize, verify and inspect as commands, on a tiny model."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from quantkit.cli import main

RECIPE = """\
version: 1
quantization:
  scheme: W4A16
  group_size: auto
  algorithm: {name: rtn}
  ignore: [lm_head]
outputs: [{format: compressed-tensors, path: out/w4a16}]
"""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a recipe in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def model(tiny_models: Callable[[str], Path]) -> str:
    return str(tiny_models("llama"))


def test_a_dry_run_prints_a_row_a_layer_and_writes_nothing(workplace: Path, model: str) -> None:
    result = invoke("quantize", "-r", "r.yaml", model, "--dry-run")
    assert (result.exit_code, result.stderr) == (0, "")
    header, *rows = result.stdout.splitlines()
    assert header.split() == ["layer", "shape", "scheme", "bytes", "before", "bytes", "after"]
    assert rows[0].split()[:2] == ["model.layers.0.self_attn.q_proj", "64x64"]
    assert len([row for row in rows if row.startswith("model.layers.")]) == 14
    assert "linear layers that stay as they are: lm_head" in rows
    plan = json.loads(invoke("quantize", "-r", "r.yaml", model, "--dry-run", "--json").stdout)
    assert [layer["name"] for layer in plan["layers"]] == [row.split()[0] for row in rows[:14]]
    assert [path.name for path in workplace.iterdir()] == ["r.yaml"]


def test_quantize_writes_a_checkpoint_and_only_progress_to_stderr(workplace: Path, model: str) -> None:
    result = invoke("quantize", "-r", "r.yaml", model, "--json")
    assert result.exit_code == 0
    manifest = json.loads(result.stdout)
    assert manifest == json.loads((workplace / "out" / "w4a16" / "quantkit.json").read_text())
    assert manifest["recipe"] == RECIPE
    assert all(" after 0:0" in line for line in result.stderr.splitlines())


def test_a_checkpoint_is_replaced_only_when_the_user_says_so(workplace: Path, model: str) -> None:
    assert invoke("quantize", "-r", "r.yaml", model).exit_code == 0
    before = (workplace / "out" / "w4a16" / "quantkit.json").read_bytes()
    refused = invoke("quantize", "-r", "r.yaml", model)
    assert refused.exit_code == 1
    assert refused.stderr.count("\n") == 1
    assert "Give --overwrite" in refused.stderr
    assert (workplace / "out" / "w4a16" / "quantkit.json").read_bytes() == before
    assert invoke("quantize", "-r", "r.yaml", model, "--overwrite", "--resume").exit_code == 0


@pytest.mark.parametrize(
    ("old", "new", "code", "words"),
    [
        ("lm_head", "lm_heat", 2, "'lm_heat' matches no layer"),
        ("group_size: auto", "group_size: 128", 2, "128 does not divide the 64 input columns"),
        ("outputs:", "calibration: {sources: [{kind: text, path: nowhere.txt}]}\noutputs:", 1, "nowhere.txt"),
    ],
)
def test_what_only_the_model_can_tell_is_one_line_too(
    workplace: Path, model: str, old: str, new: str, code: int, words: str
) -> None:
    text = RECIPE.replace(old, new)
    (workplace / "r.yaml").write_text(text.replace("rtn", "gptq") if "calibration" in new else text)
    result = invoke("quantize", "-r", "r.yaml", model)
    assert (result.exit_code, result.stdout) == (code, "")
    last = result.stderr.splitlines()[-1]
    assert last.startswith("quantkit: ")
    assert words in last
    assert not (workplace / "out").exists() or list((workplace / "out").iterdir()) == []


def test_an_unknown_model_offline_is_one_line(workplace: Path) -> None:
    result = invoke("quantize", "-r", "r.yaml", "no-such/model")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("quantkit: ")
    assert "no-such/model" in result.stderr
    assert result.stderr.count("\n") == 1


def test_verify_names_the_check_that_fails(workplace: Path, model: str) -> None:
    assert invoke("quantize", "-r", "r.yaml", model).exit_code == 0
    good = invoke("verify", "out/w4a16", "--source", model)
    assert (good.exit_code, good.stderr) == (0, "")
    assert all(line.startswith(("ok ", "note: ")) for line in good.stdout.splitlines())
    assert json.loads(invoke("verify", "out/w4a16", "--no-load", "--json").stdout)["ok"] is True
    weights = workplace / "out" / "w4a16" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    bad = invoke("verify", "out/w4a16", "--no-load")
    assert bad.exit_code == 1
    assert "FAILED  hashes" in bad.stdout
    assert bad.stderr.startswith("quantkit: w4a16 failed the check hashes: model.safetensors has changed")
    (workplace / "out" / "w4a16" / "quantkit.json").unlink()  # then nobody can see the change, and that is said
    blind = invoke("verify", "out/w4a16", "--no-load")
    assert (blind.exit_code, blind.stderr) == (0, "quantkit: warning: not checked: hashes\n")
    assert "NOT CHECKED  hashes" in blind.stdout


def test_inspect_shows_what_is_in_a_checkpoint(workplace: Path, model: str) -> None:
    assert invoke("quantize", "-r", "r.yaml", model).exit_code == 0
    shown = invoke("inspect", "out/w4a16")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "W4A16 g64 symmetric" in shown.stdout
    report = json.loads(invoke("inspect", "out/w4a16", "--json").stdout)
    assert report["name"] == "w4a16"
    missing = invoke("inspect", "no/such/folder")
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert missing.stderr.startswith("quantkit: ")


@pytest.mark.slow
def test_reading_a_gguf_file_shows_no_foreign_progress_bar(workplace: Path, smollm2_gguf: Path) -> None:
    """In a process of its own, since the libraries read their settings when they are imported; the cache is empty."""
    environment = {**os.environ, "QUANTKIT_CACHE": str(workplace / "cache")}
    command = [sys.executable, "-m", "quantkit", "quantize", "-r", "r.yaml", str(smollm2_gguf), "--dry-run", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["layers"]) == 210
    assert list((workplace / "cache").rglob("*.safetensors"))

"""From a recipe to a checkpoint: what is in it, that it is reproducible, and that a failure leaves nothing behind."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit import pipeline
from quantkit.errors import CheckpointError, QuantkitError, SourceError
from quantkit.journal import Journal
from quantkit.pipeline import quantize_model
from quantkit.recipe import Recipe, parse_recipe

TEMPLATE = """\
version: 1
model: {model}
calibration:
  sources: [{{kind: text, path: {corpus}}}]
  num_tokens: 512
  window_tokens: 64
quantization:
  scheme: W4A16
  group_size: 32
  algorithm: {{name: {algorithm}}}
outputs: [{{format: compressed-tensors, path: {output}}}]
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. A model reads the prompt and answers. " * 40)
    return path


@pytest.fixture
def make_recipe(corpus: Path, tmp_path: Path) -> Callable[..., Recipe]:
    def make(model: Path, algorithm: str = "gptq", output: str = "out") -> Recipe:
        text = TEMPLATE.format(model=model, corpus=corpus, algorithm=algorithm, output=tmp_path / output)
        return parse_recipe(text)

    return make


def _hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.safetensors")}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3"])
def test_gptq_beats_rtn_on_the_model_s_own_logits(
    family: str, tiny_models: Callable[[str], Path], make_recipe: Callable[..., Recipe]
) -> None:
    from transformers import AutoModelForCausalLM

    recipe = make_recipe(tiny_models(family))
    manifest = quantize_model(recipe)
    rtn = quantize_model(make_recipe(tiny_models(family), "rtn", "rtn"))
    assert [layer["name"] for layer in manifest["layers"]]
    mean = lambda m, key: sum(layer[key] for layer in m["layers"]) / len(m["layers"])  # noqa: E731
    assert 0 < mean(manifest, "relative_output_error") < mean(rtn, "relative_weight_error")
    assert all(layer["input_tokens"] == 512 for layer in manifest["layers"])
    assert all(layer["relative_output_error"] is None for layer in rtn["layers"])
    model = AutoModelForCausalLM.from_pretrained(recipe.outputs[0].path, dtype=torch.float32)
    probe = manifest["probe"]
    with torch.inference_mode():
        logits = model(torch.tensor([probe["token_ids"]])).logits[0]
    expected, ids = torch.tensor(probe["top_logits"]), torch.tensor(probe["top_ids"])
    torch.testing.assert_close(logits.gather(1, ids), expected, rtol=1e-3, atol=1e-3)


def test_the_same_recipe_gives_the_same_bytes(
    tiny_llama_folder: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    first = quantize_model(make_recipe(tiny_llama_folder, output="one"))
    second = quantize_model(make_recipe(tiny_llama_folder, output="two"))
    assert first["files"] == second["files"] == _hashes(tmp_path / "one") == _hashes(tmp_path / "two")
    assert first["calibration"] == second["calibration"]


def test_what_is_not_quantized_is_byte_identical_and_side_files_are_there(
    tiny_llama_folder: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    quantize_model(make_recipe(tiny_llama_folder))
    before, after = load_file(tiny_llama_folder / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    kept = before.keys() & after.keys()
    assert kept == {name for name in before if "_proj" not in name}
    assert all(torch.equal(before[name], after[name]) for name in kept)
    for path in tiny_llama_folder.iterdir():
        if path.name not in ("model.safetensors", "config.json"):
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    manifest = json.loads((tmp_path / "out/quantkit.json").read_text())
    assert manifest["recipe_sha256"] == hashlib.sha256(manifest["recipe"].encode()).hexdigest()
    assert not list(tmp_path.glob("*.partial"))


def test_an_output_that_is_not_empty_is_kept_unless_told_otherwise(
    tiny_llama_folder: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("precious")
    recipe = make_recipe(tiny_llama_folder, "rtn")
    with pytest.raises(CheckpointError, match=r"not empty. Give --overwrite"):
        quantize_model(recipe)
    assert (tmp_path / "out/mine.txt").read_text() == "precious"
    quantize_model(recipe, overwrite=True)
    assert (tmp_path / "out/config.json").exists()
    assert not (tmp_path / "out/mine.txt").exists()


def test_the_model_s_own_folder_is_never_the_output(tiny_llama_folder: Path, corpus: Path) -> None:
    text = TEMPLATE.format(model=tiny_llama_folder, corpus=corpus, algorithm="rtn", output=tiny_llama_folder)
    with pytest.raises(CheckpointError, match="own folder"):
        quantize_model(parse_recipe(text), overwrite=True)
    assert (tiny_llama_folder / "model.safetensors").exists()


@pytest.mark.parametrize("where", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_a_weight_that_is_not_finite_is_named(
    where: str, tiny_llama_folder: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(tiny_llama_folder, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors[where][3, 5] = torch.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=f"{where} in broken holds 1 values that are not finite"):
        quantize_model(make_recipe(broken, "rtn"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken"]


def test_a_full_disk_is_one_line_and_leaves_nothing(
    tiny_llama_folder: Path, make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match="no space for the checkpoint"):
        quantize_model(make_recipe(tiny_llama_folder))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interruption_leaves_nothing_behind(
    error: type[BaseException],
    tiny_llama_folder: Path,
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if done == 9:
            raise error

    with pytest.raises(error):
        quantize_model(make_recipe(tiny_llama_folder), progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_resumes_to_the_same_bytes(
    tiny_llama_folder: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    whole = quantize_model(make_recipe(tiny_llama_folder, output="whole"))
    seen: list[int] = []

    def interrupt(stage: str, done: int, total: int) -> None:
        seen.append(done)
        if done == 9:  # in the second block
            raise KeyboardInterrupt

    recipe = make_recipe(tiny_llama_folder)
    with pytest.raises(KeyboardInterrupt):
        quantize_model(recipe, resume=True, progress=interrupt)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.partial", "whole"]
    seen.clear()
    resumed = quantize_model(recipe, resume=True, progress=lambda stage, done, total: seen.append(done))
    assert seen[0] == 7  # the first block was not done again
    assert resumed["files"] == whole["files"]
    without_time = lambda m: [layer | {"seconds": 0} for layer in m["layers"]]  # noqa: E731
    assert without_time(resumed) == without_time(whole)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        p.name for p in (tmp_path / "whole").iterdir()
    )


def test_resume_refuses_another_recipe_and_names_the_difference(
    tiny_llama_folder: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(make_recipe(tiny_llama_folder), resume=True, progress=interrupt)
    with pytest.raises(CheckpointError, match="cannot resume: recipe was"):
        quantize_model(make_recipe(tiny_llama_folder, "rtn"), resume=True)
    assert (tmp_path / "out.partial/journal.json").exists()  # the work of the first recipe is not lost
    quantize_model(make_recipe(tiny_llama_folder, "rtn"))  # without --resume it starts afresh
    assert not (tmp_path / "out.partial").exists()


def test_a_broken_journal_is_refused(tmp_path: Path) -> None:
    assert Journal.load(tmp_path, {}) is None
    (tmp_path / "journal.json").write_text('{"identity"')
    with pytest.raises(CheckpointError, match="cannot read the journal"):
        Journal.load(tmp_path, {})


SCRIPT = """\
import sys
from pathlib import Path
from quantkit.pipeline import quantize_model
from quantkit.recipe import load_recipe
quantize_model(load_recipe(Path(sys.argv[1])), resume=True, progress=lambda s, d, n: print(s, d, flush=True))
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_resumes_to_the_same_bytes(
    make_tiny_model: Callable[..., Path], make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    model = make_tiny_model("llama", tmp_path / "model", num_hidden_layers=4)
    whole = quantize_model(make_recipe(model, output="whole"))
    (tmp_path / "recipe.yaml").write_text(make_recipe(model).text)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "recipe.yaml")]
    for kill_after in (3, 6, 9, 9):  # lines of progress, counted from where the run goes on
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(kill_after):
                process.stdout.readline()
            time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
    quantize_model(make_recipe(model), resume=True, overwrite=True)  # a fast machine may have outrun the last kill
    assert _hashes(tmp_path / "out") == whole["files"]
    assert not (tmp_path / "out.partial").exists()


def test_every_error_of_the_pipeline_is_one_line(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    with pytest.raises(QuantkitError) as caught:
        quantize_model(make_recipe(tmp_path / "no-such-model"))
    assert "\n" not in str(caught.value)
    assert pipeline.PROBE_TOKENS == 32

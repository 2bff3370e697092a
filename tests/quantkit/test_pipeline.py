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

from quantkit.checkpoint.journal import Journal
from quantkit.errors import CheckpointError, QuantkitError, SourceError
from quantkit.pipeline import quantize_model
from quantkit.recipe import Recipe, parse_recipe
from quantkit_eval.errors import EvalError

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
    family: str, tiny_models: Callable[[str], Path], make_recipe: Callable[..., Recipe], corpus: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logits = torch.empty(0)

    folder = tiny_models(family)
    recipe = make_recipe(folder)
    manifest = quantize_model(recipe)
    rtn = quantize_model(make_recipe(folder, "rtn", "rtn"))
    assert [layer["name"] for layer in manifest["layers"]] == [layer["name"] for layer in rtn["layers"]] != []
    assert all(layer["input_tokens"] == 512 for layer in manifest["layers"])
    assert all(layer["relative_output_error"] is None for layer in rtn["layers"])
    probe = manifest["probe"]
    text = AutoTokenizer.from_pretrained(folder)(corpus.read_text()).input_ids[:512]
    said = {}
    for name, path in {"original": folder, "gptq": tmp_path / "out", "rtn": tmp_path / "rtn"}.items():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        with torch.inference_mode():
            said[name] = model(torch.tensor(text).reshape(8, 64)).logits
            logits = model(torch.tensor([probe["token_ids"]])).logits[0] if name == "gptq" else logits
    error = {name: float((said[name] - said["original"]).square().mean()) for name in ("gptq", "rtn")}
    assert 0 < error["gptq"] < error["rtn"]
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
    whole = {"schema_version": 2, "identity": {}, "finished_blocks": 1, "written": [["a"]], "layers": []}
    (tmp_path / "journal.json").write_text(json.dumps(whole))
    assert Journal.load(tmp_path, {}, num_outputs=1, num_blocks=2) is not None
    broken: list[Any] = [{key: value for key, value in whole.items() if key != gone} for gone in whole]
    broken += [whole | {"identity": []}, whole | {"finished_blocks": 0}, whole | {"written": [[1]]}, [], 3]
    for text in ('{"identity"', "", "\udcff", *map(json.dumps, broken)):
        (tmp_path / "journal.json").write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(CheckpointError, match=r"cannot read the journal .* Run without --resume") as caught:
            Journal.load(tmp_path, {})
        assert "\n" not in str(caught.value)
    for other in (whole | {"finished_blocks": 3}, whole | {"written": [["a"], ["b"]]}):
        (tmp_path / "journal.json").write_text(json.dumps(other))
        with pytest.raises(CheckpointError, match="which this run has not"):
            Journal.load(tmp_path, {}, num_outputs=1, num_blocks=2)


def test_activations_of_another_run_are_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {})
    journal.record(0, [["a"]], [], [torch.zeros(2, 3), torch.zeros(1, 3)])
    assert [tensor.shape for tensor in journal.hidden([torch.ones(2, 3), torch.ones(1, 3)])] == [(2, 3), (1, 3)]
    for like in ([torch.ones(2, 3)], [torch.ones(2, 3), torch.ones(1, 4)]):
        with pytest.raises(CheckpointError, match="holds other activations than this run has"):
            journal.hidden(like)


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
    begun = []  # with how many of the 28 layers finished
    for kill_after in (3, 6, 9, 9):  # lines of progress, counted from where the run goes on
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(kill_after)]
            time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
        begun.append(int(lines[0].split()[-1]))
    seen: list[int] = []
    quantize_model(make_recipe(model), resume=True, progress=lambda stage, done, total: seen.append(done))
    assert begun[3] >= 7  # the third run was killed in its second block
    assert seen[:1] == [] or seen[0] >= 14  # a fast machine may have outrun the last kill; then nothing is left to do
    assert _hashes(tmp_path / "out") == whole["files"]
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"model": "no-such-model"}, "no-such-model"),
        ({"num_tokens: 512": "num_tokens: 512000"}, "tokens and 512,000 are needed"),
        ({"window_tokens: 64": "window_tokens: 512", "num_tokens: 512": "num_tokens: 4096"}, "corpus.txt has"),
        ({"group_size: 32": "group_size: 48"}, "group_size"),
        ({"group_size: 32": "group_size: 128"}, "128 does not divide the 64 input columns"),
        ({"group_size: 32": "group_size: 32\n  ignore: [lm_heat]"}, "'lm_heat' matches no layer"),
        ({"path: OUT": "path: CORPUS"}, "is a source of the calibration"),
        ({"path: OUT": "path: CORPUS/out"}, "CORPUS is no folder"),
        ({"path: OUT": "path: ."}, "the output . is the current folder"),
    ],
)
def test_every_error_of_the_pipeline_is_one_line_that_names_what_is_wrong(
    change: dict[str, str], line: str, tiny_llama_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    model = change.pop("model", tiny_llama_folder)
    text = TEMPLATE.format(model=model, corpus=corpus, algorithm="gptq", output="OUT")
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    with pytest.raises((QuantkitError, EvalError)) as caught:
        quantize_model(parse_recipe(text.replace("OUT", str(tmp_path / "out")).replace("CORPUS", str(corpus))))
    assert "\n" not in str(caught.value)
    assert line.replace("CORPUS", str(corpus)) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_finished_checkpoint_of_the_same_run_is_not_made_again(
    tiny_llama_folder: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    first = quantize_model(make_recipe(tiny_llama_folder, "rtn"))
    seen: list[str] = []
    again = quantize_model(
        make_recipe(tiny_llama_folder, "rtn"), resume=True, progress=lambda stage, done, total: seen.append(stage)
    )
    assert (again, seen) == (first, [])
    with pytest.raises(CheckpointError, match=r"not empty. Give --overwrite"):  # another run's is not taken for it
        quantize_model(make_recipe(tiny_llama_folder, "gptq"), resume=True)
    assert quantize_model(make_recipe(tiny_llama_folder, "gptq"), resume=True, overwrite=True) != first


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.safetensors", "model.safetensors is missing"),
        ("config.json", "config.json is missing"),
        (None, "changed"),
    ],
)
def test_a_finished_checkpoint_that_is_damaged_is_no_finished_one(
    tiny_llama_folder: Path,
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str | None,
    said: str,
) -> None:
    recipe = make_recipe(tiny_llama_folder, "rtn")
    first = quantize_model(recipe)
    weights = tmp_path / "out/model.safetensors"
    whole = weights.read_bytes()
    if name is not None:
        (tmp_path / "out" / name).unlink()
    else:
        weights.write_bytes(whole[:-8])
    with pytest.raises(CheckpointError, match=r"not empty. Give --overwrite"):
        quantize_model(recipe, resume=True)
    assert said in caplog.text
    assert quantize_model(recipe, resume=True, overwrite=True)["files"] == first["files"]
    assert weights.read_bytes() == whole


def test_a_block_that_config_json_leaves_out_is_named(
    tiny_llama_folder: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    import shutil

    short = Path(shutil.copytree(tiny_llama_folder, tmp_path / "short"))
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(SourceError, match=r"the block model.layers.1, and config.json asks for 1 blocks only. Set num"):
        quantize_model(make_recipe(short, "rtn"))


def test_tensors_that_transformers_does_not_load_are_said_aloud(
    tiny_llama_folder: Path, make_recipe: Callable[..., Recipe], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import shutil

    more = Path(shutil.copytree(tiny_llama_folder, tmp_path / "more"))
    tensors = load_file(more / "model.safetensors") | {f"extra.{i}.weight": torch.zeros(2) for i in range(5)}
    save_file(tensors, more / "model.safetensors", metadata={"format": "pt"})
    quantize_model(make_recipe(more, "rtn"))
    assert "does not load extra.0.weight, extra.1.weight, extra.2.weight and 2 more: copied as they are" in caplog.text


def test_copying_is_counted_in_megabytes_from_its_start(
    make_tiny_model: Callable[..., Path], make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """A count of tensors would promise the time of an embedding for every norm."""
    model = make_tiny_model("llama", tmp_path / "m", vocab_size=20_000)
    seen: list[tuple[int, int]] = []

    def note(stage: str, done: int, total: int) -> None:
        if stage == "copy (MB)":
            seen.append((done, total))

    quantize_model(make_recipe(model, "rtn"), progress=note)
    copied = 2 * 20_000 * 64 * 4 + 5 * 64 * 4  # embedding, head, norms
    assert seen[0] == (0, 11)
    assert seen[-1] == (11, -(-copied // 10**6))

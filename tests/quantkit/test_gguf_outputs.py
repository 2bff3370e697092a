"""GGUF files that a recipe asks for: from the original weights, alone or beside checkpoints, whole or not at all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from quantkit import gate, gguf_files, pipeline
from quantkit.checkpoint.output_paths import check_outputs
from quantkit.cli import main
from quantkit.errors import CheckpointError, QuantizationError, RecipeError, UsageError
from quantkit.export_gguf import export_gguf
from quantkit.export_gguf.mixes import FILE_TYPES
from quantkit.export_gguf.verify import verify_gguf
from quantkit.formats.gguf.block_types import BLOCK_TYPES, PLAIN_TYPES
from quantkit.formats.gguf.header import read_gguf_header
from quantkit.pipeline import quantize_model
from quantkit.recipe import Recipe, load_recipe
from quantkit.recipe.output import GgufFileType, GgufTensorType
from quantkit.source import open_source
from quantkit.verify import verify_checkpoint
from quantkit_eval.report import load_report_input
from quantkit_eval.report.wording import sizes

CALIBRATION = "calibration: {sources: [{kind: text, path: corpus.txt}], num_tokens: 512, window_tokens: 64}\n"
QUANTIZATION = "quantization: {scheme: W4A16, algorithm: {name: rtn}}\n"
CHECKPOINT = "{format: compressed-tensors, path: out/ck}"
PLAIN = "{format: gguf, type: Q4_0, path: out/x.gguf}"


@pytest.fixture
def make_recipe(tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """Writes r.yaml into an empty current folder."""
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("The quick brown fox jumps over the lazy dog. A model reads and answers. " * 40)

    def make(*outputs: str, before: str = "", model: Path = tiny_llama_folder) -> Recipe:
        listed = "".join(f"  - {output}\n" for output in outputs)
        Path("r.yaml").write_text(f"version: 1\nmodel: {model}\n{before}outputs:\n{listed}")
        return load_recipe("r.yaml")

    return make


def decoded(path: Path) -> dict[str, np.ndarray]:
    return {t.name: np.array(gguf.quants.dequantize(t.data, t.tensor_type)) for t in gguf.GGUFReader(path).tensors}


def files() -> list[str]:
    return sorted(str(path) for path in Path("out").rglob("*") if path.is_file())


def test_the_recipes_types_are_the_exporters() -> None:
    assert sorted(get_args(GgufFileType)) == sorted(FILE_TYPES)
    assert sorted(get_args(GgufTensorType)) == sorted((*BLOCK_TYPES, *PLAIN_TYPES))


def test_a_recipe_of_one_file_alone(make_recipe: Callable[..., Recipe], tiny_llama_folder: Path) -> None:
    """Without calibration it holds the very tensors of ``quantkit export gguf``; the manifest lies beside it."""
    recipe = make_recipe(PLAIN)
    manifest = quantize_model(recipe)
    assert files() == ["out/x.gguf", "out/x.quantkit.json"]
    export_gguf(open_source(tiny_llama_folder), Path("other/x.gguf"), "Q4_0")
    ours, theirs = decoded(Path("out/x.gguf")), decoded(Path("other/x.gguf"))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert manifest == json.loads(Path("out/x.quantkit.json").read_text())
    assert (manifest["format"], manifest["calibration"], manifest["gguf"]["importance_entries"]) == ("gguf", None, 0)
    metadata = read_gguf_header(Path("out/x.gguf")).metadata
    assert metadata["quantkit.recipe"] == recipe.text
    assert metadata["quantkit.recipe_sha256"] == manifest["recipe_sha256"] == recipe.sha256
    assert verify_gguf(Path("out/x.gguf"), open_source(tiny_llama_folder)).failed() == []


def test_calibration_tokens_are_the_importance_of_every_file(
    make_recipe: Callable[..., Recipe], tiny_llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []
    real = gguf_files.measure_importance
    monkeypatch.setattr(
        gguf_files, "measure_importance", lambda plan, *rest: measured.append(len(plan.types)) or real(plan, *rest)
    )
    quantize_model(make_recipe(PLAIN, PLAIN.replace("Q4_0", "IQ4_NL").replace("x.", "y."), before=CALIBRATION))
    assert len(measured) == 1
    manifest = json.loads(Path("out/x.quantkit.json").read_text())
    assert manifest["gguf"]["importance_entries"] == 15
    assert manifest["calibration"]["num_tokens"] == manifest["gguf"]["calibration"]["num_tokens"] == 512
    # the importance is what the layer's inputs in transformers' model are
    source = open_source(tiny_llama_folder)
    windows = pipeline.build_calibration(load_recipe("r.yaml").calibration, source)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_folder, dtype=torch.float32).eval()
    seen = []
    model.model.layers[0].mlp.up_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].reshape(-1, 64)))
    with torch.no_grad():
        for ids, length in zip(windows.token_ids, windows.lengths.tolist(), strict=True):
            model(ids[:length].unsqueeze(0))
    mean_square = {"blk.0.ffn_up.weight": torch.cat(seen).square().mean(0)}
    export_gguf(source, Path("other/x.gguf"), "Q4_0", importance=mean_square)
    name = "blk.0.ffn_up.weight"
    ours, theirs = decoded(Path("out/x.gguf"))[name], decoded(Path("other/x.gguf"))[name]
    assert (ours == theirs).mean() > 0.99  # sums in another order move a code now and then
    export_gguf(source, Path("other/plain.gguf"), "Q4_0")
    assert (ours == decoded(Path("other/plain.gguf"))[name]).mean() < 0.95


def test_a_checkpoint_and_a_file_from_one_recipe(make_recipe: Callable[..., Recipe], tiny_llama_folder: Path) -> None:
    manifest = quantize_model(make_recipe(CHECKPOINT, PLAIN, before=QUANTIZATION))
    assert manifest == json.loads(Path("out/ck/quantkit.json").read_text())
    source = open_source(tiny_llama_folder)
    assert verify_checkpoint(Path("out/ck"), source).failed() == []
    assert verify_gguf(Path("out/x.gguf"), source).failed() == []
    assert sorted(path.name for path in Path("out").iterdir()) == ["ck", "x.gguf", "x.quantkit.json"]
    first = quantize_model(make_recipe(PLAIN, CHECKPOINT, before=QUANTIZATION), overwrite=True)
    assert first["format"] == "gguf"


def test_every_key_does_something(make_recipe: Callable[..., Recipe]) -> None:
    keys = (
        "overrides: [{match: '.*ffn_down.*', type: Q8_0}], error_feedback: true, pretokenizer: qwen2, split_size: 60KB"
    )
    manifest = quantize_model(
        make_recipe(f"{{format: gguf, type: Q4_0, path: out/x.gguf, {keys}}}", before=CALIBRATION)
    )
    record = manifest["gguf"]
    assert record["tensors"]["blk.1.ffn_down.weight"] == "Q8_0"
    assert (record["error_feedback"], record["pretokenizer"]) == (True, "qwen2")
    assert len(manifest["files"]) > 1
    assert files() == [*(f"out/{name}" for name in sorted(manifest["files"])), "out/x.quantkit.json"]
    sized = quantize_model(make_recipe("{format: gguf, path: out/y.gguf, target_bpw: 7}", before=CALIBRATION))
    assert 6 < sized["gguf"]["bits_per_weight"] <= 7
    # another run with other parts leaves none of the old ones
    quantize_model(make_recipe(PLAIN), overwrite=True)
    assert [name for name in files() if "/x" in name] == ["out/x.gguf", "out/x.quantkit.json"]


def test_quantization_has_no_say_in_files_alone(
    make_recipe: Callable[..., Recipe], caplog: pytest.LogCaptureFixture
) -> None:
    quantize_model(make_recipe(PLAIN, before=QUANTIZATION))
    assert "`quantization` is not used: every output is GGUF" in caplog.text


def test_a_dry_run_shows_both_kinds_and_writes_nothing(make_recipe: Callable[..., Recipe]) -> None:
    make_recipe(CHECKPOINT, PLAIN, before=QUANTIZATION)
    result = CliRunner().invoke(main, ["quantize", "-r", "r.yaml", "--dry-run"])
    assert result.exit_code == 0
    assert "compressed-tensors checkpoint out/ck" in result.stdout
    assert "gguf file out/x.gguf: Q4_0" in result.stdout
    make_recipe(PLAIN)
    result = CliRunner().invoke(main, ["quantize", "-r", "r.yaml", "--dry-run", "--json"])
    (file,) = json.loads(result.stdout)["gguf_files"]
    assert (file["path"], file["tensors"]["blk.0.attn_q.weight"]) == ("out/x.gguf", "Q4_0")
    assert not Path("out").exists()
    result = CliRunner().invoke(main, ["quantize", "-r", "r.yaml"])
    assert result.exit_code == 0
    assert "out/x.gguf: Q4_0" in result.stdout


def test_resumed_it_keeps_the_files_that_are_whole(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(PLAIN, PLAIN.replace("x.", "y."), CHECKPOINT, before=QUANTIZATION)
    written: list[str] = []
    real = gguf_files.write_calibrated

    def note(plan: Any, path: Path, *rest: Any, **options: Any) -> dict[str, Any]:
        written.append(path.name)
        return real(plan, path, *rest, **options)

    monkeypatch.setattr(gguf_files, "write_calibrated", note)

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "quantize (layers)" and done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(recipe, resume=True, progress=interrupt)
    assert written == ["x.gguf", "y.gguf"]
    assert sorted(path.name for path in Path("out").iterdir()) == ["ck.partial", "x.gguf.partial", "y.gguf.partial"]
    before = Path("out/x.gguf.partial/x.gguf").read_bytes()
    manifest = quantize_model(recipe, resume=True)
    assert written == ["x.gguf", "y.gguf"]
    assert Path("out/x.gguf").read_bytes() == before
    places = ["ck", "x.gguf", "x.quantkit.json", "y.gguf", "y.quantkit.json"]
    assert sorted(path.name for path in Path("out").iterdir()) == places
    assert quantize_model(recipe, resume=True) == manifest  # finished: nothing to do
    assert written == ["x.gguf", "y.gguf"]
    Path("out/y.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"the output out/x\.gguf exists\. Give --overwrite"):
        quantize_model(recipe, resume=True)
    quantize_model(recipe, resume=True, overwrite=True)
    assert sorted(path.name for path in Path("out").iterdir()) == places


def test_a_failure_leaves_nothing_and_what_was_there(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(PLAIN, CHECKPOINT, before=QUANTIZATION)

    def fail(*args: Any, **options: Any) -> None:
        raise QuantizationError("blk.0 is broken")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_quantize_blocks", fail)
        with pytest.raises(QuantizationError):
            quantize_model(recipe)
        assert list(Path("out").iterdir()) == []
        Path("out/x.gguf").write_bytes(b"precious")
        with pytest.raises(QuantizationError):
            quantize_model(recipe, overwrite=True)
    assert Path("out/x.gguf").read_bytes() == b"precious"
    assert [path.name for path in Path("out").iterdir()] == ["x.gguf"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("out/x.gguf", r"the output out/x\.gguf exists\. Give --overwrite"),
        ("folder.gguf", r"the output folder\.gguf is a folder"),
        ("corpus.txt/x.gguf", r"cannot be written"),
    ],
)
def test_places_that_are_taken(path: str, reason: str, make_recipe: Callable[..., Recipe]) -> None:
    Path("out").mkdir()
    Path("folder.gguf").mkdir()
    Path("out/x.gguf").write_bytes(b"precious")
    with pytest.raises(Exception, match=reason):
        quantize_model(make_recipe(f"{{format: gguf, path: {path}}}"))
    assert Path("out/x.gguf").read_bytes() == b"precious"


def test_parts_of_an_earlier_file_are_in_the_way(make_recipe: Callable[..., Recipe]) -> None:
    Path("out").mkdir()
    Path("out/x-00001-of-00002.gguf").write_bytes(b"precious")
    with pytest.raises(CheckpointError, match=r"x-00001-of-00002\.gguf exists"):
        quantize_model(make_recipe(PLAIN))


def test_the_models_own_file_is_no_output(
    make_recipe: Callable[..., Recipe], tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    export_gguf(open_source(tiny_llama_folder), tmp_path / "out/x.gguf", "F16")
    before = Path("out/x.gguf").read_bytes()
    with pytest.raises(CheckpointError, match=r"the output out/x\.gguf is the model"):
        check_outputs(make_recipe(PLAIN, model=tmp_path / "out/x.gguf"), open_source("out/x.gguf"), overwrite=True)
    assert Path("out/x.gguf").read_bytes() == before


def test_what_cannot_be_written_is_refused_before_any_work(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "build_calibration", None)
    wrong = "{format: gguf, path: out/x.gguf, overrides: [{match: nothing, type: Q8_0}]}"
    with pytest.raises(UsageError, match="no tensor is called 'nothing'"):
        quantize_model(make_recipe(wrong, before=CALIBRATION))
    with pytest.raises(UsageError, match=r"llama\.cpp has no pre-tokenizer 'smolm'.* The nearest are smollm"):
        quantize_model(make_recipe("{format: gguf, path: out/x.gguf, pretokenizer: smolm}", before=CALIBRATION))
    with pytest.raises(RecipeError, match="the recipe has no `quantization`"):
        quantize_model(Recipe(version=1, model="m"))
    assert not Path("out").exists()


def test_a_source_of_codes_is_said(
    make_recipe: Callable[..., Recipe], tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    export_gguf(open_source(tiny_llama_folder), tmp_path / "q8.gguf", "Q8_0")
    record = quantize_model(make_recipe(PLAIN, model=tmp_path / "q8.gguf"))["gguf"]
    words = "the weights were read from q8.gguf as bfloat16; it holds codes (Q8_0), whose errors stay and count as"
    assert record["notes"][0].startswith(words)


@pytest.mark.parametrize("name", ["x.gguf", "x-00001-of-00003.gguf"])
def test_run_serves_and_judges_the_file(
    name: str,
    make_recipe: Callable[..., Recipe],
    tiny_llama_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gate, "BATCH_SIZES", (1,))
    monkeypatch.setattr(gate, "NEW_TOKENS", 2)
    gates = "gates: {suites: [extract], max_drop_pp: {extract: 20}, num_items: {extract: 2}}\n"
    size = ", split_size: 60KB" if name != "x.gguf" else ""
    verdict = gate.run(make_recipe(f"{{format: gguf, type: Q8_0, path: out/x.gguf{size}}}", before=gates))
    assert verdict["candidate"]["model"]["name"] == name
    assert Path("out/records/verdict.json").exists()
    report = load_report_input(Path("out/records"), Path("out/x.gguf"))
    assert report.checkpoint is not None
    assert report.checkpoint["recipe"] == Path("r.yaml").read_text()
    before = sum(path.stat().st_size for path in tiny_llama_folder.glob("*.safetensors"))
    after = sum(path.stat().st_size for path in Path("out").glob("x*.gguf"))
    found = sizes(report)
    assert found is not None
    assert found[0] == pytest.approx(before, rel=0.02)
    assert found[1:] == (after, "weights on disk")

"""What a run would refuse is refused before its work, by a dry run too, and with the place of the key in the recipe."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from quantkit import gate, pipeline
from quantkit.cli import main
from quantkit.errors import CheckpointError, RecipeError, SourceError
from quantkit.recipe import load_recipe
from quantkit.serve import Engine
from quantkit_eval.errors import RecordError
from quantkit_eval.file_lock import hold_records, try_lock

RECIPE = """\
version: 1
model: {model}
calibration:
  sources: [{{kind: text, path: corpus.txt}}]
  num_tokens: 64
  window_tokens: 32
quantization:
  scheme: W4A16
  algorithm: {{name: gptq}}
  ignore: [lm_head]
outputs: [{{format: compressed-tensors, path: out/ck}}]
"""
GGUF = """\
version: 1
model: {model}
calibration: {{sources: [{{kind: text, path: corpus.txt}}], num_tokens: 64, window_tokens: 32}}
outputs: [{{format: gguf, type: Q8_0, path: out/m.gguf}}]
"""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def model(make_tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of its own in the current folder, with a corpus and a recipe beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    folder = make_tiny_model("llama", tmp_path / "model")
    Path("corpus.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    Path("r.yaml").write_text(RECIPE.format(model="model"))
    return folder


def change(folder: Path, name: str, value: float) -> None:
    """Put a value into a weight of a model."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[3] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def tree() -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in Path().rglob("*"))


@pytest.mark.parametrize(
    ("old", "new", "code", "words"),
    [
        ("corpus.txt", "nowhere.txt", 1, "cannot read calibration source nowhere.txt"),
        ("kind: text, path: corpus.txt", "kind: jsonl, path: empty.jsonl", 1, "empty.jsonl holds no text"),
        ("num_tokens: 64", "num_tokens: 64000", 1, "and 64,000 are needed"),
        ("[lm_head]", "[lm_head]\n  tuning: {sources: [{kind: text, path: no.txt}]}", 1, "calibration source no.txt"),
        ("[lm_head]", "[lm_head]\n  tuning: {sources: [{kind: text, path: short.txt}]}", 1, "short.txt has 1 windows"),
        ("out/ck", "model/ck", 1, "is inside the model's own folder"),
        ("out/ck", "full", 1, "the output folder full is not empty. Give --overwrite"),
        ("out/ck", "aside", 1, "the output folder aside is not empty"),
        ("out/ck", "taken", 1, "taken.partial is in the way and is no working folder"),
    ],
)
def test_a_dry_run_refuses_what_the_run_refuses_and_writes_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, code: int, words: str
) -> None:
    Path("empty.jsonl").touch()
    Path("short.txt").write_text("The quick brown fox.")
    for folder in ("full", "aside.replaced", "taken.partial", "running.partial"):
        Path(folder).mkdir()
        (Path(folder) / "thesis.txt").touch()
    monkeypatch.setattr(pipeline, "_quantize_blocks", None)  # neither gets so far
    with try_lock(Path("running.partial/.lock")):
        Path("r.yaml").write_text(RECIPE.format(model="model").replace(old, new))
        before = tree()
        dry = invoke("quantize", "-r", "r.yaml", "--dry-run")
        assert tree() == before
        wet = invoke("quantize", "-r", "r.yaml")
    assert (dry.exit_code, dry.stdout) == (wet.exit_code, wet.stdout) == (code, "")
    assert words in dry.stderr
    assert dry.stderr.splitlines()[-1] == wet.stderr.splitlines()[-1]


def test_a_dry_run_does_not_mind_another_that_writes_the_same_output(model: Path) -> None:
    folder = Path("out/ck.partial")
    folder.mkdir(parents=True)
    (folder / "shard").touch()
    with try_lock(folder / ".lock"):
        before = tree()
        assert invoke("quantize", "-r", "r.yaml", "--dry-run").exit_code == 0
        assert tree() == before
        refused = invoke("quantize", "-r", "r.yaml")
    assert refused.exit_code == 1
    assert refused.stderr.endswith("r.yaml:11:40: another run is writing out/ck. Wait for it, or choose another path\n")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            "corpus.txt",
            "no.txt",
            "4:13: cannot read calibration source no.txt: No such file or directory (looked in {here})",
        ),
        (
            "corpus.txt",
            "/no.txt",
            "4:13: cannot read calibration source /no.txt: No such file or directory. Correct the",
        ),
        (
            "kind: text, path: corpus.txt",
            "kind: self_generated, seed_prompts: no.jsonl",
            "4:13: cannot read calibration",
        ),
        (
            "num_tokens: 64\n  window_tokens: 32",
            "num_tokens: 6400\n  window_tokens: 3200",
            "6:3: window_tokens is 3200 and",
        ),
        ("[lm_head]", "[lm_head]\n  tuning: {sources: [{kind: text, path: no.txt}]}", "11:22: cannot read calibration"),
        ("model: model", "model: smol", "2:1: no such folder: smol (looked in {here}), and "),
        ("model: model", "model: ./smol", "2:1: no such folder: smol (looked in {here}). Give a folder"),
        ("model: model", "model: m.gguf", "2:1: no such file: m.gguf (looked in {here}). Correct the path"),
        ("model: model", "model: bare", "2:1: {here}/bare has no config.json. It is no model folder, or incomplete"),
        ("out/ck", "model/ck", "11:40: the output model/ck is inside the model's own folder. Choose another path"),
        ("out/ck", "corpus.txt/ck", "11:40: {here}/corpus.txt/ck.partial/config.json: cannot be written ("),
    ],
)
def test_what_is_missing_or_in_the_way_has_its_place_in_the_recipe(model: Path, old: str, new: str, line: str) -> None:
    Path("bare").mkdir()
    Path("r.yaml").write_text(RECIPE.format(model="model").replace(old, new))
    for flags in ((), ("--dry-run",)):
        result = invoke("quantize", "-r", "r.yaml", *flags)
        assert result.exit_code == 1
        assert f"quantkit: r.yaml:{line.format(here=Path.cwd())}" in result.stderr


def test_a_model_that_the_command_line_names_has_no_place_in_the_recipe(model: Path) -> None:
    result = invoke("quantize", "-r", "r.yaml", "./smol")
    assert result.stderr.splitlines()[-1].startswith("quantkit: no such folder: smol (looked in ")


def test_what_the_whole_recipe_lacks_has_its_name(model: Path) -> None:
    Path("r.yaml").write_text(RECIPE.format(model="model").replace("model: model\n", ""))
    assert invoke("run", "r.yaml").stderr.startswith("quantkit: r.yaml: no model. Give MODEL on the command line")
    assert invoke("search", "-r", "r.yaml").stderr.startswith("quantkit: r.yaml: the recipe has no `search`. Add")


@pytest.mark.parametrize(
    ("section", "line"),
    [
        (
            "gates: {suites: [nll, {kind: file, name: mine, path: no.jsonl}]}",
            "12:23: the items no.jsonl cannot be read (No such file or directory)",
        ),
        (
            "gates: {suites: [extract, {name: nll, path: no.txt}]}",
            "12:27: suite 'nll': the text no.txt cannot be read (No such file or directory)",
        ),
        ("report: {html: out/r.html, markdown: model/r.md}", "12:28: model/r.md is inside the model's own folder"),
    ],
)
def test_a_run_names_the_place_of_suites_and_reports(model: Path, section: str, line: str) -> None:
    Path("r.yaml").write_text(f"{RECIPE.format(model='model')}{section}\n")
    result = invoke("run", "r.yaml")
    assert result.exit_code in (1, 2)
    assert result.stderr.splitlines()[-1].startswith(f"quantkit: r.yaml:{line}")


def test_messages_without_a_chat_template_are_refused_by_a_dry_run(model: Path) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    Path("r.yaml").write_text(
        RECIPE.format(model="model").replace("kind: text, path: corpus.txt", "kind: self_generated")
    )
    result = invoke("quantize", "-r", "r.yaml", "--dry-run")
    assert result.exit_code == 1
    assert "model has no chat template, so it cannot answer seed prompts" in result.stderr


def test_a_working_folder_in_the_way_is_said_before_the_calibration(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "build_calibration", None)
    for recipe, folder in ((RECIPE, "out/ck.partial"), (GGUF, "out/m.gguf.partial")):
        Path("r.yaml").write_text(recipe.format(model="model"))
        Path(folder).mkdir(parents=True)
        (Path(folder) / "thesis.txt").touch()
        for resume in (False, True):
            with pytest.raises(CheckpointError, match="is in the way and is no working folder"):
                pipeline.quantize_model(load_recipe("r.yaml"), resume=resume)


def test_a_second_run_into_the_same_records_is_refused(model: Path) -> None:
    recipe = load_recipe("r.yaml")
    with hold_records(Path("out/records")):
        Path("out/records/verdict.json").touch()
        with pytest.raises(RecordError, match=r"out/records: another run .* Wait for it, or give `report`"):
            gate.run(recipe, overwrite=True)
        assert sorted(path.name for path in Path("out/records").iterdir()) == [".lock", "verdict.json"]


def test_a_second_evaluation_into_the_same_folder_is_refused(model: Path) -> None:
    Path("r.yaml").write_text("version: 1\ngates: {suites: [extract], num_items: {extract: 2}}\n")
    with hold_records(Path("e")):
        result = invoke("eval", "model", "-r", "r.yaml", "-o", "e", "--no-cache")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "e: another run or evaluation is writing its records there. Wait for it" in result.stderr


@pytest.mark.parametrize(
    ("old", "new", "code", "place"),
    [
        ("ignore: [lm_head]", "ignore: [lm_head, lm_heat]", 2, "r.yaml:10:21: quantization.ignore: 'lm_heat' matches"),
        (
            "ignore: [lm_head]",
            "overrides:\n    - {match: x, scheme: W8A16}",
            2,
            "r.yaml:11:7: quantization.overrides[0]",
        ),
        (
            "ignore: [lm_head]",
            "overrides: [{match: '.*q_proj', scheme: W8A16}]",
            2,
            "r.yaml:10:3: quantization splits a unit",
        ),
        (
            "ignore: [lm_head]",
            "ignore: [lm_head, '.*q_proj']",
            2,
            "r.yaml:10:3: quantization splits a unit",
        ),
        ("scheme: W4A16", "scheme: W4A16\n  group_size: 128", 2, "r.yaml:9:3: quantization.group_size: 128 does not"),
        (
            "scheme: W4A16",
            "scheme: W4A16\n  target_bits: 1.5",
            2,
            "r.yaml:9:3: quantization.target_bits: 1.5 is too small: the smallest candidates need",
        ),
    ],
)
def test_what_only_the_model_can_tell_names_the_line(model: Path, old: str, new: str, code: int, place: str) -> None:
    Path("r.yaml").write_text(RECIPE.format(model="model").replace(old, new))
    for arguments in (("--dry-run",), ()):
        result = invoke("quantize", "-r", "r.yaml", *arguments)
        assert result.exit_code == code
        assert result.stderr.splitlines()[-1].startswith(f"quantkit: {place}")


def test_a_gguf_override_that_matches_nothing_names_the_line(model: Path) -> None:
    Path("r.yaml").write_text(
        GGUF.format(model="model").replace("path: out", "overrides: [{match: x, type: Q4_0}], path: out")
    )
    result = invoke("quantize", "-r", "r.yaml", "--dry-run")
    assert result.exit_code == 2
    assert result.stderr.startswith("quantkit: r.yaml:4:11: ")


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_broken_weight_is_named_before_a_gguf_file_is_measured(model: Path, name: str) -> None:
    change(model, name, float("nan"))
    Path("r.yaml").write_text(GGUF.format(model="model"))
    with pytest.raises(SourceError, match=rf"{name} in model holds 1 values that are not finite"):
        pipeline.quantize_model(load_recipe("r.yaml"))
    assert not Path("out/m.gguf").exists()


def test_an_engine_refuses_weights_that_are_no_numbers(model: Path) -> None:
    change(model, "model.layers.1.mlp.up_proj.weight", float("inf"))
    with pytest.raises(SourceError, match=r"up_proj\.weight in model holds 1 values that are not finite \(NaN or inf"):
        Engine(model)


def test_an_engine_warns_of_a_checkpoint_that_has_changed(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Path("r.yaml").write_text(RECIPE.format(model="model").replace("gptq", "rtn"))
    pipeline.quantize_model(load_recipe("r.yaml"))
    Engine("out/ck")
    assert "has changed" not in caplog.text
    change(Path("out/ck"), "model.norm.weight", 2.0)
    Engine("out/ck")
    assert "model.safetensors of ck has changed since it was written" in caplog.text
    monkeypatch.setattr("quantkit.checkpoint.stored_weights.MAX_BYTES", 0)
    Engine("out/ck")
    assert "the weights of ck were not compared with quantkit.json: they are large" in caplog.text


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_resumed_run_makes_an_output_anew_whose_side_files_have_changed(
    model: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    Path("r.yaml").write_text(RECIPE.format(model="model").replace("gptq", "rtn"))
    recipe = load_recipe("r.yaml")
    manifest = pipeline.quantize_model(recipe)
    place = Path("out/ck") / name
    whole = place.read_bytes()
    assert manifest["side_files"].keys() == {str(path.relative_to("out/ck")) for path in Path("out/ck").iterdir()} - {
        "model.safetensors",
        "quantkit.json",
    }
    assert pipeline.quantize_model(recipe, resume=True) == manifest
    place.write_bytes(whole + b" ")
    with pytest.raises(CheckpointError, match="Give --overwrite"):
        pipeline.quantize_model(recipe, resume=True)
    assert f"{name} has changed; it has to be made again" in caplog.text
    pipeline.quantize_model(recipe, resume=True, overwrite=True)
    assert place.read_bytes() == whole


def test_inspect_shows_scales_of_keys_and_values(model: Path) -> None:
    text = RECIPE.format(model="model").replace("gptq}", "rtn}\n  kv_cache: {dtype: fp8}")
    Path("r.yaml").write_text(text)
    pipeline.quantize_model(load_recipe("r.yaml"))
    report: dict[str, Any] = json.loads(invoke("inspect", "out/ck", "--json").stdout)
    assert report["quantization"]["kv_cache_scheme"]["num_bits"] == 8
    assert "type float" in next(
        line for line in invoke("inspect", "out/ck").stdout.splitlines() if "keys and v" in line
    )


def test_a_path_that_is_not_there_is_the_same_failure_everywhere(model: Path) -> None:
    Path("gates.yaml").write_text("version: 1\ngates: {suites: [extract], max_drop_pp: {extract: 20}}\n")
    for command in (
        ("verify", "nowhere"),
        ("inspect", "nowhere"),
        ("serve", "./nowhere", "--port", "0"),
        ("compare", "nowhere", "elsewhere", "-r", "gates.yaml"),
        ("report", "nowhere"),
        ("export", "gguf", "model", "-o", "m.gguf", "--imatrix", "nowhere.dat"),
    ):
        result = invoke(*command)
        assert (result.exit_code, result.stdout) == (1, ""), (command, result.stderr)
        assert "nowhere" in result.stderr


def test_a_report_without_a_verdict_says_how_to_make_one(model: Path) -> None:
    Path("run").mkdir()
    result = invoke("report", "run")
    assert result.exit_code == 1
    fix = "Write it with `quantkit compare run/baseline run/candidate -r RECIPE -o run/verdict.json`"
    assert result.stderr == f"quantkit: run/verdict.json: no such file. {fix}\n"


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            "{name: gptq}",
            "{name: gptq, damp_fraction: 5}",
            "r.yaml:9:42: quantization.algorithm.damp_fraction: must be less than 1, not 5",
        ),
        (
            "{name: gptq}",
            "{name: gptq}\n  transforms: [awq, {name: awq}]",
            "r.yaml:10:21: quantization.transforms[1]: the transform awq stands above already",
        ),
        (
            "outputs:",
            "search: {candidates: [{name: a b}]}\noutputs:",
            "r.yaml:11:30: search.candidates[0].name: must be 1 to 64 letters, digits, dots, dashes or underscores, "
            "no sign first, not 'a b'",
        ),
    ],
)
def test_a_mistake_is_said_in_the_words_of_the_recipe(model: Path, old: str, new: str, line: str) -> None:
    Path("r.yaml").write_text(RECIPE.format(model="model").replace(old, new))
    with pytest.raises(RecipeError) as caught:
        load_recipe("r.yaml")
    assert str(caught.value) == line


def test_a_long_context_shorter_than_the_usual_one_names_the_option(model: Path) -> None:
    result = invoke("plan", "model", "--context", "5,2")
    assert result.exit_code == 2
    assert result.stderr == "quantkit: --context '5,2': P99 is less than P50. Give --context 2,5\n"

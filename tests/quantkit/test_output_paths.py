"""What a run may write is decided before the work; nothing that the recipe reads is ever in the way of an output."""

from pathlib import Path

import pytest

from quantkit.checkpoint.output_paths import check_outputs, check_reports
from quantkit.errors import CheckpointError
from quantkit.recipe import Recipe, load_recipe
from quantkit.source import ModelSource, open_source
from quantkit_eval.errors import RecordError

RECIPE = """\
version: 1
model: {model}
calibration: {{sources: [{{kind: text, path: data/corpus.txt}}]}}
quantization: {{scheme: W4A16, algorithm: {{name: gptq}}}}
outputs: [{outputs}]
gates: {{suites: [{{kind: file, name: mine, path: suites/mine.jsonl}}, {{name: nll, path: texts/own.txt}}]}}
report: {{html: {html}}}
"""


@pytest.fixture
def source(make_tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSource:
    """A model in zoo/m of the current folder, beside everything else that the recipe reads."""
    monkeypatch.chdir(tmp_path)
    for name in ("data/corpus.txt", "suites/mine.jsonl", "texts/own.txt"):
        Path(name).parent.mkdir()
        Path(name).touch()
    return open_source(make_tiny_model("llama", tmp_path / "zoo" / "m"))


def recipe(*outputs: str, html: str = "run/report.html") -> Recipe:
    listed = ", ".join(f"{{format: compressed-tensors, path: '{path}'}}" for path in outputs)
    Path("recipes").mkdir(exist_ok=True)
    Path("recipes/r.yaml").write_text(RECIPE.format(model="zoo/m", outputs=listed, html=html))
    return load_recipe("recipes/r.yaml")


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("zoo/m", "is the model's own folder"),
        ("zoo/../zoo/m/", "is the model's own folder"),
        ("zoo", "holds the model's own folder"),
        ("zoo/m/quantized", "is inside the model's own folder"),
        (".", "is the current folder"),
        ("..", "holds the current folder"),
        ("/", "holds the current folder"),
        ("data", "holds a source of the calibration (data/corpus.txt)"),
        ("suites", "holds the file of the suite mine (suites/mine.jsonl)"),
        ("texts", "holds the file of the suite nll (texts/own.txt)"),
        ("recipes", "holds the recipe (recipes/r.yaml)"),
        ("run", "holds the html report (run/report.html)"),
        ("run/records", "is the folder of the records"),
        ("run/records/ck", "is inside the folder of the records"),
        ("run/report.html/ck", "run/report.html"),
    ],
)
def test_an_output_that_would_destroy_something_is_refused(source: ModelSource, output: str, reason: str) -> None:
    Path("run").mkdir()
    Path("run/report.html").touch()
    with pytest.raises((CheckpointError, RecordError)) as caught:
        check_outputs(recipe(output), source, overwrite=True)
    assert output.rstrip("/") in str(caught.value)
    assert reason in str(caught.value)
    assert (source.folder / "model.safetensors").exists()


@pytest.mark.parametrize("suffix", [".partial", ".replaced"])
def test_what_the_run_needs_beside_an_output_is_protected_too(source: ModelSource, suffix: str) -> None:
    source.folder.rename(source.folder.with_name(f"m{suffix}"))
    moved = open_source(source.folder.with_name(f"m{suffix}"))
    with pytest.raises(CheckpointError, match=rf"the output zoo/m needs .*m\{suffix}, which is the model's own folder"):
        check_outputs(recipe("zoo/m"), moved, overwrite=True)
    with pytest.raises(CheckpointError, match=r"the outputs ck\S* and ck\S* both need the folder"):
        check_outputs(recipe("ck", f"ck{suffix}"), moved, overwrite=True)


def test_an_output_link_to_the_model_is_refused(source: ModelSource) -> None:
    Path("link").symlink_to(source.folder)
    with pytest.raises(CheckpointError, match="link is the model's own folder"):
        check_outputs(recipe("link"), source, overwrite=True)


def test_an_output_link_to_nothing_is_refused_before_the_work(source: ModelSource) -> None:
    Path("link").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="the output link is a link to nowhere, which is not there"):
        check_outputs(recipe("link"), source, overwrite=True)


def test_ordinary_outputs_are_allowed_and_nothing_is_made(source: ModelSource) -> None:
    before = sorted(Path().rglob("*"))
    check_outputs(recipe("run/ck", "zoo/other"), source, overwrite=False)
    check_reports(recipe("run/ck"), source)
    assert sorted(Path().rglob("*")) == sorted([*before, Path("recipes"), Path("recipes/r.yaml")])


def test_a_report_never_takes_the_place_of_what_is_read_and_its_folder_can_be_made(source: ModelSource) -> None:
    with pytest.raises(CheckpointError, match=r"data/corpus.txt is a source of the calibration and would be overwrit"):
        check_reports(recipe("ck", html="data/corpus.txt"), source)
    with pytest.raises(CheckpointError, match=r"zoo/m/model.safetensors is inside the model's own folder"):
        check_reports(recipe("ck", html="zoo/m/model.safetensors"), source)
    with pytest.raises(RecordError, match=r"data/corpus.txt/x.html: cannot be written"):
        check_reports(recipe("ck", html="data/corpus.txt/x.html"), source)
    with pytest.raises(RecordError, match=r"cannot be written"):
        check_outputs(recipe("data/corpus.txt/ck"), source, overwrite=True)

"""`quantkit plan --sensitivity`: the table, its document and its picture."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from quantkit.cli import main

RECIPE = """\
version: 1
calibration: {{sources: [{{kind: text, path: {corpus}}}], num_tokens: 512, window_tokens: 64}}
quantization: {{scheme: W4A16, group_size: 64, algorithm: {{name: rtn}}}}
outputs: [{{format: compressed-tensors, path: {output}}}]
"""


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("The quick brown fox jumps over the lazy dog while the rain keeps falling on the stones. " * 60)
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.format(corpus=corpus, output=tmp_path / "out"))
    return path


def test_it_shows_what_each_scheme_costs_each_unit(tiny_llama_folder: Path, recipe: Path, tmp_path: Path) -> None:
    picture = tmp_path / "s.svg"
    done = plan(tiny_llama_folder, "--sensitivity", "-r", recipe, "--plot", picture, "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    units = document["units"]
    assert len(units) == 8  # of each of two blocks: q+k+v, o, gate+up, down
    smallest = [unit["candidates"][0] for unit in units]
    assert [entry["kl"] for entry in smallest] == sorted((entry["kl"] for entry in smallest), reverse=True)
    assert sum(entry["share"] for entry in smallest) == pytest.approx(1)
    for unit in units:
        four, eight = unit["candidates"][0], unit["candidates"][-1]
        assert eight["scheme"].startswith("W8A16")
        assert eight["bytes"] > four["bytes"]
        assert eight["kl"] < four["kl"] / 10
        assert four["standard_error"] > 0
    root = ElementTree.fromstring(picture.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(root.findall(".//{http://www.w3.org/2000/svg}rect")) == 8
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m", "--sensitivity"], "--sensitivity needs --recipe"),
        (["m", "--plot", "s.svg"], "--plot goes with --sensitivity"),
        (["m", "--sensitivity", "-r", "aa"], "the recipe has no `quantization`"),
    ],
)
def test_what_it_needs_is_said(arguments: list[str], message: str) -> None:
    done = plan(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr

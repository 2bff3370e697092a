"""`quantkit run` as a library call: what a failed run leaves, and what the next one takes over. Suites are canned."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from quantkit import gate
from quantkit.errors import CheckpointError
from quantkit.recipe import Recipe, load_recipe
from quantkit_eval.errors import EvalError

RECIPE = """\
version: 1
model: {model}
quantization: {{scheme: W4A16, algorithm: {{name: rtn}}}}
outputs: [{{format: compressed-tensors, path: out/ck}}]
gates: {{suites: [extract], max_drop_pp: {{extract: 20}}, num_items: {{extract: 2}}}}
report: {{html: out/report.html, junit: out/junit.xml}}
"""
LEFT = ("records/verdict.json", "records/throughput.json", "report.html", "junit.xml")


@pytest.fixture
def recipe(tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    Path("r.yaml").write_text(RECIPE.format(model=tiny_llama_folder))
    return load_recipe("r.yaml")


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a run really did, in order; throughput takes no time to measure."""
    steps: list[str] = []

    def note(name: str, real: Callable[..., Any], label: Callable[..., str]) -> None:
        def call(*args: Any, **settings: Any) -> Any:
            steps.append(label(*args))
            return real(*args, **settings)

        monkeypatch.setattr(gate, name, call)

    note("verify_checkpoint", gate.verify_checkpoint, lambda *_: "verify")
    note("evaluate", gate.evaluate, lambda model, suites, seed, out, *_: out.name)
    monkeypatch.setattr(gate, "BATCH_SIZES", (1,))
    monkeypatch.setattr(gate, "NEW_TOKENS", 2)
    return steps


def interrupt_at(monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    real = gate.evaluate

    def evaluate(*args: Any, **settings: Any) -> Any:
        if args[3].name == who:
            raise KeyboardInterrupt
        return real(*args, **settings)

    monkeypatch.setattr(gate, "evaluate", evaluate)


def _interrupted(*_: object, **__: object) -> NoReturn:
    raise KeyboardInterrupt


def test_interrupted_in_the_evaluation_it_goes_on_with_what_is_finished(
    recipe: Recipe, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, "candidate")
        with pytest.raises(KeyboardInterrupt):
            gate.run(recipe)
    assert done == ["verify", "baseline"]
    kept = [Path("out/ck/quantkit.json").stat().st_mtime_ns, Path("out/records/baseline/result.json").read_bytes()]
    with pytest.raises(CheckpointError, match=r"exists\. Give --overwrite to replace it; --resume goes on"):
        gate.run(recipe)
    done.clear()
    verdict = gate.run(recipe, resume=True)
    assert done == ["verify", "candidate"]
    baseline = Path("out/records/baseline/result.json")
    assert kept == [Path("out/ck/quantkit.json").stat().st_mtime_ns, baseline.read_bytes()]
    assert verdict == json.loads(Path("out/records/verdict.json").read_text())
    assert all((Path("out") / name).is_file() for name in LEFT)

    with monkeypatch.context() as patch:  # what the same run has left stays until there is something newer
        patch.setattr(gate, "measure_throughput", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            gate.run(recipe, resume=True)
    assert all((Path("out") / name).is_file() for name in LEFT)

    Path("out/records/baseline/samples.jsonl").write_text("")  # broken records are made again, and what rests on them
    done.clear()
    gate.run(recipe, resume=True, use_cache=False)
    assert done == ["verify", "baseline", "candidate"]

    done.clear()
    stages: list[str] = []
    gate.run(recipe, overwrite=True, progress=lambda stage, *_: stages.append(stage))
    assert done == ["verify", "candidate"]
    assert [stage for stage in stages if "from the cache" in stage and stage.startswith("baseline: ")]
    assert baseline.read_bytes() == kept[1]

    with monkeypatch.context() as patch:  # what an earlier run said is gone once a new one has begun
        interrupt_at(patch, "baseline")
        with pytest.raises(KeyboardInterrupt):
            gate.run(recipe, overwrite=True, use_cache=False)
    assert [name for name in LEFT if (Path("out") / name).exists()] == []
    assert not list(Path("out/records").rglob("result.json"))


def test_another_recipe_does_not_take_over_the_records(recipe: Recipe, done: list[str]) -> None:
    gate.run(recipe)
    Path("r.yaml").write_text(recipe.text.replace("extract: 20", "extract: 30"))
    with pytest.raises(CheckpointError, match=r"verdict.json of an earlier run exists"):
        gate.run(load_recipe("r.yaml"), resume=True)
    assert Path("out/report.html").exists()
    done.clear()
    gate.run(load_recipe("r.yaml"), resume=True, overwrite=True, use_cache=False)
    assert done == ["verify", "baseline", "candidate"]


@pytest.mark.parametrize("where", ["r.yaml/report.html", "folder"])
def test_a_report_that_cannot_be_written_shows_before_the_work(recipe: Recipe, done: list[str], where: str) -> None:
    Path("folder").mkdir()
    Path("r.yaml").write_text(recipe.text.replace("out/report.html", where))
    with pytest.raises(EvalError, match=rf"{where}: cannot be written"):
        gate.run(load_recipe("r.yaml"))
    assert done == []
    assert not Path("out").exists()

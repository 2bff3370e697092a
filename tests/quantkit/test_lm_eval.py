"""lm-eval's tasks through our engine, and our engine through lm-eval; what it must equal is lm-eval's own model."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from quantkit.cli import main
from quantkit.serve import Engine, EngineConfig
from quantkit.text_model import EngineTextModel
from quantkit_eval.comparability import Evaluation

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install lm-eval")
pytestmark = pytest.mark.filterwarnings("default")  # its own, and those of what it imports

COLOURS = [
    ("The sky is", ["blue", "green stone", "a fox"], 0),
    ("Grass is", ["red", "green", "the rain"], 1),
    ("The fox is", ["lazy", "quick and brown", "two streets"], 1),
    ("The market is", ["old", "behind the bridge", "north"], 0),
]
CHOICE = """\
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
metadata: {{version: 1.0}}
"""
WRITING = """\
task: tiny_writing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[label]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 6}}
metric_list: [{{metric: exact_match}}]
"""
ROLLING = """\
task: tiny_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}]
"""
TASKS = ("tiny_choice", "tiny_writing", "tiny_rolling")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three tasks on four documents."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "docs.jsonl"
    docs = [{"question": question, "choices": choices, "label": label} for question, choices, label in COLOURS]
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, text in zip(TASKS, (CHOICE, WRITING, ROLLING), strict=True):
        (folder / f"{name}.yaml").write_text(text.format(data=data))
    return folder


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_numbers_are_those_of_lm_evals_own_model(family: str, tiny_models: Callable[[str], Path]) -> None:
    """Contexts that end in blanks, that are empty or too long; texts of several windows; answers with stop strings."""
    from lm_eval.models.huggingface import HFLM

    from quantkit_eval.lm_eval_adapter import ModelLM

    folder = tiny_models(family)
    ours = ModelLM(EngineTextModel(Engine(folder, EngineConfig(max_model_len=66))))
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1, max_length=64)
    pairs: list[tuple[Any, ...]] = [(question, f" {one}") for question, choices, _ in COLOURS for one in choices]
    pairs += [("The fox ", "jumps"), ("", "over the dog"), ("the rain in the north " * 20, "keeps falling")]
    asked = instances("loglikelihood", pairs)
    found, expected = ours.loglikelihood(asked), theirs.loglikelihood(asked, disable_tqdm=True)
    assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], abs=1e-4)
    assert [one[1] for one in found] == [one[1] for one in expected]
    assert ours.num_shortened == 1
    texts = instances("loglikelihood_rolling", [("Where is the station?",), ("A model reads the prompt. " * 12,)])
    rolled, rolled_there = ours.loglikelihood_rolling(texts), theirs.loglikelihood_rolling(texts, disable_tqdm=True)
    assert rolled == pytest.approx(rolled_there, abs=1e-3)
    prompts = [(question, {"until": ["e"], "max_gen_toks": 8}) for question, _, _ in COLOURS]
    written = instances("generate_until", prompts)
    assert ours.generate_until(written) == theirs.generate_until(written, disable_tqdm=True)
    chat = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here"}]
    for is_open in (True, False):
        assert ours.apply_chat_template(chat[: 1 + (not is_open)], is_open) == theirs.apply_chat_template(
            chat[: 1 + (not is_open)], is_open
        )


def test_a_continuation_that_fits_nowhere_is_refused(tiny_llama_folder: Path) -> None:
    from quantkit_eval.errors import OptionError
    from quantkit_eval.lm_eval_adapter import ModelLM

    lm = ModelLM(EngineTextModel(Engine(tiny_llama_folder, EngineConfig(max_model_len=32))))
    with pytest.raises(OptionError, match=r"a continuation of \d+ tokens is longer than the model's 30"):
        lm.loglikelihood(instances("loglikelihood", [("a", "the rain in the north " * 20)]), disable_tqdm=True)
    with pytest.raises(OptionError, match="asks for answers of 100 tokens, the model's context has 30"):
        lm.generate_until(instances("generate_until", [("a", {"max_gen_toks": 100})]))


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, list(arguments))


def test_tasks_are_evaluated_compared_and_gated(
    tiny_llama_folder: Path, write_rtn_checkpoint: Callable[..., Path], tasks: Path, tmp_path: Path
) -> None:
    candidate = write_rtn_checkpoint(tiny_llama_folder, tmp_path / "w4")
    options = ["--tasks", ",".join(TASKS), "--include-path", str(tasks)]
    for model, name in ((tiny_llama_folder, "a"), (candidate, "b")):
        result = invoke("eval", str(model), *options, "-o", str(tmp_path / name))
        assert result.exit_code == 0, result.stderr
    found = Evaluation.read(tmp_path / "a")
    assert list(found.result["suites"]) == list(TASKS)
    choice = found.result["suites"]["tiny_choice"]
    assert (choice["num_items"], choice["primary_metric"], choice["options"]["right_by"]) == (4, "exact", "acc_norm")
    samples = found.samples["tiny_choice"]
    assert [sample["gold"] for sample in samples] == [label for _, _, label in COLOURS]
    assert all(sample["output"].strip() in choices for sample, (_, choices, _) in zip(samples, COLOURS, strict=True))
    right = [sample["metrics"]["exact"] for sample in samples]
    assert choice["metrics"]["exact"]["value"] == sum(right) / 4 == choice["metrics"]["lm_eval.acc_norm"]["value"]
    assert any(sample["metrics"]["truncated"] for sample in found.samples["tiny_writing"])
    rolling = found.result["suites"]["tiny_rolling"]
    assert rolling["primary_metric"] is None
    assert rolling["metrics"]["lm_eval.word_perplexity"]["value"] > 1
    recipe = tmp_path / "r.yaml"
    suites = [f"{{kind: lm-eval, task: {task}, include_path: {tasks}}}" for task in TASKS]
    recipe.write_text(f"version: 1\ngates: {{suites: [{', '.join(suites)}], max_drop_pp: {{tiny_choice: 20}}}}\n")
    judged = invoke("compare", str(tmp_path / "a"), str(tmp_path / "b"), "-r", str(recipe), "--json")
    verdict = json.loads(judged.stdout)
    assert [gate["name"] for gate in verdict["gates"]] == ["tiny_choice.exact"]
    assert verdict["gates"][0]["n"] == 4
    again = invoke("eval", str(tiny_llama_folder), "-r", str(recipe), "-o", str(tmp_path / "c"))
    assert again.exit_code == 0, again.stderr
    assert Evaluation.read(tmp_path / "c").samples == found.samples


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param(["--tasks", "no_such_task"], "lm-eval has no task 'no_such_task'", marks=pytest.mark.slow),
        (["--tasks", "a", "--include-path", "nowhere"], "include_path='nowhere' is no folder"),
        (["--limit", "3"], "--limit is of --tasks, and there are none"),
        (["--tasks", "a,a"], "a suite named a is there already"),
    ],
)
def test_wrong_tasks_are_one_line(tiny_llama_folder: Path, tmp_path: Path, options: list[str], words: str) -> None:
    result = invoke("eval", str(tiny_llama_folder), "-o", str(tmp_path / "a"), *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert not (tmp_path / "a").exists()


def test_lm_eval_finds_the_registered_model(tiny_llama_folder: Path) -> None:
    """As its command makes one: with a batch size, and a device that is its default where there is none."""
    from lm_eval.api.registry import get_model

    import quantkit.lm_eval_model

    given = {"batch_size": 1, "max_batch_size": None, "device": "cuda:0"}
    arguments = {"pretrained": str(tiny_llama_folder), "max_length": 66}
    lm = get_model("quantkit").create_from_arg_obj(arguments, given)
    assert type(lm) is quantkit.lm_eval_model.QuantkitLM
    assert lm.max_length == 64
    ((logprob, _),) = lm.loglikelihood(instances("loglikelihood", [("The fox", " jumps")]))
    assert logprob < 0


@pytest.mark.slow
def test_lm_evals_own_command_knows_the_model(tiny_llama_folder: Path, tasks: Path, tmp_path: Path) -> None:
    """And finds what ``quantkit eval`` finds."""
    arguments = ["--model", "quantkit", "--model_args", f"pretrained={tiny_llama_folder}", "--tasks", "tiny_choice"]
    out = tmp_path / "out"
    command = [sys.executable, "-m", "quantkit.lm_eval_model", *arguments]
    done = subprocess.run(
        [*command, "--include_path", str(tasks), "--output_path", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (written,) = out.rglob("results_*.json")
    theirs = json.loads(written.read_text())["results"]["tiny_choice"]
    result = invoke(
        "eval",
        str(tiny_llama_folder),
        "--tasks",
        "tiny_choice",
        "--include-path",
        str(tasks),
        "-o",
        str(tmp_path / "a"),
        "--json",
    )
    metrics = json.loads(result.stdout)["suites"]["tiny_choice"]["metrics"]
    for name in ("acc", "acc_norm"):
        assert metrics[f"lm_eval.{name}"]["value"] == theirs[f"{name},none"]

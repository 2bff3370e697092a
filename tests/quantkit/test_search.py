"""The search with a tiny model: smallest passes, second passes, none passes; resumption, budgets, refusals."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from quantkit.cli import main
from quantkit.errors import CheckpointError, RecipeError
from quantkit.pipeline import quantize_model
from quantkit.recipe import Recipe, load_recipe, parse_recipe
from quantkit.recipe.search import PlannedSpeed
from quantkit.recipe.variants import at_folder, lay_over, recipe_data, variant_text
from quantkit.search import executors
from quantkit.search.candidates import find_candidates
from quantkit.search.search import search
from quantkit.search.trial import TrialJob, run_trial
from quantkit.source import open_source
from quantkit.source.gguf import file_sha256

# W4 with rtn differs from the tiny model by some nats a token, W8 by some thousandths of one.
RECIPE = """\
version: 1
model: {model}
quantization: {{scheme: W4A16, algorithm: {{name: rtn}}}}
outputs: [{{format: compressed-tensors, path: out/ck}}]
gates: {{suites: [nll], max_kl_mean_nats: {limit}, num_items: {{nll: 10}}}}
search:
  path: {path}
  candidates:
    - {{name: w8, quantization: {{scheme: W8A16}}}}
    - {{name: w4, quantization: {{group_size: 64}}}}
  screening: {{num_items: {{nll: 9}}}}
  {more}
"""


@pytest.fixture
def make_recipe(tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    monkeypatch.chdir(tmp_path)

    def make(limit: float = 0.5, path: str = "found", more: str = "seed: 3") -> Recipe:
        Path("r.yaml").write_text(RECIPE.format(model=tiny_llama_folder, limit=limit, path=path, more=more))
        return load_recipe("r.yaml")

    return make


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the candidates whose trials ran."""
    names: list[str] = []

    def run(job: TrialJob, progress: Any = None) -> dict[str, Any]:
        names.append(job.name)
        return run_trial(job, progress)

    monkeypatch.setattr(executors, "run_trial", run)
    return names


def statuses(document: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["status"] for row in document["trials"]}


def hashes(folder: Path) -> dict[str, str]:
    """Of every file but quantkit.json, which holds the recipe's text and times."""
    return {path.name: file_sha256(path) for path in folder.iterdir() if path.name != "quantkit.json"}


def test_the_smallest_passes_and_its_recipe_makes_it_again(
    make_recipe: Callable[..., Recipe], tried: list[str], tmp_path: Path
) -> None:
    document = search(make_recipe(limit=20))
    assert (document["outcome"], document["exit_code"], document["winner"]) == ("pass", 0, "w4")
    assert tried == ["w4"]
    assert statuses(document) == {"w4": "promising", "w8": "not tried"}
    assert document["items"]["shared_prompts"] == 0
    assert min(document["items"][part]["prompts"] for part in ("screening", "certification")) >= 9
    row = document["trials"][0]
    assert row["certified"]["verdict"] == "pass"
    assert row["certified"]["gates"][0]["candidate"] != row["scores"]["kl_mean_nats"]["candidate"]
    assert document == json.loads(Path("found/search.json").read_text())
    page = Path("found/search.html").read_text()
    assert "selection score" in page
    assert "certified score" in page
    assert "sequences of 1,024 tokens that decode on H100-80GB" in page
    assert row["planned_tokens_per_s"] > 0
    assert f"{row['planned_tokens_per_s']:,.0f} planned" in page
    assert "http" not in page.replace("http-equiv", "")

    winner = load_recipe("found/winner.yaml")
    assert winner.search is None
    quantize_model(winner)
    again, found = hashes(Path("out/ck")), hashes(Path(document["paths"]["checkpoint"]))
    assert again == found
    assert row["certified"]["files"] == {name: again[name] for name in row["certified"]["files"]}

    with pytest.raises(CheckpointError, match=r"found holds a search. Give --resume to go on, or --overwrite"):
        search(make_recipe(limit=20))
    with pytest.raises(CheckpointError, match=r"cannot resume the search in .*found: recipe was \w+ when it began"):
        search(make_recipe(limit=21), resume=True)


def test_resumed_after_a_kill_between_trials_it_ends_as_one_that_was_not(
    make_recipe: Callable[..., Recipe], tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = search(make_recipe(path="whole"))
    assert whole["winner"] == "w8"
    assert statuses(whole) == {"w4": "hopeless", "w8": "promising"}
    assert not list(Path("whole/trials/w4").rglob("*.safetensors"))

    def killed(job: TrialJob, progress: Any = None) -> dict[str, Any]:
        if job.name == "w8":
            raise KeyboardInterrupt
        return run_trial(job, progress)

    with monkeypatch.context() as patch:
        patch.setattr(executors, "run_trial", killed)
        with pytest.raises(KeyboardInterrupt):
            search(make_recipe(path="broken"))
    with Path("broken/journal.jsonl").open("a") as file:
        file.write('{"kind": "trial", "key": "cut o')
    tried.clear()
    resumed = search(make_recipe(path="broken", more="seed: 3\n  budget: {trials: 5}"), resume=True)
    assert tried == ["w8"]
    assert statuses(resumed) == statuses(whole)
    assert Path("broken/winner.yaml").read_bytes() == Path("whole/winner.yaml").read_bytes()
    checkpoints = (Path(document["paths"]["checkpoint"]) for document in (whole, resumed))
    first, second = (load_file(folder / "model.safetensors") for folder in checkpoints)
    assert all(tensor.equal(second[name]) for name, tensor in first.items())


def test_none_passes(make_recipe: Callable[..., Recipe]) -> None:
    document = search(make_recipe(limit=1e-6))
    assert (document["outcome"], document["exit_code"], document["winner"]) == ("fail", 3, None)
    assert statuses(document) == {"w4": "hopeless", "w8": "hopeless"}
    assert document["attempts"]["made"] == 0
    assert not Path("found/winner.yaml").exists()


def test_a_budget_of_trials_ends_undecided_and_more_goes_on(
    make_recipe: Callable[..., Recipe], tried: list[str]
) -> None:
    document = search(make_recipe(more="budget: {trials: 1}"))
    assert (document["outcome"], document["exit_code"]) == ("inconclusive", 4)
    assert "the budget of 1 trials is used up" in document["reason"]
    none = search(make_recipe(more="budget: {trials: 2}"), resume=True, minutes=1e-9)
    assert "the budget of time is used up" in none["reason"]
    assert tried == ["w4"]


@pytest.mark.slow
def test_in_processes_it_finds_the_same_and_certifies_what_all_threads_make(
    make_recipe: Callable[..., Recipe],
) -> None:
    document = search(make_recipe(), jobs=2)
    assert document["winner"] == "w8"
    assert statuses(document) == {"w4": "hopeless", "w8": "promising"}
    quantize_model(load_recipe("found/winner.yaml"))
    assert hashes(Path("out/ck")) == hashes(Path(document["paths"]["checkpoint"]))


def quantkit(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def test_the_command_shows_candidates_and_run_says_that_it_does_not_search(make_recipe: Callable[..., Recipe]) -> None:
    make_recipe()
    done = quantkit("search", "-r", "r.yaml", "--dry-run", "--json")
    assert done.exit_code == 0, done.stderr
    assert [row["name"] for row in json.loads(done.stdout)["candidates"]] == ["w4", "w8"]
    assert not Path("found").exists()
    noted = quantkit("quantize", "-r", "r.yaml", "--dry-run")
    assert noted.exit_code == 0
    assert "note: `search` is for `quantkit search`" in noted.stderr
    refused = quantkit("search", "-r", "w4a16-rtn")
    assert refused.exit_code == 2
    assert "the recipe has no `search`" in refused.stderr
    assert quantkit("search", "-r", "r.yaml", "--budget-minutes", "0").exit_code == 2


def refusal(text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, origin="r.yaml")
    return str(caught.value)


def test_what_is_wrong_in_a_recipe_is_named_with_its_line() -> None:
    text = RECIPE.format(model="m", limit=1, path="found", more="seed: 0")
    assert refusal(text.replace("max_kl_mean_nats: 1, ", "")).startswith("r.yaml:5:8: gates: missing; a search ends")
    assert "search.budget.minutes: must be greater than 0, not 0" in refusal(text + "  budget: {minutes: 0}\n")
    assert "search.budget.trials: must be greater than or equal to 1" in refusal(text + "  budget: {trials: 0}\n")
    misspelt = refusal(text.replace("{group_size: 64}", "{group_sise: 64}"))
    assert misspelt.startswith("r.yaml:10:33: quantization.group_sise: unknown key; allowed here: scheme, group_size")
    assert misspelt.endswith("did you mean 'group_size'?")
    assert refusal(text.replace("name: w4", "name: W8")).startswith("r.yaml:10:14: search.candidates[1].name: the name")
    assert "search.speed.device: the device 'H1000' is unknown" in refusal(text + "  speed: {device: H1000}\n")
    other = refusal(text.replace("compressed-tensors", "awq"))
    assert "r.yaml:4:20: outputs[0].format" in other
    assert "extract is not in gates.suites (nll)" in refusal(text.replace("{nll: 9}", "{extract: 9}"))


def test_a_candidate_that_cannot_be_made_is_refused_by_name(make_recipe: Callable[..., Recipe]) -> None:
    make_recipe()
    ignored = Path("r.yaml").read_text().replace("{group_size: 64}", "{ignore: [lm_head, '.*q_proj']}")
    Path("r.yaml").write_text(ignored)
    line = 1 + ignored.splitlines().index(next(line for line in ignored.splitlines() if "q_proj" in line))
    with pytest.raises(RecipeError, match=rf"r.yaml:{line}:\d+: the search's candidate 'w4': .*q_proj"):
        search(load_recipe("r.yaml"))
    assert not Path("found").exists()


def test_an_error_of_the_operating_system_is_a_failed_trial(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("quantkit.search.trial.quantize_model", full)
    text = variant_text(at_folder(lay_over(recipe_data(make_recipe()), {}), tmp_path))
    record = run_trial(TrialJob("w4", text, tmp_path, tmp_path, (), {}, {}, "cpu", 1, PlannedSpeed()))
    assert record["status"] == "failed"
    assert "No space left on device" in record["reason"]


@pytest.mark.parametrize(
    "changes",
    [
        "quantization: {algorithm: {name: gptq}}, calibration: {sources: [{kind: text, path: none.txt}]}",
        "quantization: {tuning: {sources: [{kind: text, path: none.txt}]}}",
    ],
)
def test_a_candidate_whose_data_is_missing_is_refused_before_the_work(
    make_recipe: Callable[..., Recipe], changes: str
) -> None:
    make_recipe()
    text = Path("r.yaml").read_text().replace("quantization: {group_size: 64}", changes)
    Path("r.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"r.yaml:\d+:\d+: the search's candidate 'w4': .*none.txt"):
        search(load_recipe("r.yaml"))
    assert not Path("found").exists()


@pytest.mark.parametrize(
    ("place", "message"),
    [("file", "is a file"), ("full", "is not empty and holds no search"), ("out", "overlaps the output")],
)
def test_a_place_that_is_taken_is_refused_before_the_work(
    make_recipe: Callable[..., Recipe], place: str, message: str
) -> None:
    Path("file").write_text("mine")
    Path("full").mkdir()
    Path("full/notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=message):
        search(make_recipe(path=place))
    assert Path("full/notes.txt").read_text() == Path("file").read_text() == "mine"


def test_the_model_s_folder_is_left_alone(make_recipe: Callable[..., Recipe], tiny_llama_folder: Path) -> None:
    with pytest.raises(CheckpointError, match="inside the model's own folder"):
        search(make_recipe(path=tiny_llama_folder / "found"))
    assert not (tiny_llama_folder / "found").exists()


def test_the_ladder_is_ordered_by_bytes_and_says_what_it_leaves_out(
    make_recipe: Callable[..., Recipe], tiny_llama_folder: Path
) -> None:
    text = make_recipe().text.replace("version: 1", "version: 1\ncalibration: {num_tokens: 2048}")
    start, stop = text.index("  candidates"), text.index("  screening")
    candidates, left_out = find_candidates(parse_recipe(text[:start] + text[stop:]), open_source(tiny_llama_folder))
    names = [candidate.name for candidate in candidates]
    assert names[:3] == ["w4-4.5bits-tuned", "w4-g64", "w4-g64-tuned"]  # scales are float32: 4 + 32 / 64 bits and more
    assert names[-1] == "w8"
    assert {"w4-g32", "w4-g32-tuned", "w4-5.0bits-tuned"} < set(names)
    sizes = [candidate.nbytes for candidate in candidates]
    assert sizes == sorted(sizes)
    assert [line.partition(":")[0] for line in left_out if "g128" in line] == ["w4-g128", "w4-g128-tuned"]
    by_name = {candidate.name: candidate for candidate in candidates}
    assert by_name["w4-g64"].bits == pytest.approx(4 + 32 / 64, abs=0.05)  # codes and a float32 scale a group
    assert by_name["w4-5.0bits-tuned"].bits == pytest.approx(5.0, abs=0.01)

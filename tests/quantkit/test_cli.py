"""The frame of the command line: verbs, exit codes, error lines, stdout and stderr; not what a verb does."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import quantkit.recipe
from quantkit import __version__
from quantkit.cli import VERBS, main
from quantkit.cli.group import Terminated
from quantkit.errors import QuantkitError, RecipeError, SourceError, UsageError
from quantkit_eval.errors import EvalError, OptionError


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def command(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own."""
    line = [sys.executable, "-m", "quantkit", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False, **settings)


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(_name: str) -> None:
        raise error

    monkeypatch.setattr(quantkit.recipe, "load_recipe", fail)


def test_the_help_names_every_verb_in_order() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    rows = result.stdout.partition("Commands:\n")[2].splitlines()
    assert [row.split()[0] for row in rows if row[2:3] != " "] == list(VERBS)


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_imports_nothing_heavy(verb: str) -> None:
    code = (
        "import sys\nfrom quantkit.cli import main\n"
        f"code = main({[verb, '--help'] if verb else ['--help']!r}, standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'rich', 'numpy', 'yaml', 'scipy'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: quantkit")


def test_a_verb_that_is_not_there() -> None:
    assert "distill" not in VERBS
    result = invoke("distill")
    assert result.exit_code == 2
    assert result.stderr.startswith("quantkit: there is no verb 'distill'; choose from run, quantize")


def test_the_help_names_every_exit_code() -> None:
    text = " ".join(invoke("--help").stdout.split())
    for code in ("0 done or pass", "1 known", "2 wrong usage", "3 quality", "4 inconclusive", "130 inter", "143 term"):
        assert code in text


def test_version() -> None:
    assert invoke("--version").stdout == f"quantkit, version {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["quantise"], "quantkit: there is no verb 'quantise'; did you mean 'quantize'? (see quantkit --help)"),
        (["run"], "quantkit: Missing argument 'RECIPE' (see quantkit run --help)"),
        (["run", "-r", "a.yaml", "b", "c"],
         "quantkit: two recipes: -r a.yaml and b (see quantkit run --help)"),
        (["quantize", "mine.yaml"],
         "quantkit: Missing option '-r' / '--recipe'; did you mean -r mine.yaml? (see quantkit quantize --help)"),
        (["search", "m", "mine.yml"],
         "quantkit: Missing option '-r' / '--recipe'; did you mean -r mine.yml? (see quantkit search --help)"),
        (["compare", "a", "b", "mine.yaml"],
         "quantkit: Missing option '-r' / '--recipe'; did you mean -r mine.yaml? (see quantkit compare --help)"),
        (["quantize", "model"], "quantkit: Missing option '-r' / '--recipe' (see quantkit quantize --help)"),
        (["run", "a", "b", "c"], "quantkit: Got unexpected extra argument (c) (see quantkit run --help)"),
        (["recipes", "show"], "quantkit: Missing argument 'NAME' (see quantkit recipes show --help)"),
        (["generate", "m", "hi", "--seed", "99999999999999999999"],
         "quantkit: Invalid value for '--seed': 99999999999999999999 is not in the range "
         "0<=x<=9223372036854775807 (see quantkit generate --help)"),
        (["generate", "no-such-model", ""], "quantkit: the prompt is empty (see quantkit generate --help)"),
        (["generate", "no-such-model", "", "--raw"], "quantkit: the prompt is empty (see quantkit generate --help)"),
        (["bench", "a", "b", "--batches", "2,2"],
         "quantkit: Invalid value for '--batches': 2 is given twice (see quantkit bench --help)"),
        (["bench", "a", "b", "--qps", "x"],
         "quantkit: Invalid value for '--qps': 'x' is no list of numbers, such as 1,2,4 (see quantkit bench --help)"),
        (["bench", "a", "b", "--contexts", "0"],
         "quantkit: Invalid value for '--contexts': 0 is not at least 1 (see quantkit bench --help)"),
        (["bench", "a", "b", "--qps", "1"],
         "quantkit: --qps needs --contexts: the lengths of the prompts (see quantkit bench --help)"),
        (["bench", "a", "b", "c"],
         "quantkit: several candidates needs --contexts: the lengths of the prompts (see quantkit bench --help)"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], line: str) -> None:
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"{line}\n")


def test_without_a_verb_the_help_is_shown_and_the_exit_code_is_2() -> None:
    result = invoke()
    assert result.exit_code == 2
    assert "Commands:" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (QuantkitError("broken", fix="Mend it"), 1, "quantkit: broken. Mend it"),
        (SourceError("no model\nhere"), 1, "quantkit: no model here"),
        (UsageError("wrong"), 2, "quantkit: wrong"),
        (RecipeError("r.yaml:1:1: wrong"), 2, "quantkit: r.yaml:1:1: wrong"),
        (EvalError("no samples"), 1, "quantkit: no samples"),
        (OptionError("no such suite"), 2, "quantkit: no such suite"),
        (OSError(errno.ENOSPC, "No space left on device", "out/x"), 1, "quantkit: No space left on device: out/x"),
        (PermissionError(errno.EACCES, "Permission denied"), 1, "quantkit: Permission denied"),
        (KeyboardInterrupt(), 130, "quantkit: interrupted"),
    ],
)
def test_a_known_failure_is_one_line_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    failing(monkeypatch, error)
    result = invoke("recipes", "show", "aa")
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", f"{line}\n")


@pytest.mark.parametrize("error", [QuantkitError("broken"), EvalError("broken"), OSError(errno.EIO, "broken")])
def test_debug_shows_the_traceback_before_the_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    failing(monkeypatch, error)
    result = invoke("recipes", "show", "aa", "--debug")
    assert result.exit_code == 1
    assert result.stderr.startswith("Traceback (most recent call last)")
    assert result.stderr.endswith("\nquantkit: broken\n")


@pytest.mark.parametrize("error", [ValueError("a bug"), AssertionError("a bug"), KeyError("a bug")])
def test_a_bug_is_not_dressed_as_a_known_failure(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    failing(monkeypatch, error)
    result = invoke("recipes", "show", "aa")
    assert result.exception is error


def test_a_mistake_in_a_recipe_ends_with_code_2_and_its_place(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("version: 1\nmodle: x\n")
    done = command("run", "r.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("quantkit: r.yaml:2:1: modle: unknown key")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [recipe]


def test_a_model_is_named_by_the_recipe_or_the_command_line(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("version: 1\n")
    for verb in (["run", str(recipe)], ["quantize", "-r", str(recipe)]):
        result = invoke(*verb)
        assert result.exit_code == 2
        assert result.stderr.startswith("quantkit: ")
    assert "no model. Give MODEL on the command line" in invoke("run", str(recipe)).stderr
    assert "the recipe has no `quantization`" in invoke("quantize", "-r", "aa").stderr


def test_run_takes_its_recipe_as_an_option_too(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("version: 1\n")
    for arguments in (["-r", str(recipe)], ["--recipe", str(recipe)], [str(recipe)]):
        assert invoke("run", *arguments).stderr.startswith(f"quantkit: {recipe}: no model. Give MODEL on")
    for arguments in (["-r", str(recipe), "./nowhere"], [str(recipe), "./nowhere"]):
        assert invoke("run", *arguments).stderr.startswith("quantkit: no such folder: nowhere (looked in ")


def test_a_recipe_in_the_place_of_a_model_is_named(tmp_path: Path) -> None:
    result = invoke("eval", "mine.yaml", "-o", str(tmp_path / "run"))
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        "quantkit: mine.yaml is no model but a recipe by its name. Did you mean -r mine.yaml?"
    )


@pytest.mark.parametrize(
    ("arguments", "patched", "words"),
    [
        (
            ["quantize", "-r", "r.yaml"],
            "quantkit.pipeline.quantize_model",
            "what was done is discarded; --resume, given",
        ),
        (["quantize", "-r", "r.yaml", "--resume"], "quantkit.pipeline.quantize_model", "the finished layers are kept"),
        (
            ["run", "r.yaml"],
            "quantkit.gate.run",
            "the layers of an unfinished checkpoint are discarded; --resume, given",
        ),
        (["run", "r.yaml", "--resume"], "quantkit.gate.run", "what is finished is kept, and --resume goes on with it"),
        (
            ["eval", "http://127.0.0.1:9/v1", "-o", "run"],
            "quantkit.cli.eval.open_server",
            "the answers so far are kept",
        ),
    ],
)
def test_an_interrupt_says_what_became_of_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], patched: str, words: str
) -> None:
    def interrupted(*_arguments: Any, **_options: Any) -> None:
        raise Terminated

    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(
        "version: 1\nmodel: m\nquantization: {scheme: W8A8, algorithm: {name: rtn}}\n"
        "outputs: [{format: compressed-tensors, path: out/ck}]\n"
    )
    monkeypatch.setattr(patched, interrupted)
    result = invoke(*arguments)
    assert result.exit_code == 143
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"quantkit: terminated; {words}")
    assert "--resume" in last


def test_recipes_list_and_show() -> None:
    listed = invoke("recipes", "list")
    names = list(quantkit.recipe.builtin_recipes())
    assert {"aa", "w4a16-gptq", "w4a16-rtn", "w8a8"} <= set(names)
    assert [line.split()[0] for line in listed.stdout.splitlines()] == names
    as_json = json.loads(invoke("recipes", "list", "--json").stdout)
    assert [entry["name"] for entry in as_json] == names
    shown = invoke("recipes", "show", "w4a16-rtn")
    assert shown.stdout == quantkit.recipe.builtin_recipes()["w4a16-rtn"].read_text()
    assert json.loads(invoke("recipes", "show", "aa", "--json").stdout)["text"].startswith("# ")


def test_models_lists_families() -> None:
    families = [entry["family"] for entry in json.loads(invoke("models", "--json").stdout)]
    assert {"llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3", "mixtral"} <= set(families)
    lines = invoke("models").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["family", *families]


@pytest.mark.skipif(os.name != "posix", reason="needs a pipe that its reader closes")
def test_a_reader_that_goes_away_is_no_error() -> None:
    line = f"{sys.executable} -m quantkit recipes show w4a16-gptq | true"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.parametrize(
    ("number", "code", "line"),
    [(signal.SIGINT, 130, "quantkit: interrupted\n"), (signal.SIGTERM, 143, "quantkit: terminated\n")],
)
def test_an_interrupt_cleans_up_and_is_one_line(tmp_path: Path, number: int, code: int, line: str) -> None:
    script = (
        "import pathlib, sys, time, quantkit.recipe\nfrom quantkit.cli import main\n"
        "def wait(name):\n"
        "    try:\n        print('waiting', flush=True)\n        time.sleep(60)\n"
        "    finally:\n        pathlib.Path('cleaned').touch()\n"
        "quantkit.recipe.load_recipe = wait\nmain(['recipes', 'show', 'aa'])"
    )
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job inherits that it is ignored
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (code, line)
    assert (tmp_path / "cleaned").exists()

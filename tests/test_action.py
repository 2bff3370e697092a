"""action.yml and docs/CI.md: every command and option exists, every input is used, and the verdict gets through."""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from quantkit.cli import VERBS, main

ROOT = Path(__file__).resolve().parent.parent
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
SCRIPTS = {step["name"]: step["run"] for step in STEPS if "run" in step}
CI = (ROOT / "docs" / "CI.md").read_text(encoding="utf-8")
STUB = """\
#!/bin/bash
echo "$@" >> "$CALLS"
[ "$1" = run ] && exit "$CODE_OF_RUN"
while [ $# -gt 0 ]; do [ "$1" = --markdown ] && echo "## the report" > "$2"; shift; done
exit 0
"""


def commands(text: str) -> Iterator[list[str]]:
    """The words of every call of quantkit in a script."""
    for line in text.splitlines():
        match = re.match(r"\s*(?:- )?(quantkit [a-z].*)", line)
        if match:
            yield shlex.split(match[1].partition("||")[0])


CALLS = [*(words for script in SCRIPTS.values() for words in commands(script)), *commands(CI)]


def test_the_pieces_are_found() -> None:
    assert {words[1] for words in CALLS} == {"run", "eval", "compare", "report"}


@pytest.mark.parametrize("words", CALLS, ids=" ".join)
def test_every_command_and_option_exists(words: list[str]) -> None:
    assert words[1] in VERBS
    command = main.get_command(click.Context(main), words[1])
    assert command is not None
    known = {name for parameter in command.params for name in parameter.opts}
    given = {word.partition("=")[0] for word in words[2:] if word.startswith("-") and word != "--"}
    assert given <= known


def test_every_input_is_used_and_every_used_one_declared() -> None:
    text = yaml.safe_dump(ACTION["runs"])
    assert set(re.findall(r"inputs\.([a-z-]+)", text)) == set(ACTION["inputs"])
    for name in ACTION["inputs"]:
        assert f"`{name}`" in CI, name
    assert set(re.findall(r"steps\.gate\.outputs\.([a-z-]+)", yaml.safe_dump(ACTION["outputs"]))) == set(
        re.findall(r"^echo \"([a-z-]+)=", SCRIPTS["Run the gate"], re.MULTILINE)
    )


def test_what_a_failing_gate_has_evaluated_is_cached_too() -> None:
    """actions/cache alone saves nothing after a job that failed, and a gate fails on purpose."""
    (restore,) = (step for step in STEPS if step.get("uses", "").startswith("actions/cache/restore@"))
    (save,) = (step for step in STEPS if step.get("uses", "").startswith("actions/cache/save@"))
    assert save["if"] == "always()"
    assert save["with"] == {name: restore["with"][name] for name in ("path", "key")}
    names = [step.get("name") for step in STEPS]
    assert STEPS.index(restore) < names.index("Run the gate") < STEPS.index(save) < names.index("Pass the verdict on")
    assert not any(step.get("uses", "").startswith("actions/cache@") for step in STEPS)


def test_no_input_is_pasted_into_a_script() -> None:
    """An input is text of whoever opens a pull request: it reaches a shell as a variable, never as code."""
    assert all("${{" not in script for script in SCRIPTS.values())
    assert all(step["shell"] == "bash" for step in STEPS if "run" in step)


@pytest.mark.parametrize("document", re.findall(r"```yaml\n(.*?)```", CI, re.DOTALL))
def test_the_examples_are_yaml_with_known_inputs(document: str) -> None:
    parsed = yaml.safe_load(document)
    jobs = parsed.get("jobs", {})
    steps = [step for job in jobs.values() for step in job["steps"] if "quantkit" in step["uses"]]
    assert all(set(step["with"]) <= set(ACTION["inputs"]) for step in steps)


def run_step(name: str, folder: Path, **environment: str) -> int:
    """Run a step as GitHub does: bash that stops at the first error."""
    given = {key: str(folder / key.lower()) for key in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "CALLS")}
    path = f"{folder}:{os.environ['PATH']}"
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", SCRIPTS[name]]
    return subprocess.run(command, cwd=folder, env={"PATH": path, **given, **environment}, check=False).returncode


@pytest.fixture
def runner(tmp_path: Path) -> Path:
    """A folder with a quantkit that notes how it was called."""
    stub = tmp_path / "quantkit"
    stub.write_text(STUB)
    stub.chmod(0o755)
    (tmp_path / "out" / "records").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("code", "verdict", "fail_on_inconclusive", "end"),
    [(0, "pass", "true", 0), (3, "fail", "false", 3), (4, "inconclusive", "true", 4), (4, "inconclusive", "false", 0),
     (1, "", "false", 1)],
)  # fmt: skip
def test_the_verdict_gets_through(runner: Path, code: int, verdict: str, fail_on_inconclusive: str, end: int) -> None:
    assert run_step("Run the gate", runner, RECIPE="my recipe.yaml", MODEL="", CODE_OF_RUN=str(code)) == 0
    assert (runner / "calls").read_text() == "run --overwrite -- my recipe.yaml\n"
    assert (runner / "github_output").read_text() == f"exit-code={code}\nverdict={verdict}\n"
    assert run_step("Pass the verdict on", runner, CODE=str(code), FAIL_ON_INCONCLUSIVE=fail_on_inconclusive) == end


def test_the_report_reaches_the_summary(runner: Path) -> None:
    report = runner / "report"
    assert run_step("Write the report", runner, RECORDS="out/records", REPORT=str(report)) == 0
    assert (runner / "github_step_summary").read_text() == "## the report\n"
    assert (report / "records").is_dir()

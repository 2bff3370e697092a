"""What a user is told to install: never the project that has the name quantkit on PyPI."""

import importlib
import importlib.util
import re
import shlex
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from quantkit.extras import install_command
from quantkit_eval.errors import OptionError
from quantkit_eval.suites.lm_eval_task import check_task

ROOT = Path(__file__).resolve().parents[2]
FROM_THE_INDEX = re.compile(r"pip3? install (-\S+ )*['\"]?quantkit\b|(?<!\./)\bquantkit\[[a-z]")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def listed(extras: dict[str, list[str]]) -> list[str]:
    """As an installed distribution lists them."""
    return ["torch>=2.9", *(f"{line}; extra == '{extra}'" for extra, lines in extras.items() for line in lines)]


@pytest.mark.parametrize("extra", [extra for extra in EXTRAS if extra != "dev"])  # which names our own extra
def test_the_command_names_the_packages_of_the_extra(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: listed(EXTRAS))
    assert shlex.split(install_command(extra)) == ["pip", "install", *EXTRAS[extra]]


def test_other_markers_of_a_package_are_not_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["a>=1; platform_system == 'Linux' and extra == \"serve\"", "b; extra == 'serve-more'", "c"]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    assert install_command("serve") == "pip install 'a>=1'"


def test_a_clone_that_is_not_installed_is_named_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    for requires in (missing, lambda name: None, lambda name: ["torch"]):
        monkeypatch.setattr(metadata, "requires", requires)
        assert install_command("serve") == "pip install '.[serve]' in the clone of quantkit's repository"


def test_the_suites_of_lm_eval_name_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"not installed\. pip install lm-eval$"):
        check_task("hellaswag", {"kind": "lm-eval", "task": "hellaswag"})


@pytest.mark.parametrize(
    "place", ["README.md", "CHANGELOG.md", "action.yml", "docs", "recipes", "scripts", "quantkit", "eval"]
)
def test_nothing_installs_what_has_our_name_on_the_index(place: str) -> None:
    path = ROOT / place
    files = (
        [path] if path.is_file() else [file for file in path.rglob("*") if file.suffix in (".py", ".md", ".yaml", "")]
    )
    texts = {file: file.read_text(encoding="utf-8") for file in files if file.is_file()}
    assert texts
    wrong = [
        (file.name, line) for file, text in texts.items() for line in text.splitlines() if FROM_THE_INDEX.search(line)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "line",
    ["pip install 'quantkit[serve]'", "pip install -U quantkit", "Install quantkit[datasets]", "pip install quantkit"],
)
def test_the_search_finds_what_it_should(line: str) -> None:
    assert FROM_THE_INDEX.search(line)
    assert not FROM_THE_INDEX.search("pip install './quantkit[serve]'")


def test_lm_evals_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    script = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, _, name = script["quantkit-lm-eval"].partition(":")
    command = getattr(importlib.import_module(module), name)  # importing it needs no lm-eval
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"^quantkit-lm-eval: lm-eval is not installed\. pip install "):
        command()

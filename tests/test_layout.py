"""The shape of the repository: which package may import which, what is no package, what a wheel holds."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from quantkit.cli import VERBS, main
from quantkit.recipe import builtin_recipes

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "quantkit": ROOT / "quantkit",
    "quantkit_kernels": ROOT / "kernels" / "quantkit_kernels",
    "quantkit_eval": ROOT / "eval" / "quantkit_eval",
}
ALLOWED = {
    "quantkit_kernels": {"quantkit_kernels", "torch", "triton", "numpy"},
    "quantkit_eval": {
        *(
            "quantkit_eval",
            "torch",
            "numpy",
            "scipy",
            "safetensors",
            "jsonschema",
            "referencing",
            "jinja2",
            "markupsafe",
            "httpx",
            "lm_eval",  # the extra lm-eval; at the top of the adapter alone
        ),
    },
    "quantkit": {
        *PACKAGES,
        *("torch", "transformers", "tokenizers", "accelerate", "compressed_tensors", "gguf", "safetensors"),
        *("huggingface_hub", "greenlet", "numpy", "scipy", "pydantic", "pydantic_core", "yaml", "jinja2", "markupsafe"),
        *("click", "rich"),
        *("jsonschema", "referencing"),
        "lm_eval",  # the extra lm-eval; at the top of lm_eval_model.py alone
        "datasets",  # an extra; imported where a recipe names a dataset
        "ray",  # an extra; imported where a search is given a cluster's address
        *("fastapi", "starlette", "uvicorn", "llguidance"),  # the extra serve; the first two at the top of serve/http
    },
}
OPTIONAL = {"datasets", "ray", "triton", "uvicorn", "llguidance"}  # may only be imported inside a function


def imports(file: Path) -> Iterator[tuple[str, bool]]:
    """Absolute module names that a file imports, and whether at its top level."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    top = {id(node) for statement in tree.body for node in ([statement] if _is_import(statement) else [])}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            yield node.module or "", id(node) in top


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


@pytest.mark.parametrize("folder", ["kernels", "eval", "recipes", "scripts", "docs", "tests"])
def test_a_source_root_or_data_folder_is_no_package(folder: str) -> None:
    assert not list((ROOT / folder).glob("__init__.py"))


@pytest.mark.parametrize("folder", ["kernels", "eval"])
def test_nothing_lies_beside_the_package_in_a_source_root(folder: str) -> None:
    """A `kernels/utils.py` would be importable as `utils` everywhere."""
    python = {
        path.name for path in (ROOT / folder).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert python == {f"quantkit_{folder}"}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_follow_the_dependency_rule(package: str) -> None:
    files = sorted(PACKAGES[package].rglob("*.py"))
    assert files
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name, _ in imports(file)
        if name.partition(".")[0] not in ALLOWED[package] | set(sys.stdlib_module_names)
    ]
    assert not wrong


def test_optional_packages_are_imported_where_they_are_used() -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {name} at its top"
        for package in ("quantkit", "quantkit_eval")
        for file in sorted(PACKAGES[package].rglob("*.py"))
        for name, is_top in imports(file)
        if is_top and name.partition(".")[0] in OPTIONAL
    ]
    assert not wrong


def test_only_the_cli_knows_the_cli() -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in sorted(PACKAGES["quantkit"].rglob("*.py"))
        for name, _ in imports(file)
        if name.startswith("quantkit.cli") and "cli" not in file.parts and file.name != "__main__.py"
    ]
    assert not wrong


def test_every_allowed_package_is_declared() -> None:
    """Otherwise an import works only because somebody else's dependency brings the package along."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    declared = {re.split(r"[<>=!~;\[ ]", line)[0].lower().replace("-", "_") for line in lines}
    spelled = {
        "yaml": "pyyaml",
        "pydantic_core": "pydantic",
        "markupsafe": "jinja2",
        "starlette": "fastapi",
    }  # who declares it
    wanted = {spelled.get(name, name) for allowed in ALLOWED.values() for name in allowed if name not in PACKAGES}
    assert wanted - declared == set()


def test_kernels_is_never_ours() -> None:
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(ROOT)


def test_transformers_probe_for_the_package_kernels_survives() -> None:
    """From the root, where a folder of that name lies: transformers sees the installed distribution or nothing."""
    code = (
        "from importlib import metadata\nfrom transformers.utils import import_utils\n"
        "is_installed = any((d.name or '').lower() == 'kernels' for d in metadata.distributions())\n"
        "print(import_utils.is_kernels_available() is is_installed)"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert told.strip() == "True"


@pytest.mark.parametrize("package", PACKAGES)
def test_types_are_shipped(package: str) -> None:
    assert (PACKAGES[package] / "py.typed").exists()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_is_in_the_readme(verb: str) -> None:
    command = main.get_command(click.Context(main), verb)
    assert command is not None
    assert len(command.get_short_help_str()) > 10
    for parameter in command.params:
        assert isinstance(parameter, click.Argument) or parameter.to_info_dict()["help"], parameter.name
    assert f"quantkit {verb}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_built_in_recipe_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in builtin_recipes() if name not in readme] == []


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    code = (
        "import sys, quantkit, quantkit.cli\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'rich', 'numpy', 'yaml'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_tests_run_from_another_folder(tmp_path: Path) -> None:
    chosen = f"{Path(__file__)}::test_types_are_shipped"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), chosen]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("hatchling"), reason="needs the build backend: pip install hatchling")
def test_a_wheel_holds_three_packages_and_their_data_and_runs_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("quantkit-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert {name.partition("/")[0].partition("-")[0] for name in names} == set(PACKAGES)
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert f"{package}/{path.relative_to(folder).as_posix()}" in names
    assert {name for name in names if name.startswith("quantkit/recipes/")} == {
        f"quantkit/recipes/{name}.yaml" for name in builtin_recipes()
    }
    code = (
        "import pathlib, quantkit.recipe, quantkit.cli, quantkit_eval, quantkit_kernels\n"
        "assert pathlib.Path.cwd() / 'site' in pathlib.Path(quantkit.recipe.__file__).parents\n"
        "assert pathlib.Path.cwd() / 'site' in quantkit.recipe.builtin_recipes()['aa'].parents\n"
        "assert pathlib.Path.cwd() / 'site' in pathlib.Path(quantkit_kernels.__file__).parents\n"
        "quantkit.recipe.load_recipe('w4a16-gptq')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)

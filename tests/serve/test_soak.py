"""The soak script on a tiny model: few requests always, more where there is time."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "soak_serve.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("soak_serve", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak_serve"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def check(found: Any) -> None:
    assert found.leaked_blocks == 0
    assert found.preemptions > found.swaps > 0
    assert found.aborted > 0
    assert found.prefix_cache_hit_rate > 0.05


def test_a_short_soak_gives_the_answers_of_an_undisturbed_run(script: Any, tiny_llama_folder: Path) -> None:
    found = script.soak(tiny_llama_folder, 60, 1, deterministic=False)
    check(found)
    assert found.different == 0


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_longer_soak(script: Any, tiny_llama_folder: Path, deterministic: bool) -> None:
    found = script.soak(tiny_llama_folder, 300, 2, deterministic=deterministic)
    check(found)
    assert found.different <= (0 if deterministic else 1)
    assert found.is_clean

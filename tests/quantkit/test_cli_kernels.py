"""``inspect --kernels`` and ``bench --kernels``: no model is named."""

import json

import pytest
from click.testing import CliRunner

from quantkit.cli import main


@pytest.mark.parametrize("verb", ["inspect", "bench"])
def test_models_and_kernels_exclude_each_other(verb: str) -> None:
    result = CliRunner().invoke(main, [verb, "a-model", "--kernels"])
    assert result.exit_code == 2
    assert "give either" in result.stderr
    result = CliRunner().invoke(main, [verb])
    assert result.exit_code == 2
    assert "--kernels" in result.stderr


def test_the_kernels_of_this_machine_are_listed_with_their_reasons() -> None:
    result = CliRunner().invoke(main, ["inspect", "--kernels"])
    assert result.exit_code == 0
    assert result.stdout.startswith("CPU, activations in torch.bfloat16:\n  linear: ")
    found = json.loads(CliRunner().invoke(main, ["inspect", "--kernels", "--json"]).stdout)
    assert found["kernels"] == result.stdout.splitlines()


def test_the_crossover_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit_kernels.crossover.main", lambda: print("measured"))
    assert CliRunner().invoke(main, ["bench", "--kernels"]).stdout == "measured\n"

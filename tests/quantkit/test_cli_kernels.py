"""``inspect --kernels`` and ``bench --kernels``: no model is named."""

import json
from collections.abc import Iterator

import pytest
import torch
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


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("quantkit_kernels.crossover.SHAPES", ((32, 64),))
    monkeypatch.setattr("quantkit_kernels.crossover.ROWS", (1, 5))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU its table would be written")
@pytest.mark.usefixtures("small_shapes")
def test_the_crossover_is_measured() -> None:
    result = CliRunner().invoke(main, ["bench", "--kernels"])
    assert result.exit_code == 0
    machine, *records = map(json.loads, result.stdout.splitlines())
    assert machine.keys() == {"cpu", "torch"}
    assert [record["rows"] for record in records] == [1, 5]
    assert all(record["int4pack_us"] > 0 for record in records)
    document = json.loads(CliRunner().invoke(main, ["bench", "--kernels", "--json"]).stdout)
    assert [record.keys() for record in document] == [record.keys() for record in (machine, *records)]


def test_a_table_that_cannot_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> Iterator[dict[str, object]]:
        yield {"device": "a GPU"}
        raise PermissionError(13, "Permission denied", "crossover.json")

    monkeypatch.setattr("quantkit_kernels.crossover.records", refused)
    result = CliRunner().invoke(main, ["bench", "--kernels"])
    assert result.exit_code == 1
    assert "Permission denied: crossover.json" in result.stderr

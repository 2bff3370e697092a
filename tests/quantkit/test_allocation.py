"""Allocation of bits: the estimate against a measured KL, the knapsack against all combinations, the checkpoint."""

import ctypes
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scipy.optimize
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quantkit.algorithms import load_algorithm
from quantkit.allocation.allocate import allocate, check_target
from quantkit.allocation.knapsack import choose
from quantkit.allocation.sensitivity import measure_sensitivity
from quantkit.allocation.units import find_units
from quantkit.calibration.dataset import build_calibration
from quantkit.errors import QuantizationError, RecipeError
from quantkit.pipeline import quantize_model
from quantkit.plan import make_plan
from quantkit.primitives import choose_qparams, dequantize, quantize
from quantkit.recipe import Recipe, parse_recipe
from quantkit.scheme import QuantScheme
from quantkit.verify import verify_checkpoint

TEMPLATE = """\
version: 1
model: {model}
calibration: {{sources: [{{kind: text, path: {corpus}}}], num_tokens: 2048, window_tokens: 64}}
quantization:
  scheme: W4A16
  algorithm: {{name: rtn}}
  {more}
outputs: [{{format: compressed-tensors, path: {output}}}]
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    words = ["river", "stone", "window", "yellow", "seven", "quiet", "morning", "letter", "market", "garden"]
    path.write_text(" ".join(" ".join(words[(i * 7 + j * j) % 10] for j in range(9)) + "." for i in range(400)))
    return path


@pytest.fixture
def make_recipe(corpus: Path, tmp_path: Path) -> Callable[..., Recipe]:
    def make(model: Path, more: str = "target_bits: 5.5") -> Recipe:
        return parse_recipe(TEMPLATE.format(model=model, corpus=corpus, more=more, output=tmp_path / "out"))

    return make


@pytest.mark.parametrize("seed", range(4))
def test_the_knapsack_finds_what_trying_everything_finds(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    costs = torch.rand(5, 3, generator=generator).tolist()
    sizes = torch.randint(1, 50, (5, 3), generator=generator).tolist()
    budget = int(sum(min(row) for row in sizes) * 1.6)
    everything = itertools.product(range(3), repeat=5)

    def of(table: list[list[Any]], numbers: tuple[int, ...]) -> Any:
        return sum(row[number] for row, number in zip(table, numbers, strict=True))

    best = min(of(costs, numbers) for numbers in everything if of(sizes, numbers) <= budget)
    chosen = tuple(choose(costs, sizes, budget))
    assert of(sizes, chosen) <= budget
    assert of(costs, chosen) == pytest.approx(best, rel=1e-3)


def test_the_solver_writes_nothing_where_a_result_stands(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def talk(*args: Any, **kwargs: Any) -> Any:
        ctypes.CDLL(None).puts(b"HighsMipSolverData::transformNewIntegerFeasibleSolution")
        return scipy.optimize.milp(*args, **kwargs)

    monkeypatch.setattr("quantkit.allocation.knapsack.milp", talk)
    assert choose([[2.0, 1.0]], [[1, 2]], 2) == [1]
    print("result")
    assert capfd.readouterr().out == "result\n"


def test_a_budget_below_the_smallest_is_an_error_with_both_numbers() -> None:
    with pytest.raises(QuantizationError, match="take 30 bytes and the target allows 29"):
        choose([[1.0, 0.5], [1.0, 0.5]], [[10, 20], [20, 30]], 29)


@torch.no_grad()
def _measured_kl(model: Any, changes: dict[str, Tensor], windows: list[Tensor]) -> float:
    """Mean KL in nats when the given changes are added to the weights."""
    before = [model(ids[None]).logits[0].log_softmax(-1) for ids in windows]
    for name, change in changes.items():
        model.get_submodule(name).weight += change
    after = [model(ids[None]).logits[0].log_softmax(-1) for ids in windows]
    for name, change in changes.items():
        model.get_submodule(name).weight -= change
    pairs = zip(before, after, strict=True)
    return float(torch.cat([(old.exp() * (old - new)).sum(-1) for old, new in pairs]).mean())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_estimate_is_the_measured_kl_of_small_errors(
    family: str, tiny_models: Callable[[str], Path], make_recipe: Callable[..., Recipe]
) -> None:
    folder = tiny_models(family)
    recipe = make_recipe(folder)
    plan = make_plan(recipe)
    assert recipe.calibration is not None
    windows = list(build_calibration(recipe.calibration, plan.source).token_ids)[:32]
    units = find_units(list(plan.layers))
    eight = QuantScheme(8, -1)  # small errors: the estimate is the second order of the KL
    candidates = {unit.name: [eight] for unit in units}
    table = measure_sensitivity(plan, units, candidates, windows, lambda *_: None, load_algorithm("rtn"))
    assert next(plan.model.parameters()).is_meta
    reader = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for entry in table[::3]:
        changes = {}
        for name in entry.unit.layers:
            weight = reader.get_submodule(name).weight.detach()
            scale, _ = choose_qparams(weight, eight, torch.float32)
            changes[name] = dequantize(quantize(weight, scale, eight), scale) - weight
        measured = _measured_kl(reader, changes, windows)
        assert entry.kl[0] == pytest.approx(measured, abs=5 * entry.standard_error[0] + 0.1 * measured)
        assert entry.standard_error[0] < 0.6 * entry.kl[0]


def test_units_are_what_engines_fuse(tiny_models: Callable[[str], Path], make_recipe: Callable[..., Recipe]) -> None:
    plan = make_plan(make_recipe(tiny_models("llama")))
    names = [unit.name for unit in find_units(plan.in_block(0))]
    assert names == [
        "model.layers.0.self_attn.q+k+v_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate+up_proj",
        "model.layers.0.mlp.down_proj",
    ]


@pytest.mark.parametrize("target", [4.6, 5.5, 7.0])
def test_the_target_is_met_and_a_larger_one_costs_less(
    target: float, tiny_models: Callable[[str], Path], make_recipe: Callable[..., Recipe]
) -> None:
    recipe = make_recipe(tiny_models("llama"), f"target_bits: {target}")
    plan = make_plan(recipe)
    assert recipe.calibration is not None
    calibration = build_calibration(recipe.calibration, plan.source)
    found = allocate(plan, recipe, calibration, lambda *_: None)
    assert target - 0.6 < found.bits <= target
    assert found.bits == pytest.approx(make_plan(recipe, schemes=found.schemes).bits_per_weight)
    rows = {row["unit"]: row for row in found.table}
    taken = [c["kl"] for row in rows.values() for c in row["candidates"] if c["scheme"] == row["chosen"]]
    assert found.predicted_kl == pytest.approx(sum(taken))
    cheapest = sum(min(row["candidates"], key=lambda c: c["bytes"])["kl"] for row in rows.values())
    assert found.predicted_kl < cheapest


def test_a_checkpoint_of_mixed_schemes_is_written_and_explains_itself(
    tiny_models: Callable[[str], Path], make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    more = "target_bits: 6\n  overrides: [{match: '.*layers.0.mlp.down_proj', scheme: W8A16}]"
    quantize_model(make_recipe(tiny_models("llama"), more))
    verify_checkpoint(tmp_path / "out").raise_for_failure()
    manifest = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    allocation = manifest["allocation"]
    assert allocation["bits"] <= 6
    assert len({layer["num_bits"] for layer in manifest["layers"]}) == 2
    assert "model.layers.0.mlp.down_proj" not in {row["unit"] for row in allocation["units"]}
    chosen = {row["unit"]: row["chosen"] for row in allocation["units"]}
    for layer in manifest["layers"]:
        if layer["name"] in chosen:
            assert layer["scheme"] == chosen[layer["name"]]


def test_target_bytes_counts_the_whole_checkpoint(
    tiny_models: Callable[[str], Path], make_recipe: Callable[..., Recipe]
) -> None:
    folder = tiny_models("llama")
    uniform = make_plan(make_recipe(folder)).bytes_after
    recipe = make_recipe(folder, f"target_bytes: {uniform + 4000}")
    plan = make_plan(recipe)
    assert recipe.calibration is not None
    found = allocate(plan, recipe, build_calibration(recipe.calibration, plan.source), lambda *_: None)
    size = make_plan(recipe, schemes=found.schemes).bytes_after
    assert uniform < size <= uniform + 4000


def test_the_least_target_that_is_named_is_one_that_can_be_met(
    tiny_models: Callable[[str], Path], make_recipe: Callable[..., Recipe]
) -> None:
    folder = tiny_models("llama")
    for target in ("target_bits", "target_bytes"):
        too_small = make_recipe(folder, f"{target}: 2")
        with pytest.raises(RecipeError) as refused:
            check_target(make_plan(too_small), too_small)
        least = re.search(r"need ([\d.,]+\d)", str(refused.value))
        assert least is not None
        recipe = make_recipe(folder, f"{target}: {least[1].replace(',', '')}")
        check_target(make_plan(recipe), recipe)


def test_a_target_beyond_the_largest_candidates_plans_what_they_take(
    tiny_models: Callable[[str], Path],
    make_recipe: Callable[..., Recipe],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quantkit.allocation.allocate.NUM_WINDOWS", 1)
    candidates = "candidates: [{scheme: W4A16, group_size: 64}, {scheme: W8A16}]"
    recipe = make_recipe(tiny_models("llama"), f"target_bits: 16\n  {candidates}")
    plan = make_plan(recipe)
    assert recipe.calibration is not None
    found = allocate(plan, recipe, build_calibration(recipe.calibration, plan.source), lambda *_: None)
    assert "more than the largest candidates take" in caplog.text
    assert found.bits < 9
    assert make_plan(recipe, schemes=found.schemes).bytes_after <= check_target(plan, recipe) < plan.bytes_before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("target_bits: 1.0", r"target_bits: 1 is too small: the smallest candidates need 4\.\d+\. Raise"),
        ("target_bytes: 100", r"target_bytes: 100 is too small: the smallest candidates need \d{3},\d{3}\. Raise"),
        ("target_bits: 5\n  overrides: [{match: '.*', scheme: W8A16}]", "overrides decide every layer"),
        ("target_bits: 9\n  candidates: [{scheme: W8A16}, {scheme: W8A16}]", "only .* is left for every layer"),
    ],
)
def test_a_target_without_a_choice_is_refused_before_anything_is_measured(
    more: str, message: str, tiny_models: Callable[[str], Path], make_recipe: Callable[..., Recipe]
) -> None:
    recipe = make_recipe(tiny_models("llama"), more)
    stages: set[str] = set()
    with pytest.raises((QuantizationError, RecipeError), match=message):
        quantize_model(recipe, progress=lambda stage, done, total: stages.add(stage))
    assert not stages


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("target_bits: 4.5\n  target_bytes: 100", "target_bits or target_bytes, not both"),
        ("candidates: [{scheme: W4A16}, {scheme: W8A16}]", "give target_bits or target_bytes"),
        ("target_bits: 0", "target_bits"),
        ("target_bits: 5\n  candidates: [{scheme: W8A8}, {scheme: W4A16}]", "16-bit inputs"),
        ("target_bits: 5\n  candidates: [{scheme: W4A16}]", "at least two"),
        ("target_bits: 5\n  candidates: [{scheem: W4A16}, {scheme: W8A16}]", "scheem.*did you mean 'scheme'"),
    ],
)
def test_wrong_targets_are_one_clear_line(more: str, message: str, make_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(RecipeError, match=message):
        make_recipe(Path("m"), more)

"""Tuning against the original: gradients, what is stored, what the checkpoint says afterwards, resumption."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.errors import CalibrationError, RecipeError
from quantkit.pipeline import quantize_model
from quantkit.plan import LayerPlan
from quantkit.primitives import QuantizedWeight, choose_qparams, quantize
from quantkit.recipe import parse_recipe
from quantkit.scheme import PRESETS, QuantScheme
from quantkit.source import open_source
from quantkit.tuning.objective import backward_through_head, kl_rows
from quantkit.tuning.optimize import rate
from quantkit.tuning.reround import solve_layer
from quantkit.tuning.score import Score, change_error
from quantkit.tuning.small_parameter import SmallParameter
from quantkit.tuning.student import Student
from quantkit.tuning.tunable_linear import CodeOffsets, TunableLinear
from quantkit.tuning.windows import read_tuning_sources
from quantkit.verify import verify_checkpoint

SCHEMES = [QuantScheme(4, 32), QuantScheme(4, 32, symmetric=False), QuantScheme(8, -1)]


def _weight(scheme: QuantScheme, dtype: torch.dtype = torch.float32) -> tuple[Tensor, QuantizedWeight]:
    original = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)) + 0.2
    scale, zero_point = choose_qparams(original, scheme, dtype)
    return original, QuantizedWeight(quantize(original, scale, scheme, zero_point), scale, scheme, zero_point)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gradients_are_those_of_autograd_on_the_written_out_product(scheme: QuantScheme) -> None:
    _, weight = _weight(scheme)
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    layer = TunableLinear(weight, torch.randn(6), torch.float32)
    layer(x).square().sum().backward()

    shift = torch.zeros_like(weight.scale, requires_grad=True)
    plain = x.detach().clone().requires_grad_()
    zero = torch.zeros_like(weight.scale) if weight.zero_point is None else weight.zero_point.float()
    columns = 64 // weight.scale.shape[1]
    steps = weight.codes.float() - zero.repeat_interleave(columns, 1)
    dense = steps * (weight.scale * (1 + shift)).repeat_interleave(columns, 1)
    nn.functional.linear(plain, dense, layer.bias).square().sum().backward()
    assert layer.shift.grad is not None
    torch.testing.assert_close(layer.shift.grad, shift.grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(x.grad, plain.grad, rtol=1e-4, atol=1e-3)


def test_8_bit_inputs_with_a_static_scale_are_rounded_and_the_scales_of_weights_follow_them() -> None:
    _, weight = _weight(PRESETS["W8A8_STATIC"])
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    layer = TunableLinear(weight, None, torch.float32, torch.tensor([0.02]))
    seen = (x / 0.02).round().clamp(-128, 127) * 0.02
    torch.testing.assert_close(layer(x), seen @ weight.dequantize().T)
    layer(x).sum().backward()
    assert layer.shift.grad is not None
    torch.testing.assert_close(layer.shift.grad, (weight.dequantize() @ seen.sum(0)).unsqueeze(1), rtol=1e-4, atol=1e-3)


def test_a_layer_multiplies_by_what_would_be_stored() -> None:
    _, weight = _weight(QuantScheme(4, 32), torch.bfloat16)
    layer = TunableLinear(weight, None, torch.bfloat16)
    layer.shift.data.fill_(1e-3)  # less than half a step of bfloat16 for most scales, more for some
    stored = layer.quantized()
    assert stored.scale.dtype == torch.bfloat16
    assert torch.equal(stored.scale, (weight.scale.float() * 1.001).bfloat16())
    assert torch.equal(layer(torch.eye(64)).T, stored.dequantize())


def test_offsets_start_without_moving_a_code_and_follow_the_sign_of_the_gradient() -> None:
    original, weight = _weight(QuantScheme(4, 32))
    offsets = CodeOffsets.start(weight, original)
    layer = TunableLinear(weight, None, torch.float32, offsets=offsets)
    assert torch.equal(layer.codes(), weight.codes)
    offsets.learning_rate = 0.3
    x = torch.eye(64)
    for _ in range(4):  # minimise the outputs' sum: every weight should fall, whatever the sign of its scale
        layer(x.requires_grad_()).sum().backward()
    fallen = layer.quantized().dequantize() < weight.dequantize()
    at_the_end = weight.codes == torch.where(weight.scale.repeat_interleave(32, 1) > 0, -8, 7)
    assert bool((fallen | at_the_end).all())
    assert int((layer.codes().int() - weight.codes).abs().max()) == 1
    assert int(layer.codes().min()) >= -8


def test_frozen_offsets_do_not_move() -> None:
    original, weight = _weight(QuantScheme(4, 32))
    layer = TunableLinear(weight, None, torch.float32, offsets=CodeOffsets.start(weight, original))
    layer(torch.eye(64).requires_grad_()).sum().backward()
    assert torch.equal(layer.codes(), weight.codes)


def test_the_gradient_through_the_head_in_pieces_is_that_of_all_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, target = (torch.randn(300, 16, generator=generator) for _ in range(2))
    head = nn.Linear(16, 50)
    counted = torch.arange(300) % 3 != 0
    loss, gradient = backward_through_head(hidden, target, counted, head, head, 128)
    whole = hidden.clone().requires_grad_()
    with torch.no_grad():
        teacher = head(target)
    expected = nn.functional.kl_div(
        head(whole)[counted].log_softmax(-1), teacher[counted].log_softmax(-1), log_target=True, reduction="batchmean"
    )
    expected.backward()  # type: ignore[no-untyped-call]
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, whole.grad, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(kl_rows(teacher, teacher), torch.zeros(300), atol=1e-6, rtol=0)


def test_a_small_parameter_is_seen_rounded_and_learns_through_the_rounding() -> None:
    start = torch.tensor([1.0, -2.0, 0.5])
    value = SmallParameter(start, torch.bfloat16)
    value.shift.data.fill_(1e-4)
    assert torch.equal(value(), (start + value.unit * 1e-4).bfloat16().float())
    value().sum().backward()
    assert value.shift.grad is not None
    assert torch.allclose(value.shift.grad, torch.full((3,), value.unit))


def test_a_score_is_better_only_if_no_source_got_worse() -> None:
    before = Score({"text": [(10, 2.0)], "chat": [(10, 4.0)]}, {})
    assert before.kl == {"text": 0.2, "chat": 0.4}
    assert Score({"text": [(10, 1.0)], "chat": [(10, 4.0)]}, {}).is_better_than(before)
    assert not Score({"text": [(10, 1.0)], "chat": [(10, 4.1)]}, {}).is_better_than(before)
    assert Score({"text": [(10, 1.0)], "chat": [(10, 2.0)]}, {}).ratio(before) == pytest.approx(0.5)
    assert Score.from_record(json.loads(json.dumps({"kl": before.kl, **before.to_record()}))).kl == before.kl


def test_a_rise_within_its_standard_error_is_none() -> None:
    chat = [(100, 40.0), (100, 44.0), (50, 19.0), (100, 41.0)]
    before = Score({"text": [(100, 20.0)], "chat": chat}, {})
    noisy = [(tokens, total + change) for (tokens, total), change in zip(chat, (2.0, -1.0, 0.6, -1.0), strict=True)]
    risen = [(tokens, total + change) for (tokens, total), change in zip(chat, (2.0, 1.0, 0.6, 1.0), strict=True)]
    assert Score({"text": [(100, 10.0)], "chat": noisy}, {}).kl["chat"] > before.kl["chat"]
    assert Score({"text": [(100, 10.0)], "chat": noisy}, {}).is_better_than(before)
    assert not Score({"text": [(100, 10.0)], "chat": risen}, {}).is_better_than(before)


def test_the_error_of_a_change_is_that_of_a_mean_where_windows_are_alike() -> None:
    changes = [0.3, -0.1, 0.2, 0.4, 0.05]
    before = [(64, 10.0 + number) for number in range(5)]
    after = [(64, total + 64 * change) for (_, total), change in zip(before, changes, strict=True)]
    assert change_error(before, after) == pytest.approx(scipy.stats.sem(changes))
    assert change_error(before[:1], after[:1]) == 0.0


def test_the_rate_rises_and_falls_to_nearly_nothing() -> None:
    rates = [rate(step, 100) for step in range(100)]
    assert rates[0] < rates[4]
    assert rates[-1] < 1e-3
    assert max(rates) <= 1


TEMPLATE = """\
version: 1
model: {model}
calibration:
  sources: [{{kind: text, path: {corpus}}}]
  num_tokens: 512
  window_tokens: 64
quantization:
  scheme: {scheme}
  {more}
  algorithm: {{name: rtn}}
  tuning: {{steps: 12, tokens_per_step: 512, learning_rate: 0.005, codes: {codes}, code_learning_rate: 0.04}}
outputs: {outputs}
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    words = ["river", "stone", "window", "yellow", "seven", "quiet", "morning", "letter", "market", "garden"]
    lines = (" ".join(words[(i * 7 + j * j) % 10] for j in range(9)) + "." for i in range(120))
    path.write_text(" ".join(lines))
    return path


def _recipe(model: Path, corpus: Path, outputs: str, codes: str = "tuned", scheme: str = "W4A16") -> Any:
    more = "group_size: 32" if "4" in scheme.split("A")[0] else ""
    text = TEMPLATE.format(model=model, corpus=corpus, outputs=outputs, codes=codes, scheme=scheme, more=more)
    return parse_recipe(text)


@pytest.mark.parametrize(
    ("family", "codes", "scheme"),
    [
        ("llama", "frozen", "W4A16"),
        ("llama", "tuned", "W4A16"),
        ("qwen2", "tuned", "W4A16_ASYM"),
        ("gemma3", "frozen", "W4A16"),
        ("qwen3", "frozen", "W8A8"),
        ("phi3", "tuned", "W4A16"),
    ],
)
def test_tuning_lowers_the_kl_and_the_checkpoint_holds_what_it_found(
    family: str, codes: str, scheme: str, tiny_models: Callable[[str], Path], corpus: Path, tmp_path: Path
) -> None:
    model = tiny_models(family)
    out = tmp_path / "out"
    manifest = quantize_model(_recipe(model, corpus, f"[{{format: compressed-tensors, path: {out}}}]", codes, scheme))
    tuning = manifest["tuning"]
    first, best = tuning["history"][0], min(tuning["history"], key=lambda entry: entry["ratio"])
    assert tuning["kept_step"] == best["step"] > 0
    assert best["kl"]["corpus.txt"] < first["kl"]["corpus.txt"]
    assert (tuning["changed_codes"] > 0) == (codes == "tuned")
    report = verify_checkpoint(out)  # hashes, and the logits of compressed-tensors' own reader against the probe
    report.raise_for_failure()
    assert not report.skipped


def test_a_bfloat16_model_is_tuned_with_the_weights_that_a_reader_makes(
    make_tiny_model: Callable[..., Path], corpus: Path, tmp_path: Path
) -> None:
    model = make_tiny_model("llama", tmp_path / "model", dtype=torch.bfloat16)
    quantize_model(_recipe(model, corpus, f"[{{format: compressed-tensors, path: {tmp_path / 'out'}}}]"))
    report = verify_checkpoint(tmp_path / "out")  # the probe's logits are of weights that are rounded to bfloat16
    report.raise_for_failure()
    assert not report.skipped


def test_each_source_judges_even_if_two_are_called_the_same(
    tiny_models: Callable[[str], Path], corpus: Path, tmp_path: Path
) -> None:
    """The built-in text and the built-in chat are both `builtin`."""
    recipe = _recipe(tiny_models("llama"), corpus, f"[{{format: compressed-tensors, path: {tmp_path / 'out'}}}]")
    twice = f"[{{kind: text, path: {corpus}, share: 0.5}}, {{kind: text, path: {corpus}, share: 0.5}}]"
    text = recipe.text.replace(f"[{{kind: text, path: {corpus}}}]", twice).replace("steps: 12", "steps: 1")
    tuning = quantize_model(parse_recipe(text))["tuning"]
    labels = ["corpus.txt (sources[0])", "corpus.txt (sources[1])"]
    assert [source["name"] for source in tuning["sources"]] == labels
    for entry in tuning["history"]:
        assert list(entry["kl"]) == list(entry["agreement"]) == labels


def test_all_outputs_hold_the_tuned_weights(tiny_models: Callable[[str], Path], corpus: Path, tmp_path: Path) -> None:
    outputs = ", ".join(
        f"{{format: {name}, path: {tmp_path / name}}}" for name in ("compressed-tensors", "gptq", "awq")
    )
    quantize_model(_recipe(tiny_models("llama"), corpus, f"[{outputs}]", "tuned", "W4A16_ASYM"))
    for name in ("compressed-tensors", "gptq", "awq"):
        verify_checkpoint(tmp_path / name).raise_for_failure()


def test_nothing_better_leaves_the_checkpoint_as_it_was(
    tiny_models: Callable[[str], Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_models("llama")
    recipe = _recipe(model, corpus, f"[{{format: compressed-tensors, path: {tmp_path / 'tuned'}}}]")
    monkeypatch.setattr("quantkit.tuning.score.Score.is_better_than", lambda *_: False)
    manifest = quantize_model(recipe)
    assert manifest["tuning"]["kept_step"] == 0
    plain = recipe.text.replace("tuned}", "tuned}").replace(str(tmp_path / "tuned"), str(tmp_path / "plain"))
    plain = "\n".join(line for line in plain.splitlines() if not line.startswith("  tuning"))
    quantize_model(parse_recipe(plain))
    tuned, untouched = (load_file(tmp_path / name / "model.safetensors") for name in ("tuned", "plain"))
    assert tuned.keys() == untouched.keys()
    assert all(torch.equal(tuned[name], untouched[name]) for name in tuned)


def test_a_loss_that_is_no_number_ends_the_tuning_and_the_record_stays_json(
    tiny_models: Callable[[str], Path],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def diverge(hidden: Tensor, *rest: Any) -> tuple[float, Tensor]:
        loss, gradient = backward_through_head(hidden, *rest)
        return loss, gradient * float("nan")

    monkeypatch.setattr("quantkit.tuning.optimize.backward_through_head", diverge)
    recipe = _recipe(tiny_models("llama"), corpus, f"[{{format: compressed-tensors, path: {tmp_path / 'out'}}}]")
    quantize_model(parse_recipe(recipe.text.replace("steps: 30", "steps: 3")))
    assert "tuning stops after 1 steps: its loss is nan; lower learning_rate" in caplog.text
    text = (tmp_path / "out" / "quantkit.json").read_text()
    assert "NaN" not in text
    assert [entry["step"] for entry in json.loads(text)["tuning"]["history"]] == [0]
    verify_checkpoint(tmp_path / "out").raise_for_failure()


def test_an_interrupted_run_goes_on_and_ends_in_the_same_bytes(
    tiny_models: Callable[[str], Path], corpus: Path, tmp_path: Path
) -> None:
    model, out = tiny_models("llama"), tmp_path / "out"
    recipe = _recipe(model, corpus, f"[{{format: compressed-tensors, path: {out}}}]")
    quantize_model(recipe)
    whole = (out / "model.safetensors").read_bytes()
    shutil.rmtree(out)

    class Stop(Exception):
        pass

    def stop(at: int) -> Callable[[str, int, int], None]:
        def progress(stage: str, done: int, total: int) -> None:
            if stage == "tune" and done == at:
                raise Stop

        return progress

    for at in (3, 11):
        with pytest.raises(Stop):
            quantize_model(recipe, resume=True, progress=stop(at))
    manifest = quantize_model(recipe, resume=True)
    assert (out / "model.safetensors").read_bytes() == whole
    assert [entry["step"] for entry in manifest["tuning"]["history"]] == [0, 2, 4, 6, 8, 10, 12]
    assert not list(out.glob("*.st"))


def test_a_run_that_stops_while_it_writes_the_result_starts_from_the_result(
    tiny_models: Callable[[str], Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = tiny_models("llama"), tmp_path / "out"
    recipe = _recipe(model, corpus, f"[{{format: compressed-tensors, path: {out}}}]")
    quantize_model(recipe)
    whole = (out / "model.safetensors").read_bytes()
    shutil.rmtree(out)
    written = CheckpointWriter.rewrite_layer

    def fail_late(self: CheckpointWriter, layer: LayerPlan, *rest: Any) -> None:
        if layer.block == 1:
            raise KeyboardInterrupt
        written(self, layer, *rest)

    monkeypatch.setattr(CheckpointWriter, "rewrite_layer", fail_late)
    with pytest.raises(KeyboardInterrupt):
        quantize_model(recipe, resume=True)
    monkeypatch.undo()
    stages = set()
    quantize_model(recipe, resume=True, progress=lambda stage, done, total: stages.add(stage))
    assert "tune" not in stages
    assert (out / "model.safetensors").read_bytes() == whole


def _rerounded(model: Path, corpus: Path, out: Path, codes: str = "frozen") -> Any:
    recipe = _recipe(model, corpus, f"[{{format: compressed-tensors, path: {out}}}]", codes)
    return parse_recipe(recipe.text.replace("steps: 12,", "steps: 12, reround: true,"))


def test_codes_are_rounded_anew_to_the_tuned_scales_and_an_interrupted_run_ends_in_the_same_bytes(
    tiny_models: Callable[[str], Path], corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    recipe = _rerounded(tiny_models("llama"), corpus, out)
    tuning = quantize_model(recipe)["tuning"]
    again = tuning["reround"]
    first = min(entry["kl"]["corpus.txt"] for entry in tuning["history"])
    assert again["kept"]  # rounding to nearest is what it is measured against
    assert min(entry["kl"]["corpus.txt"] for entry in again["history"]) < first
    assert 0 < tuning["changed_codes"] < 1
    report = verify_checkpoint(out)
    report.raise_for_failure()
    assert not report.skipped
    whole = (out / "model.safetensors").read_bytes()
    shutil.rmtree(out)

    class Stop(Exception):
        pass

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "tune again" and done == 5:
            raise Stop

    with pytest.raises(Stop):
        quantize_model(recipe, resume=True, progress=progress)
    quantize_model(recipe, resume=True)
    assert (out / "model.safetensors").read_bytes() == whole
    assert not list(out.glob("*.st"))


def test_codes_that_were_rounded_anew_for_nothing_go_back(
    tiny_models: Callable[[str], Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(plan: Any, student: Student, *_: Any) -> None:
        for layer in student.layers.values():
            layer.start = replace(layer.start, codes=torch.zeros_like(layer.start.codes))

    monkeypatch.setattr("quantkit.tuning.apply.reround", spoil)
    tuning = quantize_model(_rerounded(tiny_models("llama"), corpus, tmp_path / "tried"))["tuning"]
    assert not tuning["reround"]["kept"]
    plain = _rerounded(tiny_models("llama"), corpus, tmp_path / "plain").text.replace("reround: true,", "")
    quantize_model(parse_recipe(plain))
    tried, without = (load_file(tmp_path / name / "model.safetensors") for name in ("tried", "plain"))
    assert all(torch.equal(tried[name], without[name]) for name in without)


def test_error_feedback_lowers_the_error_of_the_outputs_for_given_scales() -> None:
    generator = torch.Generator().manual_seed(5)
    mix = torch.eye(64) + 0.3 * torch.randn(64, 64, generator=generator)
    x = torch.randn(500, 64, generator=generator) @ mix
    original, weight = _weight(QuantScheme(4, 32))
    layer = TunableLinear(weight, None, torch.float32)
    layer.shift.data.fill_(0.02)  # as tuning would leave it
    scale = layer.scale()

    def error() -> float:
        return float((x @ (layer.quantized().dequantize() - original).T).square().mean())

    before = error()
    solve_layer(layer, original, (x.T @ x / len(x)).double())
    assert error() < 0.8 * before
    assert torch.equal(layer.scale(), scale)
    assert int(layer.codes().max()) <= 7
    kept = layer.codes().clone()
    solve_layer(layer, original, torch.zeros(64, 64, dtype=torch.float64))  # no column is ever active
    assert torch.equal(layer.codes(), kept)


def _sources(model: Path, corpus: Path, sources: str) -> Any:
    recipe = parse_recipe(
        _recipe(model, corpus, "[{format: gptq, path: o}]").text.replace("tuning: {", f"tuning: {{sources: {sources}, ")
    )
    tuning = recipe.require_quantization().tuning
    assert tuning is not None
    return read_tuning_sources(tuning, recipe.calibration, open_source(model), lambda *_: None)


def test_windows_without_a_token_that_counts_neither_judge_nor_teach(
    tiny_llama_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    chats = tmp_path / "chats.jsonl"
    source = f"[{{kind: jsonl, path: {chats}, count: assistant}}]"
    asked, answered = ({"role": role, "content": "a stone in the river " * 30} for role in ("user", "assistant"))
    chats.write_text(json.dumps({"messages": [asked, answered]}) + "\n")
    (found,) = _sources(tiny_llama_folder, corpus, source)
    rows = [mask for part in (found.training, found.validation) for windows in part for mask in windows.token_mask]
    assert len(rows) > 2
    assert all(mask.any() for mask in rows)
    asked["content"], answered["content"] = "river " * 400, "Yes."
    chats.write_text(json.dumps({"messages": [asked, answered]}) + "\n")
    with pytest.raises(CalibrationError, match=r"tuning source chats.jsonl has 1 windows with tokens that count"):
        _sources(tiny_llama_folder, corpus, source)


def test_what_cannot_be_tuned_is_refused_with_the_reason(corpus: Path) -> None:
    outputs = "[{format: compressed-tensors, path: o}, {format: gguf, type: Q4_K_M, path: o.gguf}]"
    with pytest.raises(RecipeError, match=r"outputs\[1\]\.format: a GGUF file is made from the original weights"):
        _recipe(Path("m"), corpus, outputs)
    text = _rerounded(Path("m"), corpus, Path("o")).text
    with pytest.raises(RecipeError, match=r"quantization\.tuning\.reround: .*the transform awq has rescaled"):
        parse_recipe(text.replace("  algorithm:", "  transforms: [awq]\n  algorithm:"))


def test_wrong_options_are_one_clear_line(tmp_path: Path, corpus: Path) -> None:
    text = TEMPLATE.format(
        model="m", corpus=corpus, outputs="[{format: gptq, path: o}]", codes="soft", scheme="W4A16", more=""
    )
    with pytest.raises(RecipeError, match=r"quantization\.tuning\.codes.*frozen, tuned"):
        parse_recipe(text)
    misspelt = text.replace("codes: soft", "step: 3")
    with pytest.raises(RecipeError, match=r"quantization\.tuning\.step: unknown key.*did you mean 'steps'"):
        parse_recipe(misspelt)
    without = text.replace("soft", "tuned")
    without = without[: without.index("calibration:")] + without[without.index("quantization:") :]
    with pytest.raises(RecipeError, match=r"calibration.*tuning"):
        parse_recipe(without)

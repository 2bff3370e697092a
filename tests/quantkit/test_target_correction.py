"""Aiming at the original model's outputs: the formula, the two streams, what is kept, and what comes of it."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantkit.algorithms.gptq import Options, gptq
from quantkit.algorithms.target_correction import TargetCorrection, correct_target
from quantkit.architectures import find_decoder_blocks
from quantkit.calibration.activations import enter_blocks, leave_blocks
from quantkit.calibration.staged_block import StagedBlock
from quantkit.calibration.statistics import InputStatistics, Wanted
from quantkit.errors import QuantizationError, RecipeError
from quantkit.pipeline import quantize_model
from quantkit.recipe import Recipe, parse_recipe
from quantkit.scheme import QuantScheme

SCHEME = QuantScheme(num_bits=4, group_size=32)
ALWAYS = TargetCorrection(alpha=1.0, damping=1e-3, apply="always")
AUTO = replace(ALWAYS, apply="auto")
TEMPLATE = """\
version: 1
model: {model}
calibration:
  sources: [{{kind: text, path: {corpus}}}]
  num_tokens: 1024
  window_tokens: 64
quantization:
  scheme: W4A16
  group_size: 32
  algorithm: {{name: gptq{options}}}
outputs: [{{format: compressed-tensors, path: {output}}}]
"""


def _streams(tokens: int = 1600, columns: int = 64) -> tuple[Tensor, Tensor]:
    """Inputs of a layer in the quantized model and in the original: what the one lost is in part foreseeable."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    original = torch.randn(tokens, columns, generator=generator) @ mixing
    drift = 0.3 * torch.randn(columns, columns, generator=generator) / columns**0.5
    return original + original @ drift + 0.1 * torch.randn(tokens, columns, generator=generator), original


def _statistics(x: Tensor, original: Tensor, source: Tensor | None = None) -> InputStatistics:
    statistics = InputStatistics(x.shape[1], Wanted(gram=True, held_out=True, original=True))
    held_out = torch.arange(len(x)) % 8 == 7
    statistics.add(x, held_out=held_out)
    statistics.add_original(x, original, held_out=held_out, source=source)
    return statistics


def _weight() -> Tensor:
    return torch.randn(96, 64, generator=torch.Generator().manual_seed(1))


def _error(weight: Tensor, quantized: Tensor, x: Tensor, original: Tensor) -> float:
    return float((x @ quantized.T - original @ weight.T).square().sum() / (original @ weight.T).square().sum())


def test_the_target_is_the_least_squares_answer_to_the_original_outputs() -> None:
    x, original = _streams()
    weight, statistics = _weight(), _statistics(x, original)
    assert statistics.original is not None
    moments = statistics.hessian(), statistics.original.cross()
    full = correct_target(weight, *moments, replace(ALWAYS, damping=1e-9))
    expected = torch.linalg.lstsq(x.double(), original.double() @ weight.double().T).solution.T
    torch.testing.assert_close(full.double(), expected, rtol=1e-4, atol=1e-4)
    half = correct_target(weight, *moments, replace(ALWAYS, damping=1e-9, alpha=0.5))
    torch.testing.assert_close(half, (weight + full) / 2, rtol=1e-4, atol=1e-4)
    damped = correct_target(weight, *moments, replace(ALWAYS, damping=1.0))
    assert 0 < float((damped - weight).norm()) < float((full - weight).norm())
    with pytest.raises(QuantizationError, match=r"target_correction\.damping=1e-09.* Raise it"):
        correct_target(weight, moments[0] - torch.eye(64), moments[1], replace(ALWAYS, damping=1e-9))


def test_moments_are_of_counted_tokens_and_fit_without_the_held_out_ones() -> None:
    x, original = _streams(40)
    mask, held_out = torch.arange(40) % 5 != 0, torch.arange(40) >= 24
    statistics = InputStatistics(64, Wanted(gram=True, held_out=True, original=True))
    windows = (t.view(5, 8, *t.shape[1:]) for t in (x, original, mask, held_out))
    statistics.add_original(*windows, source=torch.tensor([[0], [1], [0], [0], [1]]))
    stream = statistics.original
    assert stream is not None
    assert (stream.num_tokens, stream.num_held_out) == (32, 13)
    moment = lambda rows: ((original - x)[rows].T.double() @ x[rows].double()) / int(rows.sum())  # noqa: E731
    torch.testing.assert_close(stream.cross(), moment(mask), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stream.fit_cross(), moment(mask & ~held_out), rtol=1e-4, atol=1e-5)
    pairs = stream.pairs()
    assert torch.equal(pairs[0][0], x[24:32][mask[24:32]])
    assert torch.equal(pairs[1][1], original[32:][mask[32:]])


@pytest.mark.parametrize("correction", [ALWAYS, AUTO])
def test_the_corrected_layer_is_closer_to_the_original_outputs(correction: TargetCorrection) -> None:
    (x, fresh), (original, fresh_original) = (stream.split(1600) for stream in _streams(2400))
    weight, statistics = _weight(), _statistics(x, original)
    off = gptq(weight, statistics, SCHEME, Options(), torch.float32)
    on = gptq(weight, statistics, SCHEME, Options(target_correction=correction), torch.float32)
    before = _error(weight, off.weight.dequantize(), fresh, fresh_original)
    assert _error(weight, on.weight.dequantize(), fresh, fresh_original) < 0.5 * before
    record = on.stages["target_correction"]
    assert record["kept"] is True
    assert (record["alpha"], record["damping"]) == (1.0, 1e-3)
    assert 0 < record["relative_change"] < 1
    if correction.apply == "auto":
        errors = record["errors"]["sources[0]"]
        assert errors["with"] < 0.5 * errors["without"]
        assert errors["without"] == pytest.approx(before, rel=0.2)


def test_every_source_must_be_better_off_or_the_layer_keeps_its_own_weight() -> None:
    x, original = _streams()
    source = (torch.arange(len(x)) // 8) % 4 // 3  # a fourth of the windows is of the second source
    original[source == 1] = 2 * x[source == 1] - original[source == 1]  # which drifts the other way
    weight, statistics = _weight(), _statistics(x, original, source)
    off = gptq(weight, statistics, SCHEME, Options(), torch.float32)
    on = gptq(weight, statistics, SCHEME, Options(target_correction=AUTO), torch.float32)
    errors = on.stages["target_correction"]["errors"]
    assert errors["sources[0]"]["with"] < errors["sources[0]"]["without"]
    assert errors["sources[1]"]["with"] > errors["sources[1]"]["without"]
    assert on.stages["target_correction"]["kept"] is False
    assert torch.equal(on.weight.codes, off.weight.codes)
    assert torch.equal(on.weight.scale, off.weight.scale)


def test_without_judges_or_with_other_tokens_it_is_off_and_said() -> None:
    x, original = _streams()
    statistics = InputStatistics(64, Wanted(gram=True, held_out=True, original=True))
    statistics.add(x)
    found = gptq(_weight(), statistics, SCHEME, Options(target_correction=ALWAYS), torch.float32)
    assert found.fallbacks == ("target not corrected: the original's stream routes other tokens to this layer",)
    statistics.add_original(x, original)
    found = gptq(_weight(), statistics, SCHEME, Options(target_correction=AUTO), torch.float32)
    assert found.fallbacks == ("target not corrected: there are no held-out windows to judge by",)
    assert found.stages["target_correction"]["kept"] is False


def test_layers_are_left_out_by_the_end_of_their_name_or_an_expression() -> None:
    name = "model.layers.3.mlp.down_proj"
    assert TargetCorrection().covers("model.layers.3.mlp.up_proj")
    for pattern in ("down_proj", "mlp.down_proj", name, r".*\.3\..*"):
        assert not TargetCorrection(skip=(pattern,)).covers(name)
    for pattern in ("proj", "layers.3", "down_proj.*"):
        assert TargetCorrection(skip=(pattern,)).covers(name)
    assert not TargetCorrection(alpha=0.0).covers("model.layers.3.mlp.up_proj")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_original_stream_is_the_original_model_s(family: str, tiny_models: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM

    load = lambda: AutoModelForCausalLM.from_pretrained(tiny_models(family)).eval().requires_grad_(False)  # noqa: E731
    model, reference = load(), load()
    decoder = find_decoder_blocks(model, family)
    token_ids = torch.randint(3, 320, (5, 40), generator=torch.Generator().manual_seed(0))
    batches = enter_blocks(
        model, decoder, [(ids, torch.ones_like(ids, dtype=torch.bool)) for ids in token_ids.split(2)]
    )
    originals = [replace(batch) for batch in batches]
    wanted, crosses, inputs = Wanted(gram=True, original=True), {}, {}
    for index, block in enumerate(decoder.blocks):
        linears = {name: m for name, m in block.named_modules() if isinstance(m, nn.Linear)}
        staged, beside = (StagedBlock(block, index, linears, each) for each in (batches, originals))
        for stage in staged.stages:
            crosses[index, stage[0]] = staged.collect(stage, wanted, beside).original
            beside.pass_by(stage)
            for name in stage:
                linears[name].weight = nn.Parameter(linears[name].weight.round(decimals=1), requires_grad=False)
            staged.solved(stage)
        staged.finish()
        beside.finish()
    for which, stream, owner in (("original", originals, reference), ("quantized", batches, model)):
        for index, name in crosses:
            module = owner.get_submodule(f"{decoder.name}.{index}.{name}")
            module.register_forward_pre_hook(_note(inputs, (which, index, name)))
        with torch.inference_mode():
            expected = owner(token_ids).logits
        found = leave_blocks(
            owner, find_decoder_blocks(owner, family), token_ids, torch.cat([b.hidden for b in stream])
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for (index, name), cross in crosses.items():
        x, original = (inputs[which, index, name].flatten(0, 1).double() for which in ("quantized", "original"))
        torch.testing.assert_close(cross.cross(), (original - x).T @ x / len(x), rtol=1e-3, atol=1e-4)  # type: ignore[union-attr]


def _note(seen: dict[Any, Tensor], key: Any) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.setdefault(key, args[0])

    return hook


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    words = [f"{a} {b} {c}." for a in ("the fox", "a model", "my token", "no rain") for b in ("reads", "jumps", "keeps")
             for c in ("the prompt", "over stones", "in the north", "behind a bridge", "when asked")]  # fmt: skip
    order = torch.randperm(len(words) * 4, generator=torch.Generator().manual_seed(0)) % len(words)
    path.write_text(" ".join(words[i] for i in order))
    return path


@pytest.fixture
def make_recipe(corpus: Path, tmp_path: Path) -> Callable[..., Recipe]:
    def make(model: Path, options: str, output: str, transforms: str = "") -> Recipe:
        correction = f", target_correction: {{{options}}}" if options else ""
        text = TEMPLATE.format(model=model, corpus=corpus, options=correction, output=tmp_path / output)
        return parse_recipe(text.replace("group_size: 32\n", f"group_size: 32\n{transforms}"))

    return make


def _hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.safetensors")}


def test_alpha_zero_is_off_and_skipping_all_is_off(
    tiny_llama_folder: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    for number, options in enumerate(("", "alpha: 0.0", "skip: ['.*']", "apply: always")):
        quantize_model(make_recipe(tiny_llama_folder, options, str(number)))
    off, zero, skipped, on = (_hashes(tmp_path / str(number)) for number in range(4))
    assert off == zero == skipped != on


def test_it_resumes_with_both_streams_to_the_same_bytes(
    tiny_llama_folder: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    options = "apply: always, skip: [o_proj]"
    whole = quantize_model(make_recipe(tiny_llama_folder, options, "whole"))
    corrected = {
        layer["name"].rpartition(".")[2] for layer in whole["layers"] if "target_correction" in layer["stages"]
    }
    assert corrected == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}
    seen: list[int] = []

    def interrupt(stage: str, done: int, total: int) -> None:
        seen.append(done)
        if done == 9:  # in the second block
            raise KeyboardInterrupt

    recipe = make_recipe(tiny_llama_folder, options, "out")
    with pytest.raises(KeyboardInterrupt):
        quantize_model(recipe, resume=True, progress=interrupt)
    seen.clear()
    resumed = quantize_model(recipe, resume=True, progress=lambda stage, done, total: seen.append(done))
    assert seen[0] == 7  # the first block was not done again
    assert resumed["files"] == whole["files"]


@pytest.mark.parametrize("transforms", ["", "  transforms: [awq]\n"])
def test_a_model_of_several_blocks_loses_less(
    transforms: str,
    make_tiny_model: Callable[..., Path],
    make_recipe: Callable[..., Recipe],
    corpus: Path,
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = make_tiny_model("llama", tmp_path / "model", num_hidden_layers=4)
    for name, options in {"off": "", "on": "alpha: 1.0, damping: 0.03, skip: []"}.items():
        quantize_model(make_recipe(folder, options, name, transforms))
    text = AutoTokenizer.from_pretrained(folder)(corpus.read_text()).input_ids
    held_out = torch.tensor(text[-512:]).reshape(8, 64)
    said = {}
    for name in ("model", "off", "on"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        with torch.inference_mode():
            said[name] = model(held_out).logits.log_softmax(-1)
    kl = {name: float((said["model"].exp() * (said["model"] - said[name])).sum(-1).mean()) for name in ("off", "on")}
    assert 0 < kl["on"] < 0.9 * kl["off"]


def test_what_does_not_go_together_is_refused(tmp_path: Path, tiny_llama_folder: Path, corpus: Path) -> None:
    text = TEMPLATE.format(model=tiny_llama_folder, corpus=corpus, options=", target_correction: {}", output="out")
    clip = text.replace("quantization:\n", "quantization:\n  transforms: [{name: awq, clip: true}]\n")
    with pytest.raises(RecipeError, match=r"target_correction.*awq's clip"):
        parse_recipe(clip)
    for options, message in {"alpha: 1.5": "alpha", "damping: 0.0": "damping", "apply: never": "always, auto"}.items():
        with pytest.raises(RecipeError, match=message):
            parse_recipe(text.replace("{}", f"{{{options}}}"))

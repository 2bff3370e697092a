"""Solving a block: a layer's record, static input scales, and that later stages see what an engine computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from quantkit.algorithms import load_algorithm
from quantkit.architectures import DecoderBlocks, find_decoder_blocks
from quantkit.calibration.activations import enter_blocks
from quantkit.calibration.staged_block import StagedBlock
from quantkit.errors import QuantizationError
from quantkit.plan import LayerPlan
from quantkit.primitives import fake_quantize_input
from quantkit.scheme import InputScheme, QuantScheme
from quantkit.solve import SolvedLayer, solve_block

STATIC = QuantScheme(8, -1, input=InputScheme(dynamic=False))
DYNAMIC = QuantScheme(8, -1, input=InputScheme(dynamic=True))
ASYMMETRIC = QuantScheme(4, 32, symmetric=False)


def _load(folder: Path) -> tuple[nn.Module, DecoderBlocks]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    return model, find_decoder_blocks(model, "llama")


def _solve(
    folder: Path, scheme: QuantScheme, algorithm: str, counts: bool = True, **options: Any
) -> tuple[list[SolvedLayer], list[Tensor]]:
    """The first block of a model over six windows; the solved layers and the block's outputs."""
    model, decoder = _load(folder)
    windows = torch.randint(3, 320, (6, 40), generator=torch.Generator().manual_seed(0)).split(2)
    batches = enter_blocks(model, decoder, [(ids, torch.full(ids.shape, counts)) for ids in windows])
    block, prefix = decoder.blocks[0], f"{decoder.name}.0."
    linears = {name: m for name, m in block.named_modules() if isinstance(m, nn.Linear)}
    plans = [LayerPlan(prefix + name, 0, tuple(m.weight.shape), scheme, 1, 1) for name, m in linears.items()]  # type: ignore[arg-type]
    staged = StagedBlock(block, 0, linears, batches)
    solved = solve_block(staged, linears, plans, load_algorithm(algorithm), torch.float32, lambda done: None, **options)
    staged.finish()
    return solved, [batch.hidden for batch in batches]


@pytest.mark.parametrize("scheme", [STATIC, DYNAMIC, ASYMMETRIC], ids=str)
@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_the_stream_that_goes_on_is_what_an_engine_computes(
    scheme: QuantScheme, algorithm: str, tiny_models: Callable[[str], Path]
) -> None:
    solved, outputs = _solve(tiny_models("llama"), scheme, algorithm)
    model, decoder = _load(tiny_models("llama"))
    block = decoder.blocks[0]

    def quantized(scale: Tensor | None) -> Callable[..., Any]:
        assert scheme.input is not None
        return lambda _, args: (fake_quantize_input(args[0], scheme.input, scale),)  # type: ignore[arg-type]

    for layer in solved:
        module = block.get_submodule(layer.plan.name.partition(".0.")[2])
        module.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
        if scheme.input is not None:
            module.register_forward_pre_hook(quantized(layer.input_scale))
    windows = torch.randint(3, 320, (6, 40), generator=torch.Generator().manual_seed(0)).split(2)
    batches = enter_blocks(model, decoder, [(ids, torch.ones_like(ids, dtype=torch.bool)) for ids in windows])
    for batch, found in zip(batches, outputs, strict=True):
        with torch.inference_mode():
            expected = block(batch.hidden, **batch.kwargs[0])
        assert torch.equal(found, expected)


def test_static_scales_cover_the_inputs_and_are_shared_by_a_stage(tiny_models: Callable[[str], Path]) -> None:
    solved, _ = _solve(tiny_models("llama"), STATIC, "rtn", observer="minmax")
    scales = {layer.plan.name.rpartition(".")[2]: layer.input_scale for layer in solved}
    assert all(scale is not None and scale.shape == (1,) and float(scale) > 0 for scale in scales.values())
    for one, other in (("q_proj", "k_proj"), ("q_proj", "v_proj"), ("gate_proj", "up_proj")):
        assert torch.equal(scales[one], scales[other])  # type: ignore[arg-type]
    model, decoder = _load(tiny_models("llama"))
    windows = torch.randint(3, 320, (6, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        normed = decoder.blocks[0].input_layernorm(model.get_input_embeddings()(windows))  # type: ignore[operator]
    assert float(scales["q_proj"]) == pytest.approx(float(normed.abs().max()) / 127.5, rel=1e-6)  # type: ignore[arg-type]
    assert solved[0].record["input_observer"] == "minmax"
    assert solved[0].record["input_scale"] == float(scales["q_proj"])  # type: ignore[arg-type]
    clipped, _ = _solve(tiny_models("llama"), STATIC, "rtn", observer="mse")
    assert any(
        float(mse.input_scale) < float(minmax.input_scale)  # type: ignore[arg-type]
        for mse, minmax in zip(clipped, solved, strict=True)
    )


def test_records_say_what_each_stage_chose(tiny_models: Callable[[str], Path]) -> None:
    solved, _ = _solve(tiny_models("llama"), ASYMMETRIC, "gptq")
    for layer in solved:
        assert set(layer.record["stages"]) == {"judged_by", "scale_refit"}
        assert layer.record["input_tokens"] == 240
        assert 0 < layer.record["relative_output_error"] < 0.05
        assert layer.input_scale is None
        assert layer.weight.zero_point is not None
    plain, _ = _solve(tiny_models("llama"), ASYMMETRIC, "rtn")
    assert plain[0].record["stages"] == {}
    assert plain[0].record["input_tokens"] is None
    assert plain[0].record["relative_output_error"] is None


def test_without_tokens_static_scales_are_an_error_that_names_the_layer(tiny_models: Callable[[str], Path]) -> None:
    with pytest.raises(QuantizationError, match=r"layers\.0\.self_attn\.q_proj: static input scales need calibration"):
        _solve(tiny_models("llama"), STATIC, "rtn", counts=False)

"""Running a model block by block and stage by stage equals running it whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantkit.architectures import ARCHITECTURES, DecoderBlocks, find_decoder_blocks
from quantkit.calibration.activations import enter_blocks, forget_outside, forget_weights, leave_blocks
from quantkit.calibration.staged_block import BlockBatch, StagedBlock
from quantkit.calibration.statistics import Wanted
from quantkit.errors import CalibrationError, SourceError

STAGES = {
    "llama": [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)],
    "qwen2": [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)],
    "qwen3": [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)],
    "mistral": [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)],
    "gemma3": [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)],
    "phi3": [("qkv_proj",), ("o_proj",), ("gate_up_proj",), ("down_proj",)],
    "mixtral": [("q_proj", "k_proj", "v_proj"), ("o_proj",)],
}


GRAM = Wanted(gram=True)


def _load(folder: Path) -> tuple[nn.Module, DecoderBlocks]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    return model, find_decoder_blocks(model, model.config.model_type)


def _linears(block: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in block.named_modules() if isinstance(m, nn.Linear)}


def _batches(token_ids: Tensor, mask: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
    """Two windows a batch."""
    mask = torch.ones_like(token_ids, dtype=torch.bool) if mask is None else mask
    return list(zip(token_ids.split(2), mask.split(2), strict=True))


def _windows(count: int = 5, length: int = 40) -> Tensor:
    return torch.randint(3, 320, (count, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", sorted(STAGES))
def test_stage_by_stage_equals_the_whole_model(family: str, tiny_models: Callable[[str], Path]) -> None:
    model, decoder = _load(tiny_models(family))
    reference, _ = _load(tiny_models(family))
    token_ids = _windows()
    batches = enter_blocks(model, decoder, _batches(token_ids))
    for index, block in enumerate(decoder.blocks):
        linears = _linears(block)
        staged = StagedBlock(block, index, linears, batches)
        assert [tuple(n.rpartition(".")[2] for n in stage) for stage in staged.stages] == STAGES[family]
        for stage in staged.stages:
            staged.collect(stage, GRAM)
            for name in stage:  # "solve" the layer: any change of the weight will do, as long as later stages see it
                new = linears[name].weight * 0.9
                linears[name].weight = nn.Parameter(new, requires_grad=False)
                reference.get_submodule(f"{decoder.name}.{index}.{name}").weight.mul_(0.9)
            staged.solved(stage)
        staged.finish()
    hidden = torch.cat([batch.hidden for batch in batches])
    with torch.inference_mode():
        expected = reference(token_ids).logits
    torch.testing.assert_close(leave_blocks(model, decoder, token_ids, hidden), expected, rtol=1e-4, atol=1e-4)


def test_statistics_are_those_of_the_inputs_after_the_layers_solved_before(tiny_models: Callable[[str], Path]) -> None:
    model, decoder = _load(tiny_models("llama"))
    token_ids = _windows()
    mask = torch.ones_like(token_ids, dtype=torch.bool)
    mask[-1, 25:] = False
    batches = enter_blocks(model, decoder, _batches(token_ids, mask))
    block, linears = decoder.blocks[0], _linears(decoder.blocks[0])
    staged = StagedBlock(block, 0, linears, batches)
    collected = {}
    for stage in staged.stages:
        collected[stage[0]] = staged.collect(stage, GRAM)
        for name in stage:
            linears[name].weight = nn.Parameter(linears[name].weight.round(decimals=1), requires_grad=False)
        staged.solved(stage)
    staged.finish()
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen[name] = args[0][mask].double()

        return hook

    for name in collected:
        linears[name].register_forward_pre_hook(note(name))
    with torch.inference_mode():
        model(token_ids)
    for name, statistics in collected.items():
        assert statistics.num_tokens == int(mask.sum())
        expected = seen[name].T @ seen[name] / int(mask.sum())
        torch.testing.assert_close(statistics.hessian(), expected, rtol=1e-4, atol=1e-5)


def _counting_attention(windows: list[int]) -> Callable[..., Tensor]:
    attend = torch.nn.functional.scaled_dot_product_attention

    def counted(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        windows.append(query.shape[0])
        return attend(query, *args, **kwargs)

    return counted


def test_everything_in_a_block_is_computed_once_a_window(
    tiny_models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, decoder = _load(tiny_models("llama"))
    batches = enter_blocks(model, decoder, _batches(_windows()))
    linears = _linears(decoder.blocks[0])
    rows = dict.fromkeys(linears, 0)

    def count(name: str, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def counted(x: Tensor) -> Tensor:
            rows[name] += x.shape[0] * x.shape[1]
            return forward(x)

        return counted

    attention: list[int] = []
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", _counting_attention(attention))
    staged = StagedBlock(decoder.blocks[0], 0, linears, batches)
    attention.clear()
    for name, module in linears.items():
        module.forward = count(name, module.forward)  # type: ignore[method-assign]
    for stage in staged.stages:
        staged.collect(stage, GRAM)
        staged.solved(stage)
    staged.finish()
    assert rows == dict.fromkeys(linears, 5 * 40)
    assert sum(attention) == 5


def test_solved_layers_see_their_inputs_as_an_engine_does(tiny_models: Callable[[str], Path]) -> None:
    model, decoder = _load(tiny_models("llama"))
    batches = enter_blocks(model, decoder, _batches(_windows()))
    block, linears = decoder.blocks[0], _linears(decoder.blocks[0])
    inputs = [batch.hidden for batch in batches]
    staged = StagedBlock(block, 0, linears, batches)
    for stage in staged.stages:
        staged.solved(stage, lambda x: x.round(decimals=1))
    staged.finish()
    for module in linears.values():
        module.register_forward_pre_hook(lambda _, args: (args[0].round(decimals=1),))
    with torch.inference_mode():
        expected = [block(hidden, **batch.kwargs[0]) for hidden, batch in zip(inputs, batches, strict=True)]
    for batch, hidden in zip(batches, expected, strict=True):
        assert torch.equal(batch.hidden, hidden)


def test_every_eighth_window_that_counts_is_held_out(tiny_models: Callable[[str], Path]) -> None:
    model, decoder = _load(tiny_models("llama"))

    def held_out(count: int, mask: Tensor | None = None) -> list[bool]:
        batches = enter_blocks(model, decoder, _batches(_windows(count, 4), mask))
        return [bool(row.any()) for batch in batches for row in batch.held_out]  # type: ignore[union-attr]

    assert held_out(17) == [i in (7, 15) for i in range(17)]
    assert held_out(3) == [False, False, True]
    assert held_out(1) == [False]
    mask = torch.ones(9, 4, dtype=torch.bool)
    mask[:5] = False
    assert held_out(9, mask) == [False] * 8 + [True]


def test_embeddings_that_are_forgotten_stay_tied(tiny_models: Callable[[str], Path]) -> None:
    model, decoder = _load(tiny_models("gemma3"))
    scale = model.get_input_embeddings().embed_scale  # type: ignore[operator]
    forget_outside(model, decoder)
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    assert embedding.is_meta
    assert embedding is model.get_output_embeddings().weight  # type: ignore[operator]
    assert not scale.is_meta
    assert not any(p.is_meta for p in decoder.blocks[0].parameters())


def test_hooks_are_removed_and_finished_blocks_forget_their_weights(tiny_models: Callable[[str], Path]) -> None:
    model, decoder = _load(tiny_models("qwen3"))
    batches = enter_blocks(model, decoder, _batches(_windows(2)))
    staged = StagedBlock(decoder.blocks[0], 0, _linears(decoder.blocks[0]), batches)
    for stage in staged.stages:
        staged.solved(stage)
    staged.finish()
    again = decoder.blocks[0](batches[0].hidden, **batches[0].kwargs[0])
    assert not torch.equal(again, batches[0].hidden)  # a live block, not a memory of the first pass
    forget_weights([decoder.blocks[0]])
    assert all(p.is_meta for p in decoder.blocks[0].parameters())


def test_not_finite_activations_name_the_layer() -> None:
    block = nn.Sequential()
    block.add_module("fc", nn.Linear(8, 8))
    batch = BlockBatch(torch.full((1, 4, 8), torch.nan), torch.ones(1, 4, dtype=torch.bool), [{}])
    staged = StagedBlock(block, 0, {"fc": block.fc}, [batch])  # type: ignore[dict-item]
    with pytest.raises(CalibrationError, match="block 0, fc: the inputs contain NaN"):
        staged.collect(("fc",), GRAM)


def test_an_unknown_family_is_found_by_walking_the_model() -> None:
    model = nn.Module()
    model.body = nn.Module()
    model.body.h = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model.heads = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])
    found = find_decoder_blocks(model, "unheard-of")
    assert (found.name, len(found.blocks), found.known) == ("body.h", 3, False)
    with pytest.raises(SourceError, match=r"no list of decoder blocks.*llama"):
        find_decoder_blocks(nn.Linear(2, 2), "unheard-of")
    assert "unheard-of" not in ARCHITECTURES

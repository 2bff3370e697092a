"""The steps that a GPU would run, on the CPU in Triton's interpreter: the same tokens as the engine's own CPU path."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is for Linux")
if torch.cuda.is_available():
    pytest.skip("the kernels are compiled here; scripts/gpu_check proves them", allow_module_level=True)

from quantkit.errors import EngineError, UsageError
from quantkit.scheme import PRESETS, QuantScheme
from quantkit.serve import Engine, EngineConfig, SamplingParams
from quantkit.serve.cuda_graphs import DecodeGraphs
from quantkit.serve.device import resolve_device
from quantkit.serve.paged_runner import PagedRunner
from quantkit_kernels.interpreter import interpret_triton

SMALL = {"max_model_len": 48, "max_num_seqs": 4, "kv_block_size": 16, "max_num_batched_tokens": 14}
NUM_TOKENS = 3
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
LENGTHS = (1, 18)  # a decode from the first step on; a chunk of 13 beside it, and one of 5 over a block's edge


def make(folder: Path, **config: Any) -> Engine:
    return Engine(folder, EngineConfig(**{**SMALL, **config}))


def clear_prompts(engine: Engine, random_prompt: Any) -> list[list[int]]:
    """A prompt of each length whose next tokens are the clearest of ten: rounding does not change them."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    found = []
    for length in LENGTHS:
        prompts = [random_prompt(length, 100 * length + seed) for seed in range(10)]
        margins = []
        for completion in engine.generate(prompts, params):
            assert completion.logprobs is not None
            scores = [sorted((score for score, _ in entry.values()), reverse=True) for entry in completion.logprobs]
            margins.append(min(first - second for first, second, *_ in scores))
        found.append(prompts[margins.index(max(margins))])
    return found


def on_both_paths(folder: Path, random_prompt: Any, **config: Any) -> tuple[list[Any], list[Any]]:
    """Greedy tokens of the CPU path and of Triton's bodies."""
    engine = make(folder, **config)
    prompts = clear_prompts(engine, random_prompt)
    wanted = [completion.token_ids for completion in engine.generate(prompts, GREEDY)]
    with interpret_triton():
        engine = make(folder, **config)
        assert isinstance(engine._runner, PagedRunner)
        kernels = engine.describe()["engine"]["kernels"]
        for operation in ("paged_attention", "store_kv_cache", "rms_norm", "rotary_embedding", "sample_tokens"):
            assert f"{operation}: triton (tensors are on cpu)" in kernels
        assert not any("gemm: " in line and "triton" not in line for line in kernels)
        return wanted, [completion.token_ids for completion in engine.generate(prompts, GREEDY)]


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_greedy_tokens_in_float32(family: str, tiny_models: Any, random_prompt: Any) -> None:
    wanted, found = on_both_paths(tiny_models(family), random_prompt)
    assert found == wanted


def test_greedy_tokens_with_an_int8_cache(tiny_models: Any, random_prompt: Any) -> None:
    wanted, found = on_both_paths(tiny_models("gemma3"), random_prompt, kv_cache_dtype="int8")
    assert found == wanted


def test_greedy_tokens_in_bfloat16(tiny_models: Any, random_prompt: Any) -> None:
    wanted, found = on_both_paths(tiny_models("llama"), random_prompt, dtype="bfloat16")
    assert found == wanted


@pytest.mark.parametrize("scheme", [QuantScheme(4, 32), PRESETS["W8A8"], PRESETS["W8A16"]], ids=str)
def test_greedy_tokens_of_packed_weights(
    scheme: QuantScheme, make_tiny_model: Any, write_rtn_checkpoint: Any, random_prompt: Any, tmp_path: Path
) -> None:
    dense = make_tiny_model("llama", tmp_path / "dense", dtype=torch.bfloat16)
    wanted, found = on_both_paths(write_rtn_checkpoint(dense, tmp_path / "packed", scheme=scheme), random_prompt)
    assert found == wanted


def test_rows_are_rounded_where_they_are_made(
    make_tiny_model: Any, write_rtn_checkpoint: Any, random_prompt: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In front of 8-bit products norm and gate give codes; the output of attention alone is rounded by itself."""
    dense = make_tiny_model("qwen2", tmp_path / "dense", dtype=torch.bfloat16, num_hidden_layers=1)
    folder = write_rtn_checkpoint(dense, tmp_path / "packed", scheme=PRESETS["W8A8"])
    made: list[tuple[str, int]] = []
    for operation, user in (
        ("rms_norm_quantize", "quantkit.serve.models.coded_rows"),
        ("silu_mul_quantize", "quantkit.serve.models.coded_rows"),
        ("quantize_per_token", "quantkit_kernels.triton_w8a8"),
    ):
        kernel = getattr(import_module(user), operation)

        def noted(x: Any, *rest: Any, operation: str = operation, kernel: Any = kernel, **options: Any) -> Any:
            made.append((operation, x.shape[0]))
            return kernel(x, *rest, **options)

        monkeypatch.setattr(f"{user}.{operation}", noted)
    prompt, once = random_prompt(5, 1), SamplingParams(temperature=0, max_tokens=1, logprobs=3)
    (wanted,) = make(folder).generate([prompt], once)
    assert not made
    with interpret_triton():
        engine = make(folder)
        assert "rms_norm_quantize: triton (tensors are on cpu)" in engine.describe()["engine"]["kernels"]
        (found,) = engine.generate([prompt], once)
    assert made == [("rms_norm_quantize", 5), ("quantize_per_token", 5), ("rms_norm_quantize", 5),
                    ("silu_mul_quantize", 5)]  # fmt: skip
    assert found.token_ids == wanted.token_ids
    assert found.logprobs is not None
    assert wanted.logprobs is not None
    for token, (score, _) in wanted.logprobs[0].items():
        assert found.logprobs[0][token][0] == pytest.approx(score, abs=0.3)


def test_graphs_of_decode_steps_and_the_scores_of_a_text(tiny_models: Any, random_prompt: Any) -> None:
    """The graphs only call what they were made of; a batch of one is filled up to the size of its graph."""
    folder = tiny_models("llama")
    engine = make(folder)
    prompts = clear_prompts(engine, random_prompt)
    wanted = [completion.token_ids for completion in engine.generate(prompts, GREEDY)]
    text = random_prompt(17, 3)
    scores = engine.score(text)
    with interpret_triton():
        engine = make(folder)
        runner = engine._runner
        assert isinstance(runner, PagedRunner)
        runner.graphs = DecodeGraphs(
            runner.compute, lambda compute: compute,
            max_num_seqs=4, max_context_len=48, kv_block_size=16, device=torch.device("cpu"),
        )  # fmt: skip
        prompts, wanted = [*prompts, prompts[0]], [*wanted, wanted[0]]  # three decode in a graph of four
        assert [completion.token_ids for completion in engine.generate(prompts, GREEDY)] == wanted
        assert (4, 48) in runner.graphs.buckets
        torch.testing.assert_close(engine.score(text), scores, rtol=1e-4, atol=1e-3)


def test_penalties_masks_and_draws_on_the_device(tiny_models: Any, random_prompt: Any) -> None:
    folder, prompt = tiny_models("llama"), random_prompt(3, 5)
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=7, max_tokens=2, ignore_eos=True),
        SamplingParams(temperature=0, logit_bias={17: 100.0}, max_tokens=2, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0, frequency_penalty=1.5, repetition_penalty=1.3, max_tokens=2, ignore_eos=True),
    ]
    wanted = make(folder).generate([prompt] * 3, params)
    with interpret_triton():
        found = make(folder).generate([prompt] * 3, params)
    assert [completion.token_ids for completion in found] == [completion.token_ids for completion in wanted]
    assert found[1].token_ids == (17, 17)
    assert found[1].logprobs is not None
    assert wanted[1].logprobs is not None
    for mine, other in zip(found[1].logprobs, wanted[1].logprobs, strict=True):
        assert mine.keys() == other.keys()
        assert all(abs(mine[token][0] - other[token][0]) < 1e-3 and mine[token][1] == other[token][1] for token in mine)


def test_a_gpu_that_is_not_there() -> None:
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(UsageError, match=r"device=cuda, and (torch finds no GPU|this torch is built without CUDA)"):
        resolve_device(EngineConfig(device="cuda").device)


def test_a_definition_that_the_kernels_do_not_run(tiny_models: Any) -> None:
    from quantkit.serve.models.loader import load_model
    from quantkit.source import open_source

    with pytest.raises(EngineError, match=r"transformers' definition \(as asked\), on the CPU only"):
        load_model(
            open_source(tiny_models("llama")), torch.float32, definition="transformers", device=torch.device("cuda")
        )

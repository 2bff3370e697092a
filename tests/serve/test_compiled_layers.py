"""All layers of a decode step in one compiled call: the numbers of one operation at a time, to the bit, or a reason."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.pipeline import quantize_model
from quantkit.recipe import load_recipe
from quantkit.serve import Engine, EngineConfig, SamplingParams
from quantkit.serve.models.compiled_layers import CompiledLayers, NotCompiledError
from quantkit.serve.models.decoder import Decoder
from quantkit_kernels import dispatch
from quantkit_kernels.native_library import native_blocker

pytestmark = pytest.mark.skipif(native_blocker() is not None, reason=str(native_blocker()))

PROMPTS = [list(range(3, 3 + length)) for length in (1, 5, 19, 40)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
MakeFolder = Callable[..., Path]


@pytest.fixture(autouse=True)
def widened(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On every CPU as on one without bfloat16 or 8-bit products: there the compiled bodies multiply."""
    for name in ("has_bfloat16_matmul", "has_int8_matmul"):
        monkeypatch.setattr(dispatch, name, lambda: False)
    dispatch.choose_linear.cache_clear()
    yield
    dispatch.choose_linear.cache_clear()


@pytest.fixture
def make_folder(make_tiny_model: Callable[..., Path], tmp_path: Path) -> MakeFolder:
    """``make_folder(family, scheme=None, **overrides)``: a bfloat16 model, quantized by rounding if asked."""

    def make(family: str, scheme: str | None = None, **overrides: Any) -> Path:
        folder = make_tiny_model(family, tmp_path / "model", dtype=torch.bfloat16, **overrides)
        if scheme is None:
            return folder
        recipe = tmp_path / "recipe.yaml"
        group = ", group_size: 32" if scheme.startswith("W4") else ""
        recipe.write_text(
            f"version: 1\nmodel: {folder}\n"
            f"quantization: {{scheme: {scheme}{group}, algorithm: {{name: rtn}}}}\n"
            f"outputs: [{{format: compressed-tensors, path: {tmp_path / 'out'}}}]\n"
        )
        quantize_model(load_recipe(recipe))
        return tmp_path / "out"

    return make


def make_engine(folder: Path, **config: Any) -> tuple[Engine, Decoder]:
    settings = {"max_model_len": 256, "max_num_seqs": 8, "enable_prefix_caching": False, "kv_cache_bytes": 4 << 20}
    engine = Engine(folder, EngineConfig(**(settings | config)))
    assert isinstance(engine._loaded.model, Decoder)
    return engine, engine._loaded.model


def answers(engine: Engine) -> list[Any]:
    return [(output.token_ids, output.logprobs) for output in engine.generate(PROMPTS, PARAMS)]


CASES: dict[str, tuple[str, str | None, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", None, {}, {}),
    "biases": ("llama", None, {"attention_bias": True, "mlp_bias": True}, {}),
    "biases beside codes": ("qwen2", "W4A16", {}, {}),
    "head norms": ("qwen3", None, {}, {}),
    "sliding window": ("mistral", None, {}, {}),
    "fused on disk, half turned": ("phi3", None, {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}, {}),
    "norms behind, softcap": ("gemma2", None, {"hidden_activation": "silu", "attn_logit_softcapping": 4.0}, {}),
    "4-bit codes": ("llama", "W4A16", {}, {}),
    "4-bit codes with zero points": ("llama", "W4A16_ASYM", {}, {}),
    "8-bit codes and inputs": ("llama", "W8A8", {}, {}),
    "biases beside 8-bit codes": ("qwen2", "W8A8", {}, {}),
    "8-bit cache": ("llama", None, {}, {"kv_cache_dtype": "int8"}),
    "long contexts in parts": ("llama", None, {"max_position_embeddings": 1024}, {"max_model_len": 1024}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_one_operation_at_a_time(
    name: str, make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, scheme, overrides, config = CASES[name]
    if name.startswith("long"):
        monkeypatch.setitem(globals(), "PROMPTS", [list(range(3, 300)) * 2, [5, 6]])
    engine, decoder = make_engine(make_folder(family, scheme, **overrides), **config)
    assert isinstance(decoder.compiled, CompiledLayers), str(decoder.compiled)
    calls = []
    compute = CompiledLayers.__call__
    monkeypatch.setattr(CompiledLayers, "__call__", lambda *given: calls.append(len(given[1])) or compute(*given))
    found = answers(engine)
    assert calls.count(len(PROMPTS)) >= PARAMS.max_tokens - 2  # all but the prompts' steps
    decoder.compiled = NotCompiledError("switched off by the test")
    calls.clear()
    assert answers(engine) == found
    assert not calls


def test_a_report_says_that_layers_are_one_call_or_why_not(make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder("llama")
    assert (
        "decoder_layers: cpu native, all layers in one call (in steps of one token of each request)"
        in make_engine(folder)[0].describe()["engine"]["kernels"]
    )
    wide, _ = make_engine(folder, dtype="float32")
    assert (
        "decoder_layers: one operation at a time (it multiplies with linear by aten)"
        in wide.describe()["engine"]["kernels"]
    )


@pytest.mark.parametrize(
    ("family", "scheme", "overrides", "reason"),
    [
        ("mixtral", None, {}, "it has experts"),
        ("gemma2", None, {}, "the gate is gelu_tanh, compiled for silu"),
        ("llama", None, {"head_dim": 12}, "heads of 12 numbers, compiled for multiples of 8 up to 256"),
        ("llama", None, {"head_dim": 264}, "heads of 264 numbers, compiled for multiples of 8 up to 256"),
        ("llama", "W8A16", {}, "it multiplies with w8a16_gemm by cpu int8"),
    ],
)
def test_what_has_no_compiled_body_is_computed_as_before(
    family: str, scheme: str | None, overrides: dict[str, Any], reason: str, make_folder: MakeFolder
) -> None:
    engine, decoder = make_engine(make_folder(family, scheme, **overrides))
    assert str(decoder.compiled) == f"decoder_layers: one operation at a time ({reason})"
    assert all(len(token_ids) == PARAMS.max_tokens for token_ids, _ in answers(engine))


def test_two_caches_take_turns(make_folder: MakeFolder) -> None:
    """The call is bound to the cache of its step, not to the first one that it saw."""
    folder = make_folder("llama")
    (engine, decoder), (other, _) = make_engine(folder), make_engine(folder)
    other._runner._model = decoder  # type: ignore[union-attr]
    wanted = answers(engine)
    engine.add_request(PROMPTS[2], PARAMS)
    outputs = [output for _ in range(4) for output in engine.step()]
    assert answers(other) == wanted
    while engine.has_unfinished:
        outputs += engine.step()
    assert [token for output in outputs for token in output.token_ids] == list(wanted[2][0])


@pytest.mark.parametrize("scheme", [None, "W4A16", "W8A8"])
def test_deterministic_computes_decodes_together(
    scheme: str | None, make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, decoder = make_engine(make_folder("llama", scheme), deterministic=True)
    params = SamplingParams(temperature=1.5, seed=7, max_tokens=12, ignore_eos=True, logprobs=2)
    alone = [engine.generate([prompt], params)[0] for prompt in PROMPTS]
    sizes = []
    forward = Decoder.forward
    monkeypatch.setattr(Decoder, "forward", lambda *given: sizes.append(len(given[1])) or forward(*given))
    together = engine.generate(PROMPTS, params)
    assert decoder.decodes_apart
    assert sizes.count(len(PROMPTS)) >= params.max_tokens - 2
    assert [(one.token_ids, one.logprobs) for one in together] == [(one.token_ids, one.logprobs) for one in alone]

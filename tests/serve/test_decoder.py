"""Our decoder against transformers' definition of each family, at one go and in steps, and what is left to that."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.primitives import QuantizedWeight, choose_qparams, quantize
from quantkit.scheme import PRESETS, QuantScheme
from quantkit.serve.attention_metadata import AttentionMetadata
from quantkit.serve.batch import build_batch, uncached_batch
from quantkit.serve.kv_cache import KVCache
from quantkit.serve.models.decoder import Decoder
from quantkit.serve.models.decoder_config import UnknownDecoderError, read_decoder_config
from quantkit.serve.models.linear_reader import StoredLinear, join
from quantkit.serve.models.loader import LoadedModel, load_model
from quantkit.serve.models.projection import Projection
from quantkit.serve.request import Request, SamplingParams
from quantkit.serve.scheduler import Scheduled
from quantkit.source import open_source

SLIDING = ["sliding_attention", "full_attention"]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [4.0, 4.0, 4.0, 4.0], "original_max_position_embeddings": 128, "partial_rotary_factor": 1.0,
}  # fmt: skip
GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 8, "layer_types": SLIDING}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama yarn": ("llama", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "layer_types": SLIDING}),
    "qwen3": ("qwen3", {"attention_bias": True}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0}),
    "gemma3": ("gemma3_text", {**GEMMA, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}}),
    "phi3": ("phi3", {"sliding_window": 8, "original_max_position_embeddings": 128, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "phi3 longrope": ("phi3", {"original_max_position_embeddings": 128, "rope_parameters": LONGROPE}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2_moe": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0]}),
    "qwen3_moe": ("qwen3_moe", {**MOE, "norm_topk_prob": True}),
}  # fmt: skip
COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
TOKENS = tuple(range(3, 96, 4))
Write = Callable[[str], tuple[Path, Any]]


def tiny_config(name: str) -> Any:
    from transformers import CONFIG_MAPPING

    model_type, changes = VARIANTS[name]
    return CONFIG_MAPPING[model_type](**(COMMON | changes))


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """``write(variant)``: the folder of a tiny model and transformers' model itself, both in float32."""
    from transformers import AutoModelForCausalLM

    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            model = AutoModelForCausalLM.from_config(tiny_config(name), attn_implementation="eager").eval()
            generator = torch.Generator().manual_seed(0)
            for parameter in model.parameters():
                parameter.data.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            folder = tmp_path_factory.mktemp("decoder")
            model.save_pretrained(folder)
            made[name] = folder, model
        return made[name]

    return get


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> LoadedModel:
    return load_model(open_source(folder), dtype, **options)


@torch.inference_mode()
def in_chunks(loaded: LoadedModel, tokens: tuple[int, ...], sizes: list[int]) -> Tensor:
    """[T, V] logits of a sequence computed in chunks, each beside a token of another one, over scattered blocks."""
    assert isinstance(loaded.model, Decoder)
    cache = KVCache(loaded.shapes, 40, 2, loaded.dtype)
    other = Request("other", TOKENS[::-1], SamplingParams(), 1, frozenset(), None, None)
    request = Request("request", tokens, SamplingParams(), 1, frozenset(), None, None)
    other.block_table, request.block_table = list(range(1, 40, 2)), list(range(38, 0, -2))
    found, start = [], 0
    for step, size in enumerate(sizes):
        batch = build_batch([Scheduled(other, step, 1), Scheduled(request, start, size)], 2)
        metadata = AttentionMetadata(batch, cache, loaded.model.activation_dtype)
        logits = loaded.model(batch.input_ids, batch.positions, metadata)
        first = batch.cu_seqlens[batch.requests.index(request)]
        found.append(logits[first : first + size])
        start += size
    return torch.cat(found)


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_logits_are_those_of_transformers(name: str, write: Write) -> None:
    folder, model = write(name)
    loaded = load(folder)
    assert isinstance(loaded.model, Decoder)
    assert loaded.kernels[0] == f"definition: quantkit ({VARIANTS[name][0]})"
    wanted = model(torch.tensor([TOKENS])).logits[0]
    assert wanted.std() > 0.5
    batch = uncached_batch([TOKENS])
    found = loaded.model(batch.input_ids, batch.positions, AttentionMetadata(batch, None, torch.float32))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(in_chunks(loaded, TOKENS, [5, 1, 1, 9, 7, 1]), wanted, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_chosen_rows(write: Write) -> None:
    loaded = load(write("llama")[0])
    batch = uncached_batch([TOKENS])
    metadata = AttentionMetadata(batch, None, torch.float32)
    rows = torch.tensor([7, 2])
    every = loaded.model(batch.input_ids, batch.positions, metadata)
    found = loaded.model(batch.input_ids, batch.positions, metadata, rows)
    torch.testing.assert_close(found, every[rows], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["llama tied", "llama", "qwen2_moe"])
def test_weights_are_counted_once_and_keep_their_names(name: str, write: Write) -> None:
    folder, model = write(name)
    loaded = load(folder)
    assert loaded.weight_bytes == sum(parameter.nbytes for parameter in model.parameters())
    names = dict(loaded.model.named_parameters())
    if name != "qwen2_moe":  # whose experts are one tensor for all in transformers
        wanted = dict(model.named_parameters())
        assert names.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in names.items())
        assert loaded.weight_bytes == sum(parameter.nbytes for parameter in loaded.model.parameters())


@pytest.mark.parametrize("has_bfloat16", [False, True])
@torch.inference_mode()
def test_bfloat16(has_bfloat16: bool, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without bfloat16 products: the weights are the same numbers, the activations rounded or not."""
    from quantkit_kernels import dispatch

    monkeypatch.setattr(dispatch, "has_bfloat16_matmul", lambda: has_bfloat16)
    dispatch.choose_linear.cache_clear()
    try:
        folder, model = write("llama tied")
        loaded = load(folder, torch.bfloat16)
        assert isinstance(loaded.model, Decoder)
        assert loaded.model.activation_dtype == (torch.bfloat16 if has_bfloat16 else torch.float32)
        found = in_chunks(loaded, TOKENS, [11, 13]).float()
    finally:
        dispatch.choose_linear.cache_clear()
    rounded = copy.deepcopy(model).bfloat16().float()
    wanted = rounded(torch.tensor([TOKENS])).logits[0]
    allowed = 0.1 if has_bfloat16 else 0.02  # of the spread; keys and values are rounded in both
    assert (found - wanted).std() < allowed * wanted.std()


def quantized(rows: int, scheme: QuantScheme, seed: int) -> QuantizedWeight:
    weight = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
    scale, zero = choose_qparams(weight, scheme, torch.bfloat16)
    return QuantizedWeight(quantize(weight, scale, scheme, zero), scale, scheme, zero)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "scheme",
    [
        QuantScheme(4, 32),
        QuantScheme(4, 32, symmetric=False),
        PRESETS["W8A16"],
        PRESETS["W8A8"],
        PRESETS["W8A8_STATIC"],
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_layers_answer_as_each_alone(scheme: QuantScheme, has_bias: bool, dtype: torch.dtype) -> None:
    static = scheme.input is not None and not scheme.input.dynamic
    layers = [
        StoredLinear(
            name,
            quantized(rows, scheme, rows),
            torch.linspace(-1, 1, rows).to(dtype) if has_bias and name != "k" else None,
            torch.tensor([0.03]) if static else None,
        )
        for name, rows in (("q", 64), ("k", 32), ("v", 48))
    ]
    joined = Projection(layers, dtype)
    assert len(joined.bodies) == 1
    alone = [Projection([layer], dtype) for layer in layers]
    for rows in (1, 5, 40, 200):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).to(dtype)
        wanted = torch.cat([projection(x) for projection in alone], dim=-1)
        tolerance = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(joined(x), wanted, rtol=tolerance, atol=tolerance)


def test_layers_that_are_stored_differently_stay_apart() -> None:
    four, eight = QuantScheme(4, 32), PRESETS["W8A16"]
    static = PRESETS["W8A8_STATIC"]
    dense = StoredLinear("d", torch.ones(16, 64), None)
    layers = [
        StoredLinear("a", quantized(16, four, 1), None),
        StoredLinear("b", quantized(16, four, 2), None),
        StoredLinear("c", quantized(16, eight, 3), None),
        dense,
        StoredLinear("e", quantized(16, static, 4), None, torch.tensor([0.1])),
        StoredLinear("f", quantized(16, static, 5), None, torch.tensor([0.2])),
    ]
    assert [part.name for part in join(layers)] == ["a+b", "c", "d", "e", "f"]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    projection = Projection(layers, torch.float32)
    wanted = torch.cat([Projection([layer], torch.float32)(x) for layer in layers], dim=-1)
    torch.testing.assert_close(projection(x), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("llama", {"hidden_act": "relu"}, "its activation relu is not one of silu, gelu, gelu_pytorch_tanh"),
        ("gemma3", {"use_bidirectional_attention": True}, "its attention is not causal"),
        ("gemma3", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5.0, which gemma3_text does not use"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "its layers are of the type chunked_attention"),
        ("llama", {"rope_parameters": {"rope_type": "proportional"}}, "its rope_type proportional is not one of"),
    ],
)
def test_what_a_configuration_says_that_the_decoder_does_not_do(
    name: str, changes: dict[str, Any], reason: str
) -> None:
    config = tiny_config(name)
    for key, value in changes.items():
        object.__setattr__(config, key, value)
    with pytest.raises(UnknownDecoderError, match=reason):
        read_decoder_config(config)


def test_a_new_key_of_a_known_family_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig

    config = tiny_config("llama")
    known = LlamaConfig.to_dict
    monkeypatch.setattr(LlamaConfig, "to_dict", lambda self: known(self) | {"attention_sinks": None})
    with pytest.raises(UnknownDecoderError, match="its configuration has the key attention_sinks"):
        read_decoder_config(config)


def test_transformers_takes_over_and_the_reason_is_kept(write: Write, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(write("llama")[0], folder)
    forced = load(folder, definition="transformers")
    assert not isinstance(forced.model, Decoder)
    assert forced.kernels[0] == "definition: transformers (as asked)"
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"silu"', '"relu"'))
    fallback = load(folder)
    assert not isinstance(fallback.model, Decoder)
    assert fallback.kernels[0].startswith("definition: transformers (its activation relu is not one of")

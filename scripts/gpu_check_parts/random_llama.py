"""A Llama with random weights as checkpoints: in bfloat16, and rounded to 4 and 8 bits."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quantkit.formats import compressed_tensors
from quantkit.primitives import QuantizedWeight, choose_qparams, quantize
from quantkit.scheme import PRESETS, QuantScheme

ONE_BILLION: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 8192,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
SCHEMES: dict[str, QuantScheme | None] = {
    "bf16": None,
    "W4A16": QuantScheme(num_bits=4, group_size=64),
    "W8A8": PRESETS["W8A8"],
}


def write_checkpoints(folder: Path, *, tiny: bool) -> dict[str, Path]:
    """Name -> folder, for each of `SCHEMES`; the same weights in all, rounded to nearest."""
    import transformers

    settings = {**(TINY if tiny else ONE_BILLION), "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1}
    config = transformers.LlamaConfig(**settings, dtype="bfloat16")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    folders = {name: folder / name for name in SCHEMES}
    stored: dict[str, dict[str, Tensor]] = {name: {} for name in SCHEMES}
    quantized: dict[str, dict[str, QuantScheme]] = {name: {} for name in SCHEMES}
    for name, parameter in model.named_parameters():
        weight = torch.ones(parameter.shape, dtype=torch.bfloat16)
        if "norm" not in name:
            weight = torch.empty(parameter.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        for kind, scheme in SCHEMES.items():
            if scheme is None or not name.endswith("_proj.weight"):
                stored[kind][name] = weight
                continue
            layer = name.removesuffix(".weight")
            scale = choose_qparams(weight.float(), scheme, torch.bfloat16)[0]
            codes = QuantizedWeight(quantize(weight, scale, scheme), scale, scheme)
            stored[kind] |= compressed_tensors.encode(layer, codes)
            quantized[kind][layer] = scheme
    for kind, path in folders.items():
        path.mkdir(parents=True)
        save_file(stored.pop(kind), path / "model.safetensors", metadata={"format": "pt"})
        document = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
        if quantized[kind]:
            document["quantization_config"] = compressed_tensors.quantization_config(quantized[kind], ["lm_head"])
        (path / "config.json").write_text(json.dumps(document))
        _tokenizer(settings["vocab_size"]).save_pretrained(path)
    return folders


def _tokenizer(vocab_size: int) -> Any:
    """Numbers as words; the check gives token ids, and nobody reads the text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<bos>": 0, "<eos>": 1, "<unk>": 2} | {f"w{number}": number for number in range(3, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip

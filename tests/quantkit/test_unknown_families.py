"""Causal decoders that are not in the table: older code of transformers calls its blocks in other ways."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quantkit.architectures import fused_units
from quantkit.errors import RecipeError
from quantkit.pipeline import quantize_model
from quantkit.plan import make_plan
from quantkit.recipe import Recipe, parse_recipe

TOKENS = {"vocab_size": 320, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA_LIKE = SIZES | {"intermediate_size": 128, "max_position_embeddings": 512}
CONFIGS: dict[str, Callable[[], Any]] = {
    # hidden states as a keyword, a tensor in return
    "olmo": lambda: transformers.OlmoConfig(**TOKENS, **LLAMA_LIKE),
    # blocks that return a tuple
    "mpt": lambda: transformers.MptConfig(**TOKENS, d_model=64, n_layers=3, n_heads=4, max_seq_len=512),
    # a tuple, and an argument for each head of each window
    "bloom": lambda: transformers.BloomConfig(**TOKENS, hidden_size=64, n_layer=3, n_head=4),
    # blocks that are given more than hidden states without a name
    "xglm": lambda: transformers.XGLMConfig(
        **TOKENS, d_model=64, num_layers=3, attention_heads=4, ffn_dim=128, max_position_embeddings=512
    ),
}


@pytest.fixture(scope="module")
def unknown(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of a family; made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = folder = tmp_path_factory.mktemp(family)
            torch.manual_seed(0)
            transformers.AutoModelForCausalLM.from_config(CONFIGS[family]()).save_pretrained(folder)
            transformers.AutoTokenizer.from_pretrained(tiny_llama_folder).save_pretrained(folder)
        return made[family]

    return get


def _recipe(model: Path, out: Path, more: str = "") -> Recipe:
    return parse_recipe(
        f"version: 1\nmodel: {model}\n"
        "calibration: {sources: [{kind: text, path: builtin}], num_tokens: 256, window_tokens: 32}\n"
        f"quantization: {{scheme: W8A16, algorithm: {{name: gptq}}{more}}}\n"
        f"outputs: [{{format: compressed-tensors, path: {out}}}]\n"
    )


@pytest.mark.parametrize("family", CONFIGS)
def test_its_blocks_are_run_as_the_model_runs_them(family: str, unknown: Callable[[str], Path], tmp_path: Path) -> None:
    folder = unknown(family)
    manifest = quantize_model(_recipe(folder, tmp_path / "out"))
    assert all(layer["input_tokens"] == 256 for layer in manifest["layers"])
    probe = manifest["probe"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        original = model(torch.tensor([probe["token_ids"]])).logits[0]
    said = torch.tensor(probe["top_logits"])
    expected = original.gather(1, torch.tensor(probe["top_ids"]))
    assert (said - expected).abs().max() < 0.02 * original.abs().max()  # eight bits change this little


def test_layers_that_engines_join_are_told_by_their_names(unknown: Callable[[str], Path], tmp_path: Path) -> None:
    names = ["a.q_proj", "a.k_proj", "b.q_proj", "b.up_proj", "c.mlp.up_proj", "c.mlp.gate_proj", "v_proj"]
    assert fused_units(names) == [("a.q_proj", "a.k_proj"), ("c.mlp.gate_proj", "c.mlp.up_proj")]
    more = ", overrides: [{match: '.*q_proj', scheme: W4A16}]"
    with pytest.raises(RecipeError, match=r"k_proj is W8A16 channel symmetric and .*q_proj is W4A16"):
        make_plan(_recipe(unknown("olmo"), tmp_path / "out", more))

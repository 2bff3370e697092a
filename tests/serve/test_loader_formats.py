"""Every format and scheme that quantkit writes runs in the engine from its packed weights and answers rightly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.errors import CheckpointError
from quantkit.formats import Format
from quantkit.scheme import PRESETS, QuantScheme
from quantkit.serve import Engine, EngineConfig
from quantkit.serve.models.linear_reader import LinearReader
from quantkit.serve.models.projection import Projection
from quantkit.source import open_source
from quantkit_kernels import reference

SMALL = EngineConfig(max_model_len=64, max_num_seqs=4, kv_block_size=16)
SYMMETRIC = QuantScheme(4, 32)
ASYM = QuantScheme(4, 32, symmetric=False)
W8A16_ASYM = QuantScheme(8, 64, symmetric=False)
EVERY_SCHEME = [
    ("compressed-tensors", ASYM),
    ("compressed-tensors", PRESETS["W8A16"]),
    ("compressed-tensors", W8A16_ASYM),
    ("gptq", SYMMETRIC),
    ("gptq", ASYM),
    ("gptq", W8A16_ASYM),
    ("gptq_v2", SYMMETRIC),
    ("awq", SYMMETRIC),
    ("awq", ASYM),
]


@pytest.mark.parametrize(("form", "scheme"), EVERY_SCHEME, ids=lambda value: str(value))
def test_every_format_answers_as_the_dequantized_model(
    form: str, scheme: QuantScheme, tiny_llama_folder: Path, write_rtn_checkpoint: Any, tmp_path: Path
) -> None:
    """The record of the checkpoint holds what the dequantized model said, in transformers and float32."""
    options = (("checkpoint_format", form),) if form == "gptq_v2" else ()
    written = Format(form.removesuffix("_v2"), options)
    folder = write_rtn_checkpoint(tiny_llama_folder, tmp_path / "out", scheme=scheme, form=written)
    engine = Engine(folder, SMALL)
    kernels = engine.describe()["engine"]["kernels"]
    assert sum("_gemm: " in line for line in kernels) == 1
    assert any(f"w{scheme.num_bits}a16_gemm: " in line and " in 8 layers" in line for line in kernels)
    probe = json.loads((folder / "quantkit.json").read_text())["probe"]
    wanted = torch.tensor(probe["top_logits"]) - torch.tensor(probe["logsumexp"]).unsqueeze(1)
    found = engine.score(probe["token_ids"]).gather(1, torch.tensor(probe["top_ids"]))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("static", [False, True])
def test_eight_bit_inputs(static: bool, tiny_llama_folder: Path, write_rtn_checkpoint: Any, tmp_path: Path) -> None:
    """One layer, so that rounding cannot run away: the engine gives what the formula gives for its input."""
    scheme = PRESETS["W8A8_STATIC" if static else "W8A8"]
    input_scale = torch.tensor([0.05]) if static else None
    folder = write_rtn_checkpoint(tiny_llama_folder, tmp_path / "out", scheme=scheme, input_scale=input_scale)
    engine = Engine(folder, SMALL)
    assert engine.describe()["model"]["scheme"] == str(scheme)
    assert any(line.startswith("w8a8_gemm: ") for line in engine.describe()["engine"]["kernels"])
    source = open_source(folder)
    reader = LinearReader(source, source.skeleton())
    layer = Projection([reader.read("model.layers.1.mlp.down_proj")], torch.float32)
    stored = load_file(folder / "model.safetensors")
    codes, scale = (stored[f"model.layers.1.mlp.down_proj.{name}"] for name in ("weight", "weight_scale"))
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x), reference.w8a8_gemm(x, codes, scale, input_scale), rtol=1e-5, atol=1e-4)


def test_permuted_columns_are_refused(tiny_llama_folder: Path, write_rtn_checkpoint: Any, tmp_path: Path) -> None:
    folder = write_rtn_checkpoint(tiny_llama_folder, tmp_path / "out", form=Format("gptq"))

    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj: its columns are permuted \(g_idx\), which is not supported"):
        Engine(folder, SMALL)

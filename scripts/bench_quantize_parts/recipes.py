"""Our own entries of the table, as recipes."""

import json
from pathlib import Path
from typing import Any

GIVEN, BUILTIN = "given", "builtin"  # calibration: the same tokens as the peers; what quantkit carries
# name -> (calibration, quantization)
OURS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "rtn": (None, {"scheme": "W4A16", "algorithm": {"name": "rtn"}}),
    "awq-rtn": (GIVEN, {"scheme": "W4A16", "transforms": ["awq"], "algorithm": {"name": "rtn"}}),
    "gptq": (GIVEN, {"scheme": "W4A16", "algorithm": {"name": "gptq"}}),
    "gptq-corrected": (
        GIVEN,
        {"scheme": "W4A16", "algorithm": {"name": "gptq", "target_correction": {"alpha": 0.5, "apply": "always"}}},
    ),
    "gptq-builtin": (BUILTIN, {"scheme": "W4A16", "algorithm": {"name": "gptq"}}),
    "w8a8": (None, {"scheme": "W8A8", "algorithm": {"name": "rtn"}}),
    "w8a8-static": (GIVEN, {"scheme": "W8A8_STATIC", "algorithm": {"name": "rtn"}}),
    "smoothquant-w8a8": (GIVEN, {"scheme": "W8A8", "transforms": ["smoothquant"], "algorithm": {"name": "rtn"}}),
    "smoothquant-w8a8-static": (
        GIVEN,
        {"scheme": "W8A8_STATIC", "transforms": ["smoothquant"], "algorithm": {"name": "rtn"}},
    ),
    "smoothquant-gptq-w8a8": (
        GIVEN,
        {"scheme": "W8A8", "transforms": ["smoothquant"], "algorithm": {"name": "gptq"}},
    ),
    "smoothquant-gptq-w8a8-static": (
        GIVEN,
        {"scheme": "W8A8_STATIC", "transforms": ["smoothquant"], "algorithm": {"name": "gptq"}},
    ),
}

RUN = """\
import sys, time
start = time.perf_counter()
from quantkit.pipeline import quantize_model
from quantkit.recipe import load_recipe
quantize_model(load_recipe(sys.argv[1]))
print("SECONDS", time.perf_counter() - start)
"""


def recipe(name: str, model: Path, text: Path, out: Path, num_tokens: int, window_tokens: int, group_size: int) -> str:
    """The recipe of one of `OURS`; JSON is YAML too."""
    calibration, quantization = OURS[name]
    document: dict[str, Any] = {"version": 1, "model": str(model)}
    if calibration is not None:
        document["calibration"] = {"num_tokens": num_tokens, "window_tokens": window_tokens}
        if calibration == GIVEN:
            document["calibration"] |= {"sources": [{"kind": "text", "path": str(text)}], "pack_documents": True}
    document["quantization"] = quantization
    if quantization["scheme"] == "W4A16":
        document["quantization"] = quantization | {"group_size": group_size}
    document["outputs"] = [{"format": "compressed-tensors", "path": str(out)}]
    return json.dumps(document)

"""quantkit.json: everything a checkpoint needs to explain itself."""

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from quantkit import __version__
from quantkit.calibration.dataset import CalibrationSet
from quantkit.recipe import Recipe
from quantkit.source import ModelSource

SCHEMA_VERSION = 1
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "compressed-tensors", "numpy")
PROBE_TOP_K = 8


def provenance(recipe: Recipe, source: ModelSource, calibration: CalibrationSet | None) -> dict[str, Any]:
    """The facts that are known before the work starts.

    Returns:
        model, versions, machine and calibration; and ``identity``, the part that must not change between the start of
        a run and its resumption.
    """
    model = {"name": source.name, "revision": source.revision, "fingerprint": source.fingerprint()}
    versions = {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES}
    digest = calibration.to_record() if calibration is not None else None
    return {
        "model": model,
        "versions": versions,
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "calibration": digest,
        "identity": {
            "recipe": recipe.sha256,
            "model": model["fingerprint"],
            "calibration": digest["sha256"] if digest else None,
            "torch": versions["torch"],
            "transformers": versions["transformers"],
        },
    }


def build_manifest(
    recipe: Recipe, facts: dict[str, Any], layers: Sequence[dict[str, Any]], probe: dict[str, Any]
) -> dict[str, Any]:
    """The manifest, all but times and file hashes."""
    return {
        "schema_version": SCHEMA_VERSION,
        "quantkit_version": __version__,
        "recipe": recipe.text,
        "recipe_sha256": recipe.sha256,
        "model": facts["model"],
        "versions": facts["versions"],
        "machine": facts["machine"],
        "seed": recipe.calibration.seed if recipe.calibration else None,
        "calibration": facts["calibration"],
        "layers": list(layers),
        "probe": probe,
    }


def probe_record(token_ids: Tensor, logits: Tensor) -> dict[str, Any]:
    """What the quantized model in memory said to a fixed input, for verify to compare a reader's answer with.

    Args:
        token_ids: [1, T].
        logits: [1, T, V] float32.

    Returns:
        Token ids, and for every position the largest logits with their ids and the log of the sum of all exponentials.
    """
    top = logits[0].topk(min(PROBE_TOP_K, logits.shape[-1]))
    return {
        "token_ids": token_ids[0].tolist(),
        "top_ids": top.indices.tolist(),
        "top_logits": [[round(value, 5) for value in row] for row in top.values.tolist()],
        "logsumexp": [round(value, 5) for value in logits[0].logsumexp(-1).tolist()],
    }

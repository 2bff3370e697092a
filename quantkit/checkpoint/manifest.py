"""quantkit.json: everything a checkpoint needs to explain itself."""

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from torch import Tensor

from quantkit import __version__
from quantkit.calibration.dataset import CalibrationSet
from quantkit.errors import CheckpointError
from quantkit.recipe import Recipe
from quantkit.source import ModelSource

MANIFEST_NAME = "quantkit.json"
SCHEMA_VERSION = 1
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "compressed-tensors", "numpy")
PROBE_TOP_K = 8


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class _Layer(_Record):
    name: str
    relative_output_error: float | None = None
    relative_weight_error: float | None = None


class _Probe(_Record):
    token_ids: list[int]
    top_ids: list[list[int]]
    top_logits: list[list[float]]
    logsumexp: list[float]

    @model_validator(mode="after")
    def _has_one_shape(self) -> "_Probe":
        widths = {len(row) for row in self.top_ids} | {len(row) for row in self.top_logits}
        lengths = {len(self.token_ids), len(self.top_ids), len(self.top_logits), len(self.logsumexp)}
        if len(widths) != 1 or len(lengths) != 1:
            raise ValueError("its lists have different lengths")
        return self


class _Manifest(_Record):
    """What every reader of quantkit.json relies on."""

    schema_version: Literal[1]
    layers: list[_Layer] = []
    model: dict[str, Any] = {}
    files: dict[str, str] = {}
    side_files: dict[str, str] = {}
    rewritten_tensors: list[str] = []
    probe: _Probe | None = None
    calibration: dict[str, Any] | None = None
    versions: dict[str, Any] = {}
    machine: dict[str, Any] = {}
    identity: dict[str, Any] = {}


def manifest_path(output: Path) -> Path:
    """Where an output's manifest lies: quantkit.json in a folder, NAME.quantkit.json beside NAME.gguf."""
    return output.with_suffix(f".{MANIFEST_NAME}") if output.suffix == ".gguf" else output / MANIFEST_NAME


def read_manifest(output: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint's folder or a GGUF file; None if it has none.

    Raises:
        CheckpointError: it cannot be read, has another schema_version, or is not what a run writes.
    """
    path = manifest_path(output)
    if not path.exists():
        return None
    try:
        return _Manifest.model_validate_json(path.read_bytes()).model_dump(exclude_unset=True)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise CheckpointError(f"{path} is broken or of another version: {validation_line(error)}") from error


def validation_line(error: ValidationError) -> str:
    """The first thing that is wrong with a JSON document, and where: ``layers.3.name: Input should be ...``."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]


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
    recipe: Recipe, facts: dict[str, Any], layers: Sequence[dict[str, Any]], probe: dict[str, Any] | None
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
        "identity": facts["identity"],
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

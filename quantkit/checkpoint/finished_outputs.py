"""Whether the outputs of a run are there already, whole and as it wrote them."""

import logging
from pathlib import Path
from typing import Any

from quantkit.checkpoint.manifest import manifest_path, read_manifest
from quantkit.errors import CheckpointError
from quantkit.recipe import CheckpointOutput, Recipe
from quantkit.source.gguf import file_sha256

logger = logging.getLogger(__name__)


def finished_manifest(recipe: Recipe, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The first output's manifest if every output is the finished one of such a run.

    Args:
        recipe: of the run.
        identity: of :func:`quantkit.checkpoint.manifest.provenance`.
    """
    manifests = []
    for output in recipe.outputs:
        try:
            manifest = read_manifest(output.path) or {}
        except CheckpointError:
            return None  # whatever lies there is not the run's; it is kept or replaced like any other folder
        if manifest.get("identity") != identity:
            return None
        damage = _damage(manifest, manifest_path(output.path).parent, isinstance(output, CheckpointOutput))
        if damage is not None:
            logger.warning("%s was finished, but %s; it has to be made again", output.path, damage)
            return None
        manifests.append(manifest)
    return manifests[0]


def _damage(manifest: dict[str, Any], folder: Path, is_checkpoint: bool) -> str | None:
    """Which file of a finished output is no longer as it was written; None if all are."""
    if is_checkpoint and not (folder / "config.json").is_file():  # quantkit.json did not always list it
        return "config.json is missing"
    for name, sha256 in (manifest.get("files", {}) | manifest.get("side_files", {})).items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if file_sha256(folder / name) != sha256:
            return f"{name} has changed"
    return None

"""The manifest beside an exported file: what it was made of and how, and the hashes by which a change shows."""

import json
from pathlib import Path
from typing import Any

from quantkit import __version__
from quantkit.checkpoint.manifest import SCHEMA_VERSION, manifest_path
from quantkit.formats.shards import write_text_durably
from quantkit.source import ModelSource


def write_manifest(path: Path, source: ModelSource, record: dict[str, Any]) -> None:
    """Write NAME.quantkit.json beside NAME.gguf.

    Args:
        path: as the file was asked for, also if it became parts.
        source: its model.
        record: of :func:`quantkit.export_gguf.export.write_plan`.

    Raises:
        OSError: it cannot be written.
    """
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "quantkit_version": __version__,
        "format": "gguf",
        "model": {"name": source.name, "revision": source.revision, "fingerprint": source.fingerprint()},
        "calibration": record.get("calibration"),
        "files": {file["name"]: file["sha256"] for file in record["files"]},
        "gguf": record,
    }
    write_text_durably(manifest_path(path), json.dumps(manifest, indent=1) + "\n")

"""What of a run is finished and where it lies, so that an interrupted run goes on where it stopped."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.formats.shards import write_text_durably

JOURNAL_NAME = "journal.json"
ACTIVATIONS_NAME = "activations-{block}.st"  # not *.safetensors: no reader may take it for weights
SCHEMA_VERSION = 1


@dataclass(slots=True)
class Journal:
    """The state of a run after its last finished decoder block.

    Attributes:
        folder: the run's working folder.
        identity: everything that must be the same for the run to go on: recipe, source, calibration, versions.
        finished_blocks: how many decoder blocks are done.
        written: names of the tensors that are in the shards for certain.
        layers: records of the finished layers.
    """

    folder: Path
    identity: Mapping[str, Any]
    finished_blocks: int = 0
    written: list[str] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def load(cls, folder: Path, identity: Mapping[str, Any]) -> "Journal | None":
        """The journal of an interrupted run, or None if there is none.

        Raises:
            CheckpointError: it belongs to another run (the first difference is named), or cannot be read.
        """
        path = folder / JOURNAL_NAME
        if not path.exists():
            return None
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            before = state["identity"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"cannot read the journal {path}: {error}", fix="Run without --resume") from error
        for key in dict.fromkeys([*identity, *before]):
            if before.get(key) != identity.get(key):
                raise CheckpointError(
                    f"cannot resume: {key} was {before.get(key)} when the run began and is {identity.get(key)} now",
                    fix="Run without --resume to start afresh",
                )
        return cls(folder, identity, state["finished_blocks"], state["written"], state["layers"])

    def record(
        self, block: int, written: Sequence[str], layers: Sequence[dict[str, Any]], hidden: list[Tensor]
    ) -> None:
        """Note that ``block`` is done; the shards must have been flushed before.

        Args:
            block: its index.
            written: tensors that the block added to the shards.
            layers: records of its layers.
            hidden: the block's outputs, one tensor a batch: where the next block starts.
        """
        name = self.folder / ACTIVATIONS_NAME.format(block=block)
        partial = name.with_suffix(".partial")
        save_file({str(i): tensor.contiguous() for i, tensor in enumerate(hidden)}, partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, name)
        self.finished_blocks = block + 1
        self.written += written
        self.layers += layers
        state = {
            "schema_version": SCHEMA_VERSION,
            "identity": dict(self.identity),
            "finished_blocks": self.finished_blocks,
            "written": self.written,
            "layers": self.layers,
        }
        write_text_durably(self.folder / JOURNAL_NAME, json.dumps(state) + "\n")
        (self.folder / ACTIVATIONS_NAME.format(block=block - 1)).unlink(missing_ok=True)

    def hidden(self) -> list[Tensor]:
        """The outputs of the last finished block, one tensor a batch.

        Raises:
            CheckpointError: they are missing or broken.
        """
        path = self.folder / ACTIVATIONS_NAME.format(block=self.finished_blocks - 1)
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot resume: {path} cannot be read ({error})", fix="Run without --resume"
            ) from error
        return [tensors[str(i)] for i in range(len(tensors))]

    def remove(self) -> None:
        """Delete the journal's files; the run is finished."""
        for path in (self.folder / JOURNAL_NAME, *self.folder.glob(ACTIVATIONS_NAME.format(block="*"))):
            path.unlink(missing_ok=True)

"""What of a run is finished and where it lies, so that an interrupted run goes on where it stopped."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.checkpoint.folder import JOURNAL_NAME
from quantkit.checkpoint.manifest import validation_line
from quantkit.errors import CheckpointError
from quantkit.formats.shards import write_text_durably

ACTIVATIONS_NAME = "activations-{block}.st"  # not *.safetensors: no reader may take it for weights
TUNING_STATE_NAME = "tuning.st"  # where tuning stands
TUNING_AGAIN_NAME = "tuning-again.st"  # the same after its codes were rounded anew
TUNING_RESULT_NAME = "tuned.st"  # what it found, before it is written over what is in the shards
SCHEMA_VERSION = 2
AFRESH = "Run without --resume to start afresh"


class _Record(BaseModel):
    """What journal.json must hold."""

    model_config = ConfigDict(strict=True)
    schema_version: Literal[2]
    identity: dict[str, Any]
    finished_blocks: Annotated[int, Field(ge=1)]
    written: list[list[str]]
    layers: list[dict[str, Any]]


@dataclass(slots=True)
class Journal:
    """The state of a run after its last finished decoder block.

    Attributes:
        folder: the run's working folder.
        identity: everything that must be the same for the run to go on: recipe, source, calibration, versions.
        finished_blocks: how many decoder blocks are done.
        written: for each output, names of the tensors that are in its shards for certain.
        layers: records of the finished layers.
    """

    folder: Path
    identity: Mapping[str, Any]
    finished_blocks: int = 0
    written: list[list[str]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def load(
        cls, folder: Path, identity: Mapping[str, Any], *, num_outputs: int = 1, num_blocks: int | None = None
    ) -> "Journal | None":
        """The journal of an interrupted run, or None if there is none.

        Args:
            folder: the run's working folder.
            identity: of this run.
            num_outputs: checkpoints that this run writes.
            num_blocks: decoder blocks of the model; None does not compare them.

        Raises:
            CheckpointError: it belongs to another run (the first difference is named), or it is broken.
        """
        path = folder / JOURNAL_NAME
        if not path.exists():
            return None
        try:
            state = _Record.model_validate_json(path.read_bytes())
        except OSError as error:
            raise CheckpointError(f"cannot read the journal {path}: {error.strerror}", fix=AFRESH) from error
        except ValidationError as error:
            raise CheckpointError(f"cannot read the journal {path}: {validation_line(error)}", fix=AFRESH) from error
        before = state.identity
        for key in dict.fromkeys([*identity, *before]):
            if before.get(key) != identity.get(key):
                raise CheckpointError(
                    f"cannot resume: {key} was {before.get(key)} when the run began and is {identity.get(key)} now",
                    fix=AFRESH,
                )
        if len(state.written) != num_outputs or (num_blocks is not None and state.finished_blocks > num_blocks):
            found = f"{len(state.written)} outputs and {state.finished_blocks} finished blocks"
            raise CheckpointError(f"cannot resume: the journal {path} has {found}, which this run has not", fix=AFRESH)
        return cls(folder, identity, state.finished_blocks, state.written, state.layers)

    def record(
        self, block: int, written: Sequence[Sequence[str]], layers: Sequence[dict[str, Any]], hidden: list[Tensor]
    ) -> None:
        """Note that ``block`` is done; the shards must have been flushed before.

        Args:
            block: its index.
            written: for each output, tensors that the block added to its shards.
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
        before = self.written or [[] for _ in written]
        self.written = [[*old, *new] for old, new in zip(before, written, strict=True)]
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

    def hidden(self, like: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of the last finished block, one tensor a batch.

        Args:
            like: the inputs of the first block, which have the same shapes.

        Raises:
            CheckpointError: they are missing or broken.
        """
        path = self.folder / ACTIVATIONS_NAME.format(block=self.finished_blocks - 1)
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot resume: {path} cannot be read ({error})", fix=AFRESH) from error
        found = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        if found != {str(i): (tensor.shape, tensor.dtype) for i, tensor in enumerate(like)}:
            raise CheckpointError(f"cannot resume: {path} holds other activations than this run has", fix=AFRESH)
        return [tensors[str(i)] for i in range(len(tensors))]

    def remove(self) -> None:
        """Delete the journal's files; the run is finished."""
        tuning = (self.folder / name for name in (TUNING_STATE_NAME, TUNING_AGAIN_NAME, TUNING_RESULT_NAME))
        for path in (self.folder / JOURNAL_NAME, *tuning, *self.folder.glob(ACTIVATIONS_NAME.format(block="*"))):
            path.unlink(missing_ok=True)

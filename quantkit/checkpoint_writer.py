"""One checkpoint of a run: its weight files, config.json, side files and quantkit.json."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.formats.shards import ShardWriter, write_text_durably
from quantkit.plan import OutputPlan, Plan
from quantkit.solve import SolvedLayer


class CheckpointWriter:
    """Writes one output of a plan into its working folder.

    Args:
        plan: of the run.
        output: which of its outputs.
        folder: exists; gets the files.
        written: tensors that an interrupted run has put there; None to start afresh.

    Raises:
        CheckpointError: the disk is too small, or what the interrupted run left does not fit.
    """

    def __init__(self, plan: Plan, output: OutputPlan, folder: Path, written: Sequence[str] | None) -> None:
        self.plan, self.output, self.folder = plan, output, folder
        size = output.output.max_shard_size
        if written is None:
            self._shards = ShardWriter(folder, output.specs, size)
        else:
            self._shards = ShardWriter.resume(folder, output.specs, size, written=written)

    def write_block(self, solved: Sequence[SolvedLayer], prefix: str) -> list[str]:
        """Put codes, scales and rewritten parameters of a block into the shards; returns the tensors' names.

        Args:
            solved: its layers.
            prefix: of the names of its parameters in the model, which still has their values.

        Raises:
            CheckpointError: the format cannot store a layer without loss.
        """
        written: list[str] = []
        for layer in solved:
            name = self.plan.tensor_name(f"{layer.plan.name}.weight").removesuffix(".weight")
            for tensor_name, tensor in self.output.format.encode(name, layer.weight, layer.input_scale).items():
                written.append(self._write(tensor_name, tensor))
        for parameter in sorted(self.plan.rewritten):
            if parameter.startswith(prefix):
                value = self.plan.model.get_parameter(parameter).detach()
                written.append(self._write(self.plan.tensor_name(parameter), value, exact=False))
        return written

    def _write(self, name: str, tensor: Tensor, *, exact: bool = True) -> str:
        """Write a tensor in the type that is planned for it."""
        spec = self.output.specs.get(name)
        if spec is not None and tensor.is_floating_point() and tensor.dtype != spec.dtype:
            stored = tensor.to(spec.dtype)
            if exact and not torch.equal(stored.float(), tensor.float()):
                raise CheckpointError(f"{name} cannot be written in {spec.dtype} without loss")
            tensor = stored
        self._shards.write(name, tensor)
        return name

    def flush(self) -> None:
        """Bring what is written to the disk; after it a journal may say so."""
        self._shards.flush()

    def copy_the_rest(self, progress: Callable[[int], None]) -> None:
        """Everything that is neither quantized nor rewritten goes over byte for byte, also what no model reads.

        Args:
            progress: is called with the bytes of each tensor that is copied.
        """
        for name in self.plan.copied:
            self._shards.copy(name, *self.plan.source.locate(name))
            progress(self.plan.source.tensors[name].nbytes)

    def finish(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Name the weight files and write what stands beside them.

        Args:
            manifest: of the run.

        Returns:
            The manifest of this checkpoint, as written to quantkit.json.
        """
        self._shards.finish()
        source = self.plan.source
        for path in source.side_files():
            target = self.folder / path.relative_to(source.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        config = json.loads((source.folder / "config.json").read_text(encoding="utf-8"))
        quantization = self.output.format.quantization_config(self.plan.schemes, self.plan.ignored)
        config["quantization_config"] = quantization
        write_text_durably(self.folder / "config.json", json.dumps(config, indent=2) + "\n")
        files = {path.name: _sha256(path) for path in sorted(self.folder.glob("*.safetensors"))}
        rewritten = sorted(self.plan.tensor_name(parameter) for parameter in self.plan.rewritten)
        own = manifest | {"format": self.output.format.name, "rewritten_tensors": rewritten, "files": files}
        write_text_durably(self.folder / "quantkit.json", json.dumps(own, indent=1) + "\n")
        return own

    def close(self) -> None:
        """Close the files; temporary ones stay for a journal."""
        self._shards.close()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

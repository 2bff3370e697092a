"""One checkpoint of a run: its weight files, config.json, side files and quantkit.json."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.formats.shards import INDEX_NAME, ShardWriter, write_text_durably
from quantkit.plan import LayerPlan, OutputPlan, Plan
from quantkit.primitives import QuantizedWeight
from quantkit.solve import SolvedLayer
from quantkit.source.gguf import file_sha256
from quantkit.source.skeleton import PACKED_SUFFIXES


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

    def write_block(
        self, solved: Sequence[SolvedLayer], prefix: str, kv_scales: Mapping[str, Tensor] | None = None
    ) -> list[str]:
        """Put codes, scales and rewritten parameters of a block into the shards; returns the tensors' names.

        Args:
            solved: its layers.
            prefix: of the names of its parameters in the model, which still has their values.
            kv_scales: of its keys and values, by their names on disk.

        Raises:
            CheckpointError: the format cannot store a layer without loss.
        """
        written = [self._write(name, scale) for name, scale in (kv_scales or {}).items()]
        for layer in solved:
            name = self.plan.name_on_disk(layer.plan.name)
            for tensor_name, tensor in self.output.format.encode(name, layer.weight, layer.input_scale).items():
                written.append(self._write(tensor_name, tensor))
        for parameter in sorted(self.plan.rewritten):
            if parameter.startswith(prefix):
                value = self.plan.model.get_parameter(parameter).detach()
                written.append(self._write(self.plan.tensor_name(parameter), value, exact=False))
        return written

    def _write(self, name: str, tensor: Tensor, *, exact: bool = True) -> str:
        """Write a tensor in the type that is planned for it."""
        self._shards.write(name, self._stored(name, tensor, exact=exact))
        return name

    def _stored(self, name: str, tensor: Tensor, *, exact: bool) -> Tensor:
        """A tensor in the type that is planned for it."""
        spec = self.output.specs.get(name)
        if spec is None or not tensor.is_floating_point() or tensor.dtype == spec.dtype:
            return tensor
        stored = tensor.to(spec.dtype)
        if exact and not torch.equal(stored.float(), tensor.float()):
            raise CheckpointError(f"{name} cannot be written in {spec.dtype} without loss")
        return stored

    def write_outside(self) -> None:
        """Put the rewritten parameters that are in no decoder block into the shards, as they are in the model."""
        inside = f"{self.plan.decoder.name}."
        for parameter in sorted(self.plan.rewritten):
            if not parameter.startswith(inside):
                value = self.plan.model.get_parameter(parameter).detach()
                self._write(self.plan.tensor_name(parameter), value, exact=False)

    def read_layer(self, layer: LayerPlan) -> tuple[QuantizedWeight, Tensor | None]:
        """A layer that is written already: codes, scales, zero points, and the scale of its inputs if it has one."""
        name = self.plan.name_on_disk(layer.name)
        names = [f"{name}.{suffix}" for suffix in PACKED_SUFFIXES]
        tensors = {tensor: self._shards.read(tensor) for tensor in names if tensor in self.output.specs}
        weight = self.output.format.decode(tensors, name, layer.scheme, layer.shape)
        return weight, tensors.get(f"{name}.input_scale")

    def rewrite_layer(self, layer: LayerPlan, weight: QuantizedWeight, input_scale: Tensor | None) -> None:
        """Put other codes and scales in the place of those that are written.

        Raises:
            CheckpointError: the format cannot store them without loss.
        """
        name = self.plan.name_on_disk(layer.name)
        for tensor_name, tensor in self.output.format.encode(name, weight, input_scale).items():
            self._shards.rewrite(tensor_name, self._stored(tensor_name, tensor, exact=True))

    def read_parameter(self, parameter: str) -> Tensor:
        """A rewritten parameter that is written already, as it is stored."""
        return self._shards.read(self.plan.tensor_name(parameter))

    def rewrite_parameter(self, parameter: str, value: Tensor) -> None:
        """Put another value in the place of a rewritten parameter."""
        name = self.plan.tensor_name(parameter)
        self._shards.rewrite(name, self._stored(name, value, exact=False))

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
        beside = ["config.json", INDEX_NAME]
        for path in source.side_files():
            beside.append(str(path.relative_to(source.folder)))
            target = self.folder / beside[-1]
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        config = json.loads((source.folder / "config.json").read_text(encoding="utf-8"))
        schemes = {self.plan.name_on_disk(name): scheme for name, scheme in self.plan.schemes.items()}
        ignored = [self.plan.engine_name(name) for name in self.plan.ignored]
        has_kv_scales = bool(self.plan.attention)
        quantization = self.output.format.quantization_config(schemes, ignored, kv_scales=has_kv_scales)
        config["quantization_config"] = quantization
        write_text_durably(self.folder / "config.json", json.dumps(config, indent=2) + "\n")
        files = {path.name: file_sha256(path) for path in sorted(self.folder.glob("*.safetensors"))}
        beside_hashes = {name: file_sha256(self.folder / name) for name in beside if (self.folder / name).is_file()}
        rewritten = sorted(self.plan.tensor_name(parameter) for parameter in self.plan.rewritten)
        own = manifest | {"format": self.output.format.name, "rewritten_tensors": rewritten, "files": files}
        own["side_files"] = beside_hashes
        write_text_durably(self.folder / "quantkit.json", json.dumps(own, indent=1) + "\n")
        return own

    def close(self) -> None:
        """Close the files; temporary ones stay for a journal."""
        self._shards.close()

"""Where a model comes from: a hub id, a folder or a .gguf file, read lazily and always as an ordinary folder."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from quantkit.errors import SourceError, looked_in
from quantkit.formats.safetensors_file import TensorSlot
from quantkit.recipe import Recipe, at_keys, name_places
from quantkit.source import experts
from quantkit.source.folder import TOKENIZER_FILES, first_line, load_config, read_shards, side_files
from quantkit.source.gguf import GgufFacts, convert_gguf, file_sha256, read_gguf_facts
from quantkit.source.skeleton import WeightMap, build_skeleton, code_tensors

HUB_WEIGHTS = ("*.safetensors",)
HUB_SIDE_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py", "*.md", "LICENSE*", "NOTICE*")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_IGNORED = ("consolidated*", "original/*", "onnx/*", "openvino/*")  # the same weights a second time


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the header of a shard says about a tensor.

    Attributes:
        dtype: stored type.
        shape: stored shape.
        nbytes: stored bytes.
        shard: name of the file in the model's folder.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    shard: str


class ModelSource:
    """A model that can be read one tensor at a time. Made by `open_source`.

    Attributes:
        name: the hub id, or the name of the folder or file, without the path to it.
        kind: ``hub``, ``folder`` or ``gguf``.
        folder: an ordinary model folder, for each kind.
        revision: commit of the hub's snapshot, None for the other kinds.
        config: the model's configuration, with the quantization_config of an already quantized model.
        tensors: every tensor in the weight files, from their headers.
        quantization: quantization_config of config.json; None for an ordinary model.
        file_bytes: of a .gguf file as it was given; None for the other kinds.
        gguf: what a .gguf file said of itself; None for the other kinds.
    """

    def __init__(
        self,
        name: str,
        kind: Literal["hub", "folder", "gguf"],
        folder: Path,
        revision: str | None = None,
        file_bytes: int | None = None,
        gguf: GgufFacts | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.folder = folder
        self.revision = revision
        self.file_bytes = file_bytes
        self.gguf = gguf
        self.config: PretrainedConfig
        self.config, raw = load_config(folder)
        self.quantization: dict[str, Any] | None = raw.get("quantization_config")
        self._slots = read_shards(folder)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {
                tensor: TensorInfo(slot.spec.dtype, slot.spec.shape, slot.spec.nbytes, shard)
                for tensor, (shard, slot) in self._slots.items()
            }
        )
        self._open_shards: dict[str, Any] = {}
        self._maps: WeakKeyDictionary[nn.Module, WeightMap] = WeakKeyDictionary()

    @cached_property
    def dtype(self) -> torch.dtype:
        """The floating type in which most of the weights are stored, by bytes; scales of codes do not count."""
        counts: dict[torch.dtype, int] = {}
        for name, info in self.tensors.items():
            if info.dtype.is_floating_point and not name.endswith((".scales", ".weight_scale")):
                counts[info.dtype] = counts.get(info.dtype, 0) + info.nbytes
        if not counts:
            raise SourceError(f"the model in {self.folder} has no floating-point tensor")
        return max(counts, key=lambda dtype: counts[dtype])

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored; mapped into memory, so its pages are read when they are used.

        Raises:
            SourceError: no such tensor, or the file has changed.
        """
        if name not in self.tensors:
            raise SourceError(f"the model in {self.folder} has no tensor {name}")
        shard = self.tensors[name].shard
        try:
            if shard not in self._open_shards:
                self._open_shards[shard] = safe_open(self.folder / shard, framework="pt")
            tensor: Tensor = self._open_shards[shard].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise SourceError(f"cannot read {name} from {self.folder / shard}: {error}") from error
        return tensor

    def locate(self, name: str) -> tuple[Path, TensorSlot]:
        """The file that holds a tensor and where in it, for copying its bytes untouched."""
        if name not in self._slots:
            raise SourceError(f"the model in {self.folder} has no tensor {name}")
        shard, slot = self._slots[name]
        return self.folder / shard, slot

    def side_files(self) -> list[Path]:
        """What belongs to the model beside weights, their index and config.json: tokenizer, template, code, card."""
        return side_files(self.folder)

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        try:
            return AutoTokenizer.from_pretrained(self.folder)
        except Exception as error:
            # Each tokenizer reads its files in its own way; whatever it raises, it does not load.
            if not any((self.folder / name).is_file() for name in TOKENIZER_FILES):
                raise SourceError(
                    f"the model in {self.folder} has no tokenizer",
                    fix=f"Copy its files, such as {' or '.join(TOKENIZER_FILES[:2])}, into the folder",
                ) from error
            raise SourceError(f"the model in {self.folder} has no tokenizer that loads: {first_line(error)}") from error

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, loaded once.

        Raises:
            SourceError: there is none, or it does not load.
        """
        return self._tokenizer

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        names = {"config.json", *(info.shard for info in self.tensors.values())}
        for name in sorted(names):
            digest.update(f"{name} {file_sha256(self.folder / name)}\n".encode())
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """SHA-256 over config.json and the weight files (headers and content), in hex; computed once."""
        return self._fingerprint

    def skeleton(self, *, use_linear_experts: bool = False) -> nn.Module:
        """The model of transformers without weights: parameters on meta, buffers real, tied weights tied, eval mode.

        Two weights that the configuration ties stay apart if both are stored and differ, as transformers has it.

        Args:
            use_linear_experts: make experts linear layers, as they are stored, where their layout is understood.
        """
        try:
            model = build_skeleton(self.config, self.dtype)
        except Exception as error:
            # Each family builds its layers in its own way; whatever it raises, this configuration makes no model.
            raise SourceError(f"transformers cannot build the model in {self.folder}: {first_line(error)}") from error
        self._untie_stored_twice(model)
        if use_linear_experts:
            coded = code_tensors({name: info.dtype for name, info in self.tensors.items()})
            dense = (name for name in self.tensors if name.endswith(".weight"))
            experts.use_linear_experts(model, {*dense, *(f"{layer}.weight" for layer in coded)})
        return model

    def _untie_stored_twice(self, model: nn.Module) -> None:
        groups: dict[int, list[str]] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            groups.setdefault(id(value), []).append(name)
        for first, *others in (group for group in groups.values() if len(group) > 1):
            for other in others:
                if not {first, other} <= self.tensors.keys() or torch.equal(self.read(first), self.read(other)):
                    continue
                parent, _, leaf = other.rpartition(".")
                module = model.get_submodule(parent)
                setattr(module, leaf, nn.Parameter(getattr(module, leaf).clone(), requires_grad=False))

    def weight_map(self, model: nn.Module) -> WeightMap:
        """Which tensors on disk make which parameters of ``model``, which must be a skeleton of this source."""
        if model not in self._maps:
            specs = {name: slot.spec for name, (_, slot) in self._slots.items()}
            self._maps[model] = WeightMap(model, specs)
        return self._maps[model]

    def materialize(self, model: nn.Module, *, prefix: str = "", dtype: torch.dtype | None = None) -> None:
        """Give the parameters of ``model`` under ``prefix`` their data; layers stored as codes stay on meta.

        Args:
            model: a skeleton of this source.
            prefix: a module's name, or "" for the whole model.
            dtype: convert to it; None keeps the stored type.

        Raises:
            SourceError: a parameter is not on disk.
        """
        self.weight_map(model).materialize(model, self.read, prefix=prefix, dtype=dtype)
        self.close()

    def close(self) -> None:
        """Unmap what was read; a tensor that is still used keeps its own hold, and reading opens the files again."""
        self._open_shards.clear()


def open_source(model: str | Path, *, revision: str | None = None) -> ModelSource:
    """Open a model without reading its weights.

    Args:
        model: a folder, a .gguf file, or a hub id (from the cache when offline).
        revision: branch, tag or commit of a hub id.

    Raises:
        SourceError: not found, incomplete, broken, or no causal decoder; one line with the file and the fix.
    """
    if not str(model).strip():
        raise SourceError("the model's name is empty", fix="Give a folder, a .gguf file or a hub id such as owner/name")
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise SourceError(f"no such file: {path}{looked_in(path)}", fix="Correct the path")
        folder = convert_gguf(path.resolve())
        facts = read_gguf_facts(path.resolve())
        return ModelSource(path.name, "gguf", folder, file_bytes=path.stat().st_size, gguf=facts)
    if path.is_dir():
        return ModelSource(path.resolve().name, "folder", path.resolve())
    if path.suffix in (".yaml", ".yml"):
        raise SourceError(f"{path} is no model but a recipe by its name", fix=f"Did you mean -r {path}?")
    if path.exists():
        raise SourceError(f"{path} is neither a folder nor a .gguf file")
    name = str(model)
    if isinstance(model, Path) or not HUB_ID.fullmatch(name) or name.startswith("."):
        fix = "Give a folder, a .gguf file or a hub id such as owner/name"
        raise SourceError(f"no such folder: {path}{looked_in(path)}", fix=fix)
    folder = _download(name, revision)
    return ModelSource(name, "hub", folder, folder.name)


def open_model(recipe: Recipe) -> ModelSource:
    """Open the model of a recipe; what is wrong with it has the place of ``model`` in the recipe.

    Raises:
        RecipeError: there is none.
        SourceError: as from `open_source`.
    """
    with name_places(recipe), at_keys(*recipe.model_keys):
        return open_source(recipe.require_model())


def _download(name: str, revision: str | None) -> Path:
    """The snapshot of a hub id: from the network, or from the cache when offline. No folder has its name."""
    missing = f"no such folder: {name}{looked_in(name)}"
    where = f"{name} at revision {revision}" if revision else name
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=[*HUB_WEIGHTS, *HUB_SIDE_FILES],
                ignore_patterns=list(HUB_IGNORED),
            )
        )
    except GatedRepoError as error:
        raise SourceError(
            f"{name} is gated", fix="Accept its terms on the hub and log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{name} has no revision {revision}") from error
    except RepositoryNotFoundError as error:
        raise SourceError(f"{missing}, and no hub model is called so", fix="Check the name") from error
    except HFValidationError as error:
        raise SourceError(f"{missing}, and it is no valid hub id", fix="Check the path") from error
    except LocalEntryNotFoundError as error:
        raise SourceError(
            f"{missing}, and the hub cannot be reached and its cache does not hold {where}",
            fix="Check the path; for a hub id, go online once",
        ) from error
    except (HfHubHTTPError, OSError) as error:
        fix = "Check the path; for a hub id, the network"
        raise SourceError(f"{missing}, and cannot download {where}: {first_line(error)}", fix=fix) from error

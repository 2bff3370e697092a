"""A .gguf file as an ordinary model folder: dequantized to bfloat16 once, cached by the hash of its content."""

import errno
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit.errors import SourceError
from quantkit.formats.gguf.block_types import PLAIN_TYPES
from quantkit.formats.gguf.header import GgufHeader, GgufHeaderError, read_gguf_header
from quantkit.source.folder import first_line

CONVERTER_VERSION = 4  # raise it when the same file would give another folder
HASH_CHUNK_BYTES = 1 << 22
CONFIG_KEY = "quantkit.config"  # config.json of the model that quantkit made a file of
ORIGINAL = "Use the original safetensors model instead"


def cache_folder() -> Path:
    """Where converted models live: $QUANTKIT_CACHE, or ~/.cache/quantkit."""
    return Path(os.environ.get("QUANTKIT_CACHE") or Path.home() / ".cache" / "quantkit")


def file_sha256(path: Path) -> str:
    """Hex digest of a file's content, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """What a .gguf file says of itself and its folder no longer does.

    Attributes:
        types: of its tensors, such as ``F16``.
        pretokenizer: llama.cpp's name.
    """

    types: frozenset[str]
    pretokenizer: str | None

    @property
    def codes(self) -> list[str]:
        """Those of the types that hold codes, sorted; empty for a file of floats."""
        return sorted(self.types - set(PLAIN_TYPES))

    def note(self, name: str) -> str:
        """What who quantizes the file called ``name`` should know."""
        errors = f"; it holds codes ({', '.join(self.codes)}), whose errors stay and count as the original's"
        return f"the weights were read from {name} as bfloat16{errors if self.codes else ''}"


def read_gguf_facts(path: Path) -> GgufFacts:
    """The facts of a .gguf file that was converted, with its other parts.

    Args:
        path: as for :func:`convert_gguf`.
    """
    from quantkit.export_gguf.output_file import all_parts  # that package reads models, and so this module

    headers = [read_gguf_header(part) for part in all_parts(path)]
    types = frozenset(tensor.type_name for header in headers for tensor in header.tensors)
    return GgufFacts(types, headers[0].metadata.get("tokenizer.ggml.pre"))


def convert_gguf(path: Path) -> Path:
    """The folder of the dequantized model: config, bfloat16 weights, tokenizer with its chat template.

    The first call for a content converts it; later calls, also of other processes, find the folder. Files that quantkit
    wrote carry the configuration that they were made of; others are what transformers makes of them.

    Args:
        path: an existing .gguf file, or the first part of one.

    Raises:
        SourceError: broken file, a later part of a split file, an architecture that transformers cannot read, or
            weights or position scaling that would be lost.
    """
    from quantkit.export_gguf.output_file import all_parts  # that package reads models, and so this module

    parts = all_parts(path)
    digest = hashlib.sha256("".join(map(file_sha256, parts)).encode()).hexdigest()
    content = digest if len(parts) > 1 else file_sha256(path)
    folder = cache_folder() / "gguf" / f"{path.stem}-{content[:16]}-v{CONVERTER_VERSION}"
    if folder.is_dir():
        return folder
    header = _read_header(path, len(parts))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    except OSError as error:
        raise SourceError(
            f"cannot write the cache {folder.parent}: {error.strerror}", fix="Set QUANTKIT_CACHE"
        ) from error
    try:
        _write_folder(path, partial, header, parts)
        try:
            partial.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # another process finished the same file first; its folder has the same content
    except (OSError, SafetensorError) as error:
        raise SourceError(f"cannot write {path.name} into the cache {folder.parent}: {first_line(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _read_header(path: Path, num_parts: int) -> GgufHeader:
    """The header of a file that can be converted without loss.

    Raises:
        SourceError: the file is broken, a part of several, or holds something that would be lost.
    """
    try:
        header = read_gguf_header(path)
    except GgufHeaderError as error:
        raise SourceError(f"{path} is no whole GGUF file: {error}", fix="Download it again") from error
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error
    if header.metadata.get("split.no", 0) > 0:
        raise SourceError(f"{path} is a later part of a split GGUF", fix="Give the first part")
    if "general.architecture" not in header.metadata:
        raise SourceError(f"{path} does not say its general.architecture")
    if CONFIG_KEY in header.metadata:
        _check_parts(path, header, num_parts)
        return header
    if header.metadata.get("split.count", 1) > 1:
        raise SourceError(f"{path} is one part of a split GGUF", fix="Merge the parts with llama-gguf-split --merge")
    if any(tensor.name == "rope_freqs.weight" for tensor in header.tensors):
        raise SourceError(
            f"{path} scales its rotary positions by rope_freqs.weight, which transformers ignores", fix=ORIGINAL
        )
    return header


def _check_parts(path: Path, header: GgufHeader, num_parts: int) -> None:
    """All parts of a file of ours are there.

    Raises:
        SourceError: some are not.
    """
    count = header.metadata.get("split.count", 1)
    if count != num_parts:
        raise SourceError(f"{path} is one of {count} parts, and {num_parts} are there", fix="Put all in one folder")


def _write_folder(path: Path, folder: Path, header: GgufHeader, parts: list[Path]) -> None:
    """Dequantize and save as an ordinary model."""
    if CONFIG_KEY in header.metadata:
        from quantkit.export_gguf.read_back import read_back  # as above

        model = read_back(parts, header.metadata)
        tokenizer = _tokenizer(path, header)
    else:
        model, tokenizer = _read_with_transformers(path, header)
    end_of_turn = header.metadata.get("tokenizer.ggml.eot_token_id")
    if end_of_turn is not None:  # chat models stop there; transformers keeps only the end of the text
        known = model.generation_config.eos_token_id
        known = known if isinstance(known, list) else [] if known is None else [known]
        model.generation_config.eos_token_id = sorted({*known, int(end_of_turn)})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(path: Path, header: GgufHeader) -> Any:
    """The file's own tokenizer: transformers would also take tokenizer files that lie beside it."""
    if header.metadata.get("tokenizer.ggml.model") == "t5":
        from quantkit.export_gguf.unigram_reader import read_unigram  # as above

        return read_unigram(header.metadata)
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / path.name
        alone.symlink_to(path.resolve())
        return AutoTokenizer.from_pretrained(folder, gguf_file=path.name)


def _read_with_transformers(path: Path, header: GgufHeader) -> tuple[Any, Any]:
    """Model and tokenizer through transformers' own reader of GGUF."""
    architecture = header.metadata["general.architecture"]
    config_class = getattr(transformers, "GgufConfig", None)  # newer versions could keep the blocks packed
    options = {} if config_class is None else {"quantization_config": config_class(dequantize=True)}
    try:
        with _parsed_once(path):
            model, loading = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.bfloat16, output_loading_info=True, **options
            )
            tokenizer = _tokenizer(path, header)
    except (ValueError, KeyError, IndexError, RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
        raise SourceError(
            f"transformers cannot read {path} (architecture {architecture}): {first_line(error)}", fix=ORIGINAL
        ) from error
    if loading["missing_keys"]:
        raise SourceError(f"{path} has no weights for {min(loading['missing_keys'])}", fix=ORIGINAL)
    stored = sum({id(value): value.numel() for value in model.state_dict(keep_vars=True).values()}.values())
    in_file = sum(tensor.num_elements for tensor in header.tensors)
    if stored != in_file:
        raise SourceError(f"{path} holds {in_file:,} weights, transformers reads {stored:,} of them", fix=ORIGINAL)
    rope = getattr(model.config, "rope_parameters", None) or {}
    scaling = header.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" and rope.get("rope_type", "default") == "default":
        raise SourceError(f"{path} scales its positions ({scaling}), which transformers ignores", fix=ORIGINAL)
    _forget_quantization(model)
    return model, tokenizer


@contextmanager
def _parsed_once(path: Path) -> Iterator[None]:
    """Let transformers share one parsed file and one table of names, which it otherwise builds again at every step.

    The file's metadata is read for the config, the weights and the tokenizer, and the table once per module: most of
    the time of a conversion. Other files are read as ever.
    """
    make_reader, make_names = gguf.GGUFReader, gguf.get_tensor_name_map
    reader = functools.cache(lambda: make_reader(path))

    def shared_reader(file: str | Path, *args: Any, **kwargs: Any) -> Any:
        return reader() if Path(file) == path else make_reader(file, *args, **kwargs)

    try:
        gguf.GGUFReader, gguf.get_tensor_name_map = shared_reader, functools.cache(make_names)
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = make_reader, make_names


def _forget_quantization(model: Any) -> None:
    """Undo the mark "quantized" that transformers leaves on a dequantized GGUF, for which it refuses to save it."""
    model.config.__dict__.pop("quantization_config", None)
    model.__dict__.pop("quantization_method", None)
    model.hf_quantizer, model.is_quantized = None, False

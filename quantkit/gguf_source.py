"""A .gguf file as an ordinary model folder: dequantized to bfloat16 once, cached by the hash of its content."""

import errno
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit.errors import SourceError
from quantkit.formats.gguf.header import GgufHeader, GgufHeaderError, read_gguf_header
from quantkit.model_folder import first_line

CONVERTER_VERSION = 1  # raise it when the same file would give another folder
HASH_CHUNK_BYTES = 1 << 22
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


def convert_gguf(path: Path) -> Path:
    """The folder of the dequantized model: config, bfloat16 weights, tokenizer with its chat template.

    The first call for a content converts it; later calls, also of other processes, find the folder.

    Args:
        path: an existing .gguf file.

    Raises:
        SourceError: broken file, a part of a split file, an architecture that transformers cannot read, or weights or
            position scaling that would be lost.
    """
    folder = cache_folder() / "gguf" / f"{path.stem}-{file_sha256(path)[:16]}-v{CONVERTER_VERSION}"
    if folder.is_dir():
        return folder
    header = _read_header(path)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    except OSError as error:
        raise SourceError(
            f"cannot write the cache {folder.parent}: {error.strerror}", fix="Set QUANTKIT_CACHE"
        ) from error
    try:
        _write_folder(path, partial, header)
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


def _read_header(path: Path) -> GgufHeader:
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
    if "general.architecture" not in header.metadata:
        raise SourceError(f"{path} does not say its general.architecture")
    if header.metadata.get("split.count", 1) > 1:
        raise SourceError(f"{path} is one part of a split GGUF", fix="Merge the parts with llama-gguf-split --merge")
    if any(tensor.name == "rope_freqs.weight" for tensor in header.tensors):
        raise SourceError(
            f"{path} scales its rotary positions by rope_freqs.weight, which transformers ignores", fix=ORIGINAL
        )
    return header


def _write_folder(path: Path, folder: Path, header: GgufHeader) -> None:
    """Dequantize through transformers' own GGUF reader and save as an ordinary model."""
    architecture = header.metadata["general.architecture"]
    config_class = getattr(transformers, "GgufConfig", None)  # newer versions could keep the blocks packed
    options = {} if config_class is None else {"quantization_config": config_class(dequantize=True)}
    try:
        with _parsed_once(path):
            model, loading = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.bfloat16, output_loading_info=True, **options
            )
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
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
    end_of_turn = header.metadata.get("tokenizer.ggml.eot_token_id")
    if end_of_turn is not None:  # chat models stop there; transformers keeps only the end of the text
        known = model.generation_config.eos_token_id
        known = known if isinstance(known, list) else [] if known is None else [known]
        model.generation_config.eos_token_id = sorted({*known, int(end_of_turn)})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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

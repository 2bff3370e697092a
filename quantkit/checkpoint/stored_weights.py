"""Whether the weights of a model are the numbers that they were: none that is not finite, no file that has changed."""

import logging

import torch
from torch import Tensor, nn

from quantkit.checkpoint.manifest import MANIFEST_NAME, read_manifest
from quantkit.errors import CheckpointError, SourceError
from quantkit.source import ModelSource
from quantkit.source.gguf import file_sha256

MAX_BYTES = 4 * 10**9  # of weights that are read once more before they are loaded: seconds

logger = logging.getLogger(__name__)


def check_stored_weights(source: ModelSource) -> None:
    """Refuse a model whose answers would be no answers, before it is loaded.

    Of a checkpoint of quantkit's the weight files are compared with their hashes in quantkit.json, and one that has
    changed is warned of: it may be judged as it is. A model with more than MAX_BYTES is not looked at, and a
    checkpoint says so.

    Raises:
        SourceError: a weight holds NaN or infinity.
    """
    is_small = sum(info.nbytes for info in source.tensors.values()) <= MAX_BYTES
    _check_hashes(source, is_small=is_small)
    for name in source.tensors if is_small else ():
        count = _not_finite(source.read(name))
        if count:
            raise SourceError(
                f"{name} in {source.name} holds {count} values that are not finite (NaN or infinity)",
                fix="Download or make the model again",
            )
    source.close()


def refuse_broken_weights(source: ModelSource, model: nn.Module, prefix: str = "") -> None:
    """NaN or infinity in a weight that is in memory is the source's fault, and it is named.

    Args:
        source: of the model.
        model: a skeleton, parts of which are in memory.
        prefix: the module whose parameters are looked at; "" for all.

    Raises:
        SourceError: there is one.
    """
    names = source.weight_map(model).names
    for name, value in model.get_submodule(prefix).named_parameters(prefix=prefix):
        count = 0 if value.is_meta else _not_finite(value)
        if count:
            raise SourceError(f"{', '.join(names[name])} in {source.name} holds {count} values that are not finite")


def _not_finite(value: Tensor) -> int:
    """How many values are NaN or infinite; 0 for whole numbers."""
    if value.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return 0
    if torch.isfinite(value.sum(dtype=torch.float64)):  # needs no mask as large as the weight
        return 0
    return int((~torch.isfinite(value)).sum())


def _check_hashes(source: ModelSource, *, is_small: bool) -> None:
    try:
        files = (read_manifest(source.folder) or {}).get("files", {})
    except CheckpointError as error:
        logger.warning("%s; its weights are not compared with it", error)
        return
    if files and not is_small:
        what = f"the weights of {source.name} were not compared with {MANIFEST_NAME}"
        logger.warning("%s: they are large, and `quantkit verify` does it", what)
        return
    for name in sorted({info.shard for info in source.tensors.values()} & files.keys()):
        if file_sha256(source.folder / name) != files[name]:
            logger.warning(
                "%s of %s has changed since it was written: its hash is not the one in %s; make the checkpoint again "
                "unless the change is yours",
                *(name, source.name, MANIFEST_NAME),
            )

"""Apply the recipe's transforms to one decoder block, and prove after each fold that the block computes the same."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.architectures import Fold
from quantkit.calibration.staged_block import BlockBatch
from quantkit.calibration.statistics import InputStatistics, Wanted
from quantkit.errors import CalibrationError, QuantizationError
from quantkit.scheme import QuantScheme
from quantkit.transforms import Transform
from quantkit.transforms.folding import applicable_folds, apply_fold

TOLERANCE = 1e-4  # of the block's largest output


def transform_block(
    transforms: Sequence[Transform],
    family: str,
    block: nn.Module,
    index: int,
    schemes: Mapping[str, QuantScheme],
    batches: Sequence[BlockBatch],
    dtype: torch.dtype,
) -> dict[str, list[dict[str, Any]]]:
    """Rescale a block before its layers are solved.

    Args:
        transforms: in the order of the recipe.
        family: model_type of the configuration.
        block: in float32, its weights in memory; changed in place.
        index: position of the block in the model.
        schemes: of the layers that will be quantized, by name in the block.
        batches: the calibration windows at the door of the block; the last one is the probe.
        dtype: storage dtype.

    Returns:
        What was done to each layer's input columns, for the records.

    Raises:
        QuantizationError: a fold changes what the block computes; the line names it.
    """
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in schemes}
    folds = applicable_folds(family, block, schemes)
    for transform in transforms if folds else ():
        statistics = observe(block, index, [fold.consumers[0] for fold in folds], batches, transform.wanted)
        scales: dict[Fold, Tensor] = {}
        for fold in folds:
            found = transform.search(fold, block, schemes, statistics[fold.consumers[0]], transform.options, dtype)
            before = _probe(block, index, batches[-1])
            scales[fold] = apply_fold(fold, block, found.scale, dtype)
            change = float(
                (_probe(block, index, batches[-1]) - before).abs().max() / before.abs().max().clamp(min=1e-30)
            )
            if not change <= TOLERANCE:
                raise QuantizationError(
                    f"{transform.name}: the fold {fold} changes what block {index} computes by {change:.2g} of its "
                    f"largest output (at most {TOLERANCE:g} is rounding)",
                    fix=f"Leave {transform.name} out for this model",
                )
            for name in fold.consumers:
                records[name].append({"name": transform.name, "fold": str(fold), "change": change} | found.record)
        if transform.clip is not None:
            for fold, scale in scales.items():
                transform.clip(fold, block, schemes, statistics[fold.consumers[0]], scale, transform.options)
    return records


def observe(
    block: nn.Module, index: int, names: Sequence[str], batches: Sequence[BlockBatch], wanted: Wanted
) -> dict[str, InputStatistics]:
    """Run the block as it is over all windows and collect the inputs of some layers; nothing is changed.

    Raises:
        CalibrationError: inputs that are not finite.
    """
    modules = {name: block.get_submodule(name) for name in names}
    statistics = {name: InputStatistics(modules[name].in_features, wanted) for name in names}  # type: ignore[arg-type]
    current: list[BlockBatch] = []

    def hook(name: str) -> Callable[..., None]:
        def collect(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            try:
                statistics[name].add(args[0], current[-1].token_mask, current[-1].held_out)
            except FloatingPointError as error:
                raise CalibrationError(f"block {index}, {name}: {error}") from error

        return collect

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in modules.items()]
    try:
        for batch in batches:
            current.append(batch)
            _probe(block, index, batch)
    finally:
        for handle in handles:
            handle.remove()
    return statistics


def _probe(block: nn.Module, index: int, batch: BlockBatch) -> Tensor:
    """The block's output; the batch stays as it is."""
    with torch.inference_mode():
        output = block(batch.hidden, **batch.kwargs[index])
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result

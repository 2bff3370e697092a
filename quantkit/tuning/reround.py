"""Codes anew for scales that were tuned: error feedback on the original weights, a block at a time."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn

from quantkit.algorithms.error_feedback import factor_inverse, solve_columns
from quantkit.calibration.statistics import InputStatistics
from quantkit.plan import Plan
from quantkit.primitives import QuantizedWeight
from quantkit.tuning.student import Student
from quantkit.tuning.tunable_linear import CodeOffsets, TunableLinear
from quantkit.tuning.windows import TuningSource, Windows

DAMP_FRACTION = 0.01
MAX_TOKENS = 32768  # that second moments are of


def training_windows(sources: Sequence[TuningSource]) -> list[Windows]:
    """Windows of all sources that give gradients, evenly taken, of about ``MAX_TOKENS`` tokens."""
    windows = [batch for source in sources for batch in source.training]
    tokens = sum(int(batch.token_mask.sum()) for batch in windows)
    return windows[:: max(1, -(-tokens // MAX_TOKENS))]


@torch.no_grad()
def reround(plan: Plan, student: Student, batches: Sequence[Windows], progress: Callable[[int, int], None]) -> None:
    """Round the original weights to the student's present scales, each layer by the inputs that it sees there.

    The layers of a block are solved side by side; the next block then sees their outputs. A layer that no token
    reaches (an expert) keeps its codes. Scales, zero points and small parameters stay.

    Args:
        plan: of the run, without transforms: an original weight is the target as it is.
        student: gets new codes.
        batches: windows that the layers' inputs come from.
        progress: is called with (blocks done, all blocks).

    Raises:
        QuantizationError: a second moment that cannot be factored.

    Source: arXiv:2210.17323, Algorithm 1, as in `quantkit.algorithms.gptq`.
    """
    assert not plan.transforms, "an original weight is no target beside rescaled columns"
    entered = [student.enter(windows.token_ids, windows.token_mask) for windows in batches]
    for index in range(len(plan.decoder.blocks)):
        layers = {layer.name: student.layers[layer.name] for layer in plan.in_block(index)}
        statistics = {name: InputStatistics(layer.in_features) for name, layer in layers.items()}
        for batch in entered:
            with ExitStack() as watching:
                for name, layer in layers.items():
                    hook = layer.register_forward_pre_hook(_counter(statistics[name], batch.token_mask))
                    watching.callback(hook.remove)
                student.block(index, batch, batch.hidden)
        for name, layer in layers.items():
            if statistics[name].num_tokens:
                original = plan.source.read(f"{plan.name_on_disk(name)}.weight").float()
                solve_layer(layer, original, statistics[name].hessian())
        for batch in entered:
            batch.hidden = student.block(index, batch, batch.hidden)
        progress(index + 1, len(plan.decoder.blocks))


def _counter(statistics: InputStatistics, token_mask: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    """A hook that counts a layer's inputs; those of an expert, [tokens, K], are its own tokens."""

    def count(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        statistics.add(inputs[0], token_mask if inputs[0].dim() > 2 else None)

    return count


def solve_layer(layer: TunableLinear, original: Tensor, hessian: Tensor) -> None:
    """Give a layer new codes for its present scales.

    Args:
        layer: keeps its codes if all of its inputs are zero.
        original: [N, K] float32 weight.
        hessian: [K, K] float64 second moment of the inputs; changed.
    """
    diagonal = hessian.diagonal().clone()
    dead = diagonal <= 0  # an error in such a column costs nothing
    if bool(dead.all()):
        return
    hessian[dead, dead] = diagonal[~dead].mean()
    order = torch.argsort(diagonal, descending=True, stable=True)
    factor, _ = factor_inverse(hessian, order, DAMP_FRACTION)
    start = layer.start
    target = original.masked_fill(dead, 0.0)
    codes = solve_columns(target, layer.scale(), start.zero_point, factor, order, start.scheme)
    layer.start = replace(start, codes=codes)
    if layer.offsets is not None:
        solved = QuantizedWeight(codes, layer.scale(), start.scheme, start.zero_point)
        layer.offsets = CodeOffsets.start(solved, original)

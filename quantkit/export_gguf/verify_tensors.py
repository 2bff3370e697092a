"""The tensors of a file beside the weights that they were made of: plain ones to the bit, codes block by block.

How far a block of codes may be off follows from its type. Its weights ask for a grid, whose steps lie between the
largest and the smallest of them; rounding to nearest is off by half a step at most, and by a whole one where the grid
has no level for the largest weight of the other sign. What importance and error feedback gain elsewhere they take from
weights that matter less: these are moved by some steps, and cut by some of the range.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from quantkit.export_gguf.mixes import is_quantizable
from quantkit.export_gguf.plan import ExportPlan
from quantkit.export_gguf.tensors import ExportTensor, ParameterReader
from quantkit.formats.gguf.block_types import BLOCK_TYPES, BlockType
from quantkit.verify import VerifyReport

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ROUNDED_STEPS, ROUNDED_MEAN = 1.0, 0.6  # root mean square error of a block and of a tensor; rounding gives about 0.3
WEIGHTED_STEPS, WEIGHTED_CUT, WEIGHTED_MEAN = 2.0, 0.1, 1.2  # steps, and a part of the range
MOST_OF_A_BLOCK = 0.8  # of its norm; a block that is lost has 1
SMALLEST_FACTOR = 2.0**-24  # of float16
ROPE_TOLERANCE = 1e-6  # relative: powers are rounded as the machine's library does it


def check_tensors(report: VerifyReport, plan: ExportPlan, parts: list[Path], *, weighted: bool) -> None:
    """Add the checks ``every_tensor`` and ``tensors``.

    Args:
        report: gets the checks.
        plan: of the model.
        parts: all files, in order.
        weighted: whether importance or error feedback may have had a say in rounding.
    """
    stored = {tensor.name: tensor for part in parts for tensor in gguf.GGUFReader(part).tensors}
    shapes = {tensor.name: tensor.shape for tensor in plan.tensors}
    shapes |= {name: tuple(value.shape) for name, value in plan.rope.items()}
    problems = [f"{name} is missing" for name in sorted(shapes.keys() - stored.keys())]
    problems += [f"{name} is unknown" for name in sorted(stored.keys() - shapes.keys())]
    both = [name for name in shapes if name in stored]
    found = {name: tuple(int(size) for size in stored[name].shape)[::-1] for name in both}
    problems += [f"{n} has the shape {found[n]}, the model's {shapes[n]}" for n in both if found[n] != shapes[n]]
    report.add("every_tensor", problems, f"{len(shapes)} tensors have the model's shapes")
    comparable = [name for name in both if found[name] == shapes[name]]
    _check_values(report, plan, {name: stored[name] for name in comparable}, weighted)


def _check_values(report: VerifyReport, plan: ExportPlan, stored: Mapping[str, Any], weighted: bool) -> None:
    problems, worst = [], 0.0
    for name, value in plan.rope.items():
        if name in stored and not torch.allclose(_decode(stored[name]), value, rtol=ROPE_TOLERANCE, atol=0.0):
            problems.append(f"{name} is not what the configuration gives")
    kinds = {name: tensor.tensor_type.name for name, tensor in stored.items()}
    others = sorted(set(kinds.values()) - PLAIN.keys() - BLOCK_TYPES.keys())
    if others:
        report.skipped["other_types"] = f"how far tensors of {', '.join(others)} may be off is not known"
    reader = ParameterReader(plan.source, plan.model)
    for tensor in plan.tensors:
        kind = kinds.get(tensor.name)
        if kind is None or kind in others:
            continue
        problem, steps = _tensor_problem(tensor, kind, _decode(stored[tensor.name]), reader.read(tensor), weighted)
        worst = max(worst, steps)
        if problem:
            problems.append(f"{tensor.name} ({kind}) {problem}")
    detail = (
        f"{len(stored)} tensors decode to the model's weights, the worst block within {worst:.2f} steps of its type"
    )
    report.add("tensors", problems, detail)


def _decode(stored: Any) -> Tensor:
    """Flat, as the gguf package reads it; some of its decoders warn of scales that are no number."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.array(gguf.quants.dequantize(stored.data, stored.tensor_type))).float().reshape(-1)


def _tensor_problem(
    tensor: ExportTensor, kind: str, decoded: Tensor, weight: Tensor, weighted: bool
) -> tuple[str | None, float]:
    """What is wrong with a tensor, if anything is, and the error of its worst block in steps."""
    columns, block_type = tensor.shape[-1], BLOCK_TYPES.get(kind)
    if not torch.isfinite(decoded).all():
        first = int((~torch.isfinite(decoded)).nonzero()[0])
        place = _place(first, columns, block_type) if block_type else f"row {first // columns}"
        return f"holds NaN or infinity in {place}", 0.0
    if kind != "F32" and not is_quantizable(tensor.name, tensor.shape):
        return "is not F32, as llama.cpp asks", 0.0
    if kind in PLAIN:
        wrong = decoded != weight.to(PLAIN[kind]).float().reshape(-1)
        if not wrong.any():
            return None, 0.0
        first = int(wrong.nonzero()[0])
        values = f"{float(decoded[first]):.9g}, the model's weight is {float(weight.reshape(-1)[first]):.9g}"
        return f"is {values} at column {first % columns} of row {first // columns}", 0.0
    assert block_type is not None, "other types are left aside"
    return block_problem(decoded, weight.float().reshape(-1), block_type, columns, weighted=weighted)


def block_problem(
    decoded: Tensor, weight: Tensor, kind: BlockType, columns: int, *, weighted: bool
) -> tuple[str | None, float]:
    """What is wrong with codes, if anything is, and the error of the worst block in steps of its grid.

    Args:
        decoded: flat float32, as a reader has them.
        weight: flat float32, of the model.
        kind: of the blocks.
        columns: of a row.
        weighted: whether importance or error feedback may have had a say.
    """
    floor = _floor(kind)
    step = grid_steps(weight, kind) + floor
    error = (decoded - weight).reshape(-1, kind.block).square().mean(-1).sqrt()
    norm = weight.reshape(-1, kind.block).square().mean(-1).sqrt()
    limit = WEIGHTED_STEPS + WEIGHTED_CUT * (len(kind.levels.values) - 1) if weighted else ROUNDED_STEPS
    allowed = torch.minimum(limit * step, MOST_OF_A_BLOCK * norm + floor)
    worst = int((error - allowed).argmax())
    steps = error / step
    if error[worst] > allowed[worst]:
        place, most = _place(worst * kind.block, columns, kind), float(allowed[worst] / step[worst])
        words = f"{float(steps[worst]):.1f} steps, {float(error[worst] / norm[worst].clamp(min=1e-30)):.0%} of its norm"
        return f"differs from the model's weights in {place} by {words}; {most:.1f} steps are allowed", 0.0
    mean, most = float(steps.square().mean().sqrt()), WEIGHTED_MEAN if weighted else ROUNDED_MEAN
    if mean > most:
        return f"differs from the model's weights by {mean:.2f} steps in the mean; {most} are allowed", 0.0
    return None, float(steps.max())


def grid_steps(weight: Tensor, kind: BlockType) -> Tensor:
    """[blocks] the step of the grid that each block of weights asks for: root mean square over its sub-blocks.

    Args:
        weight: float32, whole blocks.
        kind: of the blocks.
    """
    parts, levels = weight.reshape(-1, kind.sub_blocks, kind.sub_block), kind.levels
    if kind.has_minimum:
        width = parts.amax(-1).clamp(min=0) - parts.amin(-1).clamp(max=0)
    else:
        width = parts.abs().amax(-1) * (levels.high - levels.low) / abs(levels.peak)
    return (width / (len(levels.values) - 1)).square().mean(-1).sqrt()


def _floor(kind: BlockType) -> float:
    """The error that float16 adds, which has no factor smaller than SMALLEST_FACTOR."""
    scales = kind.scale_levels
    return SMALLEST_FACTOR * abs(kind.levels.peak) * (abs(scales.peak) if scales else 1.0)


def _place(index: int, columns: int, kind: BlockType) -> str:
    return f"block {index % columns // kind.block} of row {index // columns}"

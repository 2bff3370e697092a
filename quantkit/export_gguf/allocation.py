"""The types that cost least at a given size: each tensor's loss is measured for each type, bits go where they help."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import gguf
import torch
from torch import Tensor

from quantkit.calibration.dataset import CalibrationSet
from quantkit.errors import UsageError
from quantkit.export_gguf.mixes import fitting
from quantkit.export_gguf.plan import ExportPlan, tensor_bytes
from quantkit.export_gguf.sensitivity import measure_sensitivity
from quantkit.export_gguf.tensors import ExportTensor, ParameterReader
from quantkit.formats.gguf.block_types import BLOCK_TYPES
from quantkit.formats.gguf.blocks import encode_rows

CANDIDATES = ("Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
MIN_TYPE_OF_HEAD = ("Q4_K", "Q5_K", "Q6_K", "Q8_0")  # the embedding is also read row by row, which is not measured
_SAMPLE_ROWS = 96


@dataclass(frozen=True, slots=True)
class Choice:
    """A tensor in a type.

    Attributes:
        type_name: the type.
        num_bytes: stored bytes.
        loss: what it adds to the KL divergence, in nats a token, to second order.
    """

    type_name: str
    num_bytes: int
    loss: float


def allocate_types(
    plan: ExportPlan,
    importance: Mapping[str, Tensor],
    windows: CalibrationSet,
    target_bpw: float,
    pinned: Iterable[tuple[str, str]] = (),
) -> tuple[dict[str, str], str]:
    """Choose a type for every tensor that holds codes.

    Args:
        plan: of the file; tensors that were not measured (experts) keep their types.
        importance: as the tensors will be quantized with.
        windows: the calibration tokens.
        target_bpw: bits a weight, of all tensors.
        pinned: (regular expression, type) that the user has decided.

    Returns:
        GGUF name -> type, and a line on the outcome.

    Raises:
        UsageError: no choice is as small as asked.
    """
    sensitivity = measure_sensitivity(plan, windows)
    patterns = [re.compile(pattern) for pattern, _ in pinned]
    choices: dict[str, list[Choice]] = {}
    reader = ParameterReader(plan.source, plan.model)
    for tensor in plan.tensors:
        if tensor.name in sensitivity and not any(pattern.fullmatch(tensor.name) for pattern in patterns):
            choices[tensor.name] = _choices(tensor, reader.read(tensor), importance, sensitivity[tensor.name])
    fixed = sum(tensor_bytes(t.shape, plan.types[t.name]) for t in plan.tensors if t.name not in choices)
    weights = sum(math.prod(tensor.shape) for tensor in plan.tensors)
    budget = target_bpw * weights / 8 - fixed
    smallest = sum(min(choice.num_bytes for choice in options) for options in choices.values())
    if smallest > budget:
        least = (smallest + fixed) * 8 / weights
        raise UsageError(f"--target-bpw {target_bpw:g} is too small: the least for this model is {least:.2f}")
    picked = pick(choices, budget)
    types = plan.types | {name: choice.type_name for name, choice in picked.items()}
    loss = sum(choice.loss for choice in picked.values())
    note = f"types chosen for {target_bpw:g} bits a weight; expected KL divergence {loss:.3g} nats"
    kept = sum(kind in BLOCK_TYPES for name, kind in plan.types.items() if name not in sensitivity)
    return types, f"{note}; {kept} tensors were not measured and keep their type" if kept else note


def _choices(
    tensor: ExportTensor, weight: Tensor, importance: Mapping[str, Tensor], sensitivity: tuple[Tensor, Tensor]
) -> list[Choice]:
    """Each type that fits the rows, with what it costs on evenly taken rows."""
    gradient, square = sensitivity
    step = max(1, weight.shape[0] // _SAMPLE_ROWS)
    rows = weight[::step].float()
    scale = float(gradient.sum() / gradient[::step].sum().clamp(min=1e-30))
    names = MIN_TYPE_OF_HEAD if tensor.name in ("token_embd.weight", "output.weight") else CANDIDATES
    choices = []
    for name in dict.fromkeys(fitting(candidate, weight.shape[1]) for candidate in names):
        if name not in BLOCK_TYPES:
            continue
        encoded = encode_rows(rows, name, importance.get(tensor.name)).numpy()
        error = torch.from_numpy(gguf.quants.dequantize(encoded, BLOCK_TYPES[name].ggml)) - rows
        loss = 0.5 * scale * float((error.square() @ square * gradient[::step]).sum())
        choices.append(Choice(name, tensor_bytes(tensor.shape, name), loss))
    return choices


def pick(choices: Mapping[str, list[Choice]], budget: float) -> dict[str, Choice]:
    """The choices with the least summed loss within a budget of bytes, up to one step of one tensor.

    Start with the smallest and make, again and again, the step with the largest gain a byte along each tensor's convex
    hull, passing over steps that no longer fit.
    """
    hulls = {name: _convex_hull(options) for name, options in choices.items()}
    picked = {name: hull[0] for name, hull in hulls.items()}
    left = budget - sum(choice.num_bytes for choice in picked.values())
    for name, before, after in _steps(hulls):
        if picked[name] is before and after.num_bytes - before.num_bytes <= left:
            left -= after.num_bytes - before.num_bytes
            picked[name] = after
    return picked


def _steps(hulls: Mapping[str, list[Choice]]) -> list[tuple[str, Choice, Choice]]:
    """Every step along every hull, the largest gain a byte first."""
    steps = [(name, before, after) for name, hull in hulls.items() for before, after in pairwise(hull)]
    return sorted(steps, key=lambda step: (step[2].loss - step[1].loss) / (step[2].num_bytes - step[1].num_bytes))


def _convex_hull(options: list[Choice]) -> list[Choice]:
    """The choices that no mixture of others beats, from the smallest on."""
    hull: list[Choice] = []
    for choice in sorted(options, key=lambda option: (option.num_bytes, option.loss)):
        if hull and choice.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _slope(hull[-2], choice) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(choice)
    return hull


def _slope(before: Choice, after: Choice) -> float:
    return (after.loss - before.loss) / (after.num_bytes - before.num_bytes)

"""What each candidate scheme of each unit would cost: the KL that its rounding errors alone cause, estimated.

A window's answer is sampled from the model itself. The derivative of its log-likelihood along a change of the weights
has mean zero and, by Fisher's identity, a second moment that is twice the KL that the change causes:

    KL(D) = 1/2 E[<gradient, D>^2]     D: quantized - original weights of a unit, gradient of one sampled window

So one backward pass a window serves all units and all candidates, and nothing is quantized and served to measure it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from quantkit.algorithms.scale_search import search_qparams
from quantkit.allocation.units import Unit
from quantkit.calibration.activations import enter_with_gradients, run_head
from quantkit.plan import Plan
from quantkit.primitives import dequantize, quantize
from quantkit.scheme import QuantScheme

STATISTICS_WINDOWS = 16  # of them, for the size of each layer's inputs
ERROR_DTYPE = torch.bfloat16  # in which the errors of all candidates are kept


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The KL that each candidate of a unit causes when nothing else is quantized.

    Attributes:
        unit: the layers.
        kl: [F] nats a token, for each candidate.
        standard_error: [F] of the same.
    """

    unit: Unit
    kl: tuple[float, ...]
    standard_error: tuple[float, ...]


class _Observed(nn.Module):
    """A linear layer that notes how its weight's gradient lies to some given changes of the weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.square = torch.zeros(linear.in_features)
        self.tokens = 0
        self.errors: list[Tensor] = []
        self.products: list[float] = []
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            rows = x.reshape(-1, self.in_features)
            self.square += rows.square().sum(0)
            self.tokens += len(rows)
            result: Tensor = self.linear(x)
            return result
        product: Tensor = _Product.apply(x, self)
        return product if self.linear.bias is None else product + self.linear.bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: _Observed) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return x @ layer.weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        (x,), layer = ctx.saved_tensors, ctx.layer
        gradient = gradients[0]
        for_weight = (gradient.flatten(0, -2).T @ x.flatten(0, -2)).flatten()
        layer.products = [float(torch.dot(for_weight, error.float().flatten())) for error in layer.errors]
        return gradient @ layer.weight if ctx.needs_input_grad[0] else None, None


def measure_sensitivity(
    plan: Plan,
    units: Sequence[Unit],
    candidates: Mapping[str, Sequence[QuantScheme]],
    token_ids: Sequence[Tensor],
    progress: Callable[[str, int, int], None],
    seed: int = 0,
) -> list[Sensitivity]:
    """Estimate the KL of every candidate of every unit.

    The whole model is in memory in float32, and for each candidate one number of two bytes for each weight.

    Args:
        plan: of the model, whose parameters are on meta; they are on meta again afterwards.
        units: of layers of the plan.
        candidates: unit name -> the schemes to try.
        token_ids: windows, each [T] int64; some of them also give the size of the layers' inputs.
        progress: is called with (stage, done, total).
        seed: of the sampled answers.

    Source: own; the identity is that of the Fisher information matrix (arXiv:1412.1193, section 5). Deviation from
    sums of squared gradients: the products with the actual rounding errors keep the interaction of a unit's weights.
    """
    model = plan.model
    plan.source.materialize(model, prefix="", dtype=torch.float32)
    for value in model.parameters():
        value.requires_grad_(False)
    observed = _put_observers(model, [name for unit in units for name in unit.layers])
    with torch.no_grad():
        for ids in token_ids[:: max(1, len(token_ids) // STATISTICS_WINDOWS)]:
            model(ids.unsqueeze(0), use_cache=False, logits_to_keep=1)
    for number, unit in enumerate(units):
        for name in unit.layers:
            layer = observed[name]
            mean_square = layer.square / max(layer.tokens, 1)
            layer.errors = [
                rounding_error(layer.weight, mean_square, scheme, plan.scale_dtype).to(ERROR_DTYPE)
                for scheme in candidates[unit.name]
            ]
        progress("round", number + 1, len(units))
    generator = torch.Generator().manual_seed(seed)
    sums: dict[str, list[list[float]]] = {unit.name: [] for unit in units}
    for number, ids in enumerate(token_ids):
        for layer in observed.values():
            layer.products = [0.0] * len(layer.errors)  # what stays of an expert that no token reaches
        _backward(plan, ids.unsqueeze(0), generator)
        for unit in units:
            products = torch.tensor([observed[name].products for name in unit.layers], dtype=torch.float64)
            sums[unit.name].append((products.sum(0).square() / (2 * len(ids))).tolist())
        progress("sensitivity", number + 1, len(token_ids))
    for name, layer in observed.items():
        _replace(model, name, layer.linear)
    model.to("meta")
    return [_summarise(unit, torch.tensor(sums[unit.name], dtype=torch.float64)) for unit in units]


def rounding_error(weight: Tensor, mean_square: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype) -> Tensor:
    """[N, K] float32: what rounding to the nearest code adds, with scales searched by the size of the inputs."""
    scale, zero_point = search_qparams(weight, mean_square, scheme, scale_dtype)
    codes = quantize(weight, scale, scheme, zero_point)
    return dequantize(codes, scale, zero_point) - weight


def _backward(plan: Plan, token_ids: Tensor, generator: torch.Generator) -> None:
    """Derivative of the log-likelihood of an answer that the model samples to each prefix of a window, [1, T]."""
    model, decoder = plan.model, plan.decoder
    batch = enter_with_gradients(model, decoder, token_ids, torch.ones_like(token_ids, dtype=torch.bool))
    hidden = batch.hidden.requires_grad_()
    for index, block in enumerate(decoder.blocks):

        def run(x: Tensor, block: nn.Module = block, index: int = index) -> Tensor:
            output = block(x, **batch.kwargs[index])
            result: Tensor = output[0] if isinstance(output, tuple) else output
            return result

        hidden = checkpoint(run, hidden, use_reentrant=False)
    logits = run_head(model, decoder, hidden[0], {})
    with torch.no_grad():
        answers = torch.multinomial(logits.softmax(-1), 1, generator=generator)
    logits.log_softmax(-1).gather(1, answers).sum().backward()


def _put_observers(model: nn.Module, names: Sequence[str]) -> dict[str, _Observed]:
    observed = {}
    for name in names:
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear)
        observed[name] = _Observed(module)
        _replace(model, name, observed[name])
    return observed


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _summarise(unit: Unit, per_window: Tensor) -> Sensitivity:
    """Mean over the windows, [W, F] nats a token, and its standard error."""
    error = per_window.std(0) / len(per_window) ** 0.5 if len(per_window) > 1 else torch.full_like(per_window[0], 0)
    return Sensitivity(unit, tuple(per_window.mean(0).tolist()), tuple(error.tolist()))

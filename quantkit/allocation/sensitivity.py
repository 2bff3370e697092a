"""What each candidate scheme of each unit would cost: the KL that its rounding errors alone cause, estimated.

A window's answer is sampled from the model itself. The derivative of its log-likelihood along a change of the weights
has mean zero and, by Fisher's identity, a second moment that is twice the KL that the change causes:

    KL(D) = 1/2 E[<gradient, D>^2]     D: quantized - original weights of a unit, gradient of one sampled window

So one backward pass a window serves all units and all candidates, and no candidate is served to measure it. D is what
the recipe's algorithm leaves on the original model's inputs: error feedback takes most of the harm out of a few columns
that rounding to nearest spoils, so its sensitivities would choose other layers.

Such a mean of squares of one number a window is noisy (a seventh of it with 96 windows), and candidates of one unit are
told apart by less. Each candidate's error at the layer's outputs, tr(D E[x x^T] D^T), has no such noise; so a unit's KL
for each unit of that error is averaged over its candidates, and a candidate has that factor times its own error.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from quantkit.algorithms import Algorithm, load_algorithm
from quantkit.allocation.units import Unit
from quantkit.calibration.activations import HELD_OUT_EVERY, enter_with_gradients, run_head
from quantkit.calibration.statistics import InputStatistics, Wanted
from quantkit.plan import Plan
from quantkit.scheme import QuantScheme

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
    """A linear layer that collects its inputs, then notes how its gradient lies to given changes of the weight.

    Attributes:
        statistics: of the inputs, collected without gradients; None once the errors are known.
        is_held_out: whether the present window only judges.
        errors: [N, K] for each candidate.
        output_errors: mean square of what each adds to a token's outputs, summed over the outputs.
        products: of the last backward pass, gradient times error.
    """

    def __init__(self, linear: nn.Linear, statistics: InputStatistics) -> None:
        super().__init__()
        self.linear = linear
        self.statistics: InputStatistics | None = statistics
        self.is_held_out = False
        self.errors: list[Tensor] = []
        self.output_errors: list[float] = []
        self.products: list[float] = []
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.statistics is not None:
            self.statistics.add(x, held_out=torch.full(x.shape[:-1], self.is_held_out))
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
    algorithm: Algorithm,
    seed: int = 0,
) -> list[Sensitivity]:
    """Estimate the KL of every candidate of every unit.

    The whole model is in memory in float32, for each candidate one number of two bytes for each weight, and first for
    each layer the second moment of its inputs.

    Args:
        plan: of the model, whose parameters are on meta; they are on meta again afterwards.
        units: of layers of the plan.
        candidates: unit name -> the schemes to try.
        token_ids: windows, each [T] int64.
        progress: is called with (stage, done, total).
        algorithm: rounds, without a correction of its target.
        seed: of the sampled answers.

    Source: own; the identity is that of the Fisher information matrix (arXiv:1412.1193, section 5). Deviation from
    sums of squared gradients: the products with the actual rounding errors keep the interaction of a unit's weights.
    """
    model = plan.model
    plan.source.materialize(model, prefix="", dtype=torch.float32)
    for value in model.parameters():
        value.requires_grad_(False)
    algorithm = algorithm.without_correction()
    observed = _put_observers(model, [name for unit in units for name in unit.layers], algorithm)
    with torch.no_grad():
        for number, ids in enumerate(token_ids, start=1):
            for layer in observed.values():
                layer.is_held_out = number % HELD_OUT_EVERY == 0
            model(ids.unsqueeze(0), use_cache=False, logits_to_keep=1)
    for number, unit in enumerate(units):
        for name in unit.layers:
            _round(observed[name], candidates[unit.name], algorithm, plan.scale_dtype)
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
    found = []
    for unit in units:
        errors = torch.tensor([observed[name].output_errors for name in unit.layers], dtype=torch.float64).sum(0)
        found.append(_summarise(unit, torch.tensor(sums[unit.name], dtype=torch.float64), errors))
    return found


def _round(layer: _Observed, schemes: Sequence[QuantScheme], algorithm: Algorithm, scale_dtype: torch.dtype) -> None:
    """Fill in the layer's errors for each scheme, and forget its inputs."""
    statistics = layer.statistics
    assert statistics is not None
    hessian = statistics.hessian().float() if statistics.num_tokens else torch.zeros(1)
    if not statistics.num_tokens:  # an expert that no token reaches
        algorithm = load_algorithm("rtn")
    for scheme in schemes:
        solution = algorithm.solve(layer.weight, statistics, scheme, algorithm.options, scale_dtype)
        error = solution.weight.dequantize() - layer.weight
        layer.output_errors.append(float(((error @ hessian) * error).sum()) if statistics.num_tokens else 0.0)
        layer.errors.append(error.to(ERROR_DTYPE))
    layer.statistics = None


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


def _put_observers(model: nn.Module, names: Sequence[str], algorithm: Algorithm) -> dict[str, _Observed]:
    observed = {}
    wanted = algorithm.wanted | Wanted(gram=True)
    for name in names:
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear)
        observed[name] = _Observed(module, InputStatistics(module.in_features, wanted))
        _replace(model, name, observed[name])
    return observed


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _summarise(unit: Unit, per_window: Tensor, output_errors: Tensor) -> Sensitivity:
    """KL of each candidate and its standard error, from [W, F] nats a token of the windows and [F] output errors."""
    factors = torch.where(output_errors > 0, per_window / output_errors.clamp(min=1e-300), 0.0).mean(1)
    error = factors.std() / len(factors) ** 0.5 if len(factors) > 1 else torch.zeros(())
    return Sensitivity(unit, tuple((factors.mean() * output_errors).tolist()), tuple((error * output_errors).tolist()))

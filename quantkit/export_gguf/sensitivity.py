"""How much the model's answers change with the outputs of each layer: the mean square of the gradient of its own loss.

For a small change of the weights the KL divergence from the original is a quadratic form in it, whose matrix is the
Fisher information. Its diagonal, with inputs and gradients taken as independent, is E[g_i^2] E[x_j^2] for the weight of
output i and input j; g is the gradient of log p of a token that is drawn from the model itself.

Source: arXiv:1503.05671 (K-FAC) for the factors, arXiv:1206.6464 for drawing the token.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from quantkit.calibration.dataset import CalibrationSet
from quantkit.export_gguf.plan import ExportPlan
from quantkit.formats.gguf.block_types import BLOCK_TYPES

MAX_WINDOWS = 16
MAX_WINDOW_TOKENS = 256


def measure_sensitivity(plan: ExportPlan, windows: CalibrationSet, seed: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean squares of gradient and input of every layer that holds codes; the whole model is in memory in float32.

    Args:
        plan: says which tensors those are.
        windows: the tokens; the beginnings of up to 16 windows, evenly taken, are used.
        seed: of the drawn tokens.

    Returns:
        GGUF name -> (E[g^2] [N], E[x^2] [K]); a tied embedding under its own name, as the output matrix.
    """
    model = plan.source.skeleton()
    plan.source.materialize(model, dtype=torch.float32)
    by_parameter = {tensor.parameter: tensor for tensor in plan.tensors if plan.types[tensor.name] in BLOCK_TYPES}
    head = model.get_output_embeddings()  # type: ignore[operator]
    sums: dict[str, list[Tensor]] = {}
    handles = []
    for name, module in model.named_modules():
        parameter = f"{name}.weight"
        if module is head and parameter not in by_parameter:
            parameter = next((own for own in by_parameter if model.get_parameter(own) is module.weight), parameter)
        if isinstance(module, nn.Linear) and parameter in by_parameter:
            tensor = by_parameter[parameter]
            order = tensor.row_order(module.out_features) if tensor.heads else None
            handles.append(module.register_forward_hook(partial(_watch, sums, tensor.name, order)))
    generator = torch.Generator().manual_seed(seed)
    step = -(-len(windows.lengths) // MAX_WINDOWS)
    tokens = 0
    for ids, length in zip(windows.token_ids[::step], windows.lengths[::step].tolist(), strict=True):
        window = ids[: min(length, MAX_WINDOW_TOKENS)].unsqueeze(0)
        tokens += window.shape[1]
        _backward(model, window, generator)
    for handle in handles:
        handle.remove()
    return {name: (gradient / tokens, square / tokens) for name, (gradient, square) in sums.items()}


def _watch(
    sums: dict[str, list[Tensor]],
    name: str,
    order: Tensor | None,
    _: nn.Module,
    args: tuple[Tensor, ...],
    output: Tensor,
) -> None:
    """Add the squares of a layer's inputs now, and those of its outputs' gradient when it comes."""
    rows = args[0].detach().reshape(-1, args[0].shape[-1])
    entry = sums.setdefault(name, [torch.zeros(output.shape[-1]), torch.zeros(rows.shape[1])])
    entry[1] += rows.square().sum(0)

    def add(gradient: Tensor) -> None:
        squares = gradient.detach().reshape(-1, gradient.shape[-1]).square().sum(0)
        entry[0] += squares if order is None else squares[order]

    output.register_hook(add)


def _backward(model: nn.Module, window: Tensor, generator: torch.Generator) -> None:
    """One pass there and back with tokens that the model itself draws."""
    embedding: Callable[[Tensor], Tensor] = model.get_input_embeddings()  # type: ignore[operator]
    inputs = embedding(window).detach().requires_grad_(True)
    logits = model(inputs_embeds=inputs, use_cache=False).logits[0].float()
    drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
    logits.log_softmax(-1).gather(1, drawn).sum().backward()

"""The experts of mixture models as linear layers, as they are stored, quantized and read by engines.

transformers keeps the experts of a layer in two parameters, gate_up_proj [E, 2F, K] and down_proj [E, K, F]. On disk
there is one tensor for each expert and projection. `use_linear_experts` puts modules that look like the disk in their
place; what they compute is the same.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.core_model_loading import dot_natural_key

from quantkit.source.tensor_renaming import TensorRenaming

PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # fused parameter -> layers, in order
STACKED = {"gate_up_proj": ["MergeModulelist", "Concatenate"], "down_proj": ["MergeModulelist"]}  # how it is fused
Calibrate = Literal["routed", "all_tokens"]


class Expert(nn.Module):
    """down(activation(gate) * up), of linear layers without biases.

    Args:
        hidden_size: K.
        intermediate_size: F.
        act_fn: of the gate.
        like: gives device and type of the weights.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, act_fn: nn.Module, like: Tensor) -> None:
        super().__init__()
        made: dict[str, Any] = {"bias": False, "device": "meta", "dtype": like.dtype}
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, **made)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, **made)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **made)
        self.act_fn = act_fn

    def forward(self, x: Tensor) -> Tensor:
        """[T, K] from [T, K]."""
        product: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return product


class LinearExperts(nn.Module):
    """The experts of a layer, called 0, 1, ...; takes the place of transformers' fused ones.

    Args:
        fused: the module that it replaces; its weights are not read.
        stored: layer in this module, such as ``3.up_proj`` -> its name on disk.

    Attributes:
        stored: as given.
        num_experts: E.
        calibrate: None calls an expert with the tokens that are routed to it, if there are any; ``routed`` also if
            there are none, so that whoever waits for its inputs meets every expert; ``all_tokens`` with all tokens,
            whatever becomes of the others' outputs. What comes out is the same.
    """

    def __init__(self, fused: Any, stored: dict[str, str]) -> None:
        super().__init__()
        self.num_experts, rows, columns = fused.gate_up_proj.shape
        for number in range(self.num_experts):
            self.add_module(str(number), Expert(columns, rows // 2, fused.act_fn, fused.gate_up_proj))
        self.stored = stored
        self.calibrate: Calibrate | None = None

    def route(self, top_k_index: Tensor) -> tuple[Tensor, ...]:
        """For each expert the places in [T * k] choices, [T, k] experts of each token, where it is chosen, in order."""
        chosen = top_k_index.flatten()
        counts = torch.bincount(chosen, minlength=self.num_experts).tolist()
        return chosen.argsort(stable=True).split(counts)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, K]: the outputs of each token's experts, weighted.

        Args:
            hidden_states: [T, K].
            top_k_index: [T, k] the experts of each token.
            top_k_weights: [T, k] their weights.
        """
        out = torch.zeros_like(hidden_states)
        weights = top_k_weights.flatten()
        for expert, choices in zip(self.children(), self.route(top_k_index), strict=True):
            tokens = choices // top_k_index.shape[-1]
            if self.calibrate == "all_tokens":
                product = expert(hidden_states)[tokens]
            elif len(tokens) or self.calibrate == "routed":
                product = expert(hidden_states[tokens])
            else:
                continue
            out.index_add_(0, tokens, (product * weights[choices].unsqueeze(-1)).to(out.dtype))
        return out


def linear_experts(model: nn.Module) -> dict[str, LinearExperts]:
    """The experts of a model or block that are linear layers, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LinearExperts)}


def router_names(model: nn.Module) -> Iterator[str]:
    """The matrices beside linear experts that choose or weigh them: E rows, or one for all. Engines keep them."""
    for name, experts in linear_experts(model).items():
        parent, _, _ = name.rpartition(".")
        for leaf, module in model.get_submodule(parent).named_children():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[0] in (1, experts.num_experts):
                yield f"{parent}.{leaf}" if parent else leaf


def use_linear_experts(model: nn.Module, weights: Iterable[str]) -> None:
    """Replace the fused experts of a skeleton that are understood and are one tensor per expert on disk.

    Args:
        model: on meta; changed.
        weights: names on disk of weights, ``.weight`` at their ends; also of those that are stored as codes.
    """
    fused = {name: module for name, module in model.named_modules() if is_fused(module)}
    candidates = {name: module for name, module in fused.items() if why_not_linear(module) is None}
    if not candidates:
        return
    renaming = TensorRenaming(model)
    parameters = {f"{name}.{part}" for name in candidates for part in PARTS}
    found: dict[str, dict[str, list[str]]] = {}  # parameter -> pattern -> names on disk, by expert
    for weight in sorted(weights, key=dot_natural_key):
        parameter, pattern = renaming.rename(weight)
        if parameter in parameters and pattern is not None:
            found.setdefault(parameter, {}).setdefault(pattern, []).append(weight)
    for name, module in candidates.items():
        stored: dict[str, str] = {}
        for part in PARTS:
            stored |= _stored(renaming, part, found.get(f"{name}.{part}", {}))
        if len(stored) == 3 * module.gate_up_proj.shape[0]:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, LinearExperts(module, stored))


def _stored(renaming: TensorRenaming, part: str, found: dict[str, list[str]]) -> dict[str, str]:
    """Layer in the experts' module -> its name on disk, for one fused parameter; nothing if it is fused otherwise."""
    stored: dict[str, str] = {}
    for pattern, names in found.items():
        converter = renaming.converter(pattern)
        operations = [type(operation).__name__ for operation in converter.operations]
        if operations != STACKED[part] or len(converter.source_patterns) != len(PARTS[part]):
            return {}
        layer = PARTS[part][converter.source_patterns.index(pattern)]
        stored |= {f"{number}.{layer}": name.removesuffix(".weight") for number, name in enumerate(names)}
    return stored


def is_fused(module: nn.Module) -> bool:
    """Whether a module holds all experts of a layer in transformers' fused parameters."""
    own = dict(module.named_parameters(recurse=False))
    return all(name in own and own[name].dim() == 3 for name in PARTS)


def fused_weight(fused: nn.Module, number: int, layer: str) -> Tensor:
    """The part of transformers' fused parameters, [E, 2F, K] or [E, K, F], that is a layer of an expert."""
    part = next(part for part, layers in PARTS.items() if layer in layers)
    layers = PARTS[part]
    return fused.get_parameter(part)[number].chunk(len(layers))[layers.index(layer)]


def why_not_linear(module: Any) -> str | None:
    """Why fused experts are not taken for linear layers; None if their layout and activation are understood."""
    facts = {
        "its experts have biases": bool(getattr(module, "has_bias", True)),
        "the weights of its experts are transposed": bool(getattr(module, "is_transposed", True)),
        "gate and up of its experts are interleaved": not getattr(module, "is_concatenated", True),
        "its experts have no gate": not getattr(module, "has_gate", False),
        "its experts have a norm": bool(getattr(module, "has_post_expert_norm", False)),
        "its experts have an activation of their own": (
            not isinstance(getattr(module, "act_fn", None), nn.Module)
            or getattr(type(module), "_apply_gate", is_fused).__module__ != "transformers.integrations.moe"
        ),
    }
    return next((reason for reason, applies in facts.items() if applies), None)

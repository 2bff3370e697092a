"""Which tokens reach each expert of a decoder block while it is calibrated, and whether they are enough."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quantkit.errors import CalibrationError
from quantkit.recipe.quantization import Experts
from quantkit.source.experts import LinearExperts, linear_experts


class ExpertTokens:
    """Follows what the routers of a block decide.

    Args:
        block: experts among whose layers are some of ``layers`` are told how to call them until :meth:`finish`.
        index: position of the block in the model.
        layers: names of the layers to solve.
        options: of the recipe.
        position: gives the number of the batch whose pass is running, None for a pass of another.
    """

    def __init__(
        self,
        block: nn.Module,
        index: int,
        layers: Collection[str],
        options: Experts,
        position: Callable[[], int | None],
    ) -> None:
        self._index, self._options, self._position = index, options, position
        solved = {layer.rpartition(".")[0].rpartition(".")[0] for layer in layers}
        self._experts = {name: module for name, module in linear_experts(block).items() if name in solved}
        self._chosen: dict[tuple[str, int], tuple[Tensor, ...]] = {}
        self._unchecked = set(self._experts) if options.calibrate == "routed" else set()
        self._handles: list[RemovableHandle] = []
        for module in self._experts.values():
            module.calibrate = options.calibrate

    def watch(self) -> None:
        """From now on note which tokens go where."""
        for name, module in self._experts.items():
            self._handles.append(module.register_forward_pre_hook(self._note(name), with_kwargs=True))

    def expert_of(self, layer: str) -> str | None:
        """The expert that a layer belongs to; None for a layer of none."""
        parent = layer.rpartition(".")[0]
        return parent if parent.rpartition(".")[0] in self._experts else None

    def has_own_tokens(self, layer: str) -> bool:
        """Whether a layer gets a part of the tokens only."""
        return self._options.calibrate == "routed" and self.expert_of(layer) is not None

    def select(self, layer: str, position: int, of_tokens: Tensor | None) -> Tensor | None:
        """The values of the tokens that a layer gets, in the order in which it gets them.

        Args:
            layer: name in the block.
            position: number of the batch.
            of_tokens: [B, T] a value for each token of the batch; None stays None.
        """
        if of_tokens is None or not self.has_own_tokens(layer):
            return of_tokens
        experts, _, number = layer.rpartition(".")[0].rpartition(".")
        return of_tokens.reshape(-1)[self._chosen[experts, position][int(number)]]

    def check(self, layer: str, counted: Sequence[Tensor]) -> None:
        """Refuse to go on with experts that see too few tokens, once it is known how many each of them sees.

        Args:
            layer: whose inputs have just been collected.
            counted: [B, T] bool for each batch: the tokens that solve a layer.

        Raises:
            CalibrationError: it names the expert that sees fewest.
        """
        experts = (self.expert_of(layer) or "").rpartition(".")[0]
        if experts not in self._unchecked:
            return
        self._unchecked.remove(experts)
        module = self._experts[experts]
        counts = torch.zeros(module.num_experts, dtype=torch.int64)
        for position, tokens in enumerate(counted):
            mask = tokens.reshape(-1)
            counts += torch.stack([mask[chosen].sum() for chosen in self._chosen[experts, position]])
        least = self._options.min_tokens
        needed = fewest_tokens(module) if least is None else least
        few = int((counts < needed).sum())
        if few:
            worst = int(counts.argmin())
            more = f" (and {few - 1} more of {module.num_experts})" if few > 1 else ""
            raise CalibrationError(
                f"block {self._index}, {experts}: expert {worst} sees {int(counts[worst])} calibration tokens and "
                f"needs {needed}{more}",
                fix="Calibrate with more tokens, or set quantization.experts to {calibrate: all_tokens}",
            )

    def finish(self) -> None:
        """Call experts as usual again."""
        for handle in self._handles:
            handle.remove()
        for module in self._experts.values():
            module.calibrate = None

    def _note(self, name: str) -> Callable[..., None]:
        def hook(module: LinearExperts, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            position = self._position()
            if position is not None:
                chosen = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
                per_token = chosen.shape[-1]
                self._chosen[name, position] = tuple(choices // per_token for choices in module.route(chosen))

        return hook


def fewest_tokens(experts: LinearExperts) -> int:
    """How many tokens an expert must have seen if the recipe does not say: as many as it has input columns.

    With fewer the second moment of its inputs is singular, and error feedback moves errors to where it has seen
    nothing: on other tokens that can be worse than rounding to nearest.
    """
    return max(layer.in_features for layer in experts.modules() if isinstance(layer, nn.Linear))

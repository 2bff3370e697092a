"""One decoder block, run over the calibration windows stage by stage: solve what reads the first input, then go on.

A stage is a set of linear layers that read the same tensor (q, k and v; then o; then gate and up; then down). The
stages are found by running the block once, not by names, so every family has them. Going on from a solved stage does
not start over: outputs of finished layers are kept and reused, so that each matrix product of the block is computed
once in all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibration.statistics import InputStatistics
from quantkit.errors import CalibrationError, QuantizationError


@dataclass(slots=True)
class BlockBatch:
    """A batch of windows at the door of a decoder block.

    Attributes:
        hidden: [B, T, hidden] float32 input of the block; replaced by its output when the block is finished.
        token_mask: [B, T] bool, False for padding.
        kwargs: one mapping a decoder block: what the model passes to that block besides the hidden states.
    """

    hidden: Tensor
    token_mask: Tensor
    kwargs: Sequence[Mapping[str, Any]]


class _StageReachedError(Exception):
    """Ends a forward pass whose remaining work is not needed yet."""


class StagedBlock:
    """Runs ``block`` over ``batches`` up to the input of a stage.

    Args:
        block: the decoder block, its weights in memory; layers are solved by writing ``weight`` in place.
        index: position of the block in the model.
        linears: the layers to solve, by name inside the block.
        batches: the windows; their ``hidden`` is replaced by :meth:`finish`.

    Raises:
        QuantizationError: a layer is never run by the first window (an expert that is not routed to).
    """

    def __init__(
        self, block: nn.Module, index: int, linears: Mapping[str, nn.Linear], batches: Sequence[BlockBatch]
    ) -> None:
        self._block, self._index, self._linears, self._batches = block, index, dict(linears), batches
        self._original = {name: module.forward for name, module in self._linears.items()}
        self._kept: dict[nn.Module, list[Any]] = {}
        self._restore: dict[nn.Module, Callable[..., Any]] = {}
        self.stages = self._discover()
        self._solved: set[str] = set()

    def collect(self, stage: Sequence[str]) -> InputStatistics:
        """Statistics of the input that the layers of ``stage`` share, over all windows, after what is solved so far.

        Raises:
            CalibrationError: the inputs are not finite.
        """
        leader = self._linears[stage[0]]
        statistics = InputStatistics(leader.in_features)
        for position, batch in enumerate(self._batches):
            with self._stop_before(leader) as seen:
                self._forward(position)
            try:
                statistics.add(seen[0], batch.token_mask)
            except FloatingPointError as error:
                raise CalibrationError(f"block {self._index}, {stage[0]}: {error}") from error
        return statistics

    def solved(self, stage: Sequence[str]) -> None:
        """Say that the layers of ``stage`` have their final weights: their outputs may be kept from now on."""
        self._solved.update(stage)
        for name in stage:
            self._keep_outputs(self._linears[name])
        for child_name, child in self._block.named_children():
            inside = [name for name in self._linears if name.startswith(f"{child_name}.")]
            if inside and self._solved.issuperset(inside) and child not in self._restore:
                self._keep_outputs(child)  # now the child's output replaces those of its layers

    def finish(self) -> None:
        """Run every window through the finished block and put the outputs in the place of the inputs."""
        for position, batch in enumerate(self._batches):
            batch.hidden = self._forward(position)
            for kept in self._kept.values():
                kept[position] = None
        for module, forward in self._restore.items():
            module.forward = forward
        self._kept.clear()
        self._restore.clear()

    def _forward(self, position: int) -> Tensor:
        self._position = position
        batch = self._batches[position]
        try:
            with torch.inference_mode():
                output = self._block(batch.hidden, **batch.kwargs[self._index])
        except _StageReachedError:
            return batch.hidden
        return output[0] if isinstance(output, tuple) else output

    def _discover(self) -> list[tuple[str, ...]]:
        """Group the layers by the tensor that they read, in the order in which the block runs them."""
        groups: list[tuple[Tensor, list[str]]] = []

        def record(name: str) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                for tensor, names in groups:
                    if tensor is args[0]:
                        names.append(name)
                        return
                groups.append((args[0], [name]))

            return hook

        handles = [module.register_forward_pre_hook(record(name)) for name, module in self._linears.items()]
        first = self._batches[0]
        window = {key: _first_window(value, first.hidden.shape[0]) for key, value in first.kwargs[self._index].items()}
        try:
            with torch.inference_mode():
                self._block(first.hidden[:1], **window)
        finally:
            for handle in handles:
                handle.remove()
        missing = set(self._linears) - {name for _, names in groups for name in names}
        if missing:
            raise QuantizationError(
                f"block {self._index}: the first calibration window never reaches {', '.join(sorted(missing))}",
                fix="Put the layer into `ignore`",
            )
        return [tuple(names) for _, names in groups]

    def _keep_outputs(self, module: nn.Module) -> None:
        """From now on compute the module once a window and answer from memory after that."""
        kept: list[Any] = [None] * len(self._batches)
        compute = module.forward
        self._kept[module], self._restore[module] = kept, compute
        nested = [inner for inner in self._kept if inner is not module and any(inner is m for m in module.modules())]

        def forward(*args: Any, **kwargs: Any) -> Any:
            position = self._position
            if kept[position] is None:
                kept[position] = compute(*args, **kwargs)
                for inner in nested:  # the outer output stands for the inner ones
                    self._kept[inner][position] = None
            return kept[position]

        module.forward = forward

    @contextmanager
    def _stop_before(self, leader: nn.Module) -> Iterator[list[Tensor]]:
        """Catch the input of ``leader`` and end the pass there."""
        seen: list[Tensor] = []

        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen.append(args[0])
            raise _StageReachedError

        handle = leader.register_forward_pre_hook(hook)
        try:
            yield seen
        finally:
            handle.remove()


def _first_window(value: Any, batch_size: int) -> Any:
    """The part of a block's argument that belongs to the first window."""
    if isinstance(value, Tensor):
        return value[:1] if value.dim() > 1 and value.shape[0] == batch_size else value
    if isinstance(value, tuple):
        return tuple(_first_window(inner, batch_size) for inner in value)
    return value

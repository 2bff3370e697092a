"""One decoder block, run over the calibration windows stage by stage: solve what reads the first input, then go on.

A stage is a set of linear layers that read the same tensor (q, k and v; then o; then gate and up; then down). The
stages are found by running the block once, not by names, so every family has them. Each batch of windows goes through
the block in a forward pass of its own that stops before a stage (a greenlet keeps its stack) and goes on when the stage
is solved. So everything in the block is computed once, and only what a pass still needs stays in memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from quantkit.calibration.expert_tokens import ExpertTokens
from quantkit.calibration.statistics import InputStatistics, Wanted
from quantkit.errors import CalibrationError, QuantizationError
from quantkit.recipe.quantization import ROUTED, Experts


@dataclass(slots=True)
class BlockBatch:
    """A batch of windows at the door of a decoder block.

    Attributes:
        hidden: [B, T, hidden] float32 input of the block; replaced by its output when the block is finished.
        token_mask: [B, T] bool, False for padding.
        kwargs: one mapping a decoder block: what the model passes to that block besides the hidden states.
        held_out: [B, T] bool, True for windows that only judge; None for none.
        source: [B, 1] int64, the number of the calibration source of each window; None if it is not known.
    """

    hidden: Tensor
    token_mask: Tensor
    kwargs: Sequence[Mapping[str, Any]]
    held_out: Tensor | None = None
    source: Tensor | None = None


class StagedBlock:
    """Runs ``block`` over ``batches`` up to the input of a stage, and on from there.

    Two may run one block side by side: with the layers as they are solved, and (`pass_by`) as they were before.

    Args:
        block: the decoder block, its weights in memory; layers are solved by writing ``weight`` in place.
        index: position of the block in the model.
        linears: the layers to solve, by name inside the block.
        batches: the windows; their ``hidden`` is replaced by :meth:`finish`.
        options: which tokens the experts are calibrated with, if the block has some.

    Attributes:
        stages: layer names of each stage, in the order in which the block runs them.
        experts: which of the tokens reach each expert.

    Raises:
        QuantizationError: a layer is never run by a window.
    """

    def __init__(
        self,
        block: nn.Module,
        index: int,
        linears: Mapping[str, nn.Linear],
        batches: Sequence[BlockBatch],
        options: Experts = ROUTED,
    ) -> None:
        self._block, self._index, self._linears, self._batches = block, index, dict(linears), batches
        self.experts = ExpertTokens(block, index, self._linears, options, self._position)
        fewest = min(batches, key=lambda batch: batch.hidden.shape[0])  # the probe, one window, where there is one
        self.stages = discover_stages(block, index, self._linears, fewest)
        self._solved: set[str] = set()
        self._input_transforms: dict[str, Callable[[Tensor], Tensor]] = {}
        self._passes = [greenlet(self._run) for _ in batches]
        self._own = frozenset(self._passes)
        self._waiting: list[tuple[str, Tensor] | None] = [None] * len(batches)
        leaders = {stage[0] for stage in self.stages}
        self.experts.watch()
        self._handles = [
            module.register_forward_pre_hook(self._door(name, name in leaders)) for name, module in linears.items()
        ]

    def collect(self, stage: Sequence[str], wanted: Wanted, original: "StagedBlock | None" = None) -> InputStatistics:
        """Statistics of the input that the layers of ``stage`` share, over all windows, after what is solved so far.

        Args:
            stage: of ``stages``; the ones before it are solved.
            wanted: what to collect.
            original: the same block over the same windows with the original's weights and inputs, for
                ``wanted.original``; it has passed by the stages before.

        Raises:
            CalibrationError: the inputs are not finite, or an expert gets too few of the tokens.
        """
        leader = stage[0]
        statistics = InputStatistics(self._linears[leader].in_features, wanted)
        for position, batch in enumerate(self._batches):
            x = self._input_of(leader, position)
            if x is None or not x.numel():
                continue  # no token of this batch reaches the stage
            token_mask, held_out = (
                self.experts.select(leader, position, of_tokens) for of_tokens in (batch.token_mask, batch.held_out)
            )
            try:
                statistics.add(x, token_mask, held_out)
            except FloatingPointError as error:
                raise CalibrationError(f"block {self._index}, {leader}: {error}") from error
            other = original._input_of(leader, position) if original is not None and wanted.original else None
            if other is not None and other.shape == x.shape and not self.experts.has_own_tokens(leader):
                statistics.add_original(x, other, batch.token_mask, batch.held_out, batch.source)
        self.experts.check(leader, [_solving_tokens(batch) for batch in self._batches])
        return statistics

    def pass_by(self, stage: Sequence[str]) -> None:
        """Let every window go on through the layers of ``stage`` with the weights that they have now."""
        self.solved(stage)
        for position, waiting in enumerate(self._waiting):
            if waiting is not None and waiting[0] in self._solved:
                self._advance(position)

    def solved(self, stage: Sequence[str], input_transform: Callable[[Tensor], Tensor] | None = None) -> None:
        """Say that the layers of ``stage`` have their final weights.

        Args:
            stage: names of layers.
            input_transform: what an engine does to the inputs of these layers (it quantizes them); None for nothing.
        """
        self._solved.update(stage)
        if input_transform is not None:
            self._input_transforms.update(dict.fromkeys(stage, input_transform))

    def finish(self) -> None:
        """Run every window to the end of the block and put the outputs in the place of the inputs."""
        self._solved.update(self._linears)
        for position, one_pass in enumerate(self._passes):
            while not one_pass.dead:
                self._advance(position)
        for handle in self._handles:
            handle.remove()
        self.experts.finish()

    def _position(self) -> int | None:
        """The number of the batch whose pass is running; None for a pass of another."""
        running = getcurrent()
        return self._passes.index(running) if running in self._own else None

    def _input_of(self, leader: str, position: int) -> Tensor | None:
        """The input of a stage, which a pass waits with or goes on to; None if it never gets there."""
        waiting = self._waiting[position]
        if waiting is None or waiting[0] in self._solved:
            waiting = self._advance(position)
        return waiting[1] if waiting is not None and waiting[0] == leader else None

    def _advance(self, position: int) -> tuple[str, Tensor] | None:
        """Let a pass go on until it waits before an unsolved stage; returns where it waits, None at its end."""
        self._waiting[position] = None
        one_pass = self._passes[position]
        with torch.inference_mode():
            reached = one_pass.switch() if one_pass else one_pass.switch(position)
        if not one_pass.dead:
            self._waiting[position] = reached
        return self._waiting[position]

    def _run(self, position: int) -> None:
        batch = self._batches[position]
        output = self._block(batch.hidden, **batch.kwargs[self._index])
        batch.hidden = output[0] if isinstance(output, tuple) else output

    def _door(self, name: str, leads: bool) -> Callable[..., Any]:
        """A hook that waits before an unsolved stage, and transforms the input of a solved one."""

        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if getcurrent() not in self._own:
                return None  # a pass of another
            if leads and name not in self._solved:
                getcurrent().parent.switch((name, args[0]))
            transform = self._input_transforms.get(name)
            return None if transform is None else (transform(args[0]), *args[1:])

        return hook


def _solving_tokens(batch: BlockBatch) -> Tensor:
    """[B, T] bool: the tokens that count and do not only judge."""
    return batch.token_mask if batch.held_out is None else batch.token_mask & ~batch.held_out


def discover_stages(
    block: nn.Module, index: int, linears: Mapping[str, nn.Linear], batch: BlockBatch
) -> list[tuple[str, ...]]:
    """Group layers by the tensor that they read, in the order in which the block runs them over one window.

    Args:
        block: the decoder block, its weights in memory.
        index: position of the block in the model.
        linears: the layers, by name inside the block.
        batch: its first window is run.

    Raises:
        QuantizationError: the window does not reach a layer.
    """
    groups: list[tuple[Tensor, list[str]]] = []

    def record(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            for tensor, names in groups:
                if tensor is args[0]:
                    names.append(name)
                    return
            groups.append((args[0], [name]))

        return hook

    handles = [module.register_forward_pre_hook(record(name)) for name, module in linears.items()]
    window = {key: _first_window(value, batch.hidden.shape[0]) for key, value in batch.kwargs[index].items()}
    try:
        with torch.inference_mode():
            block(batch.hidden[:1], **window)
    finally:
        for handle in handles:
            handle.remove()
    missing = set(linears) - {name for _, names in groups for name in names}
    if missing:
        raise QuantizationError(
            f"block {index}: the first calibration window never reaches {', '.join(sorted(missing))}",
            fix="Put the layer into `ignore`",
        )
    return [tuple(names) for _, names in groups]


def _first_window(value: Any, batch_size: int) -> Any:
    """The part of a block's argument that belongs to the first window."""
    if isinstance(value, Tensor):
        return value[:1] if value.dim() > 1 and value.shape[0] == batch_size else value
    if isinstance(value, tuple):
        return tuple(_first_window(inner, batch_size) for inner in value)
    return value

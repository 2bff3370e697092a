"""The model that is tuned: transformers' own definition with tunable layers inside, run block by block."""

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from quantkit.architectures import DecoderBlocks
from quantkit.calibration.activations import enter_with_gradients, run_head
from quantkit.calibration.staged_block import BlockBatch
from quantkit.tuning.objective import rows_at_once
from quantkit.tuning.small_parameter import SmallParameter, small_parameters
from quantkit.tuning.tunable_linear import TunableLinear


class Student:
    """A quantized model with everything in memory: codes, scales, small parameters, embeddings.

    Args:
        model: everything outside the quantized layers has its weights, in float32.
        decoder: its blocks.
        layers: the quantized layers by their name in the model; they are put in their places.
        dtype: storage dtype of the model.
        vocab_size: columns of its logits.
        checkpointing: keep only the input of each block for the backward pass and compute the block again there.

    Attributes:
        layers: as given.
        small: norms' weights and biases by name, the final norm among them.
        rows_at_once: rows of logits that are made at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        decoder: DecoderBlocks,
        layers: Mapping[str, TunableLinear],
        dtype: torch.dtype,
        vocab_size: int,
        *,
        checkpointing: bool = False,
    ) -> None:
        self.model, self.decoder, self.layers = model, decoder, dict(layers)
        self._checkpointing = checkpointing
        self.rows_at_once = rows_at_once(vocab_size)
        for name, layer in self.layers.items():
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, layer)
        self.small = {name: SmallParameter(model.get_parameter(name), dtype) for name in small_parameters(model)}
        self._of_block = [self._inside(f"{decoder.name}.{index}.") for index in range(len(decoder.blocks))]
        inside = f"{decoder.name}."
        self._outside = {name: value for name, value in self.small.items() if not name.startswith(inside)}

    def _inside(self, prefix: str) -> dict[str, SmallParameter]:
        return {name.removeprefix(prefix): value for name, value in self.small.items() if name.startswith(prefix)}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Everything that an optimizer moves; offsets of codes move by themselves."""
        for layer in self.layers.values():
            yield layer.shift
        for value in self.small.values():
            yield value.shift

    def enter(self, token_ids: Tensor, token_mask: Tensor) -> BlockBatch:
        """A batch of windows, [B, T] ids and mask, at the door of the first block."""
        return enter_with_gradients(self.model, self.decoder, token_ids, token_mask)

    def blocks(self, batch: BlockBatch) -> Tensor:
        """[B, T, hidden] output of the last block, with a gradient if it is enabled."""
        hidden = batch.hidden
        for index in range(len(self.decoder.blocks)):
            if self._checkpointing and torch.is_grad_enabled():
                hidden = checkpoint(partial(self.block, index, batch), hidden, use_reentrant=False)
            else:
                hidden = self.block(index, batch, hidden)
        return hidden

    def block(self, index: int, batch: BlockBatch, hidden: Tensor) -> Tensor:
        """[B, T, hidden] output of one block for ``hidden`` at its door; the rest of the input is the batch's."""
        values = {name: value() for name, value in self._of_block[index].items()}
        output = functional_call(self.decoder.blocks[index], values, (hidden,), dict(batch.kwargs[index]))
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def head(self, hidden: Tensor) -> Tensor:
        """[T, V] logits from [T, hidden] of the last block, through the tuned final norm."""
        return run_head(self.model, self.decoder, hidden, {name: value() for name, value in self._outside.items()})

    def logits(self, token_ids: Tensor) -> Tensor:
        """[1, T, V] float32 logits of one sequence, [1, T] int64."""
        with torch.no_grad():
            hidden = self.blocks(self.enter(token_ids, torch.ones_like(token_ids, dtype=torch.bool)))
            return self.head(hidden[0]).unsqueeze(0)

    def original_head(self, hidden: Tensor) -> Tensor:
        """The same through the final norm as it was."""
        return run_head(self.model, self.decoder, hidden, {})

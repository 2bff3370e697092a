"""The two ends of a model that is run block by block: from token ids to the first block, from the last to logits."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from quantkit.architectures import DecoderBlocks
from quantkit.calibration.staged_block import BlockBatch

HELD_OUT_EVERY = 8  # one window of so many judges what the others have solved


class _TakesFirstError(Exception):
    """The model takes the first of several things that a block returns, and has been given the hidden states alone."""


class _Passage(nn.Module):
    """Stands in for a decoder block: notes what it is given and hands hidden states on.

    Args:
        block: whose place it takes.
        calls: of all passages so far, the hidden states and what else each block was given, by its name.
        answer: is handed on; None for what comes in.
        in_tuple: hand it on as the first of a tuple.
    """

    def __init__(
        self, block: nn.Module, calls: list[tuple[Tensor, Mapping[str, Any]]], answer: Tensor | None, *, in_tuple: bool
    ) -> None:
        super().__init__()
        self._block = [block]  # in a list, so that it does not become a submodule
        self._calls, self._answer, self._in_tuple = calls, answer, in_tuple
        self._names = list(inspect.signature(block.forward).parameters)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._block[0], name)  # models ask their blocks for attention_type and the like

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        hidden = given.pop(self._names[0])
        if self._calls and hidden.dim() < self._calls[0][0].dim():
            raise _TakesFirstError
        self._calls.append((hidden, given))
        answer: Tensor = hidden if self._answer is None else self._answer
        return (answer,) if self._in_tuple else answer


@contextmanager
def _passages(
    model: nn.Module, decoder: DecoderBlocks, answer: Tensor | None, *, in_tuple: bool
) -> Iterator[list[tuple[Tensor, Mapping[str, Any]]]]:
    """Put a passage in the place of every block; yields the calls, one a block."""
    parent_name, _, attribute = decoder.name.rpartition(".")
    parent = model.get_submodule(parent_name)
    original = getattr(parent, attribute)
    calls: list[tuple[Tensor, Mapping[str, Any]]] = []
    passages = (_Passage(block, calls, answer, in_tuple=in_tuple) for block in decoder.blocks)
    setattr(parent, attribute, nn.ModuleList(passages))
    try:
        yield calls
    finally:
        setattr(parent, attribute, original)


def _run_outside(
    model: nn.Module, decoder: DecoderBlocks, run: Callable[[], Any], answer: Tensor | None = None
) -> tuple[Any, list[tuple[Tensor, Mapping[str, Any]]]]:
    """What ``run``, a call of the model, gives with passages in the place of its blocks, and what these were given.

    Blocks return hidden states, or in older models a tuple that begins with them. Which of both is not known without
    running one, but a model that takes the first element of hidden states has lost a dimension at its second block.
    """
    try:
        with _passages(model, decoder, answer, in_tuple=False) as calls:
            return run(), calls
    except _TakesFirstError:
        with _passages(model, decoder, answer, in_tuple=True) as calls:
            return run(), calls


def enter_blocks(
    model: nn.Module, decoder: DecoderBlocks, windows: Iterable[tuple[Tensor, Tensor]]
) -> list[BlockBatch]:
    """Embed the windows and note what the model passes to each of its blocks.

    Args:
        model: everything outside the blocks has its weights; the blocks themselves are not run.
        decoder: the model's blocks.
        windows: batches of token ids [B, T] int64 and token mask [B, T] bool; padding stands at the end of a window, so
            a causal model never looks at it.

    Returns:
        The batches at the door of block 0. Of the windows that count every eighth is held out (the last one if there
        are fewer; none if there is one).
    """
    given = list(windows)
    counting = torch.cat([mask.any(dim=1) for _, mask in given])
    every = min(HELD_OUT_EVERY, int(counting.sum()))
    held_out = counting & (counting.cumsum(0) % every == 0) if every > 1 else torch.zeros_like(counting)
    keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
    batches = []
    for (ids, mask), judges in zip(given, held_out.split([len(mask) for _, mask in given]), strict=True):
        options = {"logits_to_keep": 1} if keeps_logits else {}
        with torch.inference_mode():
            _, calls = _run_outside(model, decoder, partial(model, ids, use_cache=False, **options))
        kwargs = [kwargs for _, kwargs in calls]
        batches.append(BlockBatch(calls[0][0].float(), mask, kwargs, judges.unsqueeze(1).expand_as(mask)))
    return batches


def enter_with_gradients(model: nn.Module, decoder: DecoderBlocks, token_ids: Tensor, token_mask: Tensor) -> BlockBatch:
    """One batch of windows, [B, T] ids and mask, at the door of block 0, made of tensors a backward pass may keep."""
    (batch,) = enter_blocks(model, decoder, [(token_ids, token_mask)])
    kwargs = [{name: _ordinary(value) for name, value in each.items()} for each in batch.kwargs]
    return BlockBatch(batch.hidden.clone(), token_mask, kwargs)


def _ordinary(value: object) -> object:
    """The same without inference tensors inside."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple):
        return tuple(_ordinary(part) for part in value)
    return value


def leave_blocks(model: nn.Module, decoder: DecoderBlocks, token_ids: Tensor, hidden: Tensor) -> Tensor:
    """Logits of windows whose hidden states have left the last block.

    Args:
        model: everything outside the blocks has its weights.
        decoder: the model's blocks.
        token_ids: [B, T] int64, only for their shape.
        hidden: [B, T, hidden] output of the last block.

    Returns:
        [B, T, V] float32.
    """
    with torch.inference_mode():
        output, _ = _run_outside(model, decoder, partial(model, token_ids, use_cache=False), hidden)
    logits: Tensor = output.logits
    return logits.float()


def run_head(model: nn.Module, decoder: DecoderBlocks, hidden: Tensor, replaced: Mapping[str, Tensor]) -> Tensor:
    """Logits of single tokens whose hidden states have left the last block, with a gradient if it is enabled.

    Args:
        model: everything outside the blocks has its weights.
        decoder: the model's blocks.
        hidden: [T, hidden] output of the last block.
        replaced: parameters outside the blocks to use instead of the model's own, by name.

    Returns:
        [T, V] float32.
    """
    token_ids = torch.zeros(1, len(hidden), dtype=torch.int64)
    run = partial(functional_call, model, dict(replaced), (token_ids,), {"use_cache": False})
    output, _ = _run_outside(model, decoder, run, hidden.unsqueeze(0))
    logits: Tensor = output.logits[0]
    return logits.float()


def forget_weights(modules: Sequence[nn.Module]) -> None:
    """Free the parameters of finished blocks."""
    for module in modules:
        module.to("meta")


def forget_outside(model: nn.Module, decoder: DecoderBlocks) -> None:
    """Free the parameters outside the blocks (embeddings, final norm, head); tied ones stay tied, buffers stay."""
    forgotten: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name.startswith(f"{decoder.name}."):
            continue
        empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, forgotten.setdefault(id(parameter), empty))

"""Paged attention against softmax written out in float64, and everything that it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantkit_kernels
from quantkit.errors import EngineError
from quantkit.serve.attention import PROBE, Probe, paged_attention, paged_mask
from quantkit.serve.attention_metadata import BUCKET_BYTES, AttentionMetadata, bucket_edges
from quantkit.serve.batch import Batch, build_batch, uncached_batch
from quantkit.serve.kv_cache import KVCache, KVShape
from quantkit.serve.request import Request
from quantkit.serve.sampling_params import SamplingParams
from quantkit.serve.scheduler import Scheduled
from quantkit_kernels.dispatch import Choice
from quantkit_kernels.native_library import native_blocker

HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 6, 2, 16, 8
BLOCK = 4


@pytest.fixture(params=["gathers blocks", "reads blocks"], autouse=True)
def decode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a decode finds its keys; the second needs a compiled body."""
    if request.param == "gathers blocks":
        body = Choice("paged_attention", "reference", "for a test", lambda: None)
        monkeypatch.setattr("quantkit.serve.kv_cache.choose", lambda operation, device: body)
    elif native_blocker() is not None:
        pytest.skip(str(native_blocker()))
    return str(request.param)


class Layer(nn.Module):
    """What attention sees of a layer."""

    layer_idx = 1


def written_out(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, softcap: float | None
) -> Tensor:
    """[q, H, D_v] of the last q places: a loop over places and heads, in float64."""
    num_queries, num_keys = len(query), len(key)
    output = torch.zeros(num_queries, HEADS, value.shape[-1], dtype=torch.float64)
    for row in range(num_queries):
        place = num_keys - num_queries + row
        first = 0 if window is None else max(0, place - window + 1)
        for head in range(HEADS):
            keys, values = (t[first : place + 1, head // (HEADS // KV_HEADS)].double() for t in (key, value))
            scores = keys @ query[row, head].double() * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            output[row, head] = scores.softmax(0) @ values
    return output


class Case:
    """Requests with random keys and values, some of them already in the cache.

    Args:
        contexts: for each request (tokens in the cache, tokens in this step).
        scattered: blocks in random order; otherwise neighbours.
        value_dim: width of values.
    """

    def __init__(self, contexts: list[tuple[int, int]], *, scattered: bool, value_dim: int = HEAD_DIM) -> None:
        generator = torch.Generator().manual_seed(len(contexts))
        tables = [-(-(cached + new) // BLOCK) for cached, new in contexts]
        order = torch.randperm(sum(tables), generator=generator) if scattered else torch.arange(sum(tables))
        self.cache = KVCache([KVShape(KV_HEADS, HEAD_DIM, value_dim)] * 2, sum(tables) + 1, BLOCK, torch.float32)
        self.keys = [torch.randn(sum(context), KV_HEADS, HEAD_DIM, generator=generator) for context in contexts]
        self.values = [torch.randn(sum(context), KV_HEADS, value_dim, generator=generator) for context in contexts]
        self.queries = [torch.randn(new, HEADS, HEAD_DIM, generator=generator) for _, new in contexts]
        step = []
        free = (order + 1).tolist()
        for index, (cached, new) in enumerate(contexts):
            request = Request(str(index), tuple(range(cached + new)), SamplingParams(), 1, frozenset(), None, None)
            request.block_table, free = free[: tables[index]], free[tables[index] :]
            for place in range(cached):
                block, offset = request.block_table[place // BLOCK], place % BLOCK
                self.cache.caches[1][0][block, offset] = self.keys[index][place]
                self.cache.caches[1][1][block, offset] = self.values[index][place]
            step.append(Scheduled(request, cached, new))
        self.batch: Batch = build_batch(step, BLOCK)
        self.order = [int(request.request_id) for request in self.batch.requests]

    def row(self, tensors: list[Tensor]) -> Tensor:
        """[1, H, T, D] of the step's tokens, in the order of the batch."""
        new = [tensors[index][-len(self.queries[index]) :] for index in self.order]
        return torch.cat(new).unsqueeze(0).transpose(1, 2)

    def attend(self, **options: Any) -> list[Tensor]:
        """Per request in the order of the batch: [q, H, D_v]."""
        metadata = AttentionMetadata(self.batch, self.cache, torch.float32)
        rows = self.row(self.queries), self.row(self.keys), self.row(self.values)
        output, weights = paged_attention(Layer(), *rows, None, paged=metadata, **options)
        assert weights is None
        return list(output[0].split([len(self.queries[index]) for index in self.order]))

    def assert_written_out(
        self, *, scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None
    ) -> None:
        """Every request's output is the one written out."""
        found = self.attend(scaling=scaling, sliding_window=sliding_window, softcap=softcap)
        factor = HEAD_DIM**-0.5 if scaling is None else scaling
        for index, output in zip(self.order, found, strict=True):
            wanted = written_out(
                self.queries[index], self.keys[index], self.values[index], factor, sliding_window, softcap
            )
            torch.testing.assert_close(output.double(), wanted, rtol=1e-4, atol=1e-5)


MIXES = {
    "one decode": [(6, 1)],
    "one first token": [(0, 1)],
    "decodes of many lengths": [(length, 1) for length in (0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 30, 31, 60)],
    "equal decodes": [(11, 1)] * 5,
    "first chunks": [(0, 5), (0, 8), (0, 13)],
    "later chunks": [(4, 5), (3, 2), (9, 8), (16, 3)],
    "all kinds": [(0, 6), (20, 1), (5, 4), (21, 1), (0, 1), (2, 1), (12, 9)],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, 7, 100])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_attention_is_softmax_over_the_right_keys(
    mix: str, scattered: bool, window: int | None, softcap: float | None
) -> None:
    Case(MIXES[mix], scattered=scattered).assert_written_out(sliding_window=window, softcap=softcap)


@pytest.mark.parametrize("mix", MIXES)
def test_values_may_be_narrower_than_keys_and_scaling_is_honoured(mix: str) -> None:
    Case(MIXES[mix], scattered=True, value_dim=VALUE_DIM).assert_written_out(scaling=0.5)


def test_new_keys_and_values_are_stored_and_nothing_else_is_touched() -> None:
    case = Case([(5, 3), (2, 1)], scattered=True)
    before = [rows.clone() for rows in case.cache.rows]
    case.attend()
    assert torch.equal(case.cache.rows[0], before[0])  # another layer
    changed = (case.cache.rows[1] != before[1]).any(1).nonzero().flatten()
    assert set(changed.tolist()) == set(case.batch.slot_mapping.tolist())


def test_what_lies_in_the_null_block_and_behind_the_end_does_not_matter() -> None:
    case = Case(MIXES["all kinds"], scattered=True)
    wanted = case.attend()
    used = torch.zeros(len(case.cache.rows[1]), dtype=torch.bool)
    for request in case.batch.requests:
        for place in range(request.num_tokens):
            used[request.block_table[place // BLOCK] * BLOCK + place % BLOCK] = True
    case.cache.rows[1][~used] = 1e4
    for found, want in zip(case.attend(), wanted, strict=True):
        assert torch.equal(found, want)


def test_decodes_of_similar_length_share_one_call(monkeypatch: pytest.MonkeyPatch, decode: str) -> None:
    calls: list[int] = []
    real: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention

    def counted(query: Tensor, *arguments: Any, **options: Any) -> Tensor:
        calls.append(len(query))
        return real(query, *arguments, **options)

    name = "torch.nn.functional.scaled_dot_product_attention"
    if decode == "reads blocks":
        name, real = "quantkit.serve.attention.attend_blocks", quantkit_kernels.paged_attention
    monkeypatch.setattr(name, counted)
    Case([(length, 1) for length in range(40, 52)], scattered=True).attend()
    assert calls == [12]


def test_buckets_are_neither_padded_much_nor_large() -> None:
    assert bucket_edges((), 16, 100) == []
    assert bucket_edges((5,), 16, 100) == [1]
    assert bucket_edges((10, 11, 12, 200, 210, 1000), 16, 100) == [3, 5, 6]
    width = BUCKET_BYTES // 1000
    assert bucket_edges((1000,) * 5, 16, width // 2) == [2, 4, 5]
    assert bucket_edges((1000,) * 3, 16, width * 10) == [1, 2, 3]  # one request is never split


def test_uncached_sequences_do_not_see_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (3, 7, 1)
    query = torch.randn(1, HEADS, 11, HEAD_DIM, generator=generator)
    key, value = (torch.randn(1, KV_HEADS, 11, HEAD_DIM, generator=generator) for _ in range(2))
    batch = uncached_batch([range(length) for length in lengths])
    output, _ = paged_attention(Layer(), query, key, value, paged=AttentionMetadata(batch, None, torch.float32))
    start = 0
    for length in lengths:
        rows = [tensor[0, :, start : start + length].transpose(0, 1) for tensor in (query, key, value)]
        wanted = written_out(*rows, HEAD_DIM**-0.5, None, None)
        torch.testing.assert_close(output[0, start : start + length].double(), wanted, rtol=1e-4, atol=1e-5)
        start += length


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"s_aux": torch.zeros(6)}, "attention needs s_aux, which is not supported"),
        ({"head_mask": torch.ones(1)}, "attention needs head_mask"),
        ({"output_router_weights": True}, "attention needs output_router_weights"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"is_causal": False}, "attention is not causal"),
        ({"attention_mask": torch.zeros(1, 1, 1, 1)}, "the model makes its own attention mask"),
        ({"paged": None}, "the model does not pass the step on to attention"),
    ],
)
def test_what_attention_cannot_honour_is_refused(options: dict[str, Any], message: str) -> None:
    case = Case([(3, 1)], scattered=False)
    rows = case.row(case.queries), case.row(case.keys), case.row(case.values)
    known = {"paged": AttentionMetadata(case.batch, case.cache, torch.float32), "attention_mask": None}
    with pytest.raises(EngineError, match=f"the engine cannot run Layer, layer 1: {message}"):
        paged_attention(Layer(), *rows, **{**known, **options})


def test_options_that_do_not_concern_attention_or_are_off_are_fine() -> None:
    case = Case([(3, 1)], scattered=False)
    wanted = case.attend()
    found = case.attend(position_ids=torch.zeros(1), use_cache=True, s_aux=None, output_attentions=False, sink=False)
    assert torch.equal(found[0], wanted[0])


def sliding(window: int) -> Callable[..., Tensor]:
    return lambda batch, head, query, key: (key <= query) & (key > query - window)


def chunked(size: int) -> Callable[..., Tensor]:
    return lambda batch, head, query, key: (key <= query) & (key // size == query // size)


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def prefix(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) | (key < 2)


@pytest.mark.parametrize(
    ("mask_function", "local_size", "window", "message"),
    [
        (causal, None, None, None),
        (sliding(8), 8, 8, None),
        (sliding(1), 1, 1, None),
        (causal, None, 7, "not causal with sliding_window=7"),
        (causal, None, 8, "sliding_window=8 is in no configuration"),
        (sliding(8), 8, None, "not causal"),
        (sliding(8), 8, 9, "not causal with sliding_window=9"),
        (chunked(8), 8, None, "not causal"),
        (chunked(8), 8, 8, "not causal with sliding_window=8"),
        (prefix, None, None, "not causal"),
        (lambda batch, head, query, key: torch.zeros(3)[query] > key, None, None, "makes its own attention mask"),
    ],
)
def test_a_probe_compares_the_models_mask_with_ours(
    mask_function: Callable[..., Tensor], local_size: int | None, window: int | None, message: str | None
) -> None:
    probe = Probe(torch.float32)
    token = PROBE.set(probe)
    try:
        mask = paged_mask(3, mask_function, local_size, config=None, dtype=torch.float32)
    finally:
        PROBE.reset(token)
    assert paged_mask(3, mask_function, local_size) is None  # outside a probe there is no mask
    key = torch.zeros(1, KV_HEADS, 3, HEAD_DIM)
    if message is None:
        probe.record(Layer(), key, key[..., :4], mask, window)
        assert probe.shapes == {1: KVShape(KV_HEADS, HEAD_DIM, 4)}
        with pytest.raises(EngineError, match="attention is called twice"):
            probe.record(Layer(), key, key, mask, window)
    else:
        with pytest.raises(EngineError, match=message):
            probe.record(Layer(), key, key, mask, window)


def test_a_probe_refuses_other_types_and_layers_without_a_number() -> None:
    probe = Probe(torch.bfloat16)
    key = torch.zeros(1, KV_HEADS, 3, HEAD_DIM)
    with pytest.raises(EngineError, match=r"keys in torch.float32 and values in torch.float32 in a torch"):
        probe.record(Layer(), key, key, None, None)
    with pytest.raises(EngineError, match="the layer has no number"):
        probe.record(nn.Linear(1, 1), key, key, None, None)

"""The books of CUDA graphs: sizes, padding, inputs that stay in their place; a graph here just calls its function."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quantkit.serve.batch import Batch
from quantkit.serve.cuda_graphs import DecodeGraphs, batch_bucket, context_bucket
from quantkit.serve.step_inputs import StepInputs, StepShape

CPU = torch.device("cpu")
BLOCK = 16
VOCAB = 7


def decode_batch(lens: tuple[int, ...], *, sampled: int | None = None, fixed: bool = False) -> Batch:
    """Requests with one token each; request r has the blocks 10 r + 1, 10 r + 2, ..."""
    width = -(-max(lens) // BLOCK)
    count = len(lens)
    return Batch(
        requests=(),
        input_ids=torch.arange(100, 100 + count),
        positions=torch.tensor(lens) - 1,
        slot_mapping=torch.arange(1000, 1000 + count),
        block_tables=torch.arange(1, width + 1) + 10 * torch.arange(count).unsqueeze(1),
        cu_seqlens=tuple(range(count + 1)),
        context_lens=lens,
        num_decodes=count,
        sampled_rows=tuple(range(count if sampled is None else sampled)),
        has_fixed_shapes=fixed,
    )


class Recorder:
    """A model that notes its inputs, and graphs that call it again."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []
        self.places: list[int] = []
        self.num_captures = 0

    def compute(self, inputs: StepInputs) -> Tensor:
        (group,) = inputs.groups
        self.places.append(inputs.input_ids.data_ptr())
        self.seen.append({
            "ids": inputs.input_ids.clone(), "slots": inputs.slot_mapping.clone(), "lens": group.context_lens.clone(),
            "tables": group.block_tables.clone(), "starts": group.cu_seqlens.clone(),
        })  # fmt: skip
        return inputs.input_ids.float().unsqueeze(1).expand(-1, VOCAB)

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.num_captures += 1
        return compute

    def graphs(self) -> DecodeGraphs:
        return DecodeGraphs(
            self.compute, self.capture, max_num_seqs=20, max_context_len=2000, kv_block_size=BLOCK, device=CPU
        )


@pytest.mark.parametrize(
    ("count", "bucket"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 20), (20, 20)]
)
def test_sizes_of_batches(count: int, bucket: int) -> None:
    assert batch_bucket(count, 20) == bucket


def test_small_engines_have_small_graphs() -> None:
    assert [batch_bucket(1, 1), batch_bucket(3, 3), context_bucket(5, 64)] == [1, 3, 64]


@pytest.mark.parametrize(("length", "bucket"), [(1, 512), (512, 512), (513, 1024), (1025, 2000), (2000, 2000)])
def test_lengths_of_contexts(length: int, bucket: int) -> None:
    assert context_bucket(length, 2000) == bucket


def test_a_graph_is_captured_once_and_filled_in_place() -> None:
    recorder = Recorder()
    graphs = recorder.graphs()
    logits = graphs(decode_batch((5, 40, 70)))
    assert logits[:, 0].tolist() == [100.0, 101.0, 102.0]
    assert recorder.num_captures == 1
    assert len(recorder.seen) == 2  # once to compile, once as a graph
    again = graphs(decode_batch((6, 41, 71)))
    assert again.data_ptr() == logits.data_ptr()
    assert recorder.num_captures == 1
    assert len(set(recorder.places)) == 1
    assert recorder.seen[-1]["lens"].tolist() == [6, 41, 71, 0]


def test_padding_stores_nothing_and_sees_nothing() -> None:
    """Also where an earlier, larger batch has left its numbers."""
    recorder = Recorder()
    graphs = recorder.graphs()
    graphs(decode_batch((5, 6, 7, 8)))
    graphs(decode_batch((33, 34, 35)))
    seen = recorder.seen[-1]
    assert recorder.num_captures == 1
    assert seen["ids"].tolist() == [100, 101, 102, 0]
    assert seen["slots"].tolist() == [1000, 1001, 1002, -1]
    assert seen["lens"].tolist() == [33, 34, 35, 0]
    assert seen["starts"].tolist() == [0, 1, 2, 3, 4]
    assert seen["tables"].shape == (4, 32)  # 512 tokens
    assert seen["tables"][:, :4].tolist() == [[1, 2, 3, 0], [11, 12, 13, 0], [21, 22, 23, 0], [0, 0, 0, 0]]


def test_buckets_are_captured_when_they_are_needed() -> None:
    recorder = Recorder()
    graphs = recorder.graphs()
    for lens in ((5,), (600,), (5, 600), (7,), (1024,)):
        graphs(decode_batch(lens))
    assert graphs.buckets == [(1, 512), (1, 1024), (2, 1024)]
    assert recorder.num_captures == 3


def test_a_step_of_several_passes_keeps_its_logits() -> None:
    graphs = Recorder().graphs()
    first = graphs(decode_batch((5,), fixed=True))
    second = graphs(decode_batch((6,), fixed=True))
    assert first.data_ptr() != second.data_ptr()


def test_what_is_no_plain_decode_is_left_to_the_runner() -> None:
    graphs = Recorder().graphs()
    assert graphs.takes(decode_batch((5, 6)))
    assert not graphs.takes(decode_batch((5, 6), sampled=1))
    assert not graphs.takes(decode_batch((1,) * 21))


def test_chunks_come_behind_decodes_and_each_part_is_aligned() -> None:
    batch = Batch(
        requests=(),
        input_ids=torch.arange(8),
        positions=torch.tensor([4, 0, 1, 2, 16, 17, 18, 19]),
        slot_mapping=torch.arange(50, 58),
        block_tables=torch.tensor([[3, 0], [4, 0], [5, 6]]),
        cu_seqlens=(0, 1, 4, 8),
        context_lens=(5, 3, 20),
        num_decodes=1,
        sampled_rows=(0, 2),
    )
    shape = StepShape.of(batch, BLOCK, 2)
    inputs = StepInputs(shape, CPU)
    inputs.fill(batch, batch.logits_indices())
    decodes, chunks = inputs.groups
    assert (decodes.num_tokens, decodes.max_query_len, decodes.max_context_len) == (1, 1, 5)
    assert (chunks.num_tokens, chunks.max_query_len, chunks.max_context_len) == (7, 4, 20)
    assert (decodes.cu_seqlens.tolist(), chunks.cu_seqlens.tolist()) == ([0, 1], [0, 3, 7])
    assert (decodes.context_lens.tolist(), chunks.context_lens.tolist()) == ([5], [3, 20])
    assert chunks.block_tables[:, :2].tolist() == [[4, 0], [5, 6]]
    assert inputs.rows is not None
    assert inputs.rows.tolist() == [0, 7]
    parts = [inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.rows]
    parts += [tensor for group in inputs.groups for tensor in (group.block_tables, group.cu_seqlens)]
    assert all((part.data_ptr() - inputs.input_ids.data_ptr()) % 16 == 0 for part in parts)
    assert all(part.dtype == torch.int64 for part in parts[:4])

"""llama.cpp's importance matrices, both formats, written by hand as its tool writes them."""

import struct

import gguf
import numpy as np
import pytest
import torch

from quantkit.errors import CheckpointError, SourceError, UsageError
from quantkit.export_gguf.imatrix import ImportanceMatrix, read_imatrix, write_imatrix
from quantkit.formats.gguf.header import read_gguf_header

MEANS = {
    "blk.0.attn_q.weight": torch.tensor([1.0, 2.0, 0.0, 4.0]),
    "blk.0.ffn_up_exps.weight": torch.tensor([[1.0, 3.0], [5.0, 0.5]]),
}


def test_gguf_of_llama_cpp(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "im.gguf", "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["wiki.txt"])
    writer.add_uint32("imatrix.chunk_count", 10)
    writer.add_tensor("blk.0.attn_q.weight.in_sum2", np.array([[10, 20, 0, 40]], np.float32))
    writer.add_tensor("blk.0.attn_q.weight.counts", np.array([[10]], np.float32))
    writer.add_tensor("blk.0.ffn_up_exps.weight.in_sum2", np.array([[4, 12], [7, 7]], np.float32))
    writer.add_tensor("blk.0.ffn_up_exps.weight.counts", np.array([[4], [0]], np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    matrix = read_imatrix(tmp_path / "im.gguf")
    assert (matrix.datasets, matrix.chunks) == (("wiki.txt",), 10)
    assert matrix.means["blk.0.attn_q.weight"].tolist() == [1, 2, 0, 4]
    assert matrix.means["blk.0.ffn_up_exps.weight"].tolist() == [[1, 3], [0, 0]]  # an expert that nothing reached


def test_dat_of_llama_cpp(tmp_path):
    name, dataset = b"blk.0.attn_q.weight", b"wiki.txt"
    data = struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii3f", 5, 3, 5.0, 10.0, 0.0)
    (tmp_path / "im.dat").write_bytes(data + struct.pack("<ii", 7, len(dataset)) + dataset)
    matrix = read_imatrix(tmp_path / "im.dat")
    assert matrix.means["blk.0.attn_q.weight"].tolist() == [1, 2, 0]
    assert (matrix.datasets, matrix.chunks) == (("wiki.txt",), 7)


@pytest.mark.parametrize("name", ["im.gguf", "im.dat"])
def test_written_and_read_again(name, tmp_path):
    write_imatrix(tmp_path / name, ImportanceMatrix(MEANS, ("general.txt",), 8), chunk_tokens=512)
    again = read_imatrix(tmp_path / name)
    assert (again.datasets, again.chunks) == (("general.txt",), 8)
    for key, mean in MEANS.items():
        torch.testing.assert_close(again.means[key].reshape(mean.shape), mean)
    if name.endswith("gguf"):
        header = read_gguf_header(tmp_path / name)
        assert header.metadata["general.type"] == "imatrix"
        shapes = {tensor.name: tensor.shape for tensor in header.tensors}
        assert shapes["blk.0.ffn_up_exps.weight.in_sum2"] == (2, 2)
        assert shapes["blk.0.ffn_up_exps.weight.counts"] == (1, 2)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no importance matrix"),
        (b"GGUF\x03", "no importance matrix: it is only 5 bytes long"),
        (struct.pack("<ii", 1, 10**6), "the number 1000000 at byte 4 makes no sense"),
        (struct.pack("<ii4sii", 1, 4, b"name", 1, 12) + bytes(8), "it ends too early"),
        (struct.pack("<i", 0), "it has no entries"),
    ],
)
def test_broken_files(content, message, tmp_path):
    (tmp_path / "im.dat").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_imatrix(tmp_path / "im.dat")


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(SourceError, match=r"cannot read .*none\.dat: No such file"):
        read_imatrix(tmp_path / "none.dat")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        write_imatrix(tmp_path / "file" / "im.dat", ImportanceMatrix(MEANS), chunk_tokens=512)

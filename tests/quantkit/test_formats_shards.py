"""Weight files laid out before the work; the safetensors library and transformers are the independent readers."""

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quantkit.errors import CheckpointError
from quantkit.formats.safetensors_file import DTYPES, SafetensorsFileError, TensorSpec, read_header
from quantkit.formats.shards import ShardWriter, plan_shards
from quantkit.source import open_source


def some_tensors():
    generator = torch.Generator().manual_seed(3)
    return {
        "bytes.odd": torch.randint(-128, 127, (7,), generator=generator).to(torch.int8),
        "a.weight": torch.randn(8, 16, generator=generator).bfloat16(),
        "a.words": torch.randint(-(2**31), 2**31 - 1, (3, 5), generator=generator).to(torch.int32),
        "a.shape": torch.tensor([8, 16]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
        "größe.weight": torch.randn(4, 4, generator=generator),
    }


def specs_of(tensors):
    return {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_one_file_reads_back(tmp_path):
    tensors = some_tensors()
    with ShardWriter(tmp_path / "out", specs_of(tensors)) as writer:
        assert names(tmp_path / "out") == ["model.safetensors.partial"]
        for name in reversed(tensors):
            writer.write(name, tensors[name])
        paths = writer.finish()
    assert paths == [tmp_path / "out" / "model.safetensors"]
    assert names(tmp_path / "out") == ["model.safetensors"]
    back = load_file(paths[0])
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor), name
        assert back[name].dtype == tensor.dtype
    with safe_open(paths[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert writer.total_bytes == paths[0].stat().st_size


def test_tensors_are_aligned_to_their_elements(tmp_path):
    tensors = some_tensors()
    with ShardWriter(tmp_path, specs_of(tensors)) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.finish()
    for name, slot in read_header(tmp_path / "model.safetensors").items():
        assert slot.offset % slot.spec.dtype.itemsize == 0, name


def test_header_agrees_with_the_library(tmp_path):
    tensors = {f"t{i}": torch.zeros(3, 2).to(dtype) for i, dtype in enumerate(DTYPES.values())}
    save_file(tensors, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    assert {name: slot.spec for name, slot in header.items()} == specs_of(tensors)
    with ShardWriter(tmp_path / "ours", specs_of(tensors)) as writer:
        for name, slot in header.items():
            writer.copy(name, tmp_path / "x.safetensors", slot)
        (path,) = writer.finish()
    with safe_open(path, "pt") as file:
        assert {name: file.get_tensor(name).dtype for name in file.keys()} == {n: t.dtype for n, t in tensors.items()}  # noqa: SIM118


def test_many_files_and_their_index(tmp_path):
    tensors = {f"layer.{i}.weight": torch.full((10, 10), float(i)) for i in range(7)}  # 400 bytes each
    with ShardWriter(tmp_path, specs_of(tensors), max_shard_bytes=900) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        paths = writer.finish()
    assert [path.name for path in paths] == [
        *(f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)),
        "model.safetensors.index.json",
    ]
    index = json.loads(paths[-1].read_text())
    assert index["metadata"]["total_size"] == 2800
    assert index["weight_map"].keys() == tensors.keys()
    for name, shard in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / shard)[name], tensors[name])


def test_a_tensor_larger_than_a_file_gets_its_own():
    specs = {name: TensorSpec(torch.int8, (size,)) for name, size in (("a", 5), ("big", 50), ("b", 5), ("c", 5))}
    assert list(plan_shards(specs, 10).values()) == [["a"], ["big"], ["b", "c"]]
    with pytest.raises(ValueError, match="max_shard_bytes=0 must be positive"):
        plan_shards(specs, 0)


def test_copied_tensors_are_the_source_byte_for_byte(tiny_llama_folder, tmp_path):
    """NaN with a payload, negative zero: bits that a float conversion could change."""
    tensors = load_file(tiny_llama_folder / "model.safetensors")
    odd = torch.tensor([0x7FC12345, -0x80000000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    tensors["odd.weight"] = odd
    shutil.copytree(tiny_llama_folder, tmp_path / "source")
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    source = open_source(tmp_path / "source")
    specs = {name: TensorSpec(info.dtype, info.shape) for name, info in source.tensors.items()}
    with ShardWriter(tmp_path / "out", specs, max_shard_bytes=100_000) as writer:
        for name in specs:
            writer.copy(name, *source.locate(name))
        writer.finish()
    shutil.copy(tmp_path / "source" / "config.json", tmp_path / "out")
    out = open_source(tmp_path / "out")
    assert out.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert out.read(name).view(torch.int32).tolist() == tensor.view(torch.int32).tolist(), name


def test_same_tensors_make_the_same_bytes(tmp_path):
    tensors = some_tensors()
    for folder, order in (("a", list(tensors)), ("b", list(reversed(tensors)))):
        with ShardWriter(tmp_path / folder, specs_of(tensors)) as writer:
            for name in order:
                writer.write(name, tensors[name])
            writer.finish()
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("x", torch.zeros(2, 2), "x was not planned"),
        ("a", torch.zeros(2, 3), r"a has F32 \[2, 3\], planned was F32 \[2, 2\]"),
        ("a", torch.zeros(2, 2, dtype=torch.float16), r"a has F16 \[2, 2\], planned was F32"),
        ("a", torch.zeros(2, 2, device="meta"), "a has no data"),
    ],
)
def test_only_what_was_planned_is_written(tmp_path, name, tensor, message):
    with (
        ShardWriter(tmp_path / "out", {"a": TensorSpec(torch.float32, (2, 2))}) as writer,
        pytest.raises(CheckpointError, match=message),
    ):
        writer.write(name, tensor)
    assert not (tmp_path / "out").exists()


def test_every_tensor_must_be_written_once(tmp_path):
    specs = {name: TensorSpec(torch.float32, (2,)) for name in "abc"}
    writer = ShardWriter(tmp_path / "out", specs)
    writer.write("b", torch.ones(2))
    with pytest.raises(CheckpointError, match="b was written already"):
        writer.write("b", torch.ones(2))
    with pytest.raises(CheckpointError, match="a and 1 more was never written"):
        writer.finish()
    assert names(tmp_path / "out") == ["model.safetensors.partial"]
    writer.abort()
    assert not (tmp_path / "out").exists()


def test_failure_leaves_a_folder_that_was_there_as_it_was(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")

    def fail():
        with ShardWriter(tmp_path, {"a": TensorSpec(torch.float32, (2,))}):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert names(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("how", ["reserve", "free"])
def test_full_disk_shows_before_the_work(tmp_path, monkeypatch, how):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    if how == "reserve":
        monkeypatch.setattr(os, "posix_fallocate", full)
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(CheckpointError, match=r"no space for the checkpoint in .*out: it needs [\d,]+ bytes") as caught:
        ShardWriter(tmp_path / "out", {"a": TensorSpec(torch.float32, (1000,))})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_file_size_limit_of_the_system(tmp_path):
    """A real refusal by the kernel: the process may write files of 100 kB, the checkpoint needs 4 MB."""
    program = (
        "import resource, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from quantkit.formats.shards import ShardWriter, TensorSpec\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "ShardWriter(Path(sys.argv[1]), {'a': TensorSpec(torch.float32, (1_000_000,))})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "out"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 1
    assert "CheckpointError: no space for the checkpoint" in done.stderr
    assert not (tmp_path / "out").exists()


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint in .*: Not a directory"):
        ShardWriter(tmp_path / "file" / "out", {"a": TensorSpec(torch.float32, (2,))})


def test_resume_goes_on_in_the_same_files(tmp_path):
    tensors = {f"t{i}": torch.full((100,), float(i)) for i in range(6)}
    specs = specs_of(tensors)
    first = ShardWriter(tmp_path, specs, max_shard_bytes=900)
    for name in ("t0", "t1", "t4"):
        first.write(name, tensors[name])
    first.flush()
    first.close()
    second = ShardWriter.resume(tmp_path, specs, max_shard_bytes=900, written=["t0", "t4"])
    assert second.missing == ["t1", "t2", "t3", "t5"]
    with second:
        for name in second.missing:
            second.write(name, tensors[name])
        second.finish()
    back = {name: value for path in tmp_path.glob("*.safetensors") for name, value in load_file(path).items()}
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor)


def test_resume_refuses_other_files(tmp_path):
    specs = {"a": TensorSpec(torch.float32, (4,)), "b": TensorSpec(torch.float32, (4,))}
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.partial is missing or has another size"):
        ShardWriter.resume(tmp_path, specs, written=[])
    ShardWriter(tmp_path, specs).close()
    with pytest.raises(CheckpointError, match="z is no tensor of this checkpoint"):
        ShardWriter.resume(tmp_path, specs, written=["z"])
    other = {"a": TensorSpec(torch.float32, (4,)), "c": TensorSpec(torch.float32, (4,))}
    with pytest.raises(CheckpointError, match="was laid out for other tensors"):
        ShardWriter.resume(tmp_path, other, written=[])


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[1]", "not a JSON object"),
        (b'{"a":{"dtype":"F32","shape":[2]}}', "entry of a is malformed"),
        (b'{"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}}', "the type F99 of a is unknown"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', "a has 4 bytes where its shape and type need 8"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}}', "a has 8 bytes where|it is"),
        (b"{}", "it is too long"),
    ],
)
def test_broken_headers(tmp_path, header, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(SafetensorsFileError, match=message):
        read_header(path)

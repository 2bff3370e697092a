"""Verify on GGUF without the model's answers: what is not as the model would be written is named, with both values."""

import hashlib
import json
import struct

import gguf
import pytest
import torch

from quantkit.export_gguf import export_gguf
from quantkit.export_gguf.verify import verify_gguf
from quantkit.export_gguf.verify_tensors import block_problem, grid_steps
from quantkit.formats.gguf.block_types import BLOCK_TYPES
from quantkit.source import open_source

NAME = "blk.1.ffn_down.weight"


@pytest.fixture(scope="module")
def whole(tiny_llama_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "out.gguf"
    export_gguf(open_source(tiny_llama_folder), path, "Q5_0")
    return path


@pytest.fixture
def verify(whole, tiny_llama_folder, tmp_path):
    """Verify other bytes, beside which no manifest lies."""

    def look(data, source=tiny_llama_folder):
        (tmp_path / "out.gguf").write_bytes(data)
        return verify_gguf(tmp_path / "out.gguf", open_source(source), load_model=False)

    return look


def put(data, key, form, value):
    """Write another number under a key, whose type stands between."""
    at = data.index(key.encode()) + len(key) + 4
    struct.pack_into(form, data, at, value)


def swap(data, old, new):
    assert len(old) == len(new)
    at = data.index(old)
    data[at : at + len(old)] = new


@pytest.mark.parametrize(
    ("key", "form", "value", "detail"),
    [
        ("llama.rope.freq_base", "<f", 5e5, "llama.rope.freq_base is 500000.0, the model's is 10000.0"),
        ("llama.attention.head_count_kv", "<I", 4, "llama.attention.head_count_kv is 4, the model's is 2"),
        ("llama.context_length", "<I", 4096, "llama.context_length is 4096, the model's is 2048"),
        ("tokenizer.ggml.eos_token_id", "<I", 7, "tokenizer.ggml.eos_token_id is 7, the model's is 2"),
        ("tokenizer.ggml.add_bos_token", "<?", True, "tokenizer.ggml.add_bos_token is True, the model's is False"),
    ],
)
def test_numbers(key, form, value, detail, whole, verify):
    data = bytearray(whole.read_bytes())
    put(data, key, form, value)
    report = verify(data)
    assert report.failed() == ["metadata"]
    assert next(check.detail for check in report.checks if check.name == "metadata") == detail


def test_texts_and_lists(whole, verify):
    original = bytearray(whole.read_bytes())
    tokens = gguf.GGUFReader(whole).fields["tokenizer.ggml.tokens"].contents()
    number = next(index for index in range(290, 320) if tokens[index].isascii())
    stored = struct.pack("<Q", len(tokens[number])) + tokens[number].encode()
    other = stored[:-1] + b"#"
    for old, new, detail in (
        (
            b"\x05\0\0\0\0\0\0\0llama",
            b"\x05\0\0\0\0\0\0\0gemma",
            "general.architecture is 'gemma', the model's is 'llama'",
        ),
        (
            b"\x05\0\0\0\0\0\0\0gpt-2",
            b"\x05\0\0\0\0\0\0\0phi-2",
            "tokenizer.ggml.pre is 'phi-2', the model's is 'gpt-2'",
        ),
        (b"|im_start|>assistant", b"|im_start|>assistent", "tokenizer.chat_template is from character"),
        (
            stored,
            other,
            f"tokenizer.ggml.tokens[{number}] is {other[8:].decode()!r}, the model's is {tokens[number]!r}",
        ),
        (b"llama.vocab_size", b"llama.vocab_sizf", "it has no llama.vocab_size, the model's is 320 (and 1 more)"),
    ):
        data = original[:]
        swap(data, old, new)
        report = verify(data)
        assert report.failed() == ["metadata"], detail
        assert next(check.detail for check in report.checks if check.name == "metadata").startswith(detail)


def test_a_name_may_differ_and_the_hash_shows_it(whole, verify, tmp_path):
    data = bytearray(whole.read_bytes())
    name = gguf.GGUFReader(whole).fields["general.name"].contents().encode()
    swap(
        data,
        b"general.name\x08\0\0\0" + struct.pack("<Q", len(name)) + name,
        b"general.name\x08\0\0\0" + struct.pack("<Q", len(name)) + b"x" * len(name),
    )
    report = verify(data)
    assert report.ok
    assert report.skipped["hashes"].startswith("without out.quantkit.json the file's hash is unknown")
    manifest = json.loads((whole.parent / "out.quantkit.json").read_text())
    assert manifest["files"] == {"out.gguf": hashlib.sha256(whole.read_bytes()).hexdigest()}
    (tmp_path / "out.quantkit.json").write_text(json.dumps(manifest))
    report = verify(data)
    assert report.failed() == ["hashes"]
    assert report.checks[1].detail == "out.gguf has changed since it was written"
    assert verify(whole.read_bytes()).ok
    (tmp_path / "out.quantkit.json").write_text("{}")
    assert verify(whole.read_bytes()).failed() == ["hashes"]


def test_a_file_of_others_may_say_more_and_less(whole, verify):
    data = bytearray(whole.read_bytes())
    swap(data, b"quantkit.source_fingerprint", b"quantkit.source_fingerprinx")
    swap(data, b"llama.vocab_size", b"llama.vocab_sizf")
    report = verify(data)
    assert report.ok
    assert "it has no llama.vocab_size, the model's is 320; llama.vocab_sizf is 320, the model has none" in report.notes
    put(data, "llama.rope.freq_base", "<f", 5e5)
    assert verify(data).failed() == ["metadata"]


@pytest.mark.parametrize(
    ("old", "new", "detail"),
    [
        (b"llama.block_count", b"llama.block_counx", "it has no llama.block_count, the model's is 2"),
        (b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenx", "it has no tokenizer.ggml.tokens, the model's is ("),
        (b"llama.vocab_size", b"llama.rope.scals", "llama.rope.scals is 320, the model has none"),
    ],
)
def test_a_file_of_others_says_what_llama_cpp_needs_and_nothing_else_to_compute(old, new, detail, whole, verify):
    data = bytearray(whole.read_bytes())
    swap(data, b"quantkit.source_fingerprint", b"quantkit.source_fingerprinx")
    swap(data, old, new)
    report = verify(data)
    assert report.failed() == ["metadata"]
    assert report.checks[[check.name for check in report.checks].index("metadata")].detail.startswith(detail)


def place(path, name):
    """Offset and stored tensor."""
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
    return int(tensor.data_offset), tensor


def tensors_detail(report):
    assert report.failed() == ["tensors"]
    return next(check.detail for check in report.checks if check.name == "tensors")


def test_one_block(whole, verify):
    at, _ = place(whole, NAME)
    data = bytearray(whole.read_bytes())
    block = at + 22 * (4 * 5 + 3)  # Q5_0 has 22 bytes a block, and this row four blocks
    data[block : block + 22] = bytes(22)
    detail = tensors_detail(verify(data))
    assert detail.startswith(f"{NAME} (Q5_0) differs from the model's weights in block 3 of row 5 by ")
    assert detail.endswith(" steps, 100% of its norm; 1.0 steps are allowed")
    struct.pack_into("<e", data, block, float("nan"))
    assert tensors_detail(verify(data)) == f"{NAME} (Q5_0) holds NaN or infinity in block 3 of row 5"


def test_a_norm_and_what_follows_the_last_tensor(whole, verify):
    at, tensor = place(whole, "blk.1.ffn_norm.weight")
    data = bytearray(whole.read_bytes())
    values = tensor.data.copy()
    values[7] *= 1.004
    data[at : at + values.nbytes] = values.tobytes()
    expected = f"is {values[7]:.9g}, the model's weight is {tensor.data[7]:.9g} at column 7 of row 0"
    assert tensors_detail(verify(data)) == f"blk.1.ffn_norm.weight (F32) {expected}"
    report = verify(whole.read_bytes() + bytes(32))
    assert report.failed() == ["file"]
    assert report.checks[0].detail == "out.gguf has 32 bytes after its last tensor"


def test_a_shape(whole, verify):
    data = bytearray(whole.read_bytes())
    swap(data, NAME.encode() + struct.pack("<IQQ", 2, 128, 64), NAME.encode() + struct.pack("<IQQ", 2, 64, 128))
    report = verify(data)
    assert report.failed() == ["every_tensor"]
    detail = next(check.detail for check in report.checks if check.name == "every_tensor")
    assert detail == f"{NAME} has the shape (128, 64), the model's (64, 128)"


@pytest.mark.parametrize("file_type", ["F16", "BF16"])
def test_the_last_bit_of_a_plain_type(file_type, tiny_llama_folder, verify, tmp_path):
    path = tmp_path / "plain.gguf"
    export_gguf(open_source(tiny_llama_folder), path, file_type)
    data = bytearray(path.read_bytes())
    at, _ = place(path, NAME)
    data[at + 2 * 130] ^= 1
    assert tensors_detail(verify(data)).endswith("at column 2 of row 1")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_block_of_other_weights(kind, weighted, wide_model, tmp_path):
    importance = {"blk.0.attn_q.weight": torch.ones(256)} if weighted else None
    path = tmp_path / "out.gguf"
    export_gguf(
        open_source(wide_model), path, "F16", importance=importance, overrides=[("blk.1.ffn_down.weight", kind)]
    )
    at, _ = place(path, NAME)
    size = BLOCK_TYPES[kind].block_bytes
    data = bytearray(path.read_bytes())
    data[at : at + size] = data[at + size : at + 2 * size]
    path.write_bytes(data)
    report = verify_gguf(path, open_source(wide_model), load_model=False)
    assert report.failed() == ["hashes", "tensors"]
    detail = next(check.detail for check in report.checks if check.name == "tensors")
    assert detail.startswith(f"{NAME} ({kind}) differs from the model's weights in block 0 of row 0 by ")


def test_factors_of_the_rotary_frequencies(make_tiny_model, tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    folder = make_tiny_model("llama", tmp_path / "m", rope_parameters=rope)
    path = tmp_path / "out.gguf"
    export_gguf(open_source(folder), path, "F16")
    assert verify_gguf(path, open_source(folder), load_model=False).ok
    at, _ = place(path, "rope_freqs.weight")
    data = bytearray(path.read_bytes())
    struct.pack_into("<f", data, at + 4, 1.5)
    path.write_bytes(data)
    report = verify_gguf(path, open_source(folder), load_model=False)
    assert report.failed() == ["hashes", "tensors"]
    assert report.checks[-1].detail == "rope_freqs.weight is not what the configuration gives"


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("Q4_0", [-8.0, 3.0]),  # levels -8 to 7
        ("Q8_0", [127.0, -5.0]),
        ("Q4_1", [-3.0, 12.0]),  # 15 steps from the smallest to the largest
        ("Q5_1", [0.0, 31.0]),
        ("Q2_K", [2.0, 3.0]),  # a grid with a minimum begins at 0 or below
        ("Q6_K", [32.0, 1.0]),
        ("IQ4_NL", [127.0 / 16, 1.0]),  # 15 steps of 16 from -127 to 113
    ],
)
def test_a_step_of_the_grid_is_one(kind, weights):
    block_type = BLOCK_TYPES[kind]
    row = torch.zeros(block_type.block).reshape(-1, block_type.sub_block)
    row[:, :2] = torch.tensor(weights)
    torch.testing.assert_close(grid_steps(row.reshape(-1), block_type), torch.ones(1))


def test_errors_that_are_large_in_the_mean():
    """Each block within its bound, and all of them at its edge."""
    kind, weight = BLOCK_TYPES["Q5_0"], torch.randn(64 * 32, generator=torch.Generator().manual_seed(0))
    step = grid_steps(weight, kind).repeat_interleave(32)
    signs = torch.tensor([1.0, -1.0]).repeat(32 * 32)
    assert block_problem(weight + 0.5 * step * signs, weight, kind, 64, weighted=False) == (
        None,
        pytest.approx(0.5, 1e-3),
    )
    problem, _ = block_problem(weight + 0.9 * step * signs, weight, kind, 64, weighted=False)
    assert problem == "differs from the model's weights by 0.90 steps in the mean; 0.6 are allowed"
    assert block_problem(weight + 0.9 * step * signs, weight, kind, 64, weighted=True)[0] is None

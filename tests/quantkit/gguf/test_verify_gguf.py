"""Verify on GGUF: what is right passes, and each kind of damage is named."""

import json

import pytest
import torch
from click.testing import CliRunner

from quantkit.cli import main
from quantkit.export_gguf import export_gguf, llama_cpp, verify_logits
from quantkit.export_gguf.mixes import FILE_TYPES
from quantkit.export_gguf.verify import verify_gguf
from quantkit.source import open_source


@pytest.fixture
def exported(tiny_llama_folder, tmp_path):
    def export(file_type="Q4_0", **options):
        export_gguf(open_source(tiny_llama_folder), tmp_path / "out.gguf", file_type, **options)
        return tmp_path / "out.gguf"

    return export


@pytest.mark.parametrize("file_type", ["F16", "Q8_0", "Q2_K", "Q4_K_M", "IQ4_XS"])
def test_whole_file(file_type, exported, tiny_llama_folder):
    report = verify_gguf(exported(file_type), open_source(tiny_llama_folder))
    assert report.ok, report.to_dict()
    names = [check.name for check in report.checks if not check.name.startswith("llama_cpp")]
    assert names == [*("file", "hashes", "same_source", "metadata", "every_tensor", "tensors", "divergence", "logits")]
    if llama_cpp.why_missing() is None:
        assert [check.name for check in report.checks[8:]] == ["llama_cpp", "llama_cpp_tokens", "llama_cpp_logits"]
    else:
        assert report.skipped.keys() == {"llama_cpp"}


def test_a_float_file_gives_the_models_own_answers(make_tiny_model, tmp_path):
    folder = make_tiny_model("llama", tmp_path / "m", dtype=torch.bfloat16)
    export_gguf(open_source(folder), tmp_path / "out.gguf", "BF16")
    report = verify_gguf(tmp_path / "out.gguf", open_source(folder))
    found = {check.name: check.detail for check in report.checks}
    assert found["divergence"] == "KL(model || file) is 0 nats a token; random errors as large give 0"
    assert found["logits"].startswith("read as a model it differs by 0.0e+00")


def test_answers_that_are_not_those_of_the_tensors(exported, tiny_llama_folder, tmp_path):
    """The tensors are right, and the configuration that the file carries is another one."""
    path = exported("F16")
    data = path.read_bytes()
    assert data.count(b'"rope_theta": 10000.0') == 1
    path.write_bytes(data.replace(b'"rope_theta": 10000.0', b'"rope_theta": 90000.0'))
    assert verify_gguf(path, open_source(tiny_llama_folder)).failed() == ["hashes", "metadata", "logits"]
    report = verify_gguf(path, open_source(tiny_llama_folder), load_model=False)
    assert report.failed() == ["hashes", "metadata"]
    assert report.notes == ["the model was not loaded: logits were not compared"]


def test_a_divergence_beyond_that_of_random_errors(exported, tiny_llama_folder, monkeypatch):
    monkeypatch.setattr(verify_logits, "LARGEST_RATIO", 0.01)
    report = verify_gguf(exported("Q4_0"), open_source(tiny_llama_folder))
    assert report.failed() == ["divergence"]


def test_llama_cpp_that_cannot_be_loaded(exported, tiny_llama_folder, monkeypatch):
    monkeypatch.setattr(llama_cpp, "why_missing", lambda: "it is not there")
    report = verify_gguf(exported("F16"), open_source(tiny_llama_folder))
    assert report.ok
    assert report.skipped == {"llama_cpp": "it is not there"}


def test_parts(exported, tiny_llama_folder, tmp_path):
    exported("F16", split_bytes=100_000)
    first = sorted(tmp_path.glob("out-00001-of-*.gguf"))[0]
    assert verify_gguf(first, open_source(tiny_llama_folder)).ok
    sorted(tmp_path.glob("out-*.gguf"))[-1].unlink()
    assert verify_gguf(first, open_source(tiny_llama_folder)).failed() == ["hashes", "every_tensor"]


def test_another_model(exported, tiny_llama_folder, tiny_models, make_tiny_model, tmp_path):
    path = exported()
    other = make_tiny_model("llama", tmp_path / "other", seed=7)
    report = verify_gguf(path, open_source(other))
    assert report.failed() == ["same_source", "tensors"]
    assert report.checks[2].detail == "it was not made of other as it is now"
    assert report.skipped["logits"] == "its tensors are not the model's"
    report = verify_gguf(path, open_source(tiny_models("qwen2")))
    assert report.failed() == ["same_source", "metadata", "every_tensor", "tensors"]
    path.write_bytes(path.read_bytes()[:-100])
    assert verify_gguf(path, open_source(tiny_llama_folder)).failed() == ["file"]


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_every_type_rounds_within_its_bound(file_type, wide_model, tmp_path):
    """Also where importance is very uneven."""
    uneven = torch.exp(2 * torch.randn(256, generator=torch.Generator().manual_seed(0)))
    importance = {f"blk.{i}.{part}.weight": uneven for i in range(2) for part in ("attn_q", "ffn_up", "ffn_gate")}
    for number, given in enumerate((None, importance)):
        path = tmp_path / f"{number}.gguf"
        export_gguf(open_source(wide_model), path, file_type, importance=given)
        report = verify_gguf(path, open_source(wide_model), load_model=False)
        assert report.ok, report.to_dict()


def test_command(exported, tiny_llama_folder):
    path = str(exported())
    result = CliRunner().invoke(main, ["verify", path, "--source", str(tiny_llama_folder), "--json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["ok"]
    without = CliRunner().invoke(main, ["verify", path])
    assert without.exit_code == 2
    assert "out.gguf can only be compared with the model it was made of: give --source" in without.stderr

"""verify: a good checkpoint passes every check, and each kind of damage is caught by the check that is meant for it."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.errors import CheckpointError
from quantkit.formats import Format
from quantkit.formats.safetensors_file import read_header
from quantkit.scheme import QuantScheme
from quantkit.source import open_source
from quantkit.verify import verify_checkpoint

LAYER = "model.layers.0.mlp.down_proj"
CHECKS = [
    "files",
    "hashes",
    "same_source",
    "every_tensor",
    "untouched_tensors",
    "side_files",
    "quantization_config",
    "layers",
    "codes",
    "scales",
    "engine_rules",
    "reader",
    "weights",
    "logits",
]


@pytest.fixture(scope="module")
def good(tiny_llama_folder, write_rtn_checkpoint, tmp_path_factory):
    return write_rtn_checkpoint(tiny_llama_folder, tmp_path_factory.mktemp("verify") / "good")


@pytest.fixture
def copy(good, tmp_path):
    return Path(shutil.copytree(good, tmp_path / "checkpoint"))


@pytest.fixture
def source(tiny_llama_folder):
    return open_source(tiny_llama_folder)


def edit_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def forge_hashes(folder):
    """As if the damage had been there before the hashes were taken."""
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    edit_json(folder / "quantkit.json", lambda manifest: manifest["files"].update({"model.safetensors": digest}))


def flip_bits(folder, tensor, position, mask):
    """Change bits of one byte of a tensor in place."""
    path = folder / "model.safetensors"
    slot = read_header(path)[tensor]
    data = bytearray(path.read_bytes())
    data[slot.offset + position] ^= mask
    path.write_bytes(data)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3"])
def test_good_checkpoint_passes(tiny_models, write_rtn_checkpoint, tmp_path, family):
    folder = tiny_models(family)
    out = write_rtn_checkpoint(folder, tmp_path / "out")
    report = verify_checkpoint(out, open_source(folder))
    assert report.failed() == [], report
    assert [check.name for check in report.checks] == CHECKS
    report.raise_for_failure()
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


def test_good_checkpoint_in_bf16_and_in_shards(make_tiny_model, write_rtn_checkpoint, tmp_path):
    folder = make_tiny_model("llama", tmp_path / "m", dtype=torch.bfloat16, tie_word_embeddings=True)
    out = write_rtn_checkpoint(folder, tmp_path / "out", group_size=64, max_shard_bytes=30_000)
    report = verify_checkpoint(out, open_source(folder))
    assert report.failed() == [], report
    assert report.checks[0].detail.startswith("3 weight files are whole")


def test_two_schemes(tiny_llama_folder, write_rtn_checkpoint, source, tmp_path):
    overrides = {f"model.layers.0.mlp.{part}_proj": QuantScheme(8, 64) for part in ("gate", "up", "down")}
    out = write_rtn_checkpoint(tiny_llama_folder, tmp_path / "out", overrides=overrides)
    report = verify_checkpoint(out, source)
    assert report.failed() == [], report


def test_logits_that_are_passed_in(good, source):
    ids = torch.arange(40, 60).unsqueeze(0)
    reader = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(good, dtype="auto").eval()
    with torch.no_grad():
        logits = reader(ids).logits[0]
    assert verify_checkpoint(good, source, expected_logits=logits, token_ids=ids).ok
    logits[7, 3] += 0.5
    report = verify_checkpoint(good, source, expected_logits=logits, token_ids=ids)
    assert report.failed() == ["logits"]
    assert "differ from the model in memory by 0.5" in report.checks[-1].detail


def test_what_cannot_be_checked_is_said(copy):
    (copy / "quantkit.json").unlink()
    report = verify_checkpoint(copy)
    assert report.ok
    assert [note.split(":")[0] for note in report.notes] == [
        "no source was given",
        "12 of 14 layers, such as model.layers.0.mlp.gate_proj, are no multiples of 64 rows and 128 columns",
        "vLLM can split it over 1 or 2 GPUs (of 1, 2, 4 or 8 that were looked at)",
    ]
    assert list(report.skipped) == ["hashes", "logits"]
    assert verify_checkpoint(copy, load_model=False).notes[-1].startswith("the model was not loaded")


SCHEMES = {
    "W4A16_ASYM": QuantScheme(4, 32, symmetric=False),
    "W8A16": QuantScheme(8, -1),
    "W8A16_ASYM": QuantScheme(8, 64, symmetric=False),
    "W4A16": QuantScheme(4, 64),
}
FORMS = {
    "compressed-tensors": Format("compressed-tensors"),
    "gptq": Format("gptq"),
    "gptq_v2": Format("gptq", (("checkpoint_format", "gptq_v2"),)),
    "awq": Format("awq"),
}


@pytest.mark.parametrize(
    ("form", "scheme"),
    [
        ("compressed-tensors", "W4A16_ASYM"),
        ("compressed-tensors", "W8A16"),
        ("compressed-tensors", "W8A16_ASYM"),
        ("gptq", "W4A16"),
        ("gptq", "W8A16"),
        ("gptq_v2", "W4A16_ASYM"),
        ("awq", "W4A16"),
        ("awq", "W4A16_ASYM"),
    ],
)
def test_every_format_passes(make_tiny_model, write_rtn_checkpoint, tmp_path, form, scheme):
    folder = make_tiny_model("llama", tmp_path / "m", dtype=torch.bfloat16)
    out = write_rtn_checkpoint(folder, tmp_path / "out", scheme=SCHEMES[scheme], form=FORMS[form])
    report = verify_checkpoint(out, open_source(folder))
    assert report.failed() == [], report
    assert [check.name for check in report.checks] == CHECKS
    by_name = {check.name: check.detail for check in report.checks}
    assert ("independent decoder" in by_name["reader"]) == (form != "compressed-tensors")
    assert any("llama.cpp's converter does not take it" in note for note in report.notes) == (
        form == "awq" or (form, scheme) == ("compressed-tensors", "W8A16")
    )


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_a_flipped_nibble_of_gptq_and_awq_shows_in_the_logits(make_tiny_model, write_rtn_checkpoint, tmp_path, form):
    folder = make_tiny_model("llama", tmp_path / "m", dtype=torch.bfloat16)
    out = write_rtn_checkpoint(folder, tmp_path / "out", form=FORMS[form])
    flip_bits(out, f"{LAYER}.qweight", 11, 0x70)
    forge_hashes(out)
    assert verify_checkpoint(out, open_source(folder)).failed() == ["logits"]


def test_a_v2_file_that_says_it_is_v1_is_caught(make_tiny_model, write_rtn_checkpoint, tmp_path):
    """The trap of files whose zero points are stored in the other way: every weight would be one step off."""
    folder = make_tiny_model("llama", tmp_path / "m", dtype=torch.bfloat16)
    out = write_rtn_checkpoint(folder, tmp_path / "out", form=FORMS["gptq_v2"])
    change_quantization(("checkpoint_format",), "gptq")(out)
    report = verify_checkpoint(out, open_source(folder))
    assert report.failed() == ["codes"]
    assert "a zero point is +1 off the middle (it may be stored as gptq_v2)" in str(report)


# --- mutations ------------------------------------------------------------------------------------------------------


def flip_nibble(folder):
    flip_bits(folder, f"{LAYER}.weight_packed", 11, 0x70)


def flip_scale(folder):
    flip_bits(folder, f"{LAYER}.weight_scale", 2, 0x40)  # float32: an upper bit of the mantissa


def flip_untouched(folder):
    flip_bits(folder, "model.embed_tokens.weight", 0, 0x01)


@pytest.mark.parametrize("damage", [flip_nibble, flip_scale])
def test_flipped_bit_of_a_layer(copy, source, damage):
    damage(copy)
    report = verify_checkpoint(copy, source)
    assert "hashes" in report.failed()
    assert "model.safetensors has changed" in report.checks[1].detail
    forge_hashes(copy)
    assert verify_checkpoint(copy, source).failed() == ["logits"]
    with pytest.raises(CheckpointError, match=r"checkpoint failed the check logits: .*differ from the model in memory"):
        verify_checkpoint(copy, source).raise_for_failure()


def test_flipped_bit_of_a_copied_tensor(copy, source):
    flip_untouched(copy)
    forge_hashes(copy)
    report = verify_checkpoint(copy, source)
    assert "untouched_tensors" in report.failed()
    assert "model.embed_tokens.weight differs from the source" in str(report)


def remove(name):
    return lambda folder: (folder / name).unlink()


def change_config(**values):
    return lambda folder: edit_json(folder / "config.json", lambda config: config.update(values))


def change_quantization(path, value):
    def change(config):
        place = config["quantization_config"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return lambda folder: edit_json(folder / "config.json", change)


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def lose_a_tensor(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("model.norm.weight"))


def lose_a_scale(folder):
    edit_tensors(folder, lambda tensors: tensors.pop(f"{LAYER}.weight_scale"))


def add_a_tensor(folder):
    edit_tensors(folder, lambda tensors: tensors.update(surprise=torch.ones(2)))


def keep_the_weight(folder):
    edit_tensors(folder, lambda tensors: tensors.update({f"{LAYER}.weight": torch.ones(64, 128)}))


def zero_scale(folder):
    edit_tensors(folder, lambda tensors: tensors[f"{LAYER}.weight_scale"][0, 0].zero_())


def nan_scale(folder):
    edit_tensors(folder, lambda tensors: tensors[f"{LAYER}.weight_scale"][0, 0].fill_(float("nan")))


def wrong_shape(folder):
    edit_tensors(folder, lambda tensors: tensors[f"{LAYER}.weight_shape"].copy_(torch.tensor([64, 127])))


def edit_template(folder):
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def other_source(folder):
    edit_json(folder / "quantkit.json", lambda manifest: manifest["model"].update(fingerprint="0" * 64))


WEIGHTS = ("config_groups", "group_0", "weights")


@pytest.mark.parametrize(
    ("damage", "check", "detail"),
    [
        (truncate, "files", "model.safetensors is no whole safetensors file: it is truncated"),
        (remove("config.json"), "files", "has no config.json"),
        (remove("tokenizer.json"), "side_files", "tokenizer.json is missing"),
        (remove("generation_config.json"), "side_files", "generation_config.json is missing"),
        (edit_template, "side_files", "chat_template.jinja differs from the source"),
        (change_config(rope_parameters=None), "side_files", "config.json: rope_parameters differs from the source"),
        (other_source, "same_source", "it was not made of tiny_llama"),
        (lose_a_tensor, "every_tensor", "model.norm.weight is lost"),
        (lose_a_tensor, "layers", "model.norm.weight is not stored"),
        (lose_a_scale, "codes", f"{LAYER} has no weight_scale"),
        (add_a_tensor, "every_tensor", "surprise is not the source's"),
        (keep_the_weight, "layers", f"{LAYER} is neither quantized nor ignored"),
        (zero_scale, "scales", f"{LAYER}.weight_scale has a scale that is zero or not finite"),
        (nan_scale, "scales", f"{LAYER}.weight_scale has a scale that is zero or not finite"),
        (nan_scale, "logits", "differ from the model in memory by nan"),
        (wrong_shape, "codes", f"{LAYER} is stored as [64, 127], the model asks for [64, 128]"),
        (change_quantization(("ignore",), []), "layers", "lm_head is neither quantized nor ignored"),
        (change_quantization(("ignore",), ["lm_head", LAYER]), "layers", f"{LAYER} is stored as codes, but"),
        (change_quantization((*WEIGHTS, "num_bits"), 8), "codes", "weight_packed is torch.int32"),
        (change_quantization((*WEIGHTS, "group_size"), 64), "codes", "weight_scale is torch.float32"),
        (change_quantization((*WEIGHTS, "scheme_of_tomorrow"), 1), "quantization_config", "scheme_of_tomorrow=1"),
        (change_quantization(("format",), "int-quantized"), "quantization_config",
         "group_0 holds W4A16 g32 symmetric as int-quantized"),
        (change_config(quantization_config=None), "quantization_config", "config.json has no quantization_config"),
    ],
)  # fmt: skip
def test_damage_is_caught_by_name(copy, source, damage, check, detail):
    damage(copy)
    if (copy / "model.safetensors").exists() and damage not in (truncate,):
        forge_hashes(copy)
    report = verify_checkpoint(copy, source, load_model=check == "logits")
    found = {entry.name: entry for entry in report.checks}
    assert not found[check].ok
    assert detail in found[check].detail
    assert not report.ok


def test_layers_that_vllm_fuses_must_agree(tiny_llama_folder, write_rtn_checkpoint, source, tmp_path):
    overrides = {"model.layers.1.self_attn.k_proj": QuantScheme(8, 32)}
    out = write_rtn_checkpoint(tiny_llama_folder, tmp_path / "out", overrides=overrides)
    report = verify_checkpoint(out, source)
    assert report.failed() == ["engine_rules"]
    detail = next(check.detail for check in report.checks if check.name == "engine_rules")
    assert "vLLM fuses model.layers.1.self_attn.q_proj and" in detail
    assert "W4A16 g32 symmetric, W8A16 g32 symmetric, W4A16 g32 symmetric" in detail


def test_half_a_fused_unit(tiny_llama_folder, write_rtn_checkpoint, source, tmp_path):
    ignore = ("lm_head", "model.layers.0.mlp.gate_proj")
    report = verify_checkpoint(write_rtn_checkpoint(tiny_llama_folder, tmp_path / "out", ignore=ignore), source)
    assert report.failed() == ["engine_rules"]
    assert "differ: not quantized, W4A16 g32 symmetric" in str(report)


def test_group_size_without_a_kernel(tiny_llama_folder, write_rtn_checkpoint, source, tmp_path):
    report = verify_checkpoint(write_rtn_checkpoint(tiny_llama_folder, tmp_path / "out", group_size=16), source)
    assert report.failed() == ["engine_rules"]
    assert "vLLM has no kernel for model.layers.0.mlp.down_proj (W4A16 g16 symmetric)" in str(report)


def test_experts_that_are_not_quantized(tiny_models, write_rtn_checkpoint, tmp_path):
    """Newer versions of transformers cannot load fused experts that are no codes; the report says so then."""
    folder = tiny_models("mixtral")
    out = write_rtn_checkpoint(folder, tmp_path / "out")
    assert verify_checkpoint(out, load_model=False).failed() == ["layers"]  # engines would look for their codes
    edit_json(out / "config.json", lambda c: c["quantization_config"]["ignore"].append(r"re:.*\.experts(\.|$)"))
    report = verify_checkpoint(out, open_source(folder))
    assert [check.name for check in report.checks][: CHECKS.index("reader")] == CHECKS[: CHECKS.index("reader")]
    assert report.failed() in ([], ["reader"])
    if not report.ok:
        assert report.checks[-1].detail.startswith("transformers does not load it: ")


def test_ordinary_model_is_no_checkpoint(tiny_llama_folder):
    report = verify_checkpoint(tiny_llama_folder)
    assert report.failed() == ["quantization_config"]

"""Exports that run the model first: importance, error feedback, types for a size, and the command."""

import itertools
import json
import shutil
from collections import Counter

import gguf
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from quantkit.calibration.statistics import InputStatistics, Wanted
from quantkit.cli import main
from quantkit.errors import UsageError
from quantkit.export_gguf.allocation import Choice, allocate_types, pick
from quantkit.export_gguf.calibrated_blocks import calibration_windows, collect_importance, measure_importance
from quantkit.export_gguf.error_feedback import solve_blocks, solve_tensor
from quantkit.export_gguf.export import write_plan
from quantkit.export_gguf.imatrix import read_imatrix
from quantkit.export_gguf.plan import make_export_plan
from quantkit.export_gguf.sensitivity import measure_sensitivity
from quantkit.export_gguf.verify import verify_gguf
from quantkit.formats.gguf.blocks import encode_rows
from quantkit.formats.gguf.header import read_gguf_header
from quantkit.source import open_source

NUM_TOKENS = 1024


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(f"Line {i}: the number {i * i} stands here, after {i} others." for i in range(200)))
    return str(path)


@pytest.fixture(scope="module")
def plan(tiny_llama_folder):
    return make_export_plan(open_source(tiny_llama_folder), "Q4_0", has_importance=True)


@pytest.fixture(scope="module")
def windows(plan, text):
    return calibration_windows(plan.source, text, NUM_TOKENS)


def ask_and_measure(model, plan, windows):
    """Run a model, whose hooks look on, over the windows; the importance that the export finds on them."""
    with torch.no_grad():
        for ids, length in zip(windows.token_ids, windows.lengths.tolist(), strict=True):
            model(ids[:length].unsqueeze(0))
    importance = {}
    for block in collect_importance(plan, windows):
        importance |= block
    return importance


def test_importance_is_the_mean_square_of_each_input_column(plan, windows):
    model = AutoModelForCausalLM.from_pretrained(plan.source.folder, dtype=torch.float32).eval()
    seen = []
    hooked = model.model.layers[1].mlp.down_proj
    hooked.register_forward_pre_hook(lambda module, args: seen.append(args[0].reshape(-1, 128)))
    importance = ask_and_measure(model, plan, windows)
    assert len(importance) == 15  # 14 layers and the output matrix
    assert importance["output.weight"].shape == (64,)
    torch.testing.assert_close(
        importance["blk.1.ffn_down.weight"], torch.cat(seen).square().mean(0), rtol=1e-3, atol=1e-6
    )


def test_importance_of_experts_and_of_the_output_matrix(tiny_models, text):
    source = open_source(tiny_models("mixtral"))
    plan = make_export_plan(source, "Q4_0", has_importance=True)
    windows = calibration_windows(source, text, 256)
    model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32).eval()
    into_head, routed = [], []
    model.lm_head.register_forward_pre_hook(lambda module, args: into_head.append(args[0].reshape(-1, 64)))
    experts = model.model.layers[1].mlp.experts
    experts.register_forward_pre_hook(
        lambda module, args, kwargs: routed.append((*args, *kwargs.values())), with_kwargs=True
    )
    importance = ask_and_measure(model, plan, windows)
    expected = torch.cat(into_head).square().mean(0)
    torch.testing.assert_close(importance["output.weight"], expected, rtol=1e-3, atol=1e-6)
    found = importance["blk.1.ffn_up_exps.weight"]
    for expert in range(4):
        seen = [hidden[(chosen == expert).any(-1)] for hidden, chosen, *_ in routed]
        torch.testing.assert_close(found[expert], torch.cat(seen).square().mean(0), rtol=1e-3, atol=1e-6)
    assert importance["blk.1.ffn_down_exps.weight"].shape == plan_shape(plan, "blk.1.ffn_down_exps.weight")[::2]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_that_are_stored_as_one_tensor(family, tiny_models, text, tmp_path):
    """They are measured and solved as those that are stored one by one; the model is the same."""
    apart = open_source(tiny_models(family))
    shutil.copytree(apart.folder, tmp_path / "fused")
    model = AutoModelForCausalLM.from_pretrained(apart.folder)
    save_file(model.state_dict(), tmp_path / "fused" / "model.safetensors", metadata={"format": "pt"})
    fused = open_source(tmp_path / "fused")
    assert "model.layers.1.mlp.experts.gate_up_proj" in fused.tensors
    assert "model.layers.1.mlp.experts.gate_up_proj" not in apart.tensors
    plans = [make_export_plan(source, "Q4_0", has_importance=True) for source in (apart, fused)]
    windows = [calibration_windows(plan.source, text, 256) for plan in plans]
    expected, found = (measure_importance(plan, each) for plan, each in zip(plans, windows, strict=True))
    assert found.keys() == expected.keys()
    assert "blk.1.ffn_down_exps.weight" in found
    torch.testing.assert_close(found, expected)
    solved, same = ({}, {})
    for blocks, plan, each in zip((solved, same), plans, windows, strict=True):
        for block in solve_blocks(plan, each):
            blocks |= block
    assert solved.keys() == same.keys() == found.keys()
    assert all(torch.equal(solved[name], same[name]) for name in solved)


def test_what_was_not_measured_is_said(plan, windows, make_tiny_model, tmp_path):
    """The embedding is looked up by row; with error feedback the output matrix has its importance at the end."""
    rows = "nothing was measured of token_embd.weight: all columns count the same"
    solved = write_plan(plan, tmp_path / "solved.gguf", solved_blocks=solve_blocks(plan, windows))
    assert solved["notes"] == [rows]
    importance = measure_importance(plan, windows)
    del importance["blk.0.attn_q.weight"]
    record = write_plan(plan, tmp_path / "some.gguf", importance=importance)
    assert record["notes"] == [rows.replace("weight:", "weight and 1 more:")]
    assert write_plan(plan, tmp_path / "none.gguf")["notes"] == []
    stored = {
        name: next(t for t in gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors if t.name == "output.weight").data
        for name in ("solved", "none")
    }
    assert (stored["solved"] != stored["none"]).any()
    for name in ("solved", "some", "none"):
        report = verify_gguf(tmp_path / f"{name}.gguf", plan.source, load_model=False)
        assert report.ok, report.to_dict()


def plan_shape(plan, name):
    return next(tensor.shape for tensor in plan.tensors if tensor.name == name)


def test_experts_solved_and_experts_that_see_nothing(tiny_models, text, tmp_path, caplog):
    """Few tokens: the experts with fewer than columns are rounded by importance, and that is said."""
    source = open_source(tiny_models("mixtral"))
    plan = make_export_plan(source, "Q4_0", has_importance=True)
    windows = calibration_windows(source, text, 64)
    record = write_plan(plan, tmp_path / "solved.gguf", solved_blocks=solve_blocks(plan, windows))
    assert "4 of 4 experts see fewer tokens than columns: rounded without error feedback" in caplog.text
    kinds = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "solved.gguf").tensors}
    stored = kinds["blk.1.ffn_up_exps.weight"]
    assert bool(torch.isfinite(torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type))).all())
    assert record["error_feedback"]
    unseen = {"blk.1.ffn_up_exps.weight": torch.cat([torch.ones(3, 64), torch.zeros(1, 64)])}
    said = write_plan(plan, tmp_path / "some.gguf", importance=unseen)["notes"]
    assert "blk.1.ffn_up_exps.weight: 1 experts saw no token, their columns count the same" in said


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K", "IQ4_XS"])
def test_feedback_gives_less_output_error_and_bytes_that_decode_to_it(name):
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(256, 256, generator=generator) / 16
    inputs = torch.randn(2048, 256, generator=generator) @ (mix + torch.eye(256))
    statistics = InputStatistics(256, Wanted(gram=True))
    statistics.add(inputs)
    weight = torch.randn(64, 256, generator=generator) * 0.05
    encoded, rounded = solve_tensor(weight, statistics, name)
    kind = gguf.GGMLQuantizationType[name]
    assert torch.equal(torch.from_numpy(gguf.quants.dequantize(encoded.numpy(), kind)), rounded)
    nearest = encode_rows(weight, name, statistics.mean_square)
    plain = torch.from_numpy(gguf.quants.dequantize(nearest.numpy(), kind))

    def error(quantized):
        return float((inputs @ (quantized - weight).T).square().mean())

    assert error(rounded) < 0.8 * error(plain)


def test_file_with_feedback_is_nearer_to_the_model(plan, windows, tmp_path):
    write_plan(plan, tmp_path / "plain.gguf")
    record = write_plan(plan, tmp_path / "solved.gguf", solved_blocks=solve_blocks(plan, windows))
    assert record["error_feedback"]
    original = AutoModelForCausalLM.from_pretrained(plan.source.folder, dtype=torch.float32).eval()
    ids = windows.token_ids[:1, :128]
    with torch.no_grad():
        expected = original(ids).logits.log_softmax(-1)
        divergence = {}
        for name in ("plain", "solved"):
            model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=f"{name}.gguf", dtype=torch.float32).eval()
            got = model(ids).logits.log_softmax(-1)
            divergence[name] = float((expected.exp() * (expected - got)).sum(-1).mean())
    assert divergence["solved"] < divergence["plain"]


def test_sensitivity_is_the_gradient_of_the_models_own_loss(plan, windows):
    measured = measure_sensitivity(plan, windows)
    assert len(measured) == 15  # 14 layers and the head
    assert {tuple(part.shape) for part in measured["blk.0.ffn_down.weight"]} == {(64,), (128,)}
    assert all(bool((gradient > 0).any()) for gradient, _ in measured.values())
    # At the head the gradient is one-hot minus p: its squares sum to 1 - sum p^2 in expectation, between 0 and 2.
    assert 0 < float(measured["output.weight"][0].sum()) < 2


def test_types_for_a_size(plan, windows):
    importance = {}
    for block in collect_importance(plan, windows):
        importance |= block
    pinned = [(r"blk\.0\.attn_q\.weight", "F16")]
    types, note = allocate_types(plan, importance, windows, 6.0, pinned)
    assert types["blk.0.attn_q.weight"] == plan.types["blk.0.attn_q.weight"]
    assert len(set(types.values()) - {"F32"}) > 1
    assert "expected KL divergence" in note
    from dataclasses import replace

    assert 5.5 < replace(plan, types=types).bits_per_weight <= 6.0
    with pytest.raises(UsageError, match=r"--target-bpw 2 is too small: the least for this model is 4\."):
        allocate_types(plan, importance, windows, 2.0)


def test_pick_is_the_best_choice_of_few():
    losses = {"a": (9.0, 4.0, 1.0, 0.5), "b": (3.0, 2.5, 1.5, 0.1), "c": (20.0, 5.0, 4.9, 0.0)}
    sizes = (10, 14, 20, 32)
    choices = {
        name: [Choice(str(size), size, loss) for size, loss in zip(sizes, values, strict=True)]
        for name, values in losses.items()
    }
    for budget in (34, 48, 60, 96):
        best = min(
            sum(choice.loss for choice in combination)
            for combination in itertools.product(*choices.values())
            if sum(choice.num_bytes for choice in combination) <= budget
        )
        picked = pick(choices, budget)
        assert sum(choice.num_bytes for choice in picked.values()) <= budget
        assert sum(choice.loss for choice in picked.values()) <= best + 2.0  # at most one step of one tensor away


def run(*arguments):
    return CliRunner().invoke(main, ["export", "gguf", *map(str, arguments)])


def test_command(tiny_llama_folder, text, tmp_path):
    path, matrix = tmp_path / "out.gguf", tmp_path / "im.gguf"
    measured = ("--calibration", text, "--tokens", 512, "--save-imatrix", matrix)
    result = run(tiny_llama_folder, "-o", path, "--type", "Q4_0", *measured, "--json")
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert (record["importance_entries"], record["types"]["Q4_0"]) == (15, 15)
    assert record["calibration"]["num_tokens"] == 512
    assert len(read_imatrix(matrix).means) == 15
    again = run(tiny_llama_folder, "-o", tmp_path / "again.gguf", "--type", "Q4_0", "--imatrix", matrix)
    assert again.exit_code == 0, again.stderr
    assert "bits a weight" in again.stdout
    assert (tmp_path / "again.gguf").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["im.gguf", "im.dat"])
def test_a_saved_matrix_gives_the_same_file(name, tiny_llama_folder, text, tmp_path):
    """Of three windows: what is divided by three and multiplied again is not the same in float32."""
    common = (tiny_llama_folder, "--type", "Q4_K_M", "-o")
    measured = run(
        *common, tmp_path / "a.gguf", "--calibration", text, "--tokens", 1536, "--save-imatrix", tmp_path / name
    )
    read = run(*common, tmp_path / "b.gguf", "--imatrix", tmp_path / name)
    assert (measured.exit_code, read.exit_code) == (0, 0)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_a_file_of_chosen_types_is_called_after_most_of_them(tiny_llama_folder, text, tmp_path):
    chosen = run(
        tiny_llama_folder, "-o", tmp_path / "x.gguf", "--calibration", text, "--tokens", 256, "--target-bpw", 8.0
    )
    assert chosen.exit_code == 0, chosen.stderr
    header = read_gguf_header(tmp_path / "x.gguf")
    counts = Counter(tensor.type_name for tensor in header.tensors if tensor.type_name != "F32")
    numbers = {"Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_0": 2, "IQ4_NL": 25}
    assert header.metadata["general.file_type"] == 1024 + numbers[counts.most_common(1)[0][0]]
    assert f"x.gguf: mostly {counts.most_common(1)[0][0]}, " in chosen.stdout
    assert verify_gguf(tmp_path / "x.gguf", open_source(tiny_llama_folder), load_model=False).ok


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--type", "Q4_K_X"), "there is no file type 'Q4_K_X'"),
        (("--error-feedback",), "--error-feedback, --target-bpw and --save-imatrix need --calibration"),
        (("--tensor-type", "Q8_0"), "--tensor-type 'Q8_0' is not of the form REGEX=TYPE"),
        (("--split-size", "0"), "--split-size 0 is not a positive number of gigabytes"),
        (("--split-size", "nan"), "--split-size nan is not a positive number of gigabytes"),
        (("--split-size", "inf"), "--split-size inf is not a positive number of gigabytes"),
        (("--target-bpw", "0"), "--target-bpw 0 is not more than 0 and at most 32"),
        (("--target-bpw", "nan", "--calibration", "builtin"), "--target-bpw nan is not more than 0 and at most 32"),
        (("--tokens", "0", "--calibration", "builtin"), "--tokens 0 is less than 8"),
    ],
)
def test_wrong_usage(arguments, message, tiny_llama_folder, tmp_path):
    result = run(tiny_llama_folder, "-o", tmp_path / "out.gguf", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []

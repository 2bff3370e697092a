"""The verb: tables, one JSON document, a page, exit codes; and no torch unless it is needed."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from quantkit.capacity.planning import BATCHES
from quantkit.cli import main
from quantkit.recipe import load_recipe


@pytest.fixture
def llama(tmp_path: Path, write_config: Callable[..., Path], real_config: Callable[[str], dict[str, Any]]) -> str:
    return str(write_config(tmp_path / "llama", real_config("llama-3-8b")))


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def test_a_table_for_people(llama: str) -> None:
    done = plan(llama, "--gpu", "H100-80GB,l4", "--context", "2048,4096", "--concurrency", "32")
    assert done.exit_code == 0, done.stderr
    assert "8,030,261,248 parameters" in done.stdout
    assert "W4A16 g128       5.70 GB" in done.stdout
    assert "vllm serve PATH/TO/CHECKPOINT --max-model-len 4096" in done.stdout
    assert "W8A8 is faster than W4A16 from batch" in done.stdout


def test_columns_are_explained_and_so_is_what_a_device_would_add(llama: str) -> None:
    done = plan(llama, "--gpu", "L4", "--context", "2048,4096")
    assert "at p50, at p99: how many sequences of 2048 and of 4096 tokens fit at once" in done.stdout
    (setting,) = (line for line in done.stdout.splitlines() if "setting: paged" in line)
    assert "a sequence of 2048 tokens would leave 50.0% of room for 4096 unused" in setting
    assert "--gpu NAME,... adds what fits and how fast it is" in plan(llama).stdout
    assert "--gpu NAME,..." not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--tp", "3"], "32 attention heads cannot be split over 3 devices. Use --tp 1, 2, 4, 8, 16 or 32"),
        (["--context", "40960"], "a context of 40960 tokens is more than the model's 8192. Demand at most 8192 tokens"),
    ],
)
def test_what_cannot_run_has_no_speed_no_rank_and_exit_code_1(
    arguments: list[str], line: str, llama: str, tmp_path: Path
) -> None:
    page, recipe = tmp_path / "plan.html", tmp_path / "recipe.yaml"
    done = plan(llama, "--gpu", "L4,H200", *arguments, "--html", page, "--write-recipe", recipe)
    assert done.exit_code == 1
    assert f"quantkit: nothing that was demanded runs on L4, H200: {line}" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "nothing that was demanded runs here" in done.stdout
    for word in ("tok/s at batch", "the best first", "setting:", "vllm:", "quantkit:", "s a request"):
        assert word not in done.stdout
    assert "the best first" not in page.read_text()
    assert "Nothing that was demanded runs here" in page.read_text()
    assert not recipe.exists()
    document = json.loads(plan(llama, "--gpu", "L4", *arguments, "--json").stdout)
    (device,) = document["devices"]
    assert (device["speed"], device["advice"], device["settings"]) == ({}, [], [])
    assert set(device["crossovers"].values()) == {None}
    assert not any(found["runs"] or found["launch"] for found in device["fits"])


def test_speeds_are_of_batches_that_fit(llama: str) -> None:
    """One device of two is enough for exit code 0, and a batch that does not fit has no speed."""
    done = plan(llama, "--gpu", "T4,L4", "--context", "4096,8192", "--json")
    assert done.exit_code == 0, done.stderr
    small, large = json.loads(done.stdout)["devices"]
    assert "16-bit" not in small["speed"]
    assert "16-bit" not in [entry["scheme"] for entry in small["advice"]]
    room = {found["scheme"]: found["batch_p50"] for found in large["fits"]}
    for name, speed in large["speed"].items():
        assert [row["batch"] for row in speed["decode"]] == [size for size in BATCHES if size <= room[name]]
    assert room["16-bit"] < 16


def test_one_json_document(llama: str) -> None:
    done = plan(llama, "--gpu", "A10G", "--prompt", "100,200", "--output", "50,60", "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["model"]["parameters"] == 8_030_261_248
    assert document["footprint"]["kv"]["16-bit"]["vLLM"]["bytes_per_token"] == 131072
    (device,) = document["devices"]
    assert device["device"]["name"] == "A10G"
    assert {entry["scheme"] for entry in device["fits"]} >= {"16-bit", "W8A8", "W4A16 g128"}
    assert device["crossovers"]["sixteen_compute_bound"] > 1
    assert document["assumptions"]
    assert document["workload"]["prompt_p99"] == 200


def test_an_html_page_with_plots_that_loads_nothing(llama: str, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps({"prompt_tokens": 50, "output_tokens": 5}) for _ in range(10)))
    done = plan(llama, "--gpu", "L4", "--html", page, "--trace", trace, "--check", "w4a16-gptq")
    assert done.exit_code == 0, done.stderr
    text = page.read_text()
    drawings = [part.partition("</svg>")[0] for part in text.split("<svg")[1:]]
    assert len(drawings) == 5  # weights, cache, speed, speed beside 16 bits, load
    for drawing in drawings:
        picture = ElementTree.fromstring(f"<svg{drawing}</svg>")
        assert picture.find("title") is not None
    assert "<script" not in text
    assert "http" not in text.replace("http-equiv", "")
    assert "unrepresentative-calibration" in text
    assert "saturates at" in text


def test_check_takes_the_model_from_the_recipe(llama: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"version: 1\nmodel: {llama}\nquantization: {{scheme: W4A16, algorithm: {{name: rtn}}}}\n"
        f"outputs: [{{format: compressed-tensors, path: {tmp_path / 'out'}}}]\n"
        "gates: {suites: [nll], max_kl_mean_nats: 0.1}\n"
    )
    done = plan("--check", recipe, "--gpu", "T4", "--context", "8000,8000", "--concurrency", "500", "--json")
    assert done.exit_code == 0, done.stderr
    names = [finding["name"] for finding in json.loads(done.stdout)["findings"]]
    assert names == ["no-calibration", "no-structured-output", "demand-does-not-fit"]


def test_write_recipe_writes_one_that_loads(llama: str, tmp_path: Path) -> None:
    out = tmp_path / "recipe.yaml"
    done = plan(llama, "--gpu", "L4", "--write-recipe", out)
    assert done.exit_code == 0, done.stderr
    recipe = load_recipe(out)
    assert recipe.model == llama
    assert recipe.require_quantization().scheme(128).num_bits == 4
    assert "wrote the recipe for W4A16 g128" in done.stderr
    out.write_text("a recipe of the user's own")
    again = plan(llama, "--gpu", "L4", "--write-recipe", out)
    assert again.exit_code == 2
    assert f"{out} exists. Choose another path for --write-recipe" in again.stderr
    assert out.read_text() == "a recipe of the user's own"


def test_a_trace_is_replayed(llama: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"arrival": i / 10, "prompt_tokens": 50, "output_tokens": 5} for i in range(20)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    done = plan(llama, "--gpu", "H100-80GB", "--trace", trace, "--json")
    assert done.exit_code == 0, done.stderr
    (replay,) = json.loads(done.stdout)["trace"]
    assert replay["requests"] == replay["replay"]["finished"] == 20
    assert 0 < replay["replay"]["ttft_p50_s"] < 0.1
    assert replay["saturation_requests_per_s"] > 10


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--gpu", "H1000"], 2, "the device 'H1000' is unknown"),
        (["--gpu", ","], 2, "--gpu names no device. Known are H100-80GB"),
        (["--context", "0"], 2, "--context '0' is not P50,P99 in whole tokens of 1 or more"),
        (["--context", "99999999999", "--gpu", "L4"], 2, "is more than 10000000 tokens"),
        (["--kv-dtype", "fp4"], 2, "the KV cache dtype 'fp4' is unknown"),
        (["--context", "many"], 2, "--context 'many' is not P50,P99"),
        (["--context", "100,50"], 2, "--context '100,50': P99 is less than P50. Give --context 50,100"),
        (["--context", "1,2", "--prompt", "1,2"], 2, "--context is prompt and output together"),
        (["--trace", "x.jsonl"], 2, "need a device"),
        (["--concurrency", "0"], 2, "not in the range"),
        (["--check", "no-such-recipe"], 2, "no recipe file"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], code: int, message: str, llama: str) -> None:
    done = plan(llama, *arguments)
    assert done.exit_code == code
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_model_is_needed_and_unknown_ones_are_refused(
    tmp_path: Path, write_config: Callable[..., Path], real_config: Callable[[str], dict[str, Any]]
) -> None:
    assert (plan().exit_code, plan(tmp_path / "nowhere").exit_code) == (2, 1)
    strange = write_config(tmp_path / "strange", real_config("llama-3-8b") | {"model_type": "strange"})
    alone = plan(strange)
    assert alone.exit_code == 0
    assert "an unknown number of parameters" in alone.stdout
    assert "128.0 KiB" in alone.stdout
    fitted = plan(strange, "--gpu", "L4")
    assert fitted.exit_code == 1
    assert "are not known, so nothing can be fitted to a device" in fitted.stderr


def test_a_device_that_is_not_confirmed_is_said_once(llama: str) -> None:
    note = "not every figure of this device could be confirmed"
    assert plan(llama, "--gpu", "RTX-3090,L4,rtx-3090").stdout.count(note) == 1
    document = json.loads(plan(llama, "--gpu", "RTX-3090,L4", "--json").stdout)
    assert [entry["device"]["confirmed"] for entry in document["devices"]] == [False, True]


def test_the_help_page_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom quantkit.cli import main\n"
        "main(['plan', '--help'], standalone_mode=False)\n"
        "print(*{name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0
    assert "--gpu NAME" in done.stdout
    heavy = {"torch", "transformers", "numpy", "pydantic", "jinja2", "huggingface_hub", "safetensors", "gguf", "yaml"}
    assert not heavy & set(done.stderr.split())


def test_torch_is_not_imported_without_need(llama: str) -> None:
    code = (
        "import sys\nfrom quantkit.cli import main\n"
        f"main(['plan', {llama!r}, '--gpu', 'L4', '--check', 'aa', '--json'], standalone_mode=False)\n"
        "sys.exit(f'imported: {heavy}' if (heavy := {'torch', 'transformers'} & set(sys.modules)) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

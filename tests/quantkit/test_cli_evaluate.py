"""generate, eval, compare, report, bench and run as commands, on tiny random models."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from quantkit.cli import main
from quantkit_eval.records import read_load, read_throughput, read_verdict

QUANTIZE = """\
version: 1
quantization: {scheme: W4A16, algorithm: {name: rtn}}
outputs: [{format: compressed-tensors, path: out/w4a16}]
gates:
  suites: [extract, nll]
  max_kl_mean_nats: 0.0000001
  num_items: {extract: 2, nll: 10}
report: {html: out/report.html, junit: out/junit.xml, markdown: out/report.md}
"""
SELF = """\
version: 1
gates:
  suites: [extract, nll]
  max_kl_mean_nats: 0.1
  num_items: {extract: 2, nll: 10}
"""


def invoke(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), input=stdin)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with two recipes in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "quantize.yaml").write_text(QUANTIZE)
    (tmp_path / "self.yaml").write_text(SELF)
    return tmp_path


@pytest.fixture
def model(tiny_models: Callable[[str], Path]) -> str:
    return str(tiny_models("llama"))


def test_generate_streams_the_text_that_json_holds(model: str) -> None:
    arguments = ["generate", model, "The quick brown fox", "--max-tokens", "12"]
    plain = invoke(*arguments)
    assert (plain.exit_code, plain.stderr) == (0, "")
    document = json.loads(invoke(*arguments, "--json").stdout)
    assert document["text"] + "\n" == plain.stdout
    assert len(document["token_ids"]) <= 12
    assert document["finish_reason"] in {"stop", "length"}


def test_a_raw_prompt_has_no_template_and_may_come_from_stdin(model: str) -> None:
    options = ["--max-tokens", "8", "--json"]
    raw = json.loads(invoke("generate", model, "The quick", "--raw", *options).stdout)
    from_stdin = json.loads(invoke("generate", model, "-", "--raw", *options, stdin="The quick\n").stdout)
    chat = json.loads(invoke("generate", model, "The quick", *options).stdout)
    assert raw["token_ids"] == from_stdin["token_ids"] != chat["token_ids"]


def test_sampling_follows_its_seed(model: str) -> None:
    def sampled(seed: int) -> list[int]:
        options = ["--temperature", "1.0", "--seed", str(seed), "--max-tokens", "12", "--json"]
        token_ids: list[int] = json.loads(invoke("generate", model, "fox", *options).stdout)["token_ids"]
        return token_ids

    assert sampled(1) == sampled(1) != sampled(2)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--temperature", "-1"], "quantkit: temperature=-1.0 is not a number of 0 or more"),
        (
            ["--raw", "--system", "x"],
            "quantkit: --raw and --system exclude each other",
        ),
    ],
)
def test_generate_refuses_wrong_options(model: str, options: list[str], line: str) -> None:
    result = invoke("generate", model, "fox", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(line)
    assert result.stderr.count("\n") == 1


def test_a_prompt_that_is_no_text_is_named_and_not_the_template(model: str) -> None:
    for options in ([], ["--raw"]):
        result = invoke("generate", model, "caf\udce9", *options)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.endswith("is not UTF-8 text (character 3)\n")
        assert "template" not in result.stderr
    piped = CliRunner().invoke(main, ["generate", model, "-"], input=b"caf\xe9\n")
    assert (piped.exit_code, piped.stdout) == (2, "")
    assert "the prompt on stdin is not UTF-8 text (byte 3)" in piped.stderr


def test_a_prompt_that_does_not_fit_advises_only_what_the_command_can_do(model: str) -> None:
    result = invoke("generate", model, "word " * 3000, "--max-tokens", "5")
    assert result.exit_code == 2
    assert result.stderr.endswith("more than max_model_len=2048. Shorten the prompt or lower max_tokens\n")


def test_bench_refuses_a_file_that_it_could_not_write(workplace: Path, model: str) -> None:
    result = invoke("bench", model, model, "-o", "self.yaml/throughput.json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "self.yaml/throughput.json: cannot be written" in result.stderr


def test_eval_compare_and_report_step_by_step(workplace: Path, model: str) -> None:
    """A model against itself: the predictions are equal to the last bit, so the KL gate passes."""
    first = invoke("eval", model, "-r", "self.yaml", "-o", "run/baseline")
    assert first.exit_code == 0, first.stderr
    assert "extract.exact" in first.stdout
    second = invoke("eval", model, "-r", "self.yaml", "-o", "run/candidate", "--reference", "run/baseline", "--json")
    result = json.loads(second.stdout)
    assert result == json.loads((workplace / "run" / "candidate" / "result.json").read_text())
    assert result["suites"]["extract"]["num_items"] == 2
    assert result["suites"]["nll"]["metrics"]["kl_mean_nats"]["value"] == pytest.approx(0, abs=1e-6)
    judged = invoke("compare", "run/baseline", "run/candidate", "-r", "self.yaml", "-o", "run/verdict.json")
    assert judged.exit_code == 0, judged.stderr
    assert judged.stdout.startswith("verdict: pass\n  pass  nll.kl_mean_nats")
    assert read_verdict(workplace / "run" / "verdict.json")["verdict"] == "pass"
    written = invoke("report", "run")
    assert written.stdout.splitlines() == ["run/report.html", "run/junit.xml", "run/report.md"]
    assert (workplace / "run" / "report.html").read_text().startswith("<!doctype html>")


def test_a_baseline_is_evaluated_once(workplace: Path, model: str) -> None:
    """The second time it comes from the cache, which is said; a candidate and a control never do."""
    options = ["eval", model, "-r", "self.yaml"]
    first = invoke(*options, "-o", "a")
    assert first.exit_code == 0, first.stderr
    assert "from the cache" not in first.stderr
    second = invoke(*options, "-o", "b")
    assert f"from the cache {workplace}/cache/evaluations: 1/1" in second.stderr
    for file in ("result.json", "samples.jsonl", "nll.safetensors"):
        assert (workplace / "b" / file).read_bytes() == (workplace / "a" / file).read_bytes()
    for more in (["--no-cache"], ["--reference", "a"], ["--batch-items", "1"], ["--seed", "1"]):
        again = invoke(*options, "-o", "c", *more)
        assert again.exit_code == 0, again.stderr
        assert "from the cache" not in again.stderr, more


def test_options_of_a_server_are_not_for_a_folder(workplace: Path, model: str) -> None:
    result = invoke("eval", model, "-o", "a", "--request-timeout", "5")
    assert result.exit_code == 2
    assert "--request-timeout is for a MODEL that is a URL" in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-o", "new/r", "--reference", "nope"], "nope: no such reference file"),
        (["-o", "self.yaml/r"], "self.yaml is no folder"),
    ],
)
def test_eval_looks_at_its_paths_before_it_loads_the_model(workplace: Path, options: list[str], words: str) -> None:
    result = invoke("eval", "no-such-model-here", "-r", "self.yaml", *options)
    assert (result.exit_code, result.stdout) == (1, "")
    assert words in result.stderr
    assert "no-such-model-here" not in result.stderr
    assert not (workplace / "new").exists()


def test_compare_and_report_look_at_their_paths_first(workplace: Path) -> None:
    for name in ("a", "b"):
        (workplace / name).mkdir()
    judged = invoke("compare", "a", "b", "-r", "self.yaml", "-o", "self.yaml/v.json")
    assert "self.yaml/v.json: cannot be written" in judged.stderr
    written = invoke("report", "a", "--html", "self.yaml/r.html")
    assert "self.yaml/r.html: cannot be written" in written.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        "compare a b -r self.yaml -o a/samples.jsonl",
        "compare a b -r self.yaml -o ./b/../b/result.json",
        "compare a b -r self.yaml --control c -o c/nll.safetensors",
        "compare a b -r self.yaml --throughput t.json -o t.json",
        "compare a b c -r self.yaml --html self.yaml",
        "report run --html run/verdict.json",
        "report run --markdown run/candidate/samples.jsonl",
        "report run --checkpoint a --junit a/result.json",
        "bench a b --contexts 8 --html b/result.json",
    ],
)
def test_no_output_takes_the_place_of_what_is_read(workplace: Path, arguments: str) -> None:
    for name in ("a", "b", "c", "run/baseline", "run/candidate"):
        (workplace / name).mkdir(parents=True)
        for record in ("result.json", "samples.jsonl", "nll.safetensors"):
            (workplace / name / record).write_text(name)
    before = {path: path.read_bytes() for path in workplace.rglob("*") if path.is_file()}
    result = invoke(*arguments.split())
    assert result.exit_code == 2
    assert (
        f"{arguments.split()[-1].removeprefix('./')} is read by this command and would be overwritten" in result.stderr
    )
    assert before == {path: path.read_bytes() for path in workplace.rglob("*") if path.is_file()}


def test_two_outputs_are_two_files(workplace: Path) -> None:
    for arguments in ("compare a b c -r self.yaml -o x --html ./x", "report run --html x --junit x"):
        result = invoke(*arguments.split())
        assert (result.exit_code, result.stderr) == (2, "quantkit: x is named for two outputs. Name a file for each\n")


@pytest.mark.parametrize(
    "arguments",
    ["eval --power --discordance nan", "eval http://127.0.0.1:1 -o x --request-timeout nan"],
)
def test_no_number_is_no_number_of_an_option(workplace: Path, arguments: str) -> None:
    result = invoke(*arguments.split())
    assert result.exit_code == 2
    assert "nan is no number in the range x>0" in result.stderr.replace("0<x<=1", "x>0")


def test_eval_of_a_broken_model_names_it_and_leaves_no_folder(
    workplace: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.serve import Engine

    monkeypatch.setattr(Engine, "_take", lambda self, chosen: self._fail(chosen.request, "logits are not finite"))
    result = invoke("eval", model, "-r", "self.yaml", "-o", "new/r")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"quantkit: {model} cannot be evaluated: ")
    assert "logits are not finite. If its weights are damaged or overflow, quantize it again" in result.stderr
    assert not (workplace / "new").exists()


def test_report_refuses_another_checkpoint(workplace: Path, model: str, tiny_models: Callable[[str], Path]) -> None:
    for side, options in (("baseline", []), ("candidate", ["--reference", "run/baseline"])):
        invoke("eval", model, "-r", "self.yaml", "-o", f"run/{side}", *options)
    invoke("compare", "run/baseline", "run/candidate", "-r", "self.yaml", "-o", "run/verdict.json")
    assert invoke("report", "run", "--checkpoint", model).exit_code == 0
    result = invoke("report", "run", "--checkpoint", str(tiny_models("qwen2")))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "is not the candidate of this verdict" in result.stderr


def test_report_of_a_folder_without_records_is_one_line(workplace: Path) -> None:
    (workplace / "empty").mkdir()
    result = invoke("report", "empty")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("quantkit: empty/verdict.json: no such file")


def test_compare_refuses_a_gate_on_speed_without_throughput(workplace: Path, model: str) -> None:
    invoke("eval", model, "-r", "self.yaml", "-o", "run/baseline")
    (workplace / "fast.yaml").write_text(
        SELF.replace("max_kl_mean_nats: 0.1", "min_throughput_ratio: {decode_batch_1: 1}")
    )
    result = invoke("compare", "run/baseline", "run/baseline", "-r", "fast.yaml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no throughput of these two models was measured. Measure it with `quantkit bench" in result.stderr
    assert "--throughput FILE" in result.stderr


def test_bench_measures_pairs_and_writes_a_record(workplace: Path, model: str) -> None:
    options = ["--batches", "1,2", "--new-tokens", "4", "--repeats", "2"]
    result = invoke("bench", model, model, *options, "-o", "throughput.json", "--json")
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert record == read_throughput(workplace / "throughput.json")
    assert list(record["batches"]) == ["decode_batch_1", "decode_batch_2"]
    assert len(record["batches"]["decode_batch_2"]["candidate_tok_per_s"]) == 2
    assert record["settings"]["prompts"] == "no two alike but for the template"
    assert record["baseline"]["engine"]["enable_prefix_caching"] is False


def test_bench_measures_a_load_of_several_candidates(workplace: Path, model: str) -> None:
    load = ["--contexts", "5,40", "--batches", "1,3", "--qps", "50", "--requests", "3", "--new-tokens", "3"]
    result = invoke(
        "bench", model, model, model, *load, "--repeats", "2", "-o", "load.json", "--html", "load.html", "--json"
    )
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert record == read_load(workplace / "load.json")
    assert [(p["loop"], p["context"], p["batch"] or p["qps"]) for p in record["points"]] == [
        ("closed", 5, 1), ("closed", 5, 3), ("closed", 40, 1), ("closed", 40, 3), ("open", 5, 50), ("open", 40, 50)
    ]  # fmt: skip
    assert {len(point["runs"]) for point in record["points"]} == {3}
    assert record["points"][1]["runs"][2]["itl_ms"]["n"] == 2 * 3 * 2
    assert all(party["engine"]["enable_prefix_caching"] is False for party in record["models"])
    (own, *_) = record["memory"]
    assert own["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads of 16 float32 numbers
    assert own["concurrency"]["5"] > own["concurrency"]["40"] > 0
    assert (workplace / "load.html").read_text().startswith("<!doctype html>")
    plain = invoke("bench", model, model, "--contexts", "5", "--batches", "1", "--new-tokens", "2", "--repeats", "1")
    assert plain.stdout.splitlines()[0].split()[:3] == ["model", "weights", "cache"]


@pytest.mark.slow
def test_run_ends_with_the_verdict_as_its_exit_code(workplace: Path, model: str) -> None:
    result = invoke("run", "quantize.yaml", model, "--json")
    assert result.exit_code == 3, result.stderr
    verdict = json.loads(result.stdout)
    assert verdict["verdict"] == "fail"
    assert [gate["name"] for gate in verdict["gates"]] == ["nll.kl_mean_nats"]
    for name in ("w4a16/quantkit.json", "report.html", "junit.xml", "report.md", "records/verdict.json"):
        assert (workplace / "out" / name).is_file(), name
    again = invoke("run", "quantize.yaml", model)
    assert again.exit_code == 1
    assert "Give --overwrite" in again.stderr


@pytest.mark.slow
def test_run_without_quantization_compares_the_model_with_itself(workplace: Path, model: str) -> None:
    result = invoke("run", "self.yaml", model)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("verdict: pass\n")
    assert not list(workplace.rglob("*.safetensors.index.json"))

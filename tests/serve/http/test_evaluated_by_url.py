"""Our own server judged by URL: the same records as the engine's, and the command that makes them."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from quantkit.cli import main
from quantkit.errors import SourceError
from quantkit.serve import Engine, EngineConfig, EngineModel
from quantkit.serve.evaluated import FolderTokenizer
from quantkit_eval.compare import compare
from quantkit_eval.errors import ModelOutputError, TargetError
from quantkit_eval.evaluate import evaluate
from quantkit_eval.protocol import RENDERED_BY_SERVER, GenerationRequest
from quantkit_eval.suites import with_constrained
from quantkit_eval.targets import OpenAIServer

EXTRACT = {"extract": {"num_items": 3, "max_tokens": 12}}
SUITES: dict[str, Any] = {**with_constrained(EXTRACT), "nll": {"max_windows": 2, "window_tokens": 48}}
RECIPE = "version: 1\ngates: {suites: [extract, nll], num_items: {extract: 2, nll: 2}}\n"


@pytest.fixture(scope="module")
def local(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of the engine without a server."""
    out = tmp_path_factory.mktemp("local")
    engine = Engine(tiny_llama_folder, EngineConfig(max_model_len=1024, max_num_seqs=8, kv_block_size=16))
    evaluate(EngineModel(engine), SUITES, 0, out)
    return out


def test_a_server_is_judged_as_its_engine_is(server: Any, local: Path, tmp_path: Path, tiny_llama_folder: Path) -> None:
    by_server = OpenAIServer(f"{server.url}/v1")
    assert by_server.describe()["template_hash"] == RENDERED_BY_SERVER
    assert by_server.describe()["engine"]["name"] == "quantkit"
    result = evaluate(by_server, SUITES, 0, tmp_path / "server")
    verdict = compare(local, tmp_path / "server", {"suites": ["extract", "extract+constrained", "nll"]})
    assert [entry["changed"] for entry in verdict["changes"]] == [0, 0]
    mine = json.loads((local / "result.json").read_text())["suites"]
    for suite, metric in (
        ("nll", "nll_nats"), ("extract+constrained", "forced_token_rate"), ("extract+constrained", "legal_mass"),
    ):  # fmt: skip
        value = result["suites"][suite]["metrics"][metric]["value"]
        assert value == pytest.approx(mine[suite]["metrics"][metric]["value"], rel=1e-4), metric
        assert value is not None
        assert value > 0
    at_hand = OpenAIServer(f"{server.url}/v1", tokenizer=FolderTokenizer(str(tiny_llama_folder)))
    evaluate(at_hand, EXTRACT, 0, tmp_path / "tokenizer")
    verdict = compare(local, tmp_path / "tokenizer", {"suites": ["extract"]})
    assert verdict["candidate"]["template_hash"] == verdict["baseline"]["template_hash"]


def test_a_tokenizer_with_another_template_is_found_out(server: Any, tmp_path: Path, make_tiny_model: Any) -> None:
    folder = make_tiny_model("llama", tmp_path / "other")
    template = folder / "chat_template.jinja"
    template.write_text("Please: " + template.read_text())
    model = OpenAIServer(f"{server.url}/v1", tokenizer=FolderTokenizer(str(folder)))
    with pytest.raises(ModelOutputError, match=r"request 'a', the tokenizer makes .*They use other chat templates"):
        model.generate([GenerationRequest("a", ({"role": "user", "content": "Hi"},), 4)])
    with pytest.raises(SourceError, match=r"no tokenizer loads from .*nothing"):
        FolderTokenizer(str(tmp_path / "nothing"))


def test_a_request_that_the_server_refuses_is_one_line(server: Any) -> None:
    model = OpenAIServer(f"{server.url}/v1")
    with pytest.raises(TargetError, match=r"/v1/chat/completions refuses: 400 Bad Request \(") as caught:
        model.generate([GenerationRequest("a", ({"role": "user", "content": "Hi"},), 100_000)])
    assert "\n" not in str(caught.value)


def test_the_command_takes_a_url(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(RECIPE)
    url = f"{server.url}/v1"
    ran = CliRunner().invoke(main, ["eval", url, "-r", "r.yaml", "-o", "out", "--model", "tiny", "--resume"])
    assert ran.exit_code == 0, ran.stderr
    assert "nll.perplexity" in ran.stdout
    for options, words in (
        (["--model", "big"], "serves no model 'big'. Choose --model from tiny"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "the variable is not set or empty"),
    ):
        refused = CliRunner().invoke(main, ["eval", url, "-r", "r.yaml", "-o", "new", *options])
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert words in refused.stderr
    assert not Path("new").exists()

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from quantkit.errors import RecipeError
from quantkit.recipe import Gptq, JsonlSource, Recipe, builtin_recipes, load_recipe, parse_recipe
from quantkit.recipe.explain import SECTIONS
from quantkit.recipe.model import NOT_YET_VALUES
from quantkit.recipe.section import Section
from quantkit.scheme import PER_CHANNEL, QuantScheme

FULL = """\
version: 1
model: some/model
calibration:
  sources:
    - {kind: text, path: corpus.txt, share: 0.5}
    - {kind: jsonl, path: chats.jsonl, share: 0.3}
    - {kind: dataset, name: wiki, split: test, column: body, share: 0.2}
  num_tokens: 4096
  window_tokens: 256
  seed: 7
quantization:
  scheme: W4A16
  group_size: auto
  transforms: []
  algorithm: {name: gptq, damp_fraction: 1e-2, block_size: 64}
  ignore: [lm_head, 'model\\.layers\\.0\\..*']
outputs:
  - {format: compressed-tensors, path: out/w4a16}
gates:
  suites: [extract, nll]
  max_drop_pp: {extract: 5}
  max_kl_mean_nats: 0.10
  min_throughput_ratio: {decode_batch_1: 1.0, decode_batch_16: 0.9}
  num_items: {extract: 40}
report: {html: out/report.html, junit: out/junit.xml, markdown: out/report.md}
"""
RTN = """\
version: 1
quantization:
  scheme: W4A16
  algorithm: {name: rtn}
outputs: [{format: compressed-tensors, path: out}]
"""


def refusal(text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, origin="r.yaml")
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_key_of_the_file_is_read() -> None:
    recipe = parse_recipe(FULL)
    assert recipe.model == "some/model"
    assert recipe.calibration is not None
    assert [source.kind for source in recipe.calibration.sources] == ["text", "jsonl", "dataset"]
    assert [source.share for source in recipe.calibration.sources] == [0.5, 0.3, 0.2]
    assert recipe.calibration.sources[1] == JsonlSource(kind="jsonl", path="chats.jsonl", share=0.3)
    assert recipe.calibration.num_tokens == 4096
    assert recipe.calibration.window_tokens == 256
    assert recipe.calibration.seed == 7
    assert recipe.quantization is not None
    assert recipe.quantization.group_size == "auto"
    assert recipe.quantization.scheme(64) == QuantScheme(num_bits=4, group_size=64, symmetric=True)
    assert recipe.quantization.algorithm == Gptq(name="gptq", damp_fraction=0.01, block_size=64)
    assert recipe.quantization.ignore == ("lm_head", r"model\.layers\.0\..*")
    assert recipe.outputs[0].path == Path("out/w4a16")
    assert recipe.gates.suites == ("extract", "nll")
    assert recipe.gates.max_drop_pp == {"extract": 5}
    assert recipe.gates.max_kl_mean_nats == 0.1
    assert recipe.gates.min_throughput_ratio == {"decode_batch_1": 1.0, "decode_batch_16": 0.9}
    assert recipe.gates.num_items == {"extract": 40}
    assert recipe.report.paths == {
        "html": Path("out/report.html"),
        "junit": Path("out/junit.xml"),
        "markdown": Path("out/report.md"),
    }
    assert not recipe.is_self_comparison


def test_defaults_of_a_short_recipe() -> None:
    recipe = parse_recipe(RTN)
    assert recipe.model is None
    assert recipe.calibration is None
    assert recipe.quantization is not None
    assert recipe.quantization.group_size == "auto"
    assert recipe.quantization.ignore == ("lm_head",)
    assert recipe.gates.suites == ("extract", "nll")
    assert recipe.gates.max_drop_pp == {}
    assert recipe.report.paths == {}


@pytest.mark.parametrize(("given_group", "expected"), [("channel", PER_CHANNEL), ("32", 32), ("auto", "auto")])
def test_group_size_in_either_place(given_group: str, expected: object) -> None:
    above = parse_recipe(RTN.replace("  scheme: W4A16", f"  scheme: W4A16\n  group_size: {given_group}"))
    inside = parse_recipe(RTN.replace("W4A16", f"{{num_bits: 4, group_size: {given_group}, symmetric: true}}"))
    for recipe in (above, inside):
        assert recipe.quantization is not None
        assert recipe.quantization.group_size == expected


def test_scheme_of_an_unknown_group_size_is_refused() -> None:
    quantization = parse_recipe(RTN).quantization
    assert quantization is not None
    with pytest.raises(ValueError, match="group_size=48; choose from"):
        quantization.scheme(48)


def test_without_quantization_the_model_is_compared_with_itself() -> None:
    assert parse_recipe("version: 1\nmodel: m\n").is_self_comparison
    assert "r.yaml:2:20: outputs[0].format: a checkpoint needs `quantization`, and there is none" in refusal(
        "version: 1\noutputs: [{format: compressed-tensors, path: out}]\n"
    )
    assert "calibration: without quantization and outputs" in refusal(
        "version: 1\ncalibration: {sources: [{kind: text, path: builtin}]}\n"
    )


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ("{format: gguf, type: Q4_K, path: x.gguf}", "3:26: outputs[0].type: 'Q4_K' is not allowed; allowed: F32, F16"),
        ("{format: gguf, path: out/x}", "3:26: outputs[0].path: out/x is the path of a file and must end with .gguf"),
        ("{format: gguf, path: x.gguf, max_shard_size: 1GB}", "3:34: outputs[0].max_shard_size: unknown key; allowed "
         "here: format, path, type, target_bpw, overrides, error_feedback, pretokenizer, split_size; max_shard_size "
         "belongs under outputs[].compressed-tensors"),
        ("{format: gptq, path: x, type: Q8_0}", "3:29: outputs[0].type: unknown key; allowed here: format, path, "
         "max_shard_size, checkpoint_format; type belongs under outputs[].gguf"),
        ("{format: gguf, path: x.gguf, overrides: [{match: '(', type: Q8_0}]}",
         "3:54: outputs[0].overrides[0].match: '(' is no regular expression"),
        ("{format: gguf, path: x.gguf, overrides: [{match: x, typ: Q8_0}]}",
         "3:57: outputs[0].overrides[0].typ: unknown key; allowed here: match, type; did you mean 'type'?"),
        ("{format: gguf, path: x.gguf, error_feedback: true}",
         "3:50: outputs[0].error_feedback: needs a `calibration` section, and there is none"),
        ("{format: ggu, path: x.gguf}", "3:14: outputs[0].format: 'ggu' is not allowed; allowed: compressed-tensors, "
         "gptq, awq, gguf; did you mean 'gguf'?"),
        ("{path: x.gguf}", "3:5: outputs[0].format: missing; allowed: compressed-tensors, gptq, awq, gguf"),
    ],
)  # fmt: skip
def test_mistakes_in_gguf_outputs(outputs: str, message: str) -> None:
    assert message in refusal(f"version: 1\noutputs:\n  - {outputs}\n")


def test_text_and_hash_are_kept_also_with_another_model() -> None:
    recipe = parse_recipe(FULL)
    other = recipe.with_model("elsewhere")
    assert other.model == "elsewhere"
    assert recipe.model == "some/model"
    for kept in (recipe, other):
        assert kept.text == FULL
        assert kept.sha256 == hashlib.sha256(FULL.encode()).hexdigest()
    assert recipe.with_model(None) is recipe


def test_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        parse_recipe(FULL).model = "other"  # type: ignore[misc]


def test_a_model_is_needed_somewhere() -> None:
    recipe = parse_recipe(RTN)
    with pytest.raises(RecipeError, match=r"no model\. Give MODEL on the command line"):
        recipe.require_model()
    assert recipe.with_model("m").require_model() == "m"


def test_home_is_expanded_in_paths() -> None:
    recipe = parse_recipe(RTN.replace("path: out", "path: ~/out"))
    assert recipe.outputs[0].path == Path.home() / "out"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("model:", "modle:", "r.yaml:2:1: modle: unknown key; allowed here: version, model, calibration, quantization, "
         "outputs, gates, report, search; did you mean 'model'?"),
        ("seed: 7", "seed: 7\nscheme: W4A16", "r.yaml:11:1: scheme: unknown key; allowed here: version, model, "
         "calibration, quantization, outputs, gates, report, search; scheme belongs under quantization"),
        ("damp_fraction", "dampfraction", "r.yaml:15:27: quantization.algorithm.dampfraction: unknown key; "
         "allowed here: name, damp_fraction, scale_search, scale_refit, block_size, target_correction; "
         "did you mean 'damp_fraction'?"),
        ("name: gptq", "name: gtpq", "r.yaml:15:21: quantization.algorithm.name: 'gtpq' is not allowed; "
         "allowed: rtn, gptq; did you mean 'gptq'?"),
        ("name: gptq, ", "", "r.yaml:15:14: quantization.algorithm.name: missing; allowed: rtn, gptq"),
        ("{name: gptq, damp_fraction: 1e-2, block_size: 64}", "gptq",
         "r.yaml:15:14: quantization.algorithm: must be a mapping, not 'gptq'"),
        ("kind: jsonl", "kind: json", "r.yaml:6:14: calibration.sources[1].kind: 'json' is not allowed; "
         "allowed: text, jsonl, dataset, self_generated, structured_chat; did you mean 'jsonl'?"),
        ("path: corpus.txt, share", "text: corpus.txt, share", "r.yaml:5:20: calibration.sources[0].text: unknown key; "
         "allowed here: kind, path, share"),
        ("path: corpus.txt, share", "share", "r.yaml:5:7: calibration.sources[0].path: missing"),
        ("share: 0.2}", "share: 0.3}", "r.yaml:5:5: calibration.sources: the shares of the sources sum to 1.1; "
         "they must sum to 1"),
        ("share: 0.2}", "share: 0}", "r.yaml:7:69: calibration.sources[2].share: must be greater than 0, not 0"),
        ("num_tokens: 4096", "num_tokens: 12", "r.yaml:8:15: calibration.num_tokens: 12 is less than one window of "
         "window_tokens=256"),
        ("num_tokens: 4096", "num_tokens: lots", "r.yaml:8:15: calibration.num_tokens: must be a whole number, "
         "not 'lots'"),
        ("num_tokens: 4096", "num_tokens: 40.5", "r.yaml:8:15: calibration.num_tokens: must be a whole number, "
         "not 40.5"),
        ("num_tokens: 4096", "num_tokens: true", "r.yaml:8:15: calibration.num_tokens: must be a whole number, "
         "not true"),
        ("scheme: W4A16", "scheme: w4a16", "r.yaml:12:11: quantization.scheme: 'w4a16' is not allowed; "
         "allowed: W4A16, W4A16_ASYM, W8A16, W8A8, W8A8_STATIC; did you mean 'W4A16'?"),
        ("scheme: W4A16", "scheme: 4", "r.yaml:12:11: quantization.scheme: must be a mapping, not 4"),
        ("group_size: auto", "group_size: 48", "r.yaml:13:15: quantization.group_size: 48 is not allowed; "
         "allowed: auto, channel, 32, 64, 128"),
        ("scheme: W4A16", "scheme: {num_bits: 4, group_size: 64}", "r.yaml:13:15: quantization.group_size: given twice "
         "with different values; keep one of group_size and scheme.group_size"),
        ("lm_head,", "'(',", "r.yaml:16:12: quantization.ignore[0]: '(' is no regular expression: missing ), "
         "unterminated subpattern at position 0"),
        ("path: out/w4a16}", "path: ''}", "r.yaml:18:40: outputs[0].path: empty"),
        ("path: out/w4a16}", "path: [a]}", "r.yaml:18:40: outputs[0].path: must be a path, not a list"),
        ("suites: [extract, nll]", "suites: [extract, nlll]", "r.yaml:20:21: gates.suites[1]: 'nlll' is not allowed; "
         "allowed: extract, schema, tools, arith, needle, scripts, instructions, nll; did you mean 'nll'?"),
        ("suites: [extract, nll]", "suites: [nll]", "r.yaml:21:26: gates.max_drop_pp.extract: the suite extract is not "
         "in gates.suites (nll)"),
        ("suites: [extract, nll]", "suites: [extract]", "r.yaml:22:21: gates.max_kl_mean_nats: needs the suite nll in "
         "gates.suites (extract)"),
        ("suites: [extract, nll]", "suites: [nll, nll]", "r.yaml:20:11: gates.suites: a suite stands here twice"),
        ("suites: [extract, nll]", "suites: []", "r.yaml:20:11: gates.suites: must not be empty"),
        ("{extract: 5}", "{extrct: 5}", "r.yaml:21:17: gates.max_drop_pp.extrct: 'extrct' is not allowed; "
         "allowed: extract; did you mean 'extract'?"),
        ("max_kl_mean_nats: 0.10", "max_kl_mean_nats: .inf", "r.yaml:22:21: gates.max_kl_mean_nats: must be a finite "
         "number, not inf"),
        ("max_kl_mean_nats: 0.10", "max_kl_mean_nats: .nan", "r.yaml:22:21: gates.max_kl_mean_nats: must be a finite "
         "number, not nan"),
        ("decode_batch_16", "decode_batch_8", "r.yaml:23:47: gates.min_throughput_ratio.decode_batch_8: "
         "'decode_batch_8' is not allowed; allowed: decode_batch_1, decode_batch_16; did you mean 'decode_batch_1'?"),
        ("out/junit.xml", "out/report.html", "r.yaml:25:40: report.junit: out/report.html is also the path of another "
         "file of this recipe"),
        ("version: 1", "version: 2", "r.yaml:1:10: version: this quantkit reads version 1, not 2"),
        ("version: 1", "version: '1'", "r.yaml:1:10: version: this quantkit reads version 1, not '1'"),
        ("version: 1", "version: 1.0", "r.yaml:1:10: version: this quantkit reads version 1, not 1.0"),
        ("version: 1", "version: true", "r.yaml:1:10: version: this quantkit reads version 1, not true"),
        ("version: 1\n", "", "r.yaml:1:1: version: missing; write `version: 1`"),
        ("model: some/model", "model:", "r.yaml:2:7: model: has no value; give it one or delete the key"),
        ("model: some/model", "model: m\nmodel: n", "r.yaml:3:1: model: duplicate key, first given in line 2"),
        ("kind: text, ", "kind: text, kind: jsonl, ", "r.yaml:5:20: calibration.sources[0].kind: duplicate key, "
         "first given in line 5"),
        ("  scheme: W4A16", "\tscheme: W4A16", "r.yaml:12:1: a tab; YAML is indented with spaces"),
        ("model: some/model", "model: &a some/model", "r.yaml:2:8: & and * (anchors) are not read in a recipe; write "
         "the value out, or put it in quotes"),
        ("model: some/model", "model: !!python/name:os.system x", "r.yaml:2:8: the tag "
         "'tag:yaml.org,2002:python/name:os.system' is not read in a recipe"),
        ("model: some/model", "[a]: b", "r.yaml:2:1: a key must be text, this one is a list or a mapping"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_place(old: str, new: str, message: str) -> None:
    assert old in FULL
    assert refusal(FULL.replace(old, new, 1)) == message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("transforms: []", "overrides: [{match: x, scheme: NVFP4}]",
         "r.yaml:14:26: not supported yet: quantization.overrides[0].scheme: 'NVFP4'; supported: W4A16, W4A16_ASYM, "
         "W8A16, W8A8, W8A8_STATIC, none"),
        ("scheme: W4A16", "scheme: NVFP4", "r.yaml:12:3: not supported yet: quantization.scheme: 'NVFP4'; "
         "supported: W4A16, W4A16_ASYM, W8A16, W8A8, W8A8_STATIC"),
        ("scheme: W4A16", "scheme: {num_bits: 3}", "r.yaml:12:12: not supported yet: quantization.scheme.num_bits: 3; "
         "supported: 4, 8"),
    ],
)  # fmt: skip
def test_what_the_contract_has_and_quantkit_does_not_is_refused_by_name(old: str, new: str, message: str) -> None:
    assert old in FULL
    assert refusal(FULL.replace(old, new, 1)) == message


def test_every_value_that_is_not_yet_supported_is_said_to_be_so() -> None:
    places = {
        "quantization.scheme": ("scheme: W4A16", "scheme: {}"),
        "quantization.scheme.num_bits": ("scheme: W4A16", "scheme: {{num_bits: {}}}"),
        "quantization.overrides[].scheme": ("transforms: []", "overrides: [{{match: x, scheme: {}}}]"),
        "quantization.overrides[].scheme.num_bits": (
            "transforms: []",
            "overrides: [{{match: x, scheme: {{num_bits: {}}}}}]",
        ),
    }
    assert places.keys() == NOT_YET_VALUES.keys()
    for pattern, values in NOT_YET_VALUES.items():
        old, new = places[pattern]
        for value in values:
            word = str(value).lower() if isinstance(value, bool) else value
            assert "not supported yet: " in refusal(FULL.replace(old, new.format(word), 1)), (pattern, value)


def test_the_first_of_several_mistakes_is_shown_and_the_rest_counted() -> None:
    text = FULL.replace("seed: 7", "sede: 7").replace("html:", "htm:").replace("model:", "modle:")
    assert refusal(text).startswith("r.yaml:2:1: modle: unknown key")
    assert refusal(text).endswith("(and 2 more)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.yaml: the recipe is empty. To start from one: quantkit recipes show w4a16-gptq"),
        ("# nothing\n", "r.yaml: the recipe is empty. To start from one: quantkit recipes show w4a16-gptq"),
        ("---\n", "r.yaml: the recipe is empty. To start from one: quantkit recipes show w4a16-gptq"),
        ("- a\n", "r.yaml:1:1: a recipe is a mapping that begins with `version: 1`, this is a list"),
        ("hello\n", "r.yaml:1:1: a recipe is a mapping that begins with `version: 1`, this is the text 'hello'"),
        ("version: 1\n---\nversion: 1\n", "r.yaml:3:1: a second YAML document begins here; a recipe is one document"),
        ("version: 1\nmodel: {\n", "r.yaml:3:1: not valid YAML: expected the node content, but found '<stream end>' "
         "while parsing a flow node"),
        ("version: 1\nmodel: a\x01b\n", "r.yaml:2:9: the character '\\x01' is not allowed in YAML"),
        ("version: 1\nquantization:\n  algorithm: {name: rtn}\n  scheme: W4A16\n",
         "r.yaml:1:1: outputs: missing; write [{format: compressed-tensors, path: FOLDER}]"),
        ("version: 1\nquantization:\n  algorithm: {name: gptq}\n  scheme: W4A16\noutputs: "
         "[{format: compressed-tensors, path: o}]\n", "r.yaml:1:1: calibration: missing; the algorithm gptq needs it"),
        ("version: 1\nquantization: {scheme: W4A16}\n",
         "r.yaml:2:1: quantization.algorithm: missing; {name: gptq} or {name: rtn}"),
        ("a: " + "[" * 3000 + "]" * 3000, "r.yaml:1:15: nested too deeply to be a recipe"),
    ],
)  # fmt: skip
def test_what_is_no_recipe_is_refused(text: str, message: str) -> None:
    assert refusal(text) == message


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    try:
        parse_recipe(text)
    except RecipeError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either outcome is right


@given(st.integers(0, len(FULL) - 1), st.sampled_from(list("x:{}[],#&*!|>'\"%@`\t\n -0")))
def test_any_one_wrong_character_is_read_or_refused_in_one_line(place: int, character: str) -> None:
    try:
        parse_recipe(FULL[:place] + character + FULL[place + 1 :])
    except RecipeError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either outcome is right


def test_a_file_is_read_as_utf8_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + RTN.encode())
    assert load_recipe(path).text == RTN
    path.write_bytes(RTN.replace("\n", "\r\n").encode())
    assert load_recipe(path).text == RTN.replace("\n", "\r\n")


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    binary = tmp_path / "model.gguf"
    binary.write_bytes(b"GGUF\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"model\.gguf is not UTF-8 text \(byte 4\)\. A recipe is a YAML file"):
        load_recipe(binary)
    with binary.open("wb") as file:
        file.truncate(3 << 20)
    with pytest.raises(RecipeError, match="has more than 1048576 bytes, too many for a recipe"):
        load_recipe(binary)
    with pytest.raises(RecipeError, match="is a folder, not a recipe"):
        load_recipe(tmp_path)
    with pytest.raises(RecipeError, match=r"no recipe file 'w4a16-gtpq', .*did you mean 'w4a16-gptq'"):
        load_recipe("w4a16-gtpq")


def test_an_existing_file_wins_over_a_built_in_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("aa").text == builtin_recipes()["aa"].read_text()
    Path("aa").write_text(RTN)
    assert load_recipe("aa").text == RTN


@pytest.mark.parametrize("name", ["aa", "search-w4", "w4a16-formats", "w4a16-gptq", "w4a16-rtn", "w4a16-tuned", "w8a8"])
def test_built_in_recipes_are_short_commented_and_usable(name: str) -> None:
    recipe = load_recipe(name)
    lines = recipe.text.splitlines()
    assert len(lines) <= 30
    assert lines[0].startswith("# ")
    assert recipe.require_model()
    assert recipe.report.paths.keys() == {"html", "junit", "markdown"}
    assert recipe.is_self_comparison == (name == "aa")
    assert recipe.gates.max_drop_pp
    assert set(builtin_recipes()) == {
        *("aa", "search-w4", "w4a16-formats", "w4a16-gptq", "w4a16-rtn", "w4a16-tuned", "w8a8"),
    }


def test_importing_the_recipe_imports_no_torch() -> None:
    code = "import sys, quantkit.recipe; quantkit.recipe.load_recipe('aa'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """The sections that a field may hold, and those inside them."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
        for field in annotation.model_fields.values():
            yield from _sections(field.annotation)
    for part in get_args(annotation):
        yield from _sections(part)


def test_the_keys_of_every_section_can_be_named() -> None:
    assert set(_sections(Recipe)) <= set(SECTIONS.values())


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ("kv_cache: {foo: 1}", "quantization.kv_cache.foo: unknown key; allowed here: dtype"),
        (
            "algorithm: {name: gptq, target_correction: {alpa: 0.5}}",
            "quantization.algorithm.target_correction.alpa: unknown key; allowed here: alpha, damping, skip, apply; "
            "did you mean 'alpha'?",
        ),
    ],
)
def test_a_key_that_an_inner_section_does_not_have(quantization: str, message: str) -> None:
    algorithm = "" if "algorithm" in quantization else ", algorithm: {name: gptq}"
    text = f"version: 1\nquantization: {{scheme: W4A16{algorithm}, {quantization}}}\n"
    assert message in refusal(text)

"""Schemes, overrides and outputs in a recipe: what is read, and what cannot be is refused with its place."""

import pytest

from quantkit.errors import RecipeError
from quantkit.recipe import parse_recipe
from quantkit.scheme import PER_CHANNEL, PRESETS, InputScheme, QuantScheme

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


@pytest.mark.parametrize(
    ("scheme", "group_size", "expected"),
    [
        ("W4A16", "auto", QuantScheme(4, 128)),
        ("W4A16_ASYM", "auto", QuantScheme(4, 128, symmetric=False)),
        ("W8A16", PER_CHANNEL, QuantScheme(8, PER_CHANNEL)),
        ("{num_bits: 8, group_size: auto, symmetric: false}", "auto", QuantScheme(8, 128, symmetric=False)),
        ("W8A8", PER_CHANNEL, QuantScheme(8, PER_CHANNEL, input=InputScheme(dynamic=True))),
        ("{num_bits: 8, input: dynamic, group_size: auto}", PER_CHANNEL, PRESETS["W8A8"]),
        ("W8A8_STATIC", PER_CHANNEL, QuantScheme(8, PER_CHANNEL, input=InputScheme(dynamic=False))),
    ],
)
def test_presets_and_mappings_give_their_schemes(scheme: str, group_size: object, expected: QuantScheme) -> None:
    calibration = "calibration: {sources: [{kind: text, path: builtin}]}\nquantization:"
    quantization = parse_recipe(RTN.replace("W4A16", scheme).replace("quantization:", calibration)).quantization
    assert quantization is not None
    assert quantization.group_size == group_size
    assert quantization.scheme(128 if group_size == "auto" else PER_CHANNEL) == expected


def test_overrides_are_read() -> None:
    overrides = r"""  overrides:
    - {match: 'model\.layers\.0\..*', scheme: W8A16}
    - {match: '.*down_proj', scheme: {num_bits: 4, symmetric: false}, group_size: 32}
    - {match: '.*o_proj', scheme: none}
"""
    quantization = parse_recipe(RTN.replace("outputs:", overrides + "outputs:")).quantization
    assert quantization is not None
    first, second, third = quantization.overrides
    assert (first.match, first.scheme(-1)) == (r"model\.layers\.0\..*", PRESETS["W8A16"])
    assert (second.group_size, second.scheme(32)) == (32, QuantScheme(4, 32, symmetric=False))
    assert third.keeps


@pytest.mark.parametrize(
    ("scheme", "output", "message"),
    [
        ("W8A8", "gptq", "r.yaml:5:20: outputs[0].format: gptq cannot hold W8A8 channel symmetric, inputs dynamic per "
         "token; it holds 4 and 8 bits, symmetric and asymmetric, with 16-bit inputs"),
        ("W8A16", "awq", "r.yaml:5:20: outputs[0].format: awq cannot hold W8A16 channel symmetric; it holds 4 bits in "
         "groups of 32, 64 or 128, symmetric and asymmetric, with 16-bit inputs, one scheme for all layers"),
        ("{num_bits: 4, group_size: channel}", "awq", "r.yaml:5:20: outputs[0].format: awq cannot hold W4A16 channel "
         "symmetric; it holds 4 bits in groups of 32, 64 or 128, symmetric and asymmetric, with 16-bit inputs, one "
         "scheme for all layers"),
        ("W8A8_STATIC", "compressed-tensors", "r.yaml:3:11: quantization.scheme: static input scales are found by "
         "calibration, and there is no `calibration`"),
    ],
)  # fmt: skip
def test_a_format_that_cannot_hold_the_scheme_says_what_it_holds(scheme: str, output: str, message: str) -> None:
    assert refusal(RTN.replace("W4A16", scheme).replace("compressed-tensors", output)) == message


def test_several_outputs_with_their_options() -> None:
    outputs = """outputs:
  - {format: compressed-tensors, path: out/ct, max_shard_size: 5GB}
  - {format: gptq, path: out/gptq, checkpoint_format: gptq_v2, max_shard_size: 250 MB}
  - {format: awq, path: out/awq, max_shard_size: 4096}
"""
    recipe = parse_recipe(RTN.partition("outputs")[0] + outputs)
    assert [output.format for output in recipe.outputs] == ["compressed-tensors", "gptq", "awq"]
    assert [output.max_shard_size for output in recipe.outputs] == [5_000_000_000, 250_000_000, 4096]
    assert [output.format_options for output in recipe.outputs] == [{}, {"checkpoint_format": "gptq_v2"}, {}]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("scheme: W4A16", "scheme: {num_bits: 4, input: dynamic}", "r.yaml:12:32: quantization.scheme.input: 8-bit "
         "inputs go with 8-bit weights; no reader multiplies them by 4-bit weights"),
        ("scheme: W4A16", "scheme: {num_bits: 8, input: static, symmetric: false}", "r.yaml:12:32: "
         "quantization.scheme.input: 8-bit inputs go with symmetric weights; no engine multiplies them by asymmetric "
         "ones"),
        ("scheme: W4A16", "scheme: {num_bits: 4, symmetric: maybe}", "r.yaml:12:36: quantization.scheme.symmetric: "
         "must be true or false, not 'maybe'"),
        ("scheme: W4A16\n  group_size: auto", "scheme: W8A8\n  group_size: 64", "r.yaml:13:15: "
         "quantization.group_size: 64 does not go with 8-bit inputs, which need one scale per channel"),
        ("scheme: W4A16\n  group_size: auto", "scheme: {num_bits: 8, input: dynamic, group_size: 64}",
         "r.yaml:12:53: quantization.scheme.group_size: 64 does not go with 8-bit inputs, which need one scale per "
         "channel"),
        ("transforms: []", "overrides: [{match: x, scheme: W8A9}]", "r.yaml:14:34: quantization.overrides[0].scheme: "
         "'W8A9' is not allowed; allowed: W4A16, W4A16_ASYM, W8A16, W8A8, W8A8_STATIC, none; did you mean 'W8A8'?"),
        ("transforms: []", "overrides: [{match: x}]", "r.yaml:14:15: quantization.overrides[0].scheme: missing; one of "
         "W4A16, W4A16_ASYM, W8A16, W8A8, W8A8_STATIC, none"),
        ("transforms: []", "overrides: [{match: '(', scheme: none}]", "r.yaml:14:23: quantization.overrides[0].match: "
         "'(' is no regular expression: missing ), unterminated subpattern at position 0"),
        ("transforms: []", "overrides: [{match: x, scheme: none, group_size: 32}]", "r.yaml:14:52: "
         "quantization.overrides[0].group_size: layers that stay as they are have no groups"),
        ("transforms: []", "overrides: [{match: x, scheme: {num_bits: 4, group_sise: 32}}]", "r.yaml:14:48: "
         "quantization.overrides[0].scheme.group_sise: unknown key; allowed here: num_bits, group_size, symmetric, "
         "input; did you mean 'group_size'?"),
        ("format: compressed-tensors", "format: awq, max_shard_size: 5 elephants", "r.yaml:18:35: "
         "outputs[0].max_shard_size: '5 elephants' is no size; write a number with B, KB, MB or GB, such as 5GB"),
        ("format: compressed-tensors", "format: awq, max_shard_size: 0", "r.yaml:18:35: outputs[0].max_shard_size: "
         "0 bytes hold no tensor; write a size such as 5GB"),
        ("format: compressed-tensors", "format: awq, checkpoint_format: gptq", "r.yaml:18:38: "
         "outputs[0].checkpoint_format: belongs to the format gptq, not to awq"),
        ("outputs:", "outputs:\n  - {format: gptq, path: out/w4a16/inside}", "r.yaml:19:40: outputs[1].path: out/w4a16 "
         "is also the path of another output, or inside it"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_place(old: str, new: str, message: str) -> None:
    assert old in FULL
    assert refusal(FULL.replace(old, new, 1)) == message

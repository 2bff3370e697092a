"""Each known mistake is found, and the same recipe without it is clean."""

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest

from quantkit.capacity.devices import device_named
from quantkit.capacity.fit import Demand, fit
from quantkit.capacity.kv_footprint import KV_DTYPES, VLLM
from quantkit.capacity.lint import MIN_STATIC_TOKENS, check_recipe, recipe_scheme
from quantkit.capacity.model_facts import ModelFacts
from quantkit.capacity.weight_schemes import SCHEME_BY_NAME
from quantkit.capacity.workload import Workload
from quantkit.recipe import Recipe, builtin_recipes, load_recipe, parse_recipe

GOOD = """\
version: 1
model: owner/name
calibration:
  sources: [{{kind: jsonl, path: {data}}}]
  num_tokens: {tokens}
quantization:
  scheme: {scheme}
  {group}
  algorithm: {{name: {algorithm}}}
outputs: [{{format: compressed-tensors, path: out/x}}]
gates:
  suites: [{suites}]
  {limits}
"""
DEFAULTS = {
    "data": "chats.jsonl", "tokens": "32768", "scheme": "W4A16", "group": "group_size: auto", "algorithm": "gptq",
    "suites": "extract, nll", "limits": "max_drop_pp: {extract: 5}",
}  # fmt: skip


def recipe(**changes: str) -> Recipe:
    return parse_recipe(GOOD.format(**(DEFAULTS | changes)))


def names(found: Recipe, **settings: object) -> list[str]:
    return [finding.name for finding in check_recipe(found, **settings)]  # type: ignore[arg-type]


def test_a_good_recipe_is_clean(real_facts: Callable[..., ModelFacts]) -> None:
    facts = real_facts("llama-3-8b")
    fits = (fit(facts, SCHEME_BY_NAME["W4A16 g128"], device_named("L4"), KV_DTYPES["16-bit"], VLLM, Demand()),)
    assert names(recipe(), facts=facts, workload=Workload(), fits=fits, tp=2) == []


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"tokens": "2048"}, "little-calibration"),
        ({"suites": "nll", "limits": "max_kl_mean_nats: 0.1"}, "no-structured-output"),
        ({"limits": "num_items: {extract: 8}"}, "nothing-judged"),
    ],
)
def test_a_mistake_in_the_recipe(changes: dict[str, str], name: str) -> None:
    assert names(recipe(**changes)) == [name]


def test_no_calibration_and_only_the_built_in_text() -> None:
    assert names(load_recipe(builtin_recipes()["w4a16-rtn"])) == ["no-calibration"]
    assert names(load_recipe(builtin_recipes()["w4a16-gptq"])) == ["unrepresentative-calibration"]
    assert names(load_recipe(builtin_recipes()["aa"])) == []


def test_calibrating_on_what_is_tested(tmp_path: Path) -> None:
    tested = files("quantkit_eval").joinpath("data", "nll.txt").read_text(encoding="utf-8")
    copied, own = tmp_path / "copied.txt", tmp_path / "own.txt"
    copied.write_text("A line of our own that is long enough to be looked at by the rule.\n" + tested)
    own.write_text("A line of our own that is long enough to be looked at by the rule.\n")
    (finding,) = check_recipe(recipe(data=str(copied)))
    assert finding.name == "same-text"
    lines = sum(len(line.strip()) >= 40 for line in tested.splitlines())
    assert finding.message.startswith(f"{lines} of {lines + 1} lines of ")
    assert names(recipe(data=str(own))) == []


def test_calibrating_on_a_test_split() -> None:
    text = GOOD.format(**DEFAULTS).replace(
        "{kind: jsonl, path: chats.jsonl}", "{kind: dataset, name: wikitext, split: test}"
    )
    assert names(parse_recipe(text)) == ["calibrated-on-a-test-split"]


def test_static_activations_want_many_tokens() -> None:
    few = recipe(scheme="W8A8_STATIC", group="", tokens="32768")
    many = recipe(scheme="W8A8_STATIC", group="", tokens=str(MIN_STATIC_TOKENS))
    assert names(few) == ["static-activations"]
    assert names(many) == []


def test_groups_that_block_tensor_parallelism(real_facts: Callable[..., ModelFacts]) -> None:
    facts = real_facts("qwen2.5-0.5b")  # 896 = 7 x 128, 4864 = 38 x 128
    assert names(recipe(group="group_size: 128"), facts=facts, tp=2) == ["group-size-blocks-tp"]
    assert names(recipe(group="group_size: 64"), facts=facts, tp=2) == []
    assert names(recipe(group="group_size: 128"), facts=facts, tp=1) == []
    assert names(recipe(), facts=facts) == ["group-size-blocks-tp"]


def test_what_the_devices_cannot_hold(real_facts: Callable[..., ModelFacts]) -> None:
    facts, kv = real_facts("llama-3-8b"), KV_DTYPES["16-bit"]
    plain = load_recipe(builtin_recipes()["aa"])
    for scheme, device, demand, name in (
        ("16-bit", "T4", Demand(), "full-precision-does-not-fit"),
        ("W4A16 g128", "T4", Demand(8000, 8000, concurrency=200), "demand-does-not-fit"),
    ):
        found = fit(facts, SCHEME_BY_NAME[scheme], device_named(device), kv, VLLM, demand)
        assert names(plain, fits=(found,)) == [name]
    wide = real_facts("llama-3-8b", num_key_value_heads=32, max_position_embeddings=131072)
    found = fit(wide, SCHEME_BY_NAME["W4A16 g128"], device_named("T4"), kv, VLLM, Demand(1000, 100_000))
    assert names(plain, fits=(found,)) == ["kv-does-not-fit-at-p99"]


def test_heads_that_cannot_be_split_name_the_degrees_that_can(real_facts: Callable[..., ModelFacts]) -> None:
    facts = real_facts("llama-3-8b", num_attention_heads=9, num_key_value_heads=3, head_dim=64)
    demand = Demand(tp=2, concurrency=4)
    found = fit(facts, SCHEME_BY_NAME["16-bit"], device_named("L4"), KV_DTYPES["16-bit"], VLLM, demand)
    (finding,) = check_recipe(load_recipe(builtin_recipes()["aa"]), fits=(found,))
    assert (finding.name, finding.fix) == ("heads-block-tp", "use --tp 1, 3 or 9")
    long = fit(facts, SCHEME_BY_NAME["16-bit"], device_named("L4"), KV_DTYPES["16-bit"], VLLM, Demand(40960, 40960))
    (finding,) = check_recipe(load_recipe(builtin_recipes()["aa"]), fits=(long,))
    assert finding.name == "context-beyond-the-model"
    assert "at most 8192 tokens" in finding.fix


def test_repeated_prompts_without_prefix_caching() -> None:
    assert names(recipe(), workload=Workload(shared_prefix=500)) == ["prefix-caching-off"]
    assert names(recipe(), workload=Workload(shared_prefix=500, prefix_caching=True)) == []


def test_the_scheme_of_a_recipe() -> None:
    assert recipe_scheme(recipe()) == "W4A16"
    assert recipe_scheme(recipe(scheme="W8A8", group="")) == "W8A8"
    assert recipe_scheme(load_recipe(builtin_recipes()["aa"])) == "16-bit"

"""File types against llama.cpp: the tables are what llama-quantize prints for such models."""

import pytest

from quantkit.errors import UsageError
from quantkit.export_gguf.mixes import MixFacts, choose_types, file_type_number, fitting, is_mix, most_frequent

DENSE = MixFacts(num_blocks=32, queries_per_key=1, num_experts=0, tied=False, has_importance=False)
PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def model(blocks=32, columns=4096, parts=PARTS):
    tensors = {"token_embd.weight": (1000, columns)}
    for block in range(blocks):
        tensors |= {f"blk.{block}.{part}.weight": (columns, columns) for part in parts}
        tensors |= {f"blk.{block}.attn_norm.weight": (columns,), f"blk.{block}.attn_q.bias": (columns,)}
    return tensors | {"output_norm.weight": (columns,), "output.weight": (1000, columns)}


def blocks_with(types, part, type_name):
    return [block for block in range(32) if types.get(f"blk.{block}.{part}.weight") == type_name]


MORE_BITS = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]  # of 32 blocks


def test_q4_k_m():
    types = choose_types(model(), "Q4_K_M", DENSE)
    assert blocks_with(types, "attn_v", "Q6_K") == MORE_BITS
    assert blocks_with(types, "ffn_down", "Q6_K") == MORE_BITS
    assert {types[f"blk.5.{part}.weight"] for part in PARTS} == {"Q4_K"}
    assert (types["token_embd.weight"], types["output.weight"]) == ("Q4_K", "Q6_K")
    assert (types["blk.0.attn_norm.weight"], types["blk.0.attn_q.bias"]) == ("F32", "F32")


@pytest.mark.parametrize(
    ("file_type", "part", "expected"),
    [
        ("Q4_K_S", "attn_v", {"Q5_K": 4, "Q4_K": 28}),
        ("Q4_K_S", "ffn_down", {"Q5_K": 4, "Q4_K": 28}),
        ("Q3_K_M", "attn_v", {"Q5_K": 2, "Q4_K": 30}),
        ("Q3_K_M", "ffn_down", {"Q5_K": 2, "Q4_K": 30}),
        ("Q3_K_M", "attn_output", {"Q4_K": 32}),
        ("Q3_K_L", "attn_output", {"Q5_K": 32}),
        ("Q2_K", "ffn_down", {"Q3_K": 32}),
        ("Q2_K", "attn_v", {"Q3_K": 32}),
        ("IQ4_XS", "ffn_down", {"Q5_K": 4, "IQ4_XS": 28}),
        ("Q4_0", "ffn_down", {"Q4_0": 32}),
        ("Q6_K", "ffn_down", {"Q6_K": 32}),
        ("F16", "ffn_down", {"F16": 32}),
    ],
)
def test_exceptions_of_the_named_types(file_type, part, expected):
    types = choose_types(model(), file_type, DENSE)
    chosen = [types[f"blk.{block}.{part}.weight"] for block in range(32)]
    assert {name: chosen.count(name) for name in dict.fromkeys(chosen)} == expected


def test_facts_of_the_model_change_the_mix():
    measured = MixFacts(32, 8, 0, tied=True, has_importance=True)
    types = choose_types(model(), "Q4_0", measured)
    assert blocks_with(types, "ffn_down", "Q4_1") == [0, 1, 2, 3]
    assert types["token_embd.weight"] == "Q6_K"  # the embedding is the output matrix too
    assert choose_types(model(), "Q2_K", measured)["blk.9.attn_v.weight"] == "Q4_K"
    assert choose_types(model(), "IQ4_XS", measured)["blk.0.ffn_down.weight"] == "IQ4_XS"
    eight = MixFacts(32, 4, 8, tied=False, has_importance=False)
    experts = choose_types(model(parts=("attn_k", "attn_v", "attn_output", "ffn_gate_inp")), "Q4_K_M", eight)
    assert [experts[f"blk.7.{part}.weight"] for part in ("attn_k", "attn_v", "attn_output", "ffn_gate_inp")] == [
        *("Q8_0", "Q8_0", "Q5_K", "F32")
    ]


@pytest.mark.parametrize(
    ("wanted", "columns", "got"),
    [
        *[("Q4_K", 576, "Q5_0"), ("Q5_K", 576, "Q5_1"), ("Q6_K", 576, "Q8_0"), ("Q3_K", 576, "Q4_0")],
        *[("IQ4_XS", 576, "IQ4_NL"), ("Q4_K", 1536, "Q4_K"), ("Q4_K", 100, "F16"), ("Q8_0", 48, "F16")],
    ],
)
def test_rows_that_do_not_fit(wanted, columns, got):
    assert fitting(wanted, columns) == got


def test_overrides():
    rules = [(r"blk\.0\..*", "Q8_0"), (r"blk\.\d+\.attn_v\.weight", "F16")]
    types = choose_types(model(), "Q4_K_M", DENSE, rules)
    assert (types["blk.0.attn_v.weight"], types["blk.1.attn_v.weight"]) == ("Q8_0", "F16")
    assert types["blk.0.attn_norm.weight"] == "F32"


@pytest.mark.parametrize(
    ("file_type", "rules", "message"),
    [
        ("Q4_KM", [], r"no file type 'Q4_KM'\. .*, IQ4_XS; did you mean 'Q4_K_M'\?$"),
        ("Q4_K_M", [("a", "Q4K")], r"no tensor type 'Q4K'\. .*; did you mean 'Q4_K'\?$"),
        ("Q4_K_X", [], r"no file type 'Q4_K_X'\. Choose from F32, F16"),
        ("Q4_K_M", [("blk.*", "Q9")], r"no tensor type 'Q9'\. Choose from F32"),
        ("Q4_K_M", [("nothing", "Q8_0")], r"no tensor is called 'nothing'"),
        ("Q4_K_M", [("(", "Q8_0")], r"'\(' is no regular expression"),
    ],
)
def test_wrong_types(file_type, rules, message):
    with pytest.raises(UsageError, match=message):
        choose_types(model(), file_type, DENSE, rules)


def test_numbers_are_llama_cpps():
    numbers = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "Q2_K": 10, "Q4_K_M": 15, "Q6_K": 18, "IQ4_XS": 30, "BF16": 32}
    assert {name: file_type_number(name) for name in numbers} == numbers


def test_types_that_are_no_named_mix_are_called_after_most_of_them():
    """As llama.cpp calls a file without a label, which it marks with 1024, whatever type norms have."""
    types = {"a": "Q5_0", "b": "Q5_0", "c": "Q6_K", "n1": "F32", "n2": "F32", "n3": "F32"}
    assert most_frequent(types) == "mostly Q5_0"
    assert most_frequent({"a": "F32"}) == "F32"
    numbers = {"mostly Q5_0": 8, "mostly Q4_K": 15, "mostly Q3_K": 12, "mostly IQ4_XS": 30, "mostly BF16": 32}
    assert {name: file_type_number(name) for name in numbers} == {name: 1024 + n for name, n in numbers.items()}


def test_exceptions_do_not_change_the_name_of_a_mix_until_they_are_most():
    rules = choose_types(model(), "Q4_K_M", DENSE)
    few = choose_types(model(), "Q4_K_M", DENSE, [(r"blk\.[0-9]\..*", "Q8_0")])
    most = choose_types(model(), "Q4_K_M", DENSE, [(r"blk\..*", "Q8_0")])
    assert (is_mix(rules, rules), is_mix(few, rules), is_mix(most, rules)) == (True, True, False)
    assert most_frequent(most) == "mostly Q8_0"

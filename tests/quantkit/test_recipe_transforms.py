"""What a recipe says of algorithms and transforms."""

import re

import pytest

from quantkit.errors import RecipeError
from quantkit.recipe import parse_recipe

CALIBRATION = "calibration: {sources: [{kind: text, path: builtin}]}\n"
RTN = """\
version: 1
quantization:
  scheme: W4A16
  algorithm: {name: rtn}
outputs: [{format: compressed-tensors, path: out}]
"""


def test_algorithm_options_and_transforms_are_read() -> None:
    text = CALIBRATION + RTN.replace("{name: rtn}", "{name: rtn, search: true}")
    text = text.replace("quantization:\n", "quantization:\n  transforms: [awq, {name: smoothquant, alpha: 0.5}]\n")
    quantization = parse_recipe(text).quantization
    assert quantization is not None
    assert quantization.algorithm.model_dump() == {"name": "rtn", "search": True}
    assert [transform.model_dump() for transform in quantization.transforms] == [
        {"name": "awq", "num_ratios": 10, "clip": False},
        {"name": "smoothquant", "alpha": 0.5},
    ]
    gptq = parse_recipe(CALIBRATION + RTN.replace("rtn", "gptq, damp_fraction: [0.01, 0.1], scale_search: auto"))
    assert gptq.quantization is not None
    assert gptq.quantization.algorithm.model_dump()["damp_fraction"] == (0.01, 0.1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{name: rtn}", "{name: rtn, search: true}", "calibration: missing; the algorithm rtn with search needs it"),
        ("quantization:", "quantization:\n  transforms: [awq]", "calibration: missing; the transform awq needs it"),
        ("quantization:", "quantization:\n  transforms: [awk]", "'awk' is not allowed; allowed: awq, smoothquant"),
        ("quantization:", "quantization:\n  transforms: [{name: awq, clp: true}]", "did you mean 'clip'"),
        ("quantization:", "quantization:\n  input_observer: mean", "allowed: minmax, percentile, mse"),
    ],
)
def test_wrong_transforms_and_options_are_one_line(old: str, new: str, message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        parse_recipe(RTN.replace(old, new))

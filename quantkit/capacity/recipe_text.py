"""Recipes for the schemes that planning recommends, tried on today's recipe parser."""

from dataclasses import dataclass

from quantkit.capacity.weight_schemes import PER_CHANNEL, WeightScheme
from quantkit.errors import RecipeError

HEAD = """\
# Written by `quantkit plan`: {reason}
version: 1
model: {model}
"""
CALIBRATION = """\
calibration: {num_tokens: 32768}               # half text, half chat; better: `sources` like what the model will see
"""
GATES = """\
gates:
  suites: [extract, nll]
  num_items: {extract: 128, nll: 16}
  max_drop_pp: {extract: 5}                    # percentage points of exactly right answers
  max_kl_mean_nats: 0.15                       # to the original's next-token distribution
report: {html: out/report.html, junit: out/junit.xml, markdown: out/report.md}
"""


@dataclass(frozen=True, slots=True)
class WrittenRecipe:
    """A recipe for a scheme.

    Attributes:
        text: YAML that parses; None if no recipe can say it.
        left_out: what was recommended and is not in it, with the parser's reason; a line each.
    """

    text: str | None
    left_out: tuple[str, ...] = ()


def write_recipe(model: str, scheme: WeightScheme, reason: str) -> WrittenRecipe:
    """The fullest recipe for a scheme that today's parser accepts.

    Args:
        model: what the recipe quantizes.
        scheme: the recommended one.
        reason: why, in one line, for the head of the file.
    """
    left_out: list[str] = []
    for wish, body in _variants(scheme):
        text = HEAD.format(reason=" ".join(reason.split()), model=_quoted(model)) + body + GATES
        problem = _problem(text)
        if problem is None:
            return WrittenRecipe(text, tuple(left_out))
        left_out.append(f"{wish}: {problem}")
    return WrittenRecipe(None, tuple(left_out) or (f"{scheme.name} needs no recipe: the model stays as it is",))


def _variants(scheme: WeightScheme) -> list[tuple[str, str]]:
    """What to wish for, the best first, and the middle of its recipe."""
    if scheme.bits >= 16:
        return []
    slug = scheme.name.lower().replace(" ", "-").replace("_", "-")
    if scheme.gguf is not None:
        output = f"outputs:\n  - {{format: gguf, type: {scheme.gguf}, path: out/model-{scheme.gguf}.gguf}}\n"
        return [(f"a .gguf in {scheme.gguf}", output)]
    output = f"outputs:\n  - {{format: compressed-tensors, path: out/{slug}}}\n"
    if scheme.compute == "fp8":
        return [("FP8", _quantization("FP8_DYNAMIC", None, "{name: rtn}", ()) + output)]
    if scheme.compute == "int8":
        smooth = _quantization("W8A8", None, "{name: gptq}", ("smoothquant",))
        return [
            ("the transform smoothquant", CALIBRATION + smooth + output),
            ("W8A8 by GPTQ", CALIBRATION + _quantization("W8A8", None, "{name: gptq}", ()) + output),
        ]
    preset = scheme.name.partition(" ")[0]
    group = "channel" if scheme.group_size == PER_CHANNEL else str(scheme.group_size)
    return [(scheme.name, CALIBRATION + _quantization(preset, group, "{name: gptq}", ()) + output)]


def _quantization(scheme: str, group_size: str | None, algorithm: str, transforms: tuple[str, ...]) -> str:
    lines = ["quantization:", f"  scheme: {scheme}"]
    if group_size is not None:
        lines.append(f"  group_size: {group_size}")
    if transforms:
        lines.append(f"  transforms: [{', '.join(transforms)}]")
    return "\n".join([*lines, f"  algorithm: {algorithm}", "  ignore: [lm_head]"]) + "\n"


def _quoted(model: str) -> str:
    escaped = model.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _problem(text: str) -> str | None:
    from quantkit.recipe import parse_recipe

    try:
        parse_recipe(text, origin="recipe")
    except RecipeError as error:
        return str(error)
    return None

"""Known mistakes in a recipe and its deployment: each a warning with a name, what is wrong and what to do."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from quantkit.capacity.fit import Fit
from quantkit.capacity.model_facts import ModelFacts
from quantkit.capacity.problem import GROUPS_BLOCK_TP, tp_problem
from quantkit.capacity.weight_schemes import WeightScheme
from quantkit.capacity.workload import Workload
from quantkit.recipe import DatasetSource, JsonlSource, Recipe, StructuredChatSource, TextSource
from quantkit.recipe.gates import FileSuite

STRUCTURED_SUITES = ("extract", "schema", "tools")
DATA_FREE = ("rtn",)
MIN_STATIC_TOKENS = 65_536  # a static scale is the range of rare outliers, which few tokens do not show
MIN_TOKENS = 8_192
MIN_SHARED_LINE = 40  # characters; shorter lines are alike by chance
TEST_SPLITS = ("test", "validation", "valid", "dev")
TP_SIZES = (2, 4, 8)
MAX_TEXT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding.

    Attributes:
        name: of the rule.
        message: what is wrong, with the numbers.
        fix: what to do.
    """

    name: str
    message: str
    fix: str

    def to_dict(self) -> dict[str, Any]:
        """As one JSON document."""
        return {"name": self.name, "message": self.message, "fix": self.fix}


def check_recipe(
    recipe: Recipe,
    facts: ModelFacts | None = None,
    *,
    workload: Workload | None = None,
    fits: tuple[Fit, ...] = (),
    tp: int | None = None,
) -> list[Finding]:
    """All findings, those on the recipe first.

    Args:
        recipe: what was written.
        facts: its model; None if it cannot be read, then what needs it is left out.
        workload: what it will be asked; None if that was not said.
        fits: of the recipe's scheme on the devices that were named.
        tp: tensor-parallel devices; None tries 2, 4 and 8.
    """
    found = [*_calibration(recipe), *_same_text(recipe), *_gates(recipe), *_static(recipe)]
    if facts is not None:
        found += _groups(recipe, facts, tp)
    found += _fits(fits)
    if workload is not None:
        found += _prefix(workload)
    return found


def _calibration(recipe: Recipe) -> Iterator[Finding]:
    """No data, or data that is not like what the model will see."""
    if recipe.quantization is None:
        return
    needs_data = recipe.quantization.algorithm.name not in DATA_FREE
    if recipe.calibration is None:
        if recipe.quantization.choices and min(_bits(recipe)) <= 4:
            yield Finding(
                "no-calibration",
                f"{recipe.quantization.algorithm.name} to 4 bits without calibration data: the largest loss of quality",
                "use algorithm gptq with calibration data like the model's own use",
            )
        return
    sources = recipe.calibration.sources or ()  # none: what quantkit carries
    if needs_data and all(_is_carried(source) for source in sources):
        yield Finding(
            "unrepresentative-calibration",
            "the only calibration data is what quantkit carries, nothing that this model will see",
            "add a source of your own prompts or text, or one of kind self_generated",
        )
    if needs_data and recipe.calibration.num_tokens < MIN_TOKENS:
        yield Finding(
            "little-calibration",
            f"{recipe.calibration.num_tokens} calibration tokens are few for second-order statistics",
            f"take at least {MIN_TOKENS}",
        )


def _is_carried(source: object) -> bool:
    if isinstance(source, StructuredChatSource):
        return True
    return isinstance(source, TextSource | JsonlSource) and source.path == "builtin"


def _bits(recipe: Recipe) -> list[int]:
    assert recipe.quantization is not None
    return [choice.scheme(32).num_bits for choice in recipe.quantization.choices.values()]


def _same_text(recipe: Recipe) -> Iterator[Finding]:
    """Calibration on what the gates ask: the gate would pass what it has taught."""
    if recipe.calibration is None:
        return
    suites = [Path(suite.path) for suite in recipe.gates.suites if isinstance(suite, FileSuite)]
    tested = _evaluation_lines().union(*(_long_lines(_text(path)) for path in suites))
    for source in recipe.calibration.sources or ():
        if isinstance(source, DatasetSource) and source.split.partition("[")[0] in TEST_SPLITS:
            yield Finding(
                "calibrated-on-a-test-split",
                f"calibration reads the split {source.split!r} of {source.name}, which benchmarks are scored on",
                "use the split train",
            )
        if not isinstance(source, TextSource | JsonlSource) or source.path == "builtin":
            continue
        lines = _long_lines(_text(Path(source.path)))
        shared = sum(line in tested for line in lines)
        if shared:
            yield Finding(
                "same-text",
                f"{shared} of {len(lines)} lines of {source.path} are also in the text that the gates are judged on",
                "calibrate on other text, or the gate measures what it was fitted to",
            )


def _evaluation_lines() -> frozenset[str]:
    """Lines of the text that the suite nll scores."""
    text = files("quantkit_eval").joinpath("data", "nll.txt").read_text(encoding="utf-8")
    return frozenset(_long_lines(text))


def _text(path: Path) -> str:
    """A file's text; none if it is missing, which the run itself will say, or too large to be looked through."""
    if not path.is_file() or path.stat().st_size > MAX_TEXT_BYTES:
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def _long_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if len(line.strip()) >= MIN_SHARED_LINE]


def _gates(recipe: Recipe) -> Iterator[Finding]:
    """Gates that cannot see what quantization breaks first."""
    names = recipe.gates.suite_names
    if not any(suite in STRUCTURED_SUITES for suite in names):
        yield Finding(
            "no-structured-output",
            f"the suites {', '.join(names)} ask for no structured output, which breaks before perplexity",
            f"add one of {', '.join(STRUCTURED_SUITES)} to gates.suites",
        )
    limits = recipe.gates
    if recipe.quantization is not None and not limits.max_drop_pp and limits.max_kl_mean_nats is None:
        yield Finding(
            "nothing-judged",
            "no gate limits quality: every checkpoint passes",
            "set gates.max_drop_pp or gates.max_kl_mean_nats",
        )


def _static(recipe: Recipe) -> Iterator[Finding]:
    """Static scales of inputs from too few tokens."""
    if recipe.quantization is None or recipe.calibration is None:
        return
    inputs = [choice.scheme(-1).input for choice in recipe.quantization.choices.values()]
    tokens = recipe.calibration.num_tokens
    if any(scheme is not None and not scheme.dynamic for scheme in inputs) and tokens < MIN_STATIC_TOKENS:
        yield Finding(
            "static-activations",
            f"static input scales from {tokens} tokens miss rare outliers, which are then clipped for ever",
            f"take at least {MIN_STATIC_TOKENS} tokens, or dynamic scales (W8A8)",
        )


def _groups(recipe: Recipe, facts: ModelFacts, tp: int | None) -> Iterator[Finding]:
    """A group size that forbids splitting the model."""
    if recipe.quantization is None:
        return
    for choice in recipe.quantization.choices.values():
        given = choice.group_size
        size = _auto_group_size(facts) if given == "auto" else given
        if size is None or size < 1:
            continue
        scheme = WeightScheme("recipe", 4, size)
        for devices in (tp,) if tp is not None else TP_SIZES:
            problem = tp_problem(facts, scheme, devices)
            if problem is not None and problem.name == GROUPS_BLOCK_TP:
                yield Finding(problem.name, f"with {devices} tensor-parallel devices {problem}", problem.fix)
                return


def _auto_group_size(facts: ModelFacts) -> int | None:
    columns = [weight.columns for weight in facts.weights if weight.role == "linear"]
    return next((size for size in (128, 64, 32) if math.gcd(0, *columns) % size == 0), None)


def _fits(fits: tuple[Fit, ...]) -> Iterator[Finding]:
    """What the devices cannot hold or run; groups are judged by the recipe's own size."""
    for fit in fits:
        if fit.problem is not None and fit.problem.name != GROUPS_BLOCK_TP:
            yield Finding(fit.problem.name, f"{fit.device}: {fit.problem}", fit.problem.fix)


def _prefix(workload: Workload) -> Iterator[Finding]:
    """Repeated prompts that are computed again and again."""
    if workload.shared_prefix and not workload.prefix_caching:
        share = workload.shared_prefix / workload.prompt_p50
        yield Finding(
            "prefix-caching-off",
            f"{workload.shared_prefix} tokens ({share:.0%}) of every prompt are the same and are computed each time",
            "turn prefix caching on (--enable-prefix-caching)",
        )


def recipe_scheme(recipe: Recipe) -> str:
    """The preset that a recipe's main scheme is: ``16-bit``, ``W4A16``, ``W8A16`` or ``W8A8``."""
    if recipe.quantization is None:
        return "16-bit"
    scheme = recipe.quantization.scheme(32)
    return f"W{scheme.num_bits}A{16 if scheme.input is None else 8}"

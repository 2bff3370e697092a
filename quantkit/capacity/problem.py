"""Why something that was demanded does not fit, by name, and what mends it."""

from dataclasses import dataclass

from quantkit.capacity.model_facts import ModelFacts
from quantkit.capacity.weight_schemes import WeightScheme

MAX_TP = 1024  # devices
GROUPS_BLOCK_TP = "group-size-blocks-tp"
SPLIT_BY_COLUMNS = ("o_proj", "down_proj", "attn_output", "ffn_down")


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem; as text it is its message.

    Attributes:
        name: of the kind of problem.
        message: what is wrong, with the numbers.
        fix: what mends it.
    """

    name: str
    message: str
    fix: str

    def __str__(self) -> str:
        return self.message


def splits_heads(facts: ModelFacts, tp: int) -> bool:
    """Whether ``tp`` devices share the heads: queries evenly; keys and values evenly, or each repeated equally often.

    Source: vLLM, model_executor/models/llama.py, LlamaAttention.
    """
    groups = {layer.heads for layer in facts.kv_layers if layer.heads}
    return facts.num_heads % tp == 0 and all(heads % tp == 0 or tp % heads == 0 for heads in groups)


def tp_problem(facts: ModelFacts, scheme: WeightScheme, tp: int) -> Problem | None:
    """Why a model cannot be split over ``tp`` devices; None if it can."""
    if not splits_heads(facts, tp):
        heads = f"{facts.num_heads} attention heads"
        if facts.num_heads % tp == 0:
            heads = f"the key/value heads of {heads}"
        degrees = [degree for degree in range(1, min(facts.num_heads, MAX_TP) + 1) if splits_heads(facts, degree)]
        return Problem("heads-block-tp", f"{heads} cannot be split over {tp} devices", f"use --tp {_either(degrees)}")
    if scheme.group_size > 0 and tp > 1:
        for weight in facts.weights:
            short = weight.name.rpartition(".")[2]
            if short in SPLIT_BY_COLUMNS and weight.columns % (scheme.group_size * tp):
                return Problem(
                    GROUPS_BLOCK_TP,
                    f"groups of {scheme.group_size} do not divide {weight.columns} columns / {tp} of {weight.name}, "
                    "which tensor parallelism splits by columns",
                    "use a smaller group_size, or group_size: channel",
                )
    return None


def _either(numbers: list[int]) -> str:
    """``1, 3 or 9``."""
    rest, _, last = ", ".join(map(str, numbers)).rpartition(", ")
    return f"{rest} or {last}" if rest else last


def sequences(count: int) -> str:
    """``1 sequence``, ``2 sequences``."""
    return f"{count} sequence{'' if count == 1 else 's'}"

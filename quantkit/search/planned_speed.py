"""How fast a candidate's checkpoint will be on the device that it is for: as `quantkit plan` has it, not measured."""

from pathlib import Path
from typing import Any

from quantkit.capacity.devices import device_named
from quantkit.capacity.kv_footprint import KV_DTYPES, VLLM
from quantkit.capacity.read_facts import read_facts
from quantkit.capacity.roofline import SpeedModel
from quantkit.capacity.weight_schemes import SchemeDoesNotFitError, stored_scheme
from quantkit.errors import QuantkitError
from quantkit.recipe.search import PlannedSpeed


def plan_speed(checkpoint: Path, speed: PlannedSpeed) -> dict[str, Any]:
    """Tokens a second of all sequences together while they decode.

    Args:
        checkpoint: its configuration and the headers of its files are read.
        speed: the device, how many sequences, and their length.

    Returns:
        ``planned_tokens_per_s``, or None where it cannot be planned, and ``planned_speed_note`` with the reason.
    """
    try:
        facts = read_facts(str(checkpoint))
        scheme = stored_scheme(facts)
        if scheme is None:
            return {"planned_tokens_per_s": None, "planned_speed_note": f"{facts.quantization}: not planned for"}
        model = SpeedModel(facts, scheme, device_named(speed.device), KV_DTYPES["16-bit"], VLLM)
        seconds = model.decode(speed.batch, speed.context).total
    except (QuantkitError, SchemeDoesNotFitError) as error:
        return {"planned_tokens_per_s": None, "planned_speed_note": str(error)}
    return {"planned_tokens_per_s": round(speed.batch / seconds, 1)}

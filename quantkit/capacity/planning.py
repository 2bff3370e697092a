"""Everything that `quantkit plan` says, as one document: footprint, fits, speed, advice, findings, replay."""

import math
from dataclasses import dataclass, field
from typing import Any

from quantkit.capacity import fit as fitting
from quantkit.capacity.advice import (
    UNCERTAINTY,
    Advice,
    Setting,
    advise,
    advise_settings,
    candidates,
    sequences_at_once,
)
from quantkit.capacity.devices import (
    BANDWIDTH_SHARE,
    COMPUTE_SHARE,
    LAYER_SECONDS,
    STEP_SECONDS,
    WEIGHT_ONLY_SHARE,
    Device,
)
from quantkit.capacity.fit import Demand, Fit, fit
from quantkit.capacity.kv_footprint import (
    KV_DTYPES,
    QUANTKIT,
    VLLM,
    CacheLayout,
    KVDtype,
    block_waste,
    sequence_bytes,
    token_bytes,
    waste,
)
from quantkit.capacity.launch_flags import engine_command, llama_command, vllm_command
from quantkit.capacity.model_facts import ModelFacts
from quantkit.capacity.problem import Problem
from quantkit.capacity.roofline import Crossovers, SpeedModel, find_crossovers
from quantkit.capacity.weight_schemes import (
    SCHEMES,
    SchemeDoesNotFitError,
    WeightScheme,
    bits_per_weight,
    model_bytes,
    stored_scheme,
)
from quantkit.capacity.weight_shapes import FAMILIES
from quantkit.capacity.workload import Workload
from quantkit.errors import CapacityError, SourceError

SCHEMA_VERSION = 1
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SPEED_ASSUMPTIONS = (
    f"engines reach {BANDWIDTH_SHARE:.0%} of a data sheet's bandwidth and {COMPUTE_SHARE:.0%} of its products, "
    f"{WEIGHT_ONLY_SHARE:.0%} of those where codes are widened inside the product",
    f"the engine's own time: {1e3 * STEP_SECONDS:g} ms a step and {1e6 * LAYER_SECONDS:g} us a layer (CUDA graphs)",
    "tensor-parallel devices share the work evenly; what they tell each other is not counted",
    "experts are chosen at random",
    f"a speed is uncertain by a factor of {UNCERTAINTY:g}: a smaller gain does not outrank what loses less quality",
)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What planning says of one device.

    Attributes:
        device: the device.
        layout: of the engine that it is planned for.
        fits: schemes weighed, in the order of the table.
        speeds: of those schemes that run, by name.
        crossovers: between those of 16 bits, W4A16 and W8A8 that run.
        advice: recipes that run, the best first; empty if nothing that was demanded runs.
        settings: of the engine, the most useful first.
    """

    device: Device
    layout: CacheLayout
    fits: tuple[Fit, ...]
    speeds: dict[str, SpeedModel]
    crossovers: Crossovers
    advice: tuple[Advice, ...]
    settings: tuple[Setting, ...]

    def batches(self, scheme: str) -> list[int]:
        """Numbers of usual sequences to give the speed of, as far as they fit; empty for a scheme that does not run."""
        room = next(found.batch_p50 for found in self.fits if found.scheme == scheme)
        return [batch for batch in BATCHES if batch <= room] if scheme in self.speeds else []

    @property
    def best(self) -> Fit:
        """The fit of the best recipe; without one the first that runs, or the first."""
        runs = [found for found in self.fits if found.runs]
        return self.advice[0].fit if self.advice else (runs or self.fits)[0]

    @property
    def obstacle(self) -> Problem | None:
        """Why nothing runs here: the problem of the smallest scheme that could be weighed; None if something runs."""
        if any(found.runs for found in self.fits):
            return None
        return min(self.fits, key=lambda found: found.weight_bytes or math.inf).problem


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """A whole plan.

    Attributes:
        facts: the model.
        workload: what will be asked of it.
        demand: the same as numbers to fit.
        kv_dtype: of the cache.
        devices: one plan each.
        model: as the user named it.
        extra: findings of ``--check`` and the replay of ``--trace``, as JSON.
    """

    facts: ModelFacts
    workload: Workload
    demand: Demand
    kv_dtype: KVDtype
    devices: tuple[DevicePlan, ...]
    model: str
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        """Whether some scheme runs on some device."""
        return any(plan.obstacle is None for plan in self.devices)

    def raise_if_nothing_runs(self) -> None:
        """For a caller that has shown the plan.

        Raises:
            CapacityError: there are devices, and nothing that was demanded runs on any of them.
        """
        obstacles = {plan.device.name: plan.obstacle for plan in self.devices}
        first = next(iter(obstacles.values()), None)
        if first is not None and not self.runs:
            raise CapacityError(
                f"nothing that was demanded runs on {', '.join(obstacles)}: {first}",
                fix=first.fix[0].upper() + first.fix[1:],
            )

    def to_dict(self) -> dict[str, Any]:
        """The plan as one JSON document."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.facts.to_dict(),
            "workload": self.workload.to_dict(),
            "footprint": footprint(self.facts, self.demand),
            "devices": [_device_document(self, plan) for plan in self.devices],
            "assumptions": [*fitting.ASSUMPTIONS, *SPEED_ASSUMPTIONS],
            **self.extra,
        }


def make_capacity_plan(
    facts: ModelFacts, devices: list[Device], workload: Workload, demand: Demand, kv_dtype: KVDtype, model: str
) -> CapacityPlan:
    """Weigh a model on some devices.

    Args:
        facts: the model.
        devices: where it could run; none gives the footprint alone.
        workload: what will be asked of it.
        demand: the same as numbers to fit.
        kv_dtype: of the cache.
        model: as the user named it.

    Raises:
        UsageError: a device has no 16-bit products.
        SourceError: devices are given, and the matrices of the model are not known.
    """
    if devices and not facts.weights:
        raise SourceError(
            f"the matrices of {facts.name} ({facts.model_type}) are not known, so nothing can be fitted to a device",
            fix=f"Give a folder with its weights; families known by configuration: {', '.join(FAMILIES)}",
        )
    plans = tuple(_plan_device(facts, device, workload, demand, kv_dtype, model) for device in devices)
    return CapacityPlan(facts, workload, demand, kv_dtype, plans, model)


def footprint(facts: ModelFacts, demand: Demand) -> dict[str, Any]:
    """Bytes of weights by scheme and of the cache by dtype, on one device."""
    stored = stored_scheme(facts)
    schemes = ([stored] if stored is not None else []) + list(SCHEMES)
    kv = {}
    for name, dtype in KV_DTYPES.items():
        kv[name] = {
            layout.name: {
                "bytes_per_token": token_bytes(facts, dtype, layout),
                "bytes_p50": sequence_bytes(facts, demand.context_p50, dtype, layout),
                "bytes_p99": sequence_bytes(facts, demand.context_p99, dtype, layout),
            }
            for layout in (VLLM, QUANTKIT)
        }
    return {
        "stored_bytes": facts.stored_bytes,
        "weights": [_weight_row(facts, scheme) for scheme in schemes] if facts.weights else [],
        "kv": kv,
        "waste": {
            "reserved_p99_for_p50": waste(demand.context_p50, demand.context_p99),
            **{f"blocks_of_{s}": block_waste(demand.context_p50, s) for s in (VLLM.block_size, QUANTKIT.block_size)},
        },
    }


def _weight_row(facts: ModelFacts, scheme: WeightScheme) -> dict[str, Any]:
    try:
        return {
            "scheme": scheme.name,
            "bytes": model_bytes(facts, scheme),
            "bits_per_weight": bits_per_weight(facts, scheme),
            "problem": None,
        }
    except SchemeDoesNotFitError as error:
        return {"scheme": scheme.name, "bytes": None, "bits_per_weight": None, "problem": str(error)}


def _plan_device(
    facts: ModelFacts, device: Device, workload: Workload, demand: Demand, kv_dtype: KVDtype, model: str
) -> DevicePlan:
    layout = QUANTKIT if device.measured else VLLM
    stored = stored_scheme(facts)
    schemes = ([stored] if stored is not None else []) + candidates(facts, device)
    fits = tuple(fit(facts, scheme, device, kv_dtype, layout, demand) for scheme in schemes)
    speeds = {
        scheme.name: SpeedModel(facts, scheme, device, kv_dtype, layout, demand.tp)
        for scheme, found in zip(schemes, fits, strict=True)
        if found.runs and device.products(scheme.compute, weight_only=scheme.is_weight_only) is not None
    }
    four = next((speed for name, speed in speeds.items() if name.startswith("W4A16")), None)
    context = workload.prompt_p50 + workload.output_p50 // 2
    advice = tuple(advise(facts, device, workload, kv_dtype, layout, demand, model))
    settings = []
    if advice:
        best = advice[0].fit
        batch = sequences_at_once(workload, best)
        settings = advise_settings(facts, device, workload, best.weight_bytes * demand.tp, layout, batch)
    crossovers = find_crossovers(speeds.get("16-bit"), four, speeds.get("W8A8"), context)
    return DevicePlan(device, layout, fits, speeds, crossovers, advice, tuple(settings))


def _device_document(plan: CapacityPlan, device: DevicePlan) -> dict[str, Any]:
    workload, crossovers = plan.workload, device.crossovers
    context = workload.prompt_p50 + workload.output_p50 // 2
    speed = {}
    for name, model in device.speeds.items():
        steps = [(batch, model.decode(batch, context)) for batch in device.batches(name)]
        speed[name] = {
            "prefill_p50_s": model.prefill(workload.prompt_p50),
            "decode": [
                {"batch": batch, "step_s": step.total, "tokens_per_s": batch / step.total, "bound": step.bound}
                for batch, step in steps
            ],
        }
    return {
        "device": device.device.to_dict(),
        "engine": device.layout.name,
        "fits": [found.to_dict() | {"launch": launch_lines(plan, device, found)} for found in device.fits],
        "speed": speed,
        "crossovers": {name: getattr(crossovers, name) for name in crossovers.__slots__},
        "advice": [entry.to_dict() for entry in device.advice],
        "settings": [setting.to_dict() for setting in device.settings],
    }


def launch_lines(plan: CapacityPlan, device: DevicePlan, found: Fit) -> dict[str, str]:
    """Commands and settings of a fit, by engine."""
    lines = {}
    if not device.device.measured:
        command = vllm_command(plan.model, found, plan.demand, prefix_caching=plan.workload.shared_prefix > 0)
        if command is not None:
            lines["vllm"] = command
    command = llama_command(found)
    if command is not None:
        lines["llama.cpp"] = command
    command = engine_command(plan.model, found, plan.demand)
    if command is not None and "llama.cpp" not in lines:
        lines["quantkit"] = command
    return lines

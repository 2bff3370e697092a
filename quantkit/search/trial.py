"""One candidate, from its recipe to its selection scores. Runs in this process or in another one."""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import QuantkitError
from quantkit.pipeline import quantize_model
from quantkit.recipe import Recipe, parse_recipe
from quantkit.recipe.search import PlannedSpeed
from quantkit.search.holdout import ItemSet
from quantkit.search.planned_speed import plan_speed
from quantkit.search.screening import screen
from quantkit.search.served import serve
from quantkit.serve.device import DeviceName
from quantkit.source import open_model
from quantkit.verify import verify_checkpoint
from quantkit_eval.errors import EvalError
from quantkit_eval.gates import Gates

Progress = Callable[[str, int, int], None]
WEIGHTS = "*.safetensors"


@dataclass(frozen=True, slots=True)
class TrialJob:
    """What a trial needs, all of it plain data.

    Attributes:
        name: of the candidate.
        recipe_text: its recipe, with outputs below ``folder``.
        folder: of the trial; the checkpoint and the records go there.
        baselines: folder with the original's records of each round.
        rounds: of the screening.
        limits: gates as a mapping.
        suites: of the certification, which the engine must be able to take.
        device: where the engine runs.
        threads: that the trial may use.
        speed: what the speed is planned for.
    """

    name: str
    recipe_text: str
    folder: Path
    baselines: Path
    rounds: tuple[ItemSet, ...]
    limits: Mapping[str, Any]
    suites: Mapping[str, Mapping[str, Any]]
    device: DeviceName
    threads: int
    speed: PlannedSpeed

    @property
    def recipe(self) -> Recipe:
        """The candidate as a recipe."""
        return parse_recipe(self.recipe_text, origin=self.name)

    @property
    def checkpoint(self) -> Path:
        """The first output."""
        return self.recipe.outputs[0].path

    def remove_checkpoints(self) -> None:
        """Delete the weights; records stay."""
        for output in self.recipe.outputs:
            shutil.rmtree(output.path, ignore_errors=True)
            shutil.rmtree(output.path.with_name(f"{output.path.name}.partial"), ignore_errors=True)


def run_trial(job: TrialJob, progress: Progress | None = None) -> dict[str, Any]:
    """Quantize, verify and screen a candidate.

    A known failure is the outcome of a trial, not the end of a search.

    Returns:
        The record: ``status`` (promising, doubtful, hopeless or failed), ``reason``, ``scores``, ``rounds``,
        ``weight_bytes`` and ``bits`` as stored, ``planned_tokens_per_s``, ``files`` with their SHA-256, ``seconds``.
    """
    tell = progress or (lambda stage, done, total: None)
    torch.set_num_threads(job.threads)
    started = time.perf_counter()
    try:
        built = build(job, tell)
        source = open_model(job.recipe)
        model = serve(job.checkpoint, source, job.device, job.suites)
        found = screen(model, job.rounds, job.baselines, job.folder / "screening", Gates.parse(job.limits), tell)
    except (QuantkitError, EvalError, OSError) as error:
        built, found = {}, {"status": "failed", "reason": str(error), "rounds": 0, "scores": {}}
    return {"name": job.name, **found, **built, "seconds": round(time.perf_counter() - started, 1)}


def build(job: TrialJob, progress: Progress) -> dict[str, Any]:
    """Write and verify the candidate's checkpoint; one that is finished already is taken as it is.

    Returns:
        ``weight_bytes``, ``bits``, ``planned_tokens_per_s`` and ``files``.

    Raises:
        QuantkitError: it cannot be made, or does not read back as it should.
    """
    recipe = job.recipe
    source = open_model(recipe)
    manifest = quantize_model(recipe, overwrite=True, resume=True, progress=progress, source=source)
    verify_checkpoint(job.checkpoint, source).raise_for_failure()
    return {
        "weight_bytes": sum(path.stat().st_size for path in job.checkpoint.glob(WEIGHTS)),
        "bits": stored_bits(manifest, source.dtype),
        **plan_speed(job.checkpoint, job.speed),
        "files": dict(manifest["files"]),
    }


def stored_bits(manifest: Mapping[str, Any], dtype: torch.dtype) -> float:
    """Mean stored bits of a quantized weight, scales included."""
    layers = manifest["layers"]
    before, after = (sum(layer[key] for layer in layers) for key in ("bytes_before", "bytes_after"))
    return float(8 * dtype.itemsize * after / before)

"""The last word on a candidate: the whole gate on items that had no part in choosing it."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from quantkit.evaluation_cache import CachedEvaluation
from quantkit.gate import BATCH_SIZES, NEW_TOKENS
from quantkit.recipe import Recipe
from quantkit.search.holdout import Holdout, ItemSet
from quantkit.search.served import serve
from quantkit.serve.device import DeviceName
from quantkit.source import ModelSource
from quantkit_eval.comparability import Evaluation
from quantkit_eval.compare import compare
from quantkit_eval.errors import IncomparableResults
from quantkit_eval.evaluate import evaluate
from quantkit_eval.record_types import Verdict
from quantkit_eval.records import THROUGHPUT_FILE, VERDICT_FILE, write_throughput, write_verdict
from quantkit_eval.throughput import measure_throughput

Progress = Callable[[str, int, int], None]


def evaluate_original(
    source: ModelSource, holdout: Holdout, baselines: Path, device: DeviceName, progress: Progress
) -> dict[str, int]:
    """Leave the original's records of every item set, from the cache where it has them.

    Returns:
        How many different prompts chose, how many certify, and how many of these are the same, which is 0.

    Raises:
        IncomparableResults: the certification asks what the screening asks.
    """
    model = serve(source, source, device, holdout.certification.suites)
    for item_set in (*holdout.screening, holdout.certification):
        out = baselines / item_set.name
        cached = CachedEvaluation(model.describe(), item_set.suites, item_set.seed)
        if not cached.copy_to(out):
            evaluate(model, item_set.suites, item_set.seed, out, None, partial(_tell, progress, item_set))
            cached.keep(out)
    chose = set[str]().union(*(_prompt_hashes(baselines / item_set.name) for item_set in holdout.screening))
    certify = _prompt_hashes(baselines / holdout.certification.name)
    if chose & certify:
        raise IncomparableResults(
            f"{len(chose & certify)} prompts of the certification are of the screening, after tokenizing",
            fix="Choose another search.seed",
        )
    return {"screening": len(chose), "certification": len(certify), "shared": len(chose & certify)}


def _tell(progress: Progress, item_set: ItemSet, stage: str, done: int, total: int) -> None:
    progress(f"original, {item_set.name}: {stage}", done, total)


def _prompt_hashes(records: Path) -> set[str]:
    samples = Evaluation.read(records).all_samples()
    return {f"{sample['suite'].partition('+')[0]} {sample['prompt_hash']}" for sample in samples}


def certify(
    recipe: Recipe,
    checkpoint: Path,
    source: ModelSource,
    item_set: ItemSet,
    baseline: Path,
    records: Path,
    alpha: float,
    device: DeviceName,
    progress: Progress,
) -> Verdict:
    """Judge a checkpoint by the recipe's gates.

    Args:
        recipe: with the gates.
        checkpoint: the candidate.
        source: the original.
        item_set: what is asked.
        baseline: the original's records of it.
        records: folder for the records of both, their speed if a gate is about it, and the verdict.
        alpha: one-sided error of every bound.
        device: where the engines run.
        progress: is called with (stage, done, total).
    """
    shutil.copytree(baseline, records / "baseline", dirs_exist_ok=True)
    model = serve(checkpoint, source, device, item_set.suites)
    reference = records / "baseline" if item_set.has_reference else None
    evaluate(model, item_set.suites, item_set.seed, records / "candidate", reference, progress)
    speeds = None
    if recipe.gates.min_throughput_ratio:
        original = serve(source, source, device, item_set.suites)
        speeds = records / THROUGHPUT_FILE
        measured = measure_throughput(original, model, BATCH_SIZES, new_tokens=NEW_TOKENS, progress=progress)
        write_throughput(speeds, measured)
    verdict = compare(records / "baseline", records / "candidate", recipe.gates.limits, speeds, alpha=alpha)
    write_verdict(records / VERDICT_FILE, verdict)
    return verdict

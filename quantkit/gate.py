"""The main job: quantize, serve the model before and after, evaluate both, compare, report."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantkit import __version__
from quantkit.checkpoint.output_paths import check_outputs, check_reports, records_folder
from quantkit.errors import CheckpointError
from quantkit.evaluation_cache import CachedEvaluation
from quantkit.export_gguf.output_file import written_files
from quantkit.export_gguf.verify import verify_gguf
from quantkit.formats.shards import write_text_durably
from quantkit.pipeline import quantize_model
from quantkit.recipe import GgufOutput, Recipe, name_places
from quantkit.serve import Engine, EngineConfig, EngineModel
from quantkit.serve.device import DeviceName
from quantkit.source import ModelSource, open_model
from quantkit.source.gguf import file_sha256
from quantkit.text_model import EngineTextModel
from quantkit.verify import verify_checkpoint
from quantkit_eval.comparability import Evaluation
from quantkit_eval.compare import compare
from quantkit_eval.errors import RecordError
from quantkit_eval.evaluate import check_suites, evaluate
from quantkit_eval.file_lock import hold_records
from quantkit_eval.record_types import Verdict
from quantkit_eval.records import RESULT_FILE, THROUGHPUT_FILE, VERDICT_FILE, write_throughput, write_verdict
from quantkit_eval.report import load_report_input, write_report
from quantkit_eval.throughput import measure_throughput

Progress = Callable[[str, int, int], None]
RUN_FILE = "run.json"  # what the records beside it are of
BATCH_SIZES = (1, 16)
NEW_TOKENS = 32  # that each request of a throughput run gets
MAX_MODEL_LEN = 1024  # tokens of a request of the suites, prompt and answer
MAX_TASK_LEN = 4096  # likewise of lm-eval's tasks, whose prompts may hold examples
SEED = 0  # of the items: fixed, so that every run of every recipe judges the same ones


def run(
    recipe: Recipe,
    *,
    overwrite: bool = False,
    resume: bool = False,
    use_cache: bool = True,
    device: DeviceName = "auto",
    progress: Progress | None = None,
) -> Verdict:
    """Do everything that the recipe asks for and judge it.

    Args:
        recipe: names a model. Without `quantization` the model is compared with itself (A/A).
        overwrite: replace a checkpoint and records of an earlier run.
        resume: go on from what an interrupted run of the same recipe has finished: blocks, checkpoint, records.
        use_cache: take the baseline's evaluation from the cache, if it is there, and keep it there.
        device: where both engines run.
        progress: is called with (stage, done, total).

    Returns:
        The verdict, as written to verdict.json; ``exit_code`` is 0, 3 or 4.

    Raises:
        QuantkitError, EvalError: anything that stops the run before there is a verdict.
    """
    records = records_folder(recipe)
    check_recipe_suites(recipe)
    source = open_model(recipe)
    check_reports(recipe, source)
    with hold_records(records, fix="Wait for it, or give `report` and the outputs other paths"):
        identity = _identity(recipe, source)
        goes_on = resume and _read_identity(records) == identity
        _refuse_to_replace(recipe, records, overwrite or goes_on)
        if recipe.outputs:
            check_outputs(recipe, source, overwrite=overwrite or resume)
        _begin(recipe, records, identity, goes_on=goes_on)
        return _run(
            recipe, source, records, progress, overwrite=overwrite, resume=resume, use_cache=use_cache, device=device
        )


def check_recipe_suites(recipe: Recipe) -> None:
    """Refuse before the work suites of a recipe that cannot be evaluated.

    Raises:
        OptionError: as from `check_suites`, with the place of the suite in the recipe.
    """
    for number, (name, options) in enumerate(recipe.gates.suite_options.items()):
        with name_places(recipe, "gates", "suites", number):
            check_suites({name: options})


def _run(
    recipe: Recipe,
    source: ModelSource,
    records: Path,
    progress: Progress | None,
    *,
    overwrite: bool,
    resume: bool,
    use_cache: bool,
    device: DeviceName,
) -> Verdict:
    """Everything from the first weight to the report."""
    tell = progress or (lambda stage, done, total: None)
    if recipe.outputs:
        quantize_model(recipe, overwrite=overwrite, resume=resume, progress=progress, source=source)
    checkpoint = _checkpoint(recipe)
    if checkpoint is not None:
        tell("verify", 0, 1)
        is_file = isinstance(recipe.outputs[0], GgufOutput)
        checked = verify_gguf(checkpoint, source) if is_file else verify_checkpoint(checkpoint, source)
        checked.raise_for_failure()
        tell("verify", 1, 1)
    config = engine_config(source, device, recipe.gates.suite_options)
    baseline = EngineTextModel(Engine(source, config))
    candidate = EngineTextModel(Engine(source if checkpoint is None else checkpoint, config))
    _evaluate_both(recipe, records, baseline, candidate, tell, use_cache=use_cache)
    speeds = measure_throughput(
        baseline, candidate, BATCH_SIZES, new_tokens=NEW_TOKENS, progress=_named(tell, "throughput")
    )
    write_throughput(records / THROUGHPUT_FILE, speeds)
    verdict = compare(records / "baseline", records / "candidate", recipe.gates.limits, records / THROUGHPUT_FILE)
    write_verdict(records / VERDICT_FILE, verdict)
    report = recipe.report
    place = None if checkpoint is None else recipe.outputs[0].path
    write_report(load_report_input(records, place), report.html, report.junit, report.markdown)
    return verdict


def _checkpoint(recipe: Recipe) -> Path | None:
    """What the candidate is served from: the first output; of a GGUF file in parts the first of them."""
    if recipe.is_self_comparison:
        return None
    path = recipe.outputs[0].path
    return written_files(path)[0] if isinstance(recipe.outputs[0], GgufOutput) else path


def _evaluate_both(
    recipe: Recipe, records: Path, baseline: EngineModel, candidate: EngineModel, tell: Progress, *, use_cache: bool
) -> None:
    """Leave the records of both, as far as they are not there."""
    suites = recipe.gates.suite_options
    if not _is_evaluated(baseline, records / "baseline"):
        (records / "candidate" / RESULT_FILE).unlink(missing_ok=True)  # it refers to the baseline's
        cached = CachedEvaluation(baseline.describe(), suites, SEED)
        if use_cache and cached.copy_to(records / "baseline"):
            tell(f"baseline: from the cache {cached.folder.parent}", 1, 1)
        else:
            evaluate(baseline, suites, SEED, records / "baseline", None, _named(tell, "baseline"))
            if use_cache:
                cached.keep(records / "baseline")
    if not _is_evaluated(candidate, records / "candidate"):
        reference = records / "baseline" if "nll" in suites else None
        evaluate(candidate, suites, SEED, records / "candidate", reference, _named(tell, "candidate"))


def engine_config(
    source: ModelSource, device: DeviceName = "auto", suites: Mapping[str, Mapping[str, Any]] | None = None
) -> EngineConfig:
    """Settings for the suites: two engines stand side by side, and short prompts need no large cache."""
    has_tasks = any(options.get("kind") == "lm-eval" for options in (suites or {}).values())
    wanted = MAX_TASK_LEN if has_tasks else MAX_MODEL_LEN
    return EngineConfig(
        device=device, max_model_len=min(wanted, getattr(source.config, "max_position_embeddings", wanted))
    )


def _refuse_to_replace(recipe: Recipe, records: Path, allowed: bool) -> None:
    """Nothing of an earlier run is lost unless the user says so; said before the work, not after it."""
    if allowed:
        return
    evaluations = [records / who / RESULT_FILE for who in ("baseline", "candidate")]
    for path in (records / VERDICT_FILE, *recipe.report.paths.values(), *evaluations):
        if path.exists():
            fix = "Give --overwrite to replace it; --resume goes on with a run of the same recipe and model"
            raise CheckpointError(f"{path} of an earlier run exists", fix=fix)


def _identity(recipe: Recipe, source: ModelSource) -> dict[str, Any]:
    """What must be the same for records to be records of this run."""
    return {
        "recipe": recipe.sha256,
        "model": source.fingerprint(),
        "suites": {path: file_sha256(Path(path)) for path in recipe.gates.files.values()},
        "quantkit": __version__,
    }


def _read_identity(records: Path) -> Any:
    try:
        return json.loads((records / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # of no run that could go on


def _begin(recipe: Recipe, records: Path, identity: dict[str, Any], *, goes_on: bool) -> None:
    """Remove what this run will replace: whoever looks after a failure must not find the verdict of another run.

    What the same run has left stays until there is something newer.
    """
    if not goes_on:
        old = [records / VERDICT_FILE, records / THROUGHPUT_FILE, *recipe.report.paths.values()]
        for path in (*old, records / "baseline" / RESULT_FILE, records / "candidate" / RESULT_FILE):
            path.unlink(missing_ok=True)
    write_text_durably(records / RUN_FILE, json.dumps(identity, indent=2) + "\n")


def _is_evaluated(model: EngineModel, folder: Path) -> bool:
    """Whether whole records of exactly this model lie in the folder."""
    try:
        result: Mapping[str, Any] = Evaluation.read(folder).result
    except RecordError:
        return False
    about = model.describe()
    return all(result[key] == about[key] for key in ("model", "engine", "template_hash"))


def _named(progress: Progress, who: str) -> Progress:
    return lambda stage, done, total: progress(f"{who}: {stage}", done, total)

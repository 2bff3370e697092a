"""The main job: quantize, serve the model before and after, evaluate both, compare, report."""

from collections.abc import Callable
from pathlib import Path

from quantkit.errors import CheckpointError
from quantkit.pipeline import quantize_model
from quantkit.recipe import Recipe
from quantkit.serve import Engine, EngineConfig, EngineModel
from quantkit.source import ModelSource, open_source
from quantkit.verify import verify_checkpoint
from quantkit_eval.compare import compare
from quantkit_eval.evaluate import evaluate
from quantkit_eval.records import THROUGHPUT_FILE, VERDICT_FILE, Verdict, write_throughput, write_verdict
from quantkit_eval.report import load_report_input, write_report
from quantkit_eval.throughput import measure_throughput

Progress = Callable[[str, int, int], None]
DEFAULT_FOLDER = Path("out")
BATCH_SIZES = (1, 16)
NEW_TOKENS = 32  # that each request of a throughput run gets
MAX_MODEL_LEN = 1024  # tokens of a request of the suites, prompt and answer
SEED = 0  # of the items: fixed, so that every run of every recipe judges the same ones


def run(recipe: Recipe, *, overwrite: bool = False, progress: Progress | None = None) -> Verdict:
    """Do everything that the recipe asks for and judge it.

    Args:
        recipe: names a model. Without `quantization` the model is compared with itself (A/A).
        overwrite: replace a checkpoint and records of an earlier run.
        progress: is called with (stage, done, total).

    Returns:
        The verdict, as written to verdict.json; ``exit_code`` is 0, 3 or 4.

    Raises:
        QuantkitError, EvalError: anything that stops the run before there is a verdict.
    """
    tell = progress or (lambda stage, done, total: None)
    records = records_folder(recipe)
    _refuse_to_replace(recipe, records, overwrite)
    source = open_source(recipe.require_model())
    checkpoint = None
    if not recipe.is_self_comparison:
        checkpoint = recipe.outputs[0].path
        quantize_model(recipe, overwrite=overwrite, progress=progress)
        tell("verify", 0, 1)
        verify_checkpoint(checkpoint, source).raise_for_failure()
        tell("verify", 1, 1)
    baseline = EngineModel(Engine(source, engine_config(source)))
    candidate = EngineModel(Engine(source if checkpoint is None else checkpoint, engine_config(source)))
    suites = recipe.gates.suite_options
    evaluate(baseline, suites, SEED, records / "baseline", None, _named(tell, "baseline"))
    evaluate(candidate, suites, SEED, records / "candidate", records / "baseline", _named(tell, "candidate"))
    speeds = measure_throughput(
        baseline, candidate, BATCH_SIZES, new_tokens=NEW_TOKENS, progress=_named(tell, "throughput")
    )
    write_throughput(records / THROUGHPUT_FILE, speeds)
    verdict = compare(records / "baseline", records / "candidate", recipe.gates.limits, records / THROUGHPUT_FILE)
    write_verdict(records / VERDICT_FILE, verdict)
    report = recipe.report
    write_report(load_report_input(records, checkpoint), report.html, report.junit, report.markdown)
    return verdict


def engine_config(source: ModelSource) -> EngineConfig:
    """Settings for the suites: two engines stand side by side, and short prompts need no large cache."""
    longest = getattr(source.config, "max_position_embeddings", MAX_MODEL_LEN)
    return EngineConfig(max_model_len=min(MAX_MODEL_LEN, longest))


def records_folder(recipe: Recipe) -> Path:
    """Where the records go: ``records`` beside the first report, else beside the checkpoint, else in ``out``."""
    for path in recipe.report.paths.values():
        return path.parent / "records"
    return (recipe.outputs[0].path.parent if recipe.outputs else DEFAULT_FOLDER) / "records"


def _refuse_to_replace(recipe: Recipe, records: Path, overwrite: bool) -> None:
    """Nothing of an earlier run is lost unless the user says so; said before the work, not after it."""
    if overwrite:
        return
    for path in (records / VERDICT_FILE, *recipe.report.paths.values()):
        if path.exists():
            raise CheckpointError(f"{path} of an earlier run exists", fix="Give --overwrite to replace it")


def _named(progress: Progress, who: str) -> Progress:
    return lambda stage, done, total: progress(f"{who}: {stage}", done, total)

"""Where the numbers come from: both models, their engines, machine, recipe, calibration and versions."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit_eval.report.inputs import ReportInput
from quantkit_eval.report.quantities import MISSING, duration, number, size
from quantkit_eval.report.wording import sizes

_SHOWN_ELSEWHERE = {"schema_version", "recipe", "layers", "files"}
_SAME_MACHINE_KEYS = ("model", "engine", "template_hash", "sampling", "seed", "created", "machine")


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One fact about both models."""

    name: str
    baseline: str
    candidate: str

    @property
    def same(self) -> bool:
        """True if both models share it."""
        return self.baseline == self.candidate


def flatten(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every leaf of nested records with its words: ``machine cpu count``, ``8``."""
    for key, value in record.items():
        words = f"{prefix} {key}".strip().replace("_", " ")
        if isinstance(value, Mapping):
            yield from flatten(value, words)
        elif isinstance(value, list | tuple):
            yield words, "; ".join(_leaf(key, entry) for entry in value) or MISSING
        else:
            yield words, _leaf(key, value)


def _leaf(key: str, value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{words} {text}" for words, text in flatten(value))
    if isinstance(value, int | float):
        if key.endswith("_bytes"):
            return size(value)
        return str(value) if key == "seed" else number(value, 4)
    return str(value)


def evaluation_rows(run: ReportInput) -> list[EvaluationRow]:
    """What result.json says about both models, suites' options included, without the metrics."""
    sides = []
    for result in (run.baseline, run.candidate):
        described: dict[str, Any] = {key: result[key] for key in _SAME_MACHINE_KEYS}  # type: ignore[literal-required]
        for suite, record in result["suites"].items():
            described[f"suite {suite}"] = {
                "items": record["num_items"],
                "items hash": record["items_hash"],
                **record["options"],
                **({"reference": record["reference_sha256"]} if record.get("reference_sha256") else {}),
            }
        sides.append(dict(flatten(described)))
    names = list(dict.fromkeys([*sides[0], *sides[1]]))
    return [EvaluationRow(name, sides[0].get(name, MISSING), sides[1].get(name, MISSING)) for name in names]


def quantization_rows(run: ReportInput) -> list[tuple[str, str]]:
    """What quantkit.json says about how the checkpoint was made."""
    record = run.checkpoint
    if record is None:
        return []
    return list(flatten({key: value for key, value in record.items() if key not in _SHOWN_ELSEWHERE}))


def key_rows(run: ReportInput) -> list[tuple[str, str]]:
    """What somebody needs to repeat the run or to doubt it, in a dozen lines; rows without a value are left out."""
    record = run.checkpoint or {}
    before, after = run.baseline["model"], run.candidate["model"]
    machine = run.candidate["machine"]
    calibration = record.get("calibration") or {}
    versions = {**machine.get("versions", {}), **(record.get("versions") or {})}
    both = sizes(run)
    rows = [
        ("Baseline", _model_line(before)),
        ("Candidate", _model_line(after)),
        ("Source fingerprint", str((record.get("model") or {}).get("fingerprint") or "")),
        ("Size", f"{size(both[0])} → {size(both[1])}, {both[2]}" if both else ""),
        ("Quantized", _quantized_line(record)),
        ("Calibration", _calibration_line(calibration)),
        ("Calibration digest", str(calibration.get("sha256") or "")),
        ("Engine", ", ".join(_engine_words(run.candidate["engine"]))),
        ("Sampling", ", ".join(f"{words} {text}" for words, text in flatten(run.candidate["sampling"]))),
        ("Seed", str(run.candidate["seed"])),
        ("Machine", _machine_line(machine)),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
        ("Recipe digest", str(record.get("recipe_sha256") or "")),
    ]
    return [(name, text) for name, text in rows if text]


def _model_line(model: Mapping[str, Any]) -> str:
    parts = [str(model.get("name") or "")]
    if model.get("revision"):
        parts.append(f"revision {model['revision']}")
    if model.get("scheme"):
        parts.append(str(model["scheme"]))
    if model.get("dequantized_from"):
        parts.append(dequantized_words(model))
    if model.get("checkpoint_hash"):
        parts.append(f"hash {str(model['checkpoint_hash'])[:16]}")
    return ", ".join(part for part in parts if part)


def dequantized_words(model: Mapping[str, Any]) -> str:
    """What a model that came as a quantized file really is; empty for another."""
    origin = model.get("dequantized_from")
    return f"dequantized to 16 bits from {origin['file']} ({size(origin['file_bytes'])})" if origin else ""


def _engine_words(engine: Mapping[str, Any]) -> list[str]:
    words = [str(engine[key]) for key in ("name", "version") if engine.get(key) is not None]
    rest = {key: value for key, value in engine.items() if key not in ("name", "version") and value is not None}
    return (
        [" ".join(words), *(f"{name} {text}" for name, text in flatten(rest))]
        if words
        else [f"{n} {t}" for n, t in flatten(rest)]
    )


def _quantized_line(record: Mapping[str, Any]) -> str:
    layers = record.get("layers") or []
    if not layers:
        return ""
    kinds = Counter(f"{layer.get('scheme')} by {layer.get('algorithm')}" for layer in layers)
    text = ", ".join(f"{number(count)} layers {kind}" for kind, count in kinds.most_common())
    if record.get("seconds") is not None:
        text += f", in {duration(record['seconds'])}"
    if record.get("peak_rss_bytes"):
        text += f", peak memory {size(record['peak_rss_bytes'])}"
    return text


def _calibration_line(calibration: Mapping[str, Any]) -> str:
    if not calibration:
        return ""
    sources = "; ".join(_leaf("source", source) for source in calibration.get("sources") or [])
    tokens = f"{number(calibration.get('num_tokens'))} tokens in windows of {number(calibration.get('window_tokens'))}"
    masked = calibration.get("masked_tokens")
    return f"{tokens}{f', {number(masked)} masked' if masked else ''}{f', from {sources}' if sources else ''}"


def _machine_line(machine: Mapping[str, Any]) -> str:
    parts = [str(machine.get("accelerator") or machine.get("cpu") or "")]
    parts.append(f"{machine.get('cpu_count')} cores, {machine.get('num_threads')} threads")
    if machine.get("memory_bytes"):
        parts.append(f"{size(machine['memory_bytes'])} memory")
    parts.append(str(machine.get("platform") or ""))
    return ", ".join(part for part in parts if part)


def throughput_rows(run: ReportInput) -> list[tuple[str, str]]:
    """How the speed was measured."""
    if run.throughput is None:
        return []
    return list(flatten({"created": run.throughput["created"], **run.throughput["settings"]}))


def file_rows(run: ReportInput) -> list[tuple[str, str]]:
    """The checkpoint's files with their sha256."""
    files = (run.checkpoint or {}).get("files") or {}
    return [(name, str(digest)) for name, digest in sorted(files.items())]


def model_name(party: Mapping[str, Any]) -> str:
    """The name that a model gives itself; the last part of a path or hub id says enough in a headline."""
    name = str(party.get("name") or "model")
    return name.rstrip("/").rsplit("/", 1)[-1] if name.startswith(("/", ".")) else name

"""Reload a checkpoint with the format's own reader and compare: hashes, tensors, side files, logits, engine rules."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint.manifest import MANIFEST_NAME, read_manifest
from quantkit.errors import CheckpointError, SourceError
from quantkit.formats import StoredConfig, read_quantization_config
from quantkit.formats.kv_scales import KV_SCALES, stored_kv_scales
from quantkit.source import ModelSource, open_source
from quantkit.source.folder import read_json
from quantkit.source.gguf import file_sha256
from quantkit.source.skeleton import code_tensors
from quantkit.verify.engine_rules import engine_notes, vllm_problems
from quantkit.verify.expected_logits import ExpectedLogits
from quantkit.verify.independent_reader import (
    StoredLayer,
    independent_steps,
    open_reader,
    reader_accepts,
    stored_layers,
)
from quantkit.verify.kv_scales import kv_scale_problems, kv_scales_in

LOGIT_TOLERANCE = 1e-4  # of the largest logit; float32 sums in another order differ by about 1e-6
INPUT_LOGIT_TOLERANCE = 2e-2  # with 8-bit inputs such a difference moves a code by one now and then


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: of the check, always the same.
        ok: whether it holds.
        detail: what was found; names the first offender.
    """

    name: str
    ok: bool
    detail: str


@dataclass(slots=True)
class VerifyReport:
    """Everything that was looked at, in order.

    Attributes:
        checkpoint: name of the folder.
        checks: what holds and what does not.
        notes: what was left out on purpose, and what is allowed but slow.
        skipped: check -> why it could not be made; a fault that it would find is not found.
    """

    checkpoint: str
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if every check holds."""
        return all(check.ok for check in self.checks)

    def failed(self) -> list[str]:
        """Names of the checks that do not hold."""
        return [check.name for check in self.checks if not check.ok]

    def to_dict(self) -> dict[str, Any]:
        """The report as one JSON document."""
        return asdict(self) | {"ok": self.ok}

    def raise_for_failure(self) -> None:
        """Raise if a check does not hold.

        Raises:
            CheckpointError: it names every check that failed, and what the first one found.
        """
        for check in self.checks:
            if not check.ok:
                names = self.failed()
                which = f"the check {names[0]}" if len(names) == 1 else f"the checks {', '.join(names)}"
                raise CheckpointError(f"{self.checkpoint} failed {which}: {check.detail}")

    def add(self, name: str, problems: list[str], otherwise: str) -> bool:
        """Add a check that holds if there are no problems. Returns whether it holds."""
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        self.checks.append(Check(name, not problems, f"{problems[0]}{more}" if problems else otherwise))
        return not problems


def verify_checkpoint(
    folder: Path,
    source: ModelSource | None = None,
    *,
    expected_logits: Tensor | None = None,
    token_ids: Tensor | None = None,
    load_model: bool = True,
) -> VerifyReport:
    """Look at a checkpoint in every way that can show a fault.

    Args:
        folder: of the checkpoint.
        source: the model it was made of; without it, copies cannot be compared.
        expected_logits: [T, V] float32 of the quantized model in memory; without them those of quantkit.json are used.
        token_ids: [1, T] that gave ``expected_logits``; by default those of quantkit.json.
        load_model: let transformers load it, which needs memory for the whole model.

    Returns:
        The report; it does not raise for a bad checkpoint.
    """
    report = VerifyReport(folder.resolve().name)
    try:
        checkpoint = open_source(folder)
        skeleton = checkpoint.skeleton(use_linear_experts=True)
        weights = checkpoint.weight_map(skeleton)
    except SourceError as error:
        report.add("files", [str(error)], "")
        return report
    num_files = len({info.shard for info in checkpoint.tensors.values()})
    whole = "1 weight file is" if num_files == 1 else f"{num_files} weight files are"
    report.add("files", [], f"{whole} whole, with {len(checkpoint.tensors)} tensors")
    manifest = _read_manifest(report, folder)
    _check_hashes(report, checkpoint, manifest)
    if source is not None:
        _check_against_source(report, checkpoint, source, manifest, weights.packed)
    else:
        report.notes.append("no source was given: copied tensors and side files were not compared")
    config = _check_config(report, checkpoint)
    if config is None or not _check_layers(report, config, skeleton, weights.packed, weights.names):
        return report
    if config.kv_scales or stored_kv_scales(checkpoint.tensors):
        problems = kv_scale_problems(checkpoint, skeleton, announced=config.kv_scales)
        report.add("kv_scales", problems, "every attention layer has scales for keys and values, as config.json says")
    layers = _check_codes(report, checkpoint, config, skeleton)
    linears = [f"{name}.weight" for name, module in skeleton.named_modules() if isinstance(module, nn.Linear)]
    stays = [weights.names[name][0].removesuffix(".weight") for name in linears if name in weights.names]
    _check_engine_rules(report, checkpoint.dtype, config, layers, stays)
    if not load_model:
        report.notes.append("the model was not loaded: its weights in transformers and its logits were not compared")
    elif layers:
        vocab_size = skeleton.get_input_embeddings().num_embeddings  # type: ignore[operator]
        expected = _expectation(report, manifest, expected_logits, token_ids, vocab_size)
        extra = [name for name in weights.unused if not name.endswith(KV_SCALES)]
        _check_reader(report, checkpoint, layers, expected, extra)
    return report


def _read_manifest(report: VerifyReport, folder: Path) -> dict[str, Any] | None:
    """quantkit.json, if there is one that can be relied on."""
    try:
        return read_manifest(folder)
    except CheckpointError as error:
        report.add("manifest", [str(error)], "")
        return None


def _check_hashes(report: VerifyReport, checkpoint: ModelSource, manifest: Mapping[str, Any] | None) -> None:
    """The weight files are those that the run wrote."""
    if manifest is None:
        report.skipped["hashes"] = f"without {MANIFEST_NAME} the files' hashes are unknown, so a change does not show"
        return
    recorded = manifest.get("files") or {}
    problems = [
        f"{name} is not in the record" for name in {i.shard for i in checkpoint.tensors.values()} - recorded.keys()
    ]
    for name, digest in recorded.items():
        path = checkpoint.folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif file_sha256(path) != digest:
            problems.append(f"{name} has changed since it was written")
    report.add("hashes", sorted(problems), f"{len(recorded)} files are as they were written")


def _check_against_source(
    report: VerifyReport,
    checkpoint: ModelSource,
    source: ModelSource,
    manifest: Mapping[str, Any] | None,
    packed: Mapping[str, str],
) -> None:
    """Whatever is not quantized is the source's, byte for byte, and nothing is lost or added."""
    recorded = ((manifest or {}).get("model") or {}).get("fingerprint")
    if recorded is not None:
        other = [] if recorded == source.fingerprint() else [f"it was not made of {source.name} as it is now"]
        report.add("same_source", other, f"it was made of {source.name}")
    coded = code_tensors({name: info.dtype for name, info in checkpoint.tensors.items()})
    codes = {name for layer in packed.values() for name in coded[layer]}
    codes |= set(stored_kv_scales(checkpoint.tensors)) - source.tensors.keys()
    rewritten = set((manifest or {}).get("rewritten_tensors") or ())
    replaced = {f"{layer}.weight" for layer in packed.values()}
    lost = [f"{name} is lost" for name in source.tensors if name not in checkpoint.tensors and name not in replaced]
    added = [
        f"{name} is not the source's" for name in checkpoint.tensors if name not in source.tensors and name not in codes
    ]
    twice = [f"{name} is stored and quantized" for name in checkpoint.tensors if name in replaced - codes]
    report.add("every_tensor", lost + added + twice, f"{len(source.tensors)} tensors of the source are accounted for")
    both = [name for name in checkpoint.tensors if name in source.tensors and name not in codes | rewritten]
    changed = [f"{name} differs from the source" for name in both if not _same_bytes(checkpoint, source, name)]
    report.add("untouched_tensors", changed, f"{len(both)} tensors are byte-identical to the source")
    _check_side_files(report, checkpoint, source)


def _same_bytes(checkpoint: ModelSource, source: ModelSource, name: str) -> bool:
    ours, theirs = checkpoint.tensors[name], source.tensors[name]
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    left, right = (model.read(name).reshape(-1).view(torch.uint8) for model in (checkpoint, source))
    return torch.equal(left, right)  # as bytes: a NaN equals itself


def _check_side_files(report: VerifyReport, checkpoint: ModelSource, source: ModelSource) -> None:
    problems = []
    paths = source.side_files()
    for path in paths:
        name = str(path.relative_to(source.folder))
        copy = checkpoint.folder / name
        if not copy.is_file():
            problems.append(f"{name} is missing")
        elif copy.read_bytes() != path.read_bytes():
            problems.append(f"{name} differs from the source")
    ours, theirs = read_json(checkpoint.folder / "config.json"), read_json(source.folder / "config.json")
    ours.pop("quantization_config", None)
    problems += [
        f"config.json: {key} differs from the source"
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
    ]
    report.add("side_files", problems, f"{len(paths)} side files and config.json are the source's")


def _check_config(report: VerifyReport, checkpoint: ModelSource) -> StoredConfig | None:
    """The quantization_config is one that we and the reader's schema understand."""
    try:
        if checkpoint.quantization is None:
            raise CheckpointError("config.json has no quantization_config")
        config = read_quantization_config(checkpoint.quantization)
        objection = reader_accepts(checkpoint.quantization)
        if objection is not None:
            reader = "compressed-tensors" if config.format.name == "compressed-tensors" else "transformers"
            raise CheckpointError(f"{reader} refuses it: {objection}")
    except CheckpointError as error:
        report.add("quantization_config", [str(error)], "")
        return None
    report.add(
        "quantization_config",
        [],
        f"{config.format.name} {config.storage}, {len(config.groups)} groups, {len(config.ignore)} ignored targets",
    )
    return config


def _check_layers(
    report: VerifyReport,
    config: StoredConfig,
    skeleton: nn.Module,
    packed: Mapping[str, str],
    names: Mapping[str, tuple[str, ...]],
) -> bool:
    """The config targets exactly the layers that are stored as codes, and every parameter is stored somehow."""
    problems = []
    for name, module in skeleton.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        on_disk = [stored.removesuffix(".weight") for stored in names.get(f"{name}.weight", ())]
        is_packed = f"{name}.weight" in packed
        called = [packed[f"{name}.weight"]] if is_packed else [name, *on_disk[:1]]  # a tied head by either
        targeted = all(config.scheme_of(one) is not None for one in called)
        if targeted and not is_packed:
            problems.append(f"{name} is neither quantized nor ignored")
        elif is_packed and not targeted:
            problems.append(f"{name} is stored as codes, but config.json ignores it")
    problems += [f"{name} is not stored" for name in skeleton.state_dict() if name not in names and name not in packed]
    return report.add("layers", problems, f"{len(packed)} layers are stored as codes, as config.json says")


def _check_codes(
    report: VerifyReport, checkpoint: ModelSource, config: StoredConfig, skeleton: nn.Module
) -> list[StoredLayer]:
    """Both decoders read the same codes, and every scale is usable. Returns the layers, or nothing if one is broken."""
    layers: list[StoredLayer] = []
    different, unusable = [], []
    packaged = config.format.name == "compressed-tensors"
    reader = "compressed-tensors" if packaged else "the independent decoder"
    try:
        for layer in stored_layers(checkpoint, config, skeleton):
            layers.append(layer)
            ours = layer.weight.codes.to(torch.int16)
            if layer.weight.zero_point is not None:
                ours = ours.unflatten(1, (layer.weight.scale.shape[1], -1)) - layer.weight.zero_point.unsqueeze(-1)
            if not torch.equal(independent_steps(checkpoint, layer), ours.reshape(layer.weight.codes.shape)):
                different.append(f"{layer.name} has other codes for {reader}")
            for name, scale in (("weight", layer.weight.scale), ("input", layer.input_scale)):
                if scale is not None and (not torch.isfinite(scale).all() or bool((scale == 0).any())):
                    unusable.append(f"{layer.on_disk}.{name}_scale has a scale that is zero or not finite")
    except (CheckpointError, SourceError) as error:
        report.add("codes", [str(error)], "")
        return []
    report.add("codes", different, f"the codes of {len(layers)} layers are what {reader} reads")
    report.add("scales", unusable, f"the scales of {len(layers)} layers are finite and not zero")
    return layers


def _check_engine_rules(
    report: VerifyReport, dtype: torch.dtype, config: StoredConfig, layers: list[StoredLayer], stays: list[str]
) -> None:
    """What vLLM asks of a checkpoint beyond the format."""
    shapes = {layer.on_disk: (layer.weight.codes.shape[0], layer.weight.codes.shape[1]) for layer in layers}
    problems = vllm_problems(config, list(shapes), stays)
    report.add(
        "engine_rules", problems, "fused layers share a scheme; bits and group sizes are those of vLLM's kernels"
    )
    report.notes += engine_notes(config, dtype, shapes)


def _expectation(
    report: VerifyReport,
    manifest: Mapping[str, Any] | None,
    logits: Tensor | None,
    token_ids: Tensor | None,
    vocab_size: int,
) -> ExpectedLogits | None:
    """What the model in memory said: as it was passed in, or as quantkit.json recorded it."""
    probe = (manifest or {}).get("probe")
    if logits is not None:
        if token_ids is None and probe is not None:
            token_ids = torch.tensor([probe["token_ids"]])
        if token_ids is None:
            raise ValueError("expected_logits without token_ids, and quantkit.json has no probe")
        return ExpectedLogits(token_ids, logits)
    if probe is None:
        report.skipped["logits"] = "no logits of the model in memory are known"
        return None
    try:
        return ExpectedLogits.from_record(probe, vocab_size)
    except CheckpointError as error:
        report.add("logits", [str(error)], "")
        return None


def _check_reader(
    report: VerifyReport,
    checkpoint: ModelSource,
    layers: list[StoredLayer],
    expected: ExpectedLogits | None,
    extra: Sequence[str],
) -> None:
    """The reader loads it, makes the same weights of the codes, and gives the same logits."""
    try:
        reader = open_reader(checkpoint, layers, extra)
        report.add("reader", [], reader.description)
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            report.notes.append(f"transformers does not load {extra[0]}{more}")
        different = [
            f"{layer.name} has other weights in transformers"
            for layer in layers
            if not torch.equal(reader.weight(layer.name), layer.weight.dequantize(checkpoint.dtype))
        ]
    except CheckpointError as error:
        report.add("reader", [str(error)], "")
        return
    if stored_kv_scales(checkpoint.tensors):
        read = kv_scales_in(reader.model)
        different += [f"{name} is another in transformers" for name, v in read.items() if v != checkpoint.read(name)]
        if not read:
            report.notes.append("transformers does not take the scales of keys and values; vLLM reads them by itself")
    report.add("weights", different, f"the weights of {len(layers)} layers are what transformers computes, bit for bit")
    has_inputs = any(layer.weight.scheme.input is not None for layer in layers)
    if has_inputs and not reader.quantizes_inputs:
        why = "the reader cannot quantize inputs beside zero points or in experts"
        report.notes.append(f"{why}: its logits were not compared")
    elif expected is not None:
        tolerance = INPUT_LOGIT_TOLERANCE if has_inputs else LOGIT_TOLERANCE
        gap, size = expected.distance(reader.logits(expected.token_ids))
        detail = f"transformers' logits differ from the model in memory by {gap:.2g}, the largest logit is {size:.3g}"
        report.add("logits", [detail] if not gap <= tolerance * size else [], detail)

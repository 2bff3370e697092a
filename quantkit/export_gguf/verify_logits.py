"""What a GGUF file answers to a short text, beside the model that it was made of: by transformers and by llama.cpp."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor, nn

from quantkit.export_gguf import llama_cpp
from quantkit.export_gguf.plan import ExportPlan
from quantkit.export_gguf.read_back import put_back, read_back
from quantkit.export_gguf.tensors import ExportTensor
from quantkit.source.gguf import CONFIG_KEY
from quantkit.verify import LOGIT_TOLERANCE, VerifyReport

MAX_TOKENS = 64
LARGEST_RATIO = 4.0  # of the divergence to that of random errors; rounding gives about 1, wrong rows far more
FLOAT_DIVERGENCE = 1e-6  # nats: what sums of float32 leave over
LLAMA_CPP_TOLERANCE = 0.2  # norm of the difference: it rounds inputs to 8 bits; wrong weights give 1 and more


@torch.no_grad()
def check_logits(report: VerifyReport, plan: ExportPlan, parts: list[Path], metadata: Mapping[str, Any]) -> None:
    """Add the checks ``divergence``, ``logits`` and those of llama.cpp; the model is in memory once, in float32.

    The divergence from the original may be a few times that of random errors which are, tensor by tensor, as large as
    the file's: so the bound follows from the types. The logits of the file, read as a model by the configuration that
    it carries, must be those of the source with the gguf package's decoded tensors put in.

    Args:
        report: gets the checks.
        plan: of the source; every tensor of it is in the file.
        parts: all files, in order.
        metadata: of the first one.
    """
    ids = _short_text(plan)
    model = plan.source.skeleton()
    plan.source.materialize(model, dtype=torch.float32)
    original = _logits(model, ids)
    _add_random_errors(model, plan, parts)
    random = _divergence(original, _logits(model, ids))
    for tensor, decoded in _decoded(plan, parts):
        put_back(tensor, decoded, model.get_parameter(tensor.parameter))
    answers = _logits(model, ids)
    del model
    found = _divergence(original, answers)
    measured = f"KL(model || file) is {found:.3g} nats a token; random errors as large give {random:.3g}"
    report.add("divergence", [] if found <= LARGEST_RATIO * random + FLOAT_DIVERGENCE else [measured], measured)
    if CONFIG_KEY in metadata:
        difference = float((_logits(read_back(parts, metadata, torch.float32), ids) - answers).abs().max())
        relative = difference / max(float(answers.abs().max()), 1e-30)
        words = f"read as a model it differs by {relative:.1e} from the source with its decoded tensors"
        report.add("logits", [] if relative <= LOGIT_TOLERANCE else [words], words)
    else:
        report.skipped["logits"] = "quantkit did not write it: it carries no configuration to read it as a model by"
    _ask_llama_cpp(report, plan, parts[0], ids, answers)


def _ask_llama_cpp(report: VerifyReport, plan: ExportPlan, path: Path, ids: Tensor, answers: Tensor) -> None:
    """Its token ids and logits, where it is installed."""
    missing = llama_cpp.why_missing()
    if missing is not None:
        report.skipped["llama_cpp"] = missing
        return
    try:
        engine = llama_cpp.load(path, MAX_TOKENS, all_logits=True)
    except ValueError as error:
        report.add("llama_cpp", [f"llama.cpp does not load it: {error}"], "")
        return
    report.add("llama_cpp", [], f"llama-cpp-python {llama_cpp.version()} loads it")
    if plan.vocabulary.spells_bytes:
        report.skipped["llama_cpp_tokens"] = (
            "llama.cpp's Unigram spells nothing in bytes: ids of rare characters differ"
        )
    else:
        texts = llama_cpp.differing_texts(engine, plan.source.tokenizer(), len(plan.vocabulary.tokens))
        problems = [f"llama.cpp makes other tokens than transformers of {text!r}" for text in texts]
        report.add(
            "llama_cpp_tokens", problems, f"llama.cpp makes transformers' tokens of {len(llama_cpp.SCRIPTS) + 1} texts"
        )
    found = llama_cpp.logits(engine, ids[0].tolist())
    relative = float((found - answers).norm() / answers.norm())
    words = f"llama.cpp's logits differ by {relative:.1%} from those of the decoded tensors"
    report.add("llama_cpp_logits", [] if relative <= LLAMA_CPP_TOLERANCE else [words], words)


def _short_text(plan: ExportPlan) -> Tensor:
    """[1, T] token ids of texts in many scripts, no longer than a sliding window."""
    config: Any = plan.source.config
    rows = len(plan.vocabulary.tokens)
    ids = [index for index in plan.source.tokenizer()("\n".join(llama_cpp.SCRIPTS))["input_ids"] if index < rows]
    longest = min(MAX_TOKENS, getattr(config, "sliding_window", None) or MAX_TOKENS)
    return torch.tensor([ids[:longest]])


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    """[T, V] float32."""
    logits: Tensor = model(ids, use_cache=False).logits[0]
    return logits.float()


def _divergence(original: Tensor, other: Tensor) -> float:
    """Mean KL(original || other) in nats a token."""
    expected, found = (logits.double().log_softmax(-1) for logits in (original, other))
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def _decoded(plan: ExportPlan, parts: list[Path]) -> Iterator[tuple[ExportTensor, Tensor]]:
    """Each tensor as the gguf package reads it, one at a time."""
    stored = {tensor.name: tensor for part in parts for tensor in gguf.GGUFReader(part).tensors}
    for tensor in plan.tensors:
        found = stored[tensor.name]
        values = np.array(gguf.quants.dequantize(found.data, found.tensor_type))
        yield tensor, torch.from_numpy(values).reshape(tensor.shape)


def _add_random_errors(model: nn.Module, plan: ExportPlan, parts: list[Path]) -> None:
    """To every tensor errors of the same norm as the file's, in random directions."""
    generator = torch.Generator().manual_seed(0)
    for tensor, decoded in _decoded(plan, parts):
        parameter = model.get_parameter(tensor.parameter)
        value = tensor.lay_out(parameter.detach()).float()
        size = float((decoded - value).norm()) / value.numel() ** 0.5
        if size > 0:
            put_back(tensor, value + size * torch.randn(value.shape, generator=generator), parameter)

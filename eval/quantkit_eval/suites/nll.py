"""``nll``: how well a model predicts fixed windows of text, and how far its distributions are from the baseline's.

No sampling takes part, so this suite has more power a second than any other. A window is a document of the text, or an
even share of one that is too long; it starts afresh, without special tokens, and its first token is not predicted.
Without a reference the suite writes one (``quantkit_eval.reference``); with one it adds the divergence, the agreement
and the ratio of perplexities. A server that tells only the probability of given tokens gets likelihood and perplexity;
it neither writes a reference nor is measured against one.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from quantkit_eval.errors import ModelOutputError, OptionError
from quantkit_eval.protocol import TokenScorer, hash_token_ids
from quantkit_eval.record_types import Sample
from quantkit_eval.records import REFERENCE_FILE, SCHEMA_VERSION
from quantkit_eval.reference import Identity, Reference, TokenDistributions, hash_file, write_reference
from quantkit_eval.suites import SuiteOutcome, SuiteRun, parse_options
from quantkit_eval.window_scores import Divergence, WindowScore, histograms, summarize

SUITE = "nll"
DOCUMENT_SEPARATOR = "<|document|>"  # a line of the text between two documents; never shown to a model
NORMALIZATION_TOLERANCE = 1e-3  # log of the mass of a row; float32 log_softmax over 10**5 entries stays below 1e-5


@dataclass(frozen=True, slots=True)
class NllOptions:
    """Options of the suite.

    Attributes:
        window_tokens: most tokens of a window. Windows are what the bootstrap draws.
        max_windows: take no more than this, evenly spread over the text; 0 takes all.
        text_path: a text file in place of the built-in text.
    """

    window_tokens: int = 512
    max_windows: int = 0
    text_path: str | None = None

    def __post_init__(self) -> None:
        if self.window_tokens < 2 or self.max_windows < 0:
            raise ValueError(
                f"window_tokens={self.window_tokens} must be at least 2, max_windows={self.max_windows} at least 0"
            )

    def read_text(self) -> str:
        """The text that is cut into windows. Raises OptionError if the file cannot be read."""
        if self.text_path is None:
            return files("quantkit_eval").joinpath("data", "nll.txt").read_text(encoding="utf-8")
        try:
            text = Path(self.text_path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            words = getattr(error, "strerror", None) or error
            raise OptionError(f"suite 'nll': the text {self.text_path} cannot be read ({words})") from None
        if not any(document.strip() for document in split_documents(text)):
            raise OptionError(f"suite 'nll': the text {self.text_path} is empty")
        return text


def split_documents(text: str) -> list[str]:
    """The documents of a text, without the lines that separate them."""
    found: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.strip() == DOCUMENT_SEPARATOR:
            found.append([])
        else:
            found[-1].append(line)
    return ["\n".join(lines).strip("\n") for lines in found]


def run(suite_run: SuiteRun) -> SuiteOutcome:
    """Score every window; write a reference or measure against one.

    Raises:
        OptionError: an option is wrong or the text is shorter than one window.
        RecordError, ReferenceMismatch: the reference cannot be read or belongs to something else.
        ModelOutputError: the scores are no log-probabilities.
    """
    options = parse_options(NllOptions, suite_run.options, SUITE)
    text = options.read_text()
    windows = _cut([suite_run.model.tokenize(document) for document in split_documents(text)], options)
    identity = Identity.of(text, options.window_tokens, windows)
    reference_path: Path | None = suite_run.folder / REFERENCE_FILE
    if isinstance(suite_run.model, TokenScorer):
        scores, reference_path = _score_tokens(suite_run.model, suite_run, windows), None
    elif suite_run.reference:
        reference = Reference(suite_run.reference)
        identity.check(reference.metadata, reference.path)
        scores, reference_path = _score_against(reference, suite_run, windows), reference.path
    else:
        scores = _score_and_keep(suite_run, windows, identity)
    return SuiteOutcome(
        [_sample(i, ids, score) for i, (ids, score) in enumerate(zip(windows, scores, strict=True))],
        {
            "items_hash": _hash_items(identity.text_sha256, options),
            "num_items": len(windows),
            "options": {"window_tokens": options.window_tokens, "max_windows": options.max_windows},
            "primary_metric": None,
            "reference_sha256": hash_file(reference_path) if reference_path else None,
            "metrics": summarize(scores),
            "histograms": histograms(scores),
        },
    )


def _score_and_keep(suite_run: SuiteRun, windows: Sequence[Sequence[int]], identity: Identity) -> list[WindowScore]:
    """As a baseline: score the windows and write their distributions as the reference."""
    kept, vocab_size = [], 0
    for index, (log_probs, nll) in enumerate(_score(suite_run, windows)):
        kept.append(TokenDistributions.from_log_probs(log_probs, nll, seed=index))
        vocab_size = log_probs.shape[1]
    write_reference(suite_run.folder / REFERENCE_FILE, kept, identity, vocab_size, suite_run.model.describe())
    return [WindowScore(window.nll_nats, None) for window in kept]


def _score_against(reference: Reference, suite_run: SuiteRun, windows: Sequence[Sequence[int]]) -> list[WindowScore]:
    """As a candidate: score the windows and measure how far they are from the reference."""
    scores = []
    for index, (log_probs, nll) in enumerate(_score(suite_run, windows)):
        reference.check_vocab_size(log_probs.shape[1])
        scores.append(WindowScore(nll, Divergence.measure(log_probs, nll, reference.window(index))))
    return scores


def _score_tokens(model: TokenScorer, suite_run: SuiteRun, windows: Sequence[Sequence[int]]) -> list[WindowScore]:
    """Of a model that knows given tokens only: the likelihood, and no divergence."""
    scores = []
    for index, token_ids in enumerate(windows):
        log_probs = model.score_tokens(token_ids)
        if log_probs.shape != (len(token_ids) - 1,) or not torch.isfinite(log_probs).all():
            raise ModelOutputError(f"window {index}: score_tokens gave {tuple(log_probs.shape)} or what is not finite")
        scores.append(WindowScore(-log_probs, None))
        suite_run.progress(index + 1, len(windows))
    return scores


def _score(suite_run: SuiteRun, windows: Sequence[Sequence[int]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each window of T tokens, the [T - 1, V] log-probabilities and the [T - 1] NLL of what follows, in nats."""
    for index, token_ids in enumerate(windows):
        log_probs = _checked(suite_run.model.score(token_ids), len(token_ids), index)[:-1]
        yield log_probs, -log_probs.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
        suite_run.progress(index + 1, len(windows))


def _cut(documents: Sequence[Sequence[int]], options: NllOptions) -> list[list[int]]:
    """Whole documents, long ones in even shares; evenly spread windows if only some are wanted."""
    windows: list[list[int]] = []
    for document in filter(None, documents):
        shares = math.ceil(len(document) / options.window_tokens)
        ends = [i * len(document) // shares for i in range(shares + 1)]
        windows += [list(document[start:end]) for start, end in itertools.pairwise(ends)]
    windows = [window for window in windows if len(window) > 1]  # a single token predicts nothing
    if not windows:
        raise OptionError("suite 'nll': the text has fewer than 2 tokens in every document", fix="Give a longer text")
    wanted = min(len(windows), options.max_windows or len(windows))
    return [windows[i * len(windows) // wanted] for i in range(wanted)]


def _checked(log_probs: Tensor, num_tokens: int, window: int) -> Tensor:
    """The scores of a window, if they are what the protocol asks for."""
    if log_probs.ndim != 2 or log_probs.shape[0] != num_tokens or log_probs.dtype != torch.float32:
        raise ModelOutputError(
            f"window {window}: score gave {tuple(log_probs.shape)} {log_probs.dtype}, "
            f"asked were log-probabilities [{num_tokens}, V] in float32"
        )
    log_probs = log_probs.cpu()
    if not torch.isfinite(torch.stack(torch.aminmax(log_probs))).all():  # NaN and infinity are in one of the two
        raise ModelOutputError(
            f"window {window}: score gave NaN or infinite log-probabilities",
            fix="Its weights are damaged or overflow: quantize it again, or take another model",
        )
    mass = float(log_probs.logsumexp(dim=1).abs().max())
    if mass > NORMALIZATION_TOLERANCE:
        raise ModelOutputError(f"window {window}: the log-mass of a row of score is {mass:.3g}, not 0; is it logits?")
    return log_probs


def _hash_items(text_sha256: str, options: NllOptions) -> str:
    content = [text_sha256, options.window_tokens, options.max_windows]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _sample(index: int, token_ids: Sequence[int], score: WindowScore) -> Sample:
    return {
        "schema_version": SCHEMA_VERSION,
        "suite": SUITE,
        "id": f"window-{index:04d}",
        "prompt_hash": hash_token_ids(token_ids),
        "metrics": score.metrics(),
    }

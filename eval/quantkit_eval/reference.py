"""The baseline's next-token distributions in a file, so that the candidate can be measured later and elsewhere.

The whole distributions would fill gigabytes. Of each token the file keeps the ``TOP_K`` most probable continuations,
the mass of the rest, and ``TAIL_SAMPLES`` continuations drawn from the rest. By the chain rule (Cover and Thomas,
Elements of Information Theory, 2nd ed. 2006, theorem 2.5.3) a divergence is the one between the coarse distributions,
in which the rest is a single outcome, plus the mass of the rest times the divergence within it. The first part is
exact, and alone it is a lower bound; the second is a mean under the baseline, so the drawn continuations estimate it
without bias.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from quantkit_eval.errors import RecordError, ReferenceMismatch
from quantkit_eval.protocol import hash_token_ids
from quantkit_eval.records import REFERENCE_FILE, write_atomically

REFERENCE_VERSION = 1
METADATA_KEY = "quantkit_reference"  # one key: safetensors writes several in an order that changes from run to run
FIELDS = ("top_ids", "top_log_probs", "rest_log_probs", "tail_ids", "tail_log_probs", "nll_nats", "argmax")
TOP_K = 256
TAIL_SAMPLES = 32
WIDE_VOCABULARY = 1 << 16  # ids from here on need 32 bits


@dataclass(frozen=True, slots=True)
class TokenDistributions:
    """What is kept of the distributions of T tokens over V continuations.

    Attributes:
        top_ids: [T, k] the most probable continuations.
        top_log_probs: [T, k] float16.
        rest_log_probs: [T] float32, log of the mass of all others; -inf if there are none.
        tail_ids: [T, s] drawn from the others in proportion to their probability; s is 0 if there are none.
        tail_log_probs: [T, s] float32, of the drawn ones.
        nll_nats: [T] float32, of the token that really follows.
        argmax: [T] the most probable continuation; of equal ones, the lowest id.
    """

    top_ids: Tensor
    top_log_probs: Tensor
    rest_log_probs: Tensor
    tail_ids: Tensor
    tail_log_probs: Tensor
    nll_nats: Tensor
    argmax: Tensor

    @classmethod
    def from_log_probs(
        cls, log_probs: Tensor, nll_nats: Tensor, seed: int, top_k: int = TOP_K, tail_samples: int = TAIL_SAMPLES
    ) -> "TokenDistributions":
        """Keep the essence of [T, V] float32 log-probabilities, and the [T] NLL of the tokens that follow.

        Args:
            log_probs: of every continuation.
            nll_nats: of the right one.
            seed: of the draws from the tail.
            top_k: k, or V if that is less.
            tail_samples: s.
        """
        vocab_size = log_probs.shape[1]
        values, ids = log_probs.topk(min(top_k, vocab_size), dim=1)
        others = log_probs.scatter(1, ids, -torch.inf)
        rest = others.logsumexp(dim=1)
        if top_k < vocab_size:
            generator = torch.Generator().manual_seed(seed)
            share = others.sub_(rest[:, None]).exp_()  # in place: each copy of [T, V] costs as much as the draws
            tail_ids = share.multinomial(tail_samples, replacement=True, generator=generator)
        else:
            tail_ids = ids[:, :0]
        id_dtype = torch.uint16 if vocab_size <= WIDE_VOCABULARY else torch.int32
        return cls(
            top_ids=ids.to(id_dtype),
            top_log_probs=values.half(),
            rest_log_probs=rest,
            tail_ids=tail_ids.to(id_dtype),
            tail_log_probs=log_probs.gather(1, tail_ids),
            nll_nats=nll_nats,
            argmax=log_probs.argmax(dim=1).to(torch.int32),
        )

    def kl_divergence(self, log_probs: Tensor) -> Tensor:
        """KL(these || log_probs) of each token.

            sum over top i of p_i log(p_i / q_i) + p_rest log(p_rest / q_rest)
            + p_rest mean over tail j of [exp(r_j) - 1 - r_j],  r_j = log(q_j / q_rest) - log(p_j / p_rest)

        The first line is normalized on both sides, because float16 rounds p. In the second, -r_j alone would be an
        unbiased estimate; exp(r_j) - 1 has mean 0 and takes most of the noise away. Neither is ever negative, and
        comparing a model with its own file gives some 1e-7 instead of 0.

        Args:
            log_probs: [T, V] float32 of the other model on the same tokens.

        Returns:
            [T] float64, nats, at least 0.

        Source: the control variate is John Schulman's, "Approximating KL Divergence" (2020), estimator k3.
        """
        ids = self.top_ids.long()
        rest = log_probs.scatter(1, ids, -torch.inf).logsumexp(dim=1)
        log_p = torch.cat([self.top_log_probs, self.rest_log_probs[:, None]], dim=1).double().log_softmax(dim=1)
        log_q = torch.cat([log_probs.gather(1, ids), rest[:, None]], dim=1).double().log_softmax(dim=1)
        p = log_p.exp()
        coarse = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(dim=1)  # without a rest: 0 log 0 = 0
        if not self.tail_ids.shape[1]:
            return coarse.clamp_min(0.0)
        within_p = self.tail_log_probs - self.rest_log_probs[:, None]
        within_q = log_probs.gather(1, self.tail_ids.long()) - rest[:, None]
        log_ratio = (within_q - within_p).double()
        return coarse.clamp_min(0.0) + p[:, -1] * (log_ratio.expm1() - log_ratio).mean(dim=1)


@dataclass(frozen=True, slots=True)
class Identity:
    """What two evaluations must share for their distributions to be comparable.

    Attributes:
        text_sha256: of the text.
        window_tokens: most tokens of a window.
        num_windows: windows that were scored.
        token_ids_sha256: of the ids of all windows: the tokenizer's work.
    """

    text_sha256: str
    window_tokens: int
    num_windows: int
    token_ids_sha256: str

    @classmethod
    def of(cls, text: str, window_tokens: int, windows: Sequence[Sequence[int]]) -> "Identity":
        """Of these windows of that text."""
        lengths_and_ids = [number for window in windows for number in (len(window), *window)]
        text_sha256 = hashlib.sha256(text.encode()).hexdigest()
        return cls(text_sha256, window_tokens, len(windows), hash_token_ids(lengths_and_ids))

    def check(self, reference: Mapping[str, Any], path: Path) -> None:
        """Compare with a reference file's metadata. Raises ReferenceMismatch that names the first difference."""
        for name, what in (
            ("text_sha256", "another text"),
            ("window_tokens", "windows of another size"),
            ("token_ids_sha256", "other token ids, so another tokenizer or choice of windows"),
            ("num_windows", "another number of windows"),
        ):
            mine, theirs = getattr(self, name), reference.get(name)
            if mine != theirs:
                raise ReferenceMismatch(
                    f"{path} was made with {what}: {name} is {theirs}, here it is {mine}",
                    fix="Evaluate the baseline again with the same options",
                )


def write_reference(
    path: Path, windows: Sequence[TokenDistributions], identity: Identity, vocab_size: int, model: Mapping[str, Any]
) -> None:
    """Write the distributions of all windows, one after the other, with what identifies them.

    Args:
        path: the file to write.
        windows: at least one.
        identity: of text, windows and tokenizer.
        vocab_size: V.
        model: who made them: ``Model.describe()``.
    """
    tensors = {name: torch.cat([getattr(window, name) for window in windows]) for name in FIELDS}
    lengths = torch.tensor([0, *(len(window.argmax) for window in windows)])
    tensors["offsets"] = lengths.cumsum(dim=0)  # window i is rows offsets[i] to offsets[i + 1]
    metadata = {
        "schema_version": REFERENCE_VERSION,
        "model": model,
        "vocab_size": vocab_size,
        **asdict(identity),
    }
    write_atomically(path, save(tensors, metadata={METADATA_KEY: json.dumps(metadata, sort_keys=True)}))


class Reference:
    """A reference file, read one window at a time.

    Args:
        path: the file, or the folder of records that holds it.

    Raises:
        RecordError: there is no such file, or it is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path / REFERENCE_FILE if path.is_dir() else path
        if not self.path.is_file():
            raise RecordError(
                f"{self.path}: no such reference file", fix="Evaluate the baseline with the suite nll first"
            )
        try:
            self._file = safe_open(self.path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise RecordError(f"{self.path}: no reference file ({error})") from None
        self.metadata: dict[str, Any] = json.loads((self._file.metadata() or {}).get(METADATA_KEY, "{}"))
        missing = {*FIELDS, "offsets"} - set(self._file.keys())
        if missing or self.metadata.get("schema_version") != REFERENCE_VERSION:
            raise RecordError(f"{self.path}: no reference file of version {REFERENCE_VERSION}")
        self._offsets: list[int] = self._file.get_tensor("offsets").tolist()

    def window(self, index: int) -> TokenDistributions:
        """The distributions of one window."""
        start, end = self._offsets[index : index + 2]
        return TokenDistributions(**{name: self._file.get_slice(name)[start:end] for name in FIELDS})

    def check_vocab_size(self, vocab_size: int) -> None:
        """Raises ReferenceMismatch if the baseline's vocabulary has another size."""
        theirs = self.metadata.get("vocab_size")
        if vocab_size != theirs:
            raise ReferenceMismatch(f"{self.path} was made with a vocabulary of {theirs}, this model has {vocab_size}")


def hash_file(path: Path) -> str:
    """sha256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

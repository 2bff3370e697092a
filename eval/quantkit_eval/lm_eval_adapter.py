"""A model of ours as a model of lm-eval (EleutherAI's evaluation harness), so that its tasks run through our engine.

Contexts and continuations become tokens as in lm-eval's own Hugging Face model, so that both give the same numbers.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from quantkit_eval.errors import OptionError
from quantkit_eval.protocol import TextModel

BATCH = 64  # prompts handed to the model at once
MAX_GEN_TOKS = 256  # of an answer whose task does not say
IGNORED = ("do_sample",)  # temperature 0 says it
logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]


class ModelLM(TemplateLM):
    """Answers lm-eval's three kinds of requests with a ``TextModel``.

    Args:
        model: that answers.
        progress: called with the prompts done and all, for each kind of request anew.

    Attributes:
        max_length: most tokens that are read before the last one that is scored.
        cut_off: contexts whose answer ended at the token limit.
        num_shortened: contexts that were too long and lost their beginning.
    """

    def __init__(self, model: TextModel, progress: Progress | None = None) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = model.tokenizer
        self.max_length = model.max_model_len - 2  # the last token is scored, and one more is generated
        self.cut_off: set[str] = set()
        self.num_shortened = 0
        self._progress = progress or (lambda done, total: None)

    @property
    def eot_token_id(self) -> int:
        """The end of a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that is scored without a context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in lm-eval's caches of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, with special tokens in front unless the text begins with one or the caller says so."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode([self.prefix_token_id]))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as the model was trained to read it; without a generation prompt, its last message goes on."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation after its context, and whether greedy decoding would write it."""
        prompts = []
        for _texts, context, continuation in requests:
            whole = [*context, *continuation]
            if len(continuation) > self.max_length:
                raise OptionError(
                    f"a continuation of {len(continuation)} tokens is longer than the model's {self.max_length}",
                    fix="Take a model with a longer context",
                )
            self.num_shortened += len(whole) > self.max_length + 1
            prompts.append(whole[-(self.max_length + 1) :])
        found: list[tuple[float, bool]] = []
        for start in range(0, len(prompts), BATCH):
            scored = self.model.token_logprobs(prompts[start : start + BATCH])
            for (_texts, _context, continuation), tokens in zip(requests[start : start + BATCH], scored, strict=True):
                own = tokens[len(tokens) - len(continuation) :]
                found.append((sum(logprob for logprob, _ in own), all(is_best for _, is_best in own)))
            self._progress(len(found), len(prompts))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows that are as long as the model takes."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            rolled = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            for window in rolled:
                windows.append((None, *make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += logprob
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answer to each context, up to a stop string or the task's limit."""
        texts: list[str] = []
        for start in range(0, len(requests), BATCH):
            batch = requests[start : start + BATCH]
            sampling = [_sampling(request.args[1]) for request in batch]
            prompts = [
                self._shorten(self.tok_encode(request.args[0]), one["max_tokens"])
                for request, one in zip(batch, sampling, strict=True)
            ]
            answers = self.model.continue_prompts(prompts, sampling)
            for request, (text, is_cut_off) in zip(batch, answers, strict=True):
                texts.append(text)
                if is_cut_off:
                    self.cut_off.add(request.args[0])
            self._progress(len(texts), len(requests))
        return texts

    def _shorten(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The end of a prompt that leaves room for the answer."""
        room = self.max_length - max_tokens
        if room < 1:
            raise OptionError(
                f"a task asks for answers of {max_tokens} tokens, the model's context has {self.max_length}",
                fix="Take a model with a longer context",
            )
        self.num_shortened += len(prompt) > room
        return prompt[-room:]


def _sampling(gen_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """lm-eval's keywords of a generation by the engine's names; what the engine does not know it refuses itself."""
    given = dict(normalize_gen_kwargs(dict(gen_kwargs), MAX_GEN_TOKS))
    sampling = {name: value for name, value in given.items() if name not in (*IGNORED, "until", "max_gen_toks")}
    return (
        {"temperature": 0.0}
        | sampling
        | {"max_tokens": given["max_gen_toks"], "stop": tuple(filter(None, given["until"]))}
    )

"""What a model has answered so far, in a file, so that an evaluation can go on where a server or a machine gave out.

A line is one answer under the hash of all that was asked; the first line says who answered. The file lies beside the
records while they are not complete, and goes when they are.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantkit_eval.errors import RecordError, TargetError
from quantkit_eval.protocol import Generation, GenerationRequest, Model, check_generations

logger = logging.getLogger(__name__)

ANSWERS_FILE = "answers.partial.jsonl"
WHO = ("model", "template_hash")  # of describe(): what must be the same for its answers to be the same


class AnswerLog:
    """The answers of one evaluation.

    Args:
        path: of the file; made with the first answer.
        party: ``Model.describe()`` of who answers.
        resume: go on with the answers in the file, if there is one; otherwise the first new answer takes their place,
            and a warning says so.

    Raises:
        RecordError: the file cannot be read, or holds answers of another model.
    """

    def __init__(self, path: Path, party: Mapping[str, Any], *, resume: bool) -> None:
        self.path = path
        self._who = {key: party[key] for key in WHO}
        self._answers: dict[str, Generation] = {}
        if resume and path.exists():
            self._read()
        elif path.exists():
            logger.warning("%s: answers of an interrupted evaluation; without --resume they are asked for again", path)

    def __len__(self) -> int:
        """Answers that it holds."""
        return len(self._answers)

    def generate(self, model: Model, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """The answers to the requests, in their order: the model is asked only for those that are not here.

        Raises:
            ModelOutputError: the model's generations are not those of the requests.
            TargetError: a server failed; what it had answered is kept.
        """
        keys = [_key(request) for request in requests]
        missing = [request for key, request in zip(keys, requests, strict=True) if key not in self._answers]
        if missing:
            try:
                generations = model.generate(missing)
            except TargetError as error:
                finished = {generation.id: generation for generation in error.finished}
                answered = [request for request in missing if request.id in finished]
                self._keep(answered, [finished[request.id] for request in answered])
                how = f"{len(self)} answers are kept; the same command with --resume goes on from them"
                fix = f"{error.fix}. {how}" if error.fix else how
                raise TargetError(error.message, fix=fix if len(self) else error.fix) from error
            check_generations(missing, generations)
            self._keep(missing, generations)
        return [self._answers[key] for key in keys]

    def remove(self) -> None:
        """The records are complete."""
        self.path.unlink(missing_ok=True)

    def _keep(self, requests: Sequence[GenerationRequest], generations: Sequence[Generation]) -> None:
        answers = {_key(request): generation for request, generation in zip(requests, generations, strict=True)}
        lines = [{"key": key, **asdict(generation)} for key, generation in answers.items()]
        if lines:
            head = [] if self._answers else [self._who]
            try:
                with self.path.open("a" if self._answers else "w", encoding="utf-8") as file:
                    file.writelines(json.dumps(line) + "\n" for line in [*head, *lines])
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                fix = "Make room, and the same command with --resume goes on from what is whole"
                raise RecordError(f"{self.path}: cannot be written ({error.strerror})", fix=fix) from error
        self._answers |= answers

    def _read(self) -> None:
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecordError(f"{self.path}: cannot be read ({error})", fix="Do without --resume") from None
        whole, _, cut_off = text.rpartition("\n")  # what was being written when the machine stopped is asked for again
        for number, line in enumerate(whole.split("\n") if whole else [], start=1):
            try:
                entry = json.loads(line)
                if number > 1:
                    key, token_ids = entry.pop("key"), tuple(entry.pop("token_ids"))
                    self._answers[key] = _checked(Generation(token_ids=token_ids, **entry))
                    continue
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise RecordError(f"{self.path}:{number}: no answer", fix="Do without --resume") from None
            if entry != self._who:
                raise RecordError(f"{self.path}: the answers are of another model", fix="Do without --resume")
        if cut_off:
            try:
                os.truncate(self.path, len(f"{whole}\n".encode()) if whole else 0)
            except OSError as error:
                raise RecordError(f"{self.path}: cannot be written ({error.strerror})") from error


def _checked(generation: Generation) -> Generation:
    """Raises ValueError if what stands in the file could not have been answered."""
    texts = (generation.id, generation.text, generation.finish_reason, generation.prompt_hash)
    if not all(isinstance(text, str) for text in texts) or not isinstance(generation.num_prompt_tokens, int):
        raise ValueError("no answer")
    generation.text.encode()
    return generation


def _key(request: GenerationRequest) -> str:
    return hashlib.sha256(json.dumps(asdict(request), sort_keys=True).encode()).hexdigest()

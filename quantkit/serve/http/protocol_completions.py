"""The body of /v1/completions."""

from pydantic import Field

from quantkit.errors import UsageError
from quantkit.serve.http.protocol_sampling import GenerationRequest
from quantkit.serve.sampling_params import MAX_N, SamplingParams


class CompletionRequest(GenerationRequest):
    """A request to continue prompts."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="One or several texts, or one or several lists of token ids."
    )
    logprobs: int | None = Field(None, description="Of each new token and of so many most likely ones.")
    echo: bool = Field(False, description="Only false: prompts are not repeated.")
    best_of: int | None = Field(None, description="Only as many as n: nothing is thrown away.")
    suffix: str | None = Field(None, description="Not supported.")

    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself.

        Raises:
            UsageError: there is none, or too many.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise UsageError("prompt is an empty list", fix="give it a text or token ids")
        if isinstance(self.prompt[0], int):
            return [[item for item in self.prompt if isinstance(item, int)]]
        prompts: list[str | list[int]] = [item for item in self.prompt if not isinstance(item, int)]
        if len(prompts) * (self.n or 1) > MAX_N:
            raise UsageError(f"{len(prompts)} prompts with n={self.n or 1} are more than {MAX_N} continuations")
        return prompts

    def sampling_params(self) -> SamplingParams:
        """As the engine knows it; max_tokens is 16 unless given.

        Raises:
            UsageError: a value is out of range or not supported.
        """
        self.require_consistent()
        if self.echo:
            raise UsageError("echo=true is not supported", fix="put the prompt in front yourself")
        if self.suffix is not None:
            raise UsageError("suffix is not supported", fix="leave it out")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise UsageError(f"best_of={self.best_of} is not supported", fix="ask for n continuations and choose")
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return self.sampling(logprobs=self.logprobs, structured=self.form(), **limit)

"""What both kinds of completion requests share: how to sample, in which form, and how to answer."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quantkit.errors import UsageError
from quantkit.serve.http.fields import about
from quantkit.serve.sampling_params import SamplingParams
from quantkit.serve.structured.spec import StructuredOutput

# Fields of SamplingParams that a request passes on under the same name.
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "n",
    "prompt_logprobs",
)


class Strict(BaseModel):
    """A JSON object of known fields; null is the same as a field that is not there."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


class StreamOptions(Strict):
    """What a stream tells besides text."""

    include_usage: bool = Field(False, description="A last event with the numbers of tokens.")


class JsonSchemaFormat(Strict):
    """A schema with a name, as OpenAI has it."""

    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = Field(None, description="The schema is always followed as far as a grammar can.")


class ResponseFormat(Strict):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def forms(self) -> list[StructuredOutput]:
        """As the engine knows it; none for plain text.

        Raises:
            UsageError: type and schema do not fit together.
        """
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise UsageError("response_format: json_schema belongs to the type json_schema, and to no other")
        if self.json_schema is not None:
            return [StructuredOutput.json_schema(self.json_schema.schema_)]
        return [StructuredOutput.json_object()] if self.type == "json_object" else []


class StructuredOutputs(Strict):
    """The form of the answer, as vLLM has it; exactly one field."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None

    def forms(self) -> list[StructuredOutput]:
        """Every form that is asked for."""
        found = []
        if self.json_ is not None:
            found.append(StructuredOutput.json_schema(self.json_))
        if self.json_object:
            found.append(StructuredOutput.json_object())
        if self.regex is not None:
            found.append(StructuredOutput.regex(self.regex))
        if self.grammar is not None:
            found.append(StructuredOutput.grammar(self.grammar))
        if self.choice is not None:
            found.append(StructuredOutput.choice(self.choice))
        return found


class GenerationRequest(Strict):
    """Fields that /v1/completions and /v1/chat/completions share."""

    model: str | None = Field(None, description="The served model's name.")
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1 is all.")
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Token id -> -100 to 100.")
    priority: int | None = Field(None, description="Lower ones come first; needs scheduling_policy=priority.")
    cache_salt: str | None = Field(None, description="Only requests with the same salt share cached prompts.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Whom the caller asks for; it changes nothing.")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def _asking(self) -> dict[str, StructuredOutputs | ResponseFormat]:
        """What asks for a form of the answer, by the name of its field."""
        guided = {
            f"guided_{name}": StructuredOutputs(**{name: value})
            for name in ("json", "regex", "choice", "grammar")
            if (value := getattr(self, f"guided_{name}")) is not None
        }
        others = {"structured_outputs": self.structured_outputs, "response_format": self.response_format}
        return {**guided, **{name: value for name, value in others.items() if value is not None}}

    @property
    def form_field(self) -> str:
        """The field that the form of the answer follows from."""
        return next((name for name, asking in self._asking().items() if asking.forms()), "tools")

    def form(self) -> StructuredOutput | None:
        """The form that the answer must have.

        Raises:
            UsageError: it is wrong, or there are several.
        """
        forms = []
        for name, asking in self._asking().items():
            with about(name):
                forms += asking.forms()
        if len(forms) > 1:
            raise UsageError(f"the answer can have one form, {len(forms)} are asked for", fix="give one field of them")
        return forms[0] if forms else None

    def sampling(self, **more: Any) -> SamplingParams:
        """As the engine knows it.

        Args:
            **more: fields of SamplingParams that the kinds of requests name differently.

        Raises:
            UsageError: a value out of range.
        """
        values: dict[str, Any] = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        values["top_k"] = 0 if self.top_k == -1 else self.top_k
        values["logit_bias"] = None if self.logit_bias is None else _token_ids(self.logit_bias)
        if self.ignore_eos and more.get("structured") is not None:
            raise UsageError("ignore_eos=true and a form of the answer exclude each other: the form says where it ends")
        given = {name: value for name, value in values.items() if value is not None}
        return SamplingParams.from_mapping(given | more)

    def require_consistent(self) -> None:
        """Refuse fields that exclude each other.

        Raises:
            UsageError: two of them do.
        """
        if self.stream_options is not None and not self.stream:
            raise UsageError("stream_options needs stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise UsageError("prompt_logprobs cannot be streamed", fix="leave out prompt_logprobs, or stream=false")


def _token_ids(logit_bias: Mapping[str, float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for name, bias in logit_bias.items():
        if not (name.isascii() and name.isdigit() and len(name) < 20):
            raise UsageError(f"logit_bias holds {name!r}, which is no token id")
        if int(name) in found:
            raise UsageError(f"logit_bias names token {int(name)} twice")
        found[int(name)] = bias
    return found

"""The section ``calibration``: which tokens the algorithms see."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from quantkit.recipe.section import PathText, Positive, Section, Share, Text, Unordered, fault

CountedTokens = Literal["all", "assistant"]


class TextSource(Section):
    """Plain text: a file, or ``builtin`` for the text that quantkit carries."""

    kind: Literal["text"]
    path: PathText
    share: Share = 1.0


class JsonlSource(Section):
    """One JSON object a line with ``text``, or with ``messages`` for the model's chat template."""

    kind: Literal["jsonl"]
    path: PathText
    count: CountedTokens = "all"
    share: Share = 1.0


class DatasetSource(Section):
    """A column of a Hugging Face dataset; ``config`` is one of its configurations, where it has several."""

    kind: Literal["dataset"]
    name: Text
    config: Text | None = None
    split: Text = "train"
    column: Text = "text"
    count: CountedTokens = "all"
    share: Share = 1.0


class SelfGeneratedSource(Section):
    """The model's own answers to seed prompts: a jsonl file with ``messages``, or ``builtin``."""

    kind: Literal["self_generated"]
    seed_prompts: PathText = "builtin"
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    max_answer_tokens: Annotated[int, Field(ge=1, le=4096)] = 160
    count: CountedTokens = "all"
    share: Share = 1.0


class StructuredChatSource(Section):
    """Generated conversations that end in a right structured answer; they fill a share of any size."""

    kind: Literal["structured_chat"]
    count: CountedTokens = "all"
    share: Share = 1.0


Source = Annotated[
    TextSource | JsonlSource | DatasetSource | SelfGeneratedSource | StructuredChatSource,
    Field(discriminator="kind"),
]


class Calibration(Section):
    """Which tokens the algorithm sees: ``num_tokens`` in windows of at most ``window_tokens``, drawn with ``seed``.

    Without ``sources`` it is :func:`default_sources`. A window holds tokens of one document, unless ``pack_documents``
    joins the documents and cuts them anywhere.
    """

    sources: Annotated[tuple[Source, ...], Unordered, Field(min_length=1)] | None = None
    num_tokens: Positive = 32768
    window_tokens: Annotated[int, Field(ge=8)] = 512
    pack_documents: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="after")
    def _check(self) -> "Calibration":
        total = sum(source.share for source in self.sources or ())
        if self.sources is not None and abs(total - 1) > 1e-6:
            raise fault(f"the shares of the sources sum to {total:g}; they must sum to 1", "sources")
        if self.num_tokens < self.window_tokens:
            raise fault(
                f"{self.num_tokens} is less than one window of window_tokens={self.window_tokens}", "num_tokens"
            )
        return self


def default_sources(*, chat: bool) -> tuple[Source, ...]:
    """What calibrates if the recipe does not say: the text that quantkit carries, and as much chat if it can be read.

    Args:
        chat: whether the model has a chat template.
    """
    if not chat:
        return (TextSource(kind="text", path="builtin"),)
    return (TextSource(kind="text", path="builtin", share=0.5), JsonlSource(kind="jsonl", path="builtin", share=0.5))

"""Messages that belong to one of a few classes; the answer is an object with the class."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.calibration.structured.layout import draw_layout
from quantkit.calibration.structured.shape import assemble
from quantkit.calibration.structured.task import Sample, Task, wordings
from quantkit.calibration.structured.values import draw_value
from quantkit.calibration.structured.vocabulary import load

_SLOT = re.compile(r"\{([^{}]+)\}")


def classification_task(domain: Mapping[str, Any], rng: random.Random) -> Task:
    """Which class a message belongs to.

    Args:
        domain: an entry of ``labels.yaml``.
        rng: the draw.
    """
    language, key, layout = domain.get("language", "en"), rng.choice(domain["key"]), draw_layout(rng)
    words, labels = wordings(language), list(domain["labels"])
    rng.shuffle(labels)
    chosen = labels[: rng.randint(2, len(labels))]
    quoted = rng.choice(['"{}"', "{}"])
    listed = rng.choice([", ", " / ", " | "]).join(quoted.format(label) for label in chosen)
    form = rng.choice([json.dumps({key: "..."}), json.dumps({key: "<label>"}), f'JSON: {{"{key}": ...}}'])
    request = rng.choice(load("tasks")["classify"][language]).format(
        key=key, about=domain["about"], labels=listed, form=form
    )

    def sample(rng: random.Random) -> Sample:
        label = rng.choice(chosen)
        value = {key: label}
        return Sample(_message(domain["labels"][label], rng, language), layout.dump(value), value)

    instruction = assemble([request, *layout.told(words, rng)])
    return Task("classification", instruction, domain["about"], sample, language, [key])


def _message(sentences: Sequence[str], rng: random.Random, language: str) -> str:
    """One of the sentences, its slots filled with different values."""
    used: set[str] = set()

    def draw(match: re.Match[str]) -> str:
        text = draw_value(match[1], rng, language).surface
        while text in used:
            text = draw_value(match[1], rng, language).surface
        used.add(text)
        return text

    return _SLOT.sub(draw, rng.choice(sentences))

"""How an answer in JSON is laid out, and what a request says about it."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LAYOUTS = {"plain": 45, "oneline": 14, "indented": 20, "dense": 8, "fenced": 13}  # name -> how often


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout.

    Attributes:
        name: of LAYOUTS; ``plain`` is what json.dumps writes, without a word about it.
    """

    name: str

    def dump(self, value: Any) -> str:
        """The value in this layout; a code fence only if the layout is ``fenced``."""
        match self.name:
            case "indented":
                return json.dumps(value, ensure_ascii=False, indent=2)
            case "dense":
                return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            case "fenced":
                return f"```json\n{json.dumps(value, ensure_ascii=False, indent=2)}\n```"
        return json.dumps(value, ensure_ascii=False)

    def told(self, wordings: Mapping[str, Any], rng: random.Random) -> list[str]:
        """The sentences of a request that ask for it: none for ``plain``, else one; and often that nothing be added."""
        layout = [] if self.name == "plain" else [rng.choice(wordings[self.name])]
        return layout if self.name == "fenced" else [*layout, rng.choice(wordings["bare"])]


def draw_layout(rng: random.Random) -> Layout:
    """One of LAYOUTS, by its weight."""
    return Layout(rng.choices(list(LAYOUTS), list(LAYOUTS.values()))[0])

"""What the generator knows: the YAML files in ``data/structured``."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same result; libyaml is ten times as fast
FOLDER = Path(__file__).parent.parent / "data" / "structured"


@cache
def load(name: str) -> dict[str, Any]:
    """The content of ``data/structured/<name>.yaml``; shared, so not to be changed."""
    content: dict[str, Any] = yaml.load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), Loader=_LOADER)
    return content

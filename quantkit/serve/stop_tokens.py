"""Which tokens mean that the model is done."""

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from quantkit.source.folder import read_json

GENERATION_CONFIG = "generation_config.json"


def model_stop_token_ids(folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ends of sequence of generation_config.json (of config.json without it), and the tokenizer's.

    Chat models often have several, and each file may know only some of them.
    """
    has_file = (folder / GENERATION_CONFIG).is_file()
    declared: Any = read_json(folder / GENERATION_CONFIG).get("eos_token_id") if has_file else None
    if declared is None:
        declared = getattr(config, "eos_token_id", None)
    token_ids = [declared] if isinstance(declared, int) else list(declared or ())
    if tokenizer.eos_token_id is not None:
        token_ids.append(tokenizer.eos_token_id)
    return frozenset(token_ids)

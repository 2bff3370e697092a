"""Reading numbers out of a config.json that others wrote: defaults of the family, and one clear line for nonsense."""

from collections.abc import Mapping
from typing import Any

from quantkit.errors import SourceError

MAX_LAYERS, MAX_SIZE = 10_000, 1 << 31

# What transformers' classes fill in where a config.json of the family leaves a field out.
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096},
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
    },
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True, "sliding_window": 4096, "sliding_window_pattern": 4},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4},
    "smollm3": {"tie_word_embeddings": True},
    "llama4_text": {"attention_chunk_size": 8192},
    "qwen3_next": {"full_attention_interval": 4, "head_dim": 256},
}
GGUF_FAMILIES = {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe", "deepseek2": "deepseek_v2", "gpt-oss": "gpt_oss"}
ALIASES = {  # one field under the names of older families
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "model_max_length"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
}


class ConfigFields:
    """A config.json with the defaults of its family.

    Args:
        raw: the file's content; of a model of several inputs the part on text is used.
        where: what error lines call the file.

    Attributes:
        model_type: the family.
        notes: what was assumed on the way.

    Raises:
        SourceError: no model_type.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.notes: list[str] = []
        text = raw.get("text_config")
        if isinstance(text, Mapping):
            self.notes.append(f"{raw.get('model_type')} takes more than text: only its text part is planned for")
            raw = {**{key: raw[key] for key in ("tie_word_embeddings", "torch_dtype", "dtype") if key in raw}, **text}
        self.where = where
        self.raw = raw
        family = raw.get("model_type")
        if not isinstance(family, str) or not family:
            raise SourceError(f"{where} has no model_type", fix="It is no configuration of a transformers model")
        self.model_type: str = family
        self._defaults = FAMILY_DEFAULTS.get(self.model_type, {})

    def get(self, name: str) -> Any:
        """A field as it is, the family's default if it is missing, None if there is neither."""
        for key in (name, *ALIASES.get(name, ())):
            if self.raw.get(key) is not None:
                return self.raw[key]
        return self._defaults.get(name)

    def integer(self, name: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        """A field that must be a whole number of 1 or more.

        Raises:
            SourceError: missing without a default, no whole number, or out of range.
        """
        value = self.get(name)
        if value is None:
            if default is None:
                raise SourceError(
                    f"{self.where} of the family {self.model_type} has no {name}",
                    fix="Without it nothing can be counted: take the config.json that belongs to the model",
                )
            return default
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise SourceError(f"{self.where}: {name}={value!r} is not a whole number from 1 to {most}")
        return value

    def optional(self, name: str) -> int | None:
        """The same, but None if it is missing, or 0."""
        return self.integer(name) if self.get(name) not in (None, 0) else None

    @property
    def num_layers(self) -> int:
        """Decoder blocks."""
        return self.integer("num_hidden_layers", most=MAX_LAYERS)

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.integer("num_attention_heads")

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads: as many as query heads where the file does not say.

        Raises:
            SourceError: they do not divide the query heads.
        """
        heads = self.integer("num_key_value_heads", 1 if self.raw.get("multi_query") else self.num_heads)
        if self.num_heads % heads:
            raise SourceError(
                f"{self.where}: num_key_value_heads={heads} does not divide num_attention_heads={self.num_heads}"
            )
        return heads

    @property
    def head_dim(self) -> int:
        """Numbers of a head.

        Raises:
            SourceError: not given, and the heads do not divide the hidden size.
        """
        given = self.optional("head_dim")
        if given is not None:
            return given
        hidden = self.integer("hidden_size")
        if hidden % self.num_heads:
            raise SourceError(
                f"{self.where}: hidden_size={hidden} is not a multiple of num_attention_heads={self.num_heads}, "
                "and there is no head_dim"
            )
        return hidden // self.num_heads

    @property
    def tied(self) -> bool:
        """Whether the embedding is also the output matrix."""
        return bool(self.get("tie_word_embeddings"))

    @property
    def num_experts(self) -> int:
        """Experts of a layer, 0 for a dense model."""
        for name in ("num_local_experts", "num_experts", "n_routed_experts"):
            if self.get(name):
                return self.integer(name)
        return 0

    @property
    def experts_per_token(self) -> int:
        """Experts that a token uses, 0 for a dense model.

        Raises:
            SourceError: more than there are.
        """
        if not self.num_experts:
            return 0
        used = self.integer("num_experts_per_tok")
        if used > self.num_experts:
            raise SourceError(f"{self.where}: num_experts_per_tok={used} is more than the {self.num_experts} experts")
        return used

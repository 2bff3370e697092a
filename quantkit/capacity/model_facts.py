"""What planning knows of a model: its matrices by role, and what each layer keeps of a sequence."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["linear", "expert", "embedding", "lm_head", "other"]
KVKind = Literal["full", "sliding", "latent", "shared", "state"]


@dataclass(frozen=True, slots=True)
class Weight:
    """Equal matrices (or vectors) of a model.

    Attributes:
        name: what they are called in a block, such as ``q_proj``; numbers of layers and experts are left out.
        role: ``linear`` and ``expert`` matrices can be quantized; ``other`` (norms, biases, routers) stays as it is.
        rows: output features; of a vector its length.
        columns: input features; 1 for a vector.
        count: how many there are.
        stored_bits: bits a number in the file, scales included; None if only the configuration is known.
    """

    name: str
    role: Role
    rows: int
    columns: int
    count: int = 1
    stored_bits: float | None = None

    @property
    def parameters(self) -> int:
        """Numbers in all of them."""
        return self.rows * self.columns * self.count


@dataclass(frozen=True, slots=True)
class KVLayer:
    """What a layer keeps of a sequence.

    Attributes:
        kind: ``full`` keeps every token, ``sliding`` the last ``window``, ``latent`` one compressed vector a token
            (MLA), ``shared`` nothing (it reads another layer's), ``state`` a fixed state (linear attention, Mamba).
        heads: key/value heads; 1 for a latent.
        key_dim: numbers of a key in each head; of the latent.
        value_dim: numbers of a value in each head; 0 for a latent, whose values are computed from it.
        window: tokens that a ``sliding`` layer sees.
        state_numbers: numbers of a ``state``, kept in 16 bits.
        expanded_width: numbers a token of an engine that keeps a latent's keys and values computed.
    """

    kind: KVKind
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    state_numbers: int = 0
    expanded_width: int | None = None

    @property
    def width(self) -> int:
        """Numbers a token."""
        return self.heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Everything that planning needs of a model.

    Attributes:
        name: hub id, or name of the folder or file.
        model_type: family, as config.json has it.
        weights: all matrices and vectors; a tied embedding is one entry with the role ``embedding``.
        kv_layers: one a layer.
        hidden_size: width of the model.
        intermediate_size: widest activation of a block.
        vocab_size: tokens.
        num_heads: query heads.
        max_model_len: most tokens that it was made for; None if it does not say.
        tied: True if the embedding is also the output matrix.
        num_experts: experts of a layer; 0 for a dense model.
        experts_per_token: of them used by a token.
        quantization: how its weights are stored already; None for an ordinary model.
        quantization_config: of config.json; empty for an ordinary model and for a .gguf.
        stored_bytes: of its weight files' tensors; None if only the configuration is known.
        counted_from: where the parameters come from.
        notes: what could not be counted, and what was assumed.
    """

    name: str
    model_type: str
    weights: tuple[Weight, ...]
    kv_layers: tuple[KVLayer, ...]
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    max_model_len: int | None = None
    tied: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    quantization: str | None = None
    quantization_config: Mapping[str, Any] = field(default_factory=dict)
    stored_bytes: int | None = None
    counted_from: str = "config.json"
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def parameters(self) -> int:
        """All numbers, a tied matrix once."""
        return sum(weight.parameters for weight in self.weights)

    @property
    def num_layers(self) -> int:
        """Decoder blocks."""
        return len(self.kv_layers)

    def of_role(self, *roles: Role) -> int:
        """Parameters of some roles."""
        return sum(weight.parameters for weight in self.weights if weight.role in roles)

    def active_share(self, num_tokens: float) -> float:
        """Share of the experts that ``num_tokens`` tokens touch, if each chooses at random; 1 for a dense model."""
        if not self.num_experts:
            return 1.0
        return 1.0 - (1.0 - self.experts_per_token / self.num_experts) ** num_tokens

    @property
    def multiplied(self) -> int:
        """Parameters that one token is multiplied with: the matrices of the blocks and the output matrix."""
        share = self.experts_per_token / self.num_experts if self.num_experts else 1.0
        head = self.of_role("lm_head") or (self.of_role("embedding") if self.tied else 0)
        return self.of_role("linear") + head + round(self.of_role("expert") * share)

    def to_dict(self) -> dict[str, Any]:
        """The facts as one JSON document."""
        kinds = {kind: sum(layer.kind == kind for layer in self.kv_layers) for kind in KVKind.__args__}  # type: ignore[attr-defined]
        return {
            "name": self.name,
            "model_type": self.model_type,
            "parameters": self.parameters,
            "parameters_by_role": {role: self.of_role(role) for role in Role.__args__},  # type: ignore[attr-defined]
            "layers": self.num_layers,
            "layers_by_kind": {kind: count for kind, count in kinds.items() if count},
            "max_model_len": self.max_model_len,
            "tied": self.tied,
            "experts": self.num_experts,
            "experts_per_token": self.experts_per_token,
            "quantization": self.quantization,
            "stored_bytes": self.stored_bytes,
            "counted_from": self.counted_from,
            "notes": list(self.notes),
        }

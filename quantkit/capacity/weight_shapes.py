"""The matrices of a model from its config.json alone, for the families whose layers are known.

Source: the model definitions of transformers; the tests compare every family with the model built on the meta device.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.capacity.config_fields import ConfigFields
from quantkit.capacity.model_facts import Weight


@dataclass(frozen=True, slots=True)
class Family:
    """What a family adds to two norms, q/k/v/o and a gated MLP.

    Attributes:
        qkv_bias: biases of q, k and v; None: as ``attention_bias`` says.
        o_bias: bias of the output projection; None: as ``attention_bias`` says.
        mlp_bias: biases of the MLP, if ``mlp_bias`` says so.
        qk_norm: norms of queries and keys, over a ``head`` or over all of them (``full``).
        norms: norms of a block.
        fused: q/k/v are one matrix on disk, gate and up another.
        sinks: a learned number a head.
        expert_bias: experts and router have biases.
    """

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool = False
    qk_norm: str | None = None
    norms: int = 2
    fused: bool = False
    sinks: bool = False
    expert_bias: bool = False


PLAIN = Family(qkv_bias=False, o_bias=False)
FAMILIES: dict[str, Family] = {
    "llama": Family(mlp_bias=True),
    "granite": Family(mlp_bias=True),
    "smollm3": Family(mlp_bias=True),
    "mistral": PLAIN,
    "mixtral": PLAIN,
    "gemma": Family(),
    "gemma2": Family(norms=4),
    "gemma3_text": Family(norms=4, qk_norm="head"),
    "qwen2": Family(qkv_bias=True, o_bias=False),
    "qwen2_moe": Family(qkv_bias=True, o_bias=False),
    "qwen3": Family(qk_norm="head"),
    "qwen3_moe": Family(qk_norm="head"),
    "phi3": Family(qkv_bias=False, o_bias=False, fused=True),
    "olmo2": Family(qk_norm="full"),
    "deepseek_v2": Family(),
    "deepseek_v3": Family(),
    "gpt_oss": Family(sinks=True, expert_bias=True),
}


def weights_of(fields: ConfigFields) -> tuple[Weight, ...]:
    """All matrices and vectors of a model of a known family.

    Raises:
        SourceError: a field is missing or impossible.
        KeyError: the family is not in `FAMILIES`.
    """
    family = FAMILIES[fields.model_type]
    vocab, hidden, layers = fields.integer("vocab_size"), fields.integer("hidden_size"), fields.num_layers
    found = [Weight("embed_tokens", "embedding", vocab, hidden)]
    if not fields.tied:
        found.append(Weight("lm_head", "lm_head", vocab, hidden))
    attention = _latent_attention if fields.optional("kv_lora_rank") else _attention
    for weight in attention(fields, family):
        found.append(_times(weight, layers))
    sparse = sum(_is_sparse(i, fields) for i in range(layers)) if fields.num_experts else 0
    if sparse < layers:
        for weight in _mlp(fields, family, fields.integer("intermediate_size")):
            found.append(_times(weight, layers - sparse))
    if sparse:
        for weight in _experts(fields, family):
            found.append(_times(weight, sparse))
    found.append(Weight("norm", "other", hidden, 1, family.norms * layers + 1))
    return tuple(found)


def _times(weight: Weight, count: int) -> Weight:
    return Weight(weight.name, weight.role, weight.rows, weight.columns, weight.count * count)


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Iterator[Weight]:
    yield Weight(name, "linear", rows, columns)
    if bias:
        yield Weight(f"{name}.bias", "other", rows, 1)


def _attention(fields: ConfigFields, family: Family) -> Iterator[Weight]:
    hidden, head = fields.integer("hidden_size"), fields.head_dim
    queries, keys = fields.num_heads * head, fields.num_kv_heads * head
    given = bool(fields.get("attention_bias"))
    if fields.model_type == "gpt_oss":
        given = fields.raw.get("attention_bias", True)
    qkv = given if family.qkv_bias is None else family.qkv_bias
    if family.fused:
        yield from _linear("qkv_proj", queries + 2 * keys, hidden, qkv)
    else:
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield from _linear(name, rows, hidden, qkv)
    yield from _linear("o_proj", hidden, queries, given if family.o_bias is None else family.o_bias)
    if family.qk_norm:
        full = family.qk_norm == "full"
        yield Weight("q_norm", "other", queries if full else head, 1)
        yield Weight("k_norm", "other", keys if full else head, 1)
    if family.sinks:
        yield Weight("sinks", "other", fields.num_heads, 1)


def _latent_attention(fields: ConfigFields, _family: Family) -> Iterator[Weight]:
    """MLA: queries and keys/values through narrow matrices, with a norm in between."""
    hidden, heads, bias = fields.integer("hidden_size"), fields.num_heads, bool(fields.get("attention_bias"))
    nope, rope, value = (fields.integer(f"{name}_head_dim") for name in ("qk_nope", "qk_rope", "v"))
    rank, query_rank = fields.integer("kv_lora_rank"), fields.optional("q_lora_rank")
    if query_rank is None:
        yield from _linear("q_proj", heads * (nope + rope), hidden)
    else:
        yield from _linear("q_a_proj", query_rank, hidden, bias)
        yield Weight("q_a_layernorm", "other", query_rank, 1)
        yield from _linear("q_b_proj", heads * (nope + rope), query_rank)
    yield from _linear("kv_a_proj_with_mqa", rank + rope, hidden, bias)
    yield Weight("kv_a_layernorm", "other", rank, 1)
    yield from _linear("kv_b_proj", heads * (nope + value), rank)
    yield from _linear("o_proj", hidden, heads * value, bias)


def _mlp(fields: ConfigFields, family: Family, width: int) -> Iterator[Weight]:
    hidden, bias = fields.integer("hidden_size"), family.mlp_bias and bool(fields.get("mlp_bias"))
    if family.fused:
        yield from _linear("gate_up_proj", 2 * width, hidden, bias)
    else:
        yield from _linear("gate_proj", width, hidden, bias)
        yield from _linear("up_proj", width, hidden, bias)
    yield from _linear("down_proj", hidden, width, bias)


def _is_sparse(index: int, fields: ConfigFields) -> bool:
    """Whether a layer has experts."""
    if index < (fields.get("first_k_dense_replace") or 0) or index in (fields.get("mlp_only_layers") or ()):
        return False
    return (index + 1) % fields.integer("decoder_sparse_step", 1) == 0


def _experts(fields: ConfigFields, family: Family) -> Iterator[Weight]:
    """The experts, the shared ones and the router of a layer."""
    hidden, experts = fields.integer("hidden_size"), fields.num_experts
    width = fields.optional("moe_intermediate_size") or fields.integer("intermediate_size")
    for name, rows, columns in (
        ("gate_proj", width, hidden),
        ("up_proj", width, hidden),
        ("down_proj", hidden, width),
    ):
        yield Weight(f"experts.{name}", "expert", rows, columns, experts)
        if family.expert_bias:
            yield Weight(f"experts.{name}.bias", "other", rows, 1, experts)
    yield Weight("router", "other", experts, hidden)
    if family.expert_bias:
        yield Weight("router.bias", "other", experts, 1)
    if fields.model_type == "deepseek_v3":
        yield Weight("e_score_correction_bias", "other", experts, 1)  # a buffer, stored with the weights
    shared = fields.optional("shared_expert_intermediate_size") or width * (fields.optional("n_shared_experts") or 0)
    if shared:
        for weight in _mlp(fields, family, shared):
            yield Weight(f"shared_expert.{weight.name}", weight.role, weight.rows, weight.columns)
    if fields.optional("shared_expert_intermediate_size"):
        yield Weight("shared_expert_gate", "other", 1, hidden)

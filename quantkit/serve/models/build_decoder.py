"""From a checkpoint to a `decoder.Decoder`: which of transformers' parameters goes where."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.serve.attention import Layer
from quantkit.serve.models.coded_rows import silu_mul_coded
from quantkit.serve.models.compiled_layers import CompiledLayers, NotCompiledError
from quantkit.serve.models.decoder import Attention, Decoder, DecoderLayer
from quantkit.serve.models.decoder_config import Activation, DecoderConfig
from quantkit.serve.models.feed_forward import Experts, FeedForward, Gate
from quantkit.serve.models.linear_reader import LinearReader, StoredLinear
from quantkit.serve.models.projection import Projection
from quantkit.serve.models.rotary import RotaryFrequencies
from quantkit.source.experts import LinearExperts
from quantkit_kernels import gelu_mul, silu_mul

GATED: dict[Activation, Gate] = {
    "silu": silu_mul,
    "gelu": partial(gelu_mul, tanh=False),
    "gelu_tanh": partial(gelu_mul, tanh=True),
}


def build_decoder(model: nn.Module, reader: LinearReader, config: DecoderConfig, dtype: torch.dtype) -> Decoder:
    """Make the decoder; layers are prepacked side by side, on as many threads as torch may use.

    Args:
        model: transformers' definition with its parameters, but for the layers that are stored as codes; it loses the
            weights of each decoder layer on the way.
        reader: of its linear layers.
        config: what the decoder does.
        dtype: of the parameters.
    """
    return _Builder(model, reader, config, dtype).build()


class _Builder:
    def __init__(self, model: nn.Module, reader: LinearReader, config: DecoderConfig, dtype: torch.dtype) -> None:
        self._model: Any = model
        self._reader, self._config, self._dtype = reader, config, dtype
        self._projections: list[Projection] = []
        self._others: dict[str, Tensor] = {}

    def build(self) -> Decoder:
        embedding = self._parameter("model.embed_tokens.weight")
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            head = threads.submit(self._project, "lm_head")
            layers = list(threads.map(self._layer, range(len(self._config.windows))))
        names = {name for name in self._config.rope if name is not None}
        return Decoder(
            self._config,
            layers,
            embedding,
            self._norm("model.norm"),
            head.result(),
            RotaryFrequencies(self._model.model.rotary_emb, names, embedding.device),
            self._projections,
            self._others,
            self._compile(layers, embedding.device),
        )

    def _compile(self, layers: list[DecoderLayer], device: torch.device) -> CompiledLayers | NotCompiledError:
        try:
            return CompiledLayers(layers, self._config, self._dtype, device)
        except NotCompiledError as error:
            return error

    def _layer(self, number: int) -> DecoderLayer:
        prefix, family = f"model.layers.{number}", self._config.family
        has_behind = family.has_norms_behind
        before = "pre_feedforward_layernorm" if has_behind else "post_attention_layernorm"
        layer = DecoderLayer(
            self._attention(f"{prefix}.self_attn", number),
            self._feed_forward(f"{prefix}.mlp"),
            self._norm(f"{prefix}.input_layernorm"),
            self._norm(f"{prefix}.{before}"),
            self._norm(f"{prefix}.post_attention_layernorm") if has_behind else None,
            self._norm(f"{prefix}.post_feedforward_layernorm") if has_behind else None,
            self._config.eps,
        )
        self._model.model.layers[number] = nn.Identity()  # gives the memory of what was prepacked back
        return layer

    def _attention(self, name: str, number: int) -> Attention:
        config = self._config
        names = ["qkv_proj"] if config.family.is_fused else ["q_proj", "k_proj", "v_proj"]
        head_norms = None
        if hasattr(self._model.get_submodule(name), "q_norm"):
            head_norms = self._norm(f"{name}.q_norm"), self._norm(f"{name}.k_norm")
        return Attention(
            self._project(*(f"{name}.{part}" for part in names)),
            self._project(f"{name}.o_proj"),
            Layer(number, config.windows[number], config.scaling, config.attention_softcap),
            config,
            self._dtype,
            head_norms,
        )

    def _feed_forward(self, name: str) -> FeedForward | Experts:
        module = self._model.get_submodule(name)
        if not hasattr(module, "experts"):
            return self._dense(name)
        shared = None
        if hasattr(module, "shared_expert"):
            shared = self._dense(f"{name}.shared_expert"), self._project(f"{name}.shared_expert_gate")
        return Experts(
            self._project(f"{name}.gate"),
            self._experts(f"{name}.experts", module.experts),
            self._config.num_experts_per_token,
            self._config.normalizes_experts,
            shared,
        )

    def _dense(self, name: str) -> FeedForward:
        names = ["gate_up_proj"] if self._config.family.is_fused else ["gate_proj", "up_proj"]
        gate_up = self._project(*(f"{name}.{part}" for part in names))
        return self._gated(gate_up, self._project(f"{name}.down_proj"))

    def _gated(self, gate_up: Projection, down: Projection) -> FeedForward:
        is_coded = self._config.activation == "silu" and down.takes_codes
        return FeedForward(gate_up, silu_mul_coded if is_coded else GATED[self._config.activation], down)

    def _experts(self, name: str, module: Any) -> list[FeedForward]:
        """From the layers of each expert, or from one tensor for all experts: [E, 2F, K] and [E, K, F]."""
        if isinstance(module, LinearExperts):
            return [self._dense(f"{name}.{number}") for number in range(module.num_experts)]
        experts = []
        for index, weights in enumerate(zip(module.gate_up_proj, module.down_proj, strict=True)):
            products = []
            for part, weight in zip(("gate_up_proj", "down_proj"), weights, strict=True):
                products.append(Projection([StoredLinear(f"{name}.{index}.{part}", weight, None)], self._dtype))
            self._projections += products
            experts.append(self._gated(*products))
        return experts

    def _project(self, *names: str) -> Projection:
        projection = Projection([self._reader.read(name) for name in names], self._dtype)
        self._projections.append(projection)
        return projection

    def _norm(self, name: str) -> Tensor:
        """Its weight in float32, with the family's offset added."""
        return self._parameter(f"{name}.weight").float() + self._config.family.norm_offset

    def _parameter(self, name: str) -> Tensor:
        parameter: Tensor = self._model.get_parameter(name).detach()
        self._others[name] = parameter
        return parameter

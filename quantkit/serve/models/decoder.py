"""A decoder of our own for the families of `decoder_config`: rows of tokens in, logits out.

The tokens of all requests of a step lie in one row, without a batch dimension. What is computed between two products is
an operation of quantkit_kernels, so that the same code runs on every device that those have a body for.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantkit.serve.attention import Layer, attend
from quantkit.serve.attention_metadata import AttentionMetadata
from quantkit.serve.kv_cache import KVShape
from quantkit.serve.models.coded_rows import Rows, norm
from quantkit.serve.models.compiled_layers import CompiledLayers, NotCompiledError
from quantkit.serve.models.decoder_config import DecoderConfig
from quantkit.serve.models.feed_forward import Experts, FeedForward
from quantkit.serve.models.projection import Projection
from quantkit.serve.models.rotary import RotaryFrequencies
from quantkit.serve.paged_step import PagedStep
from quantkit_kernels import rms_norm, rotary_embedding
from quantkit_kernels.cpu_native_linear import NativeWeight
from quantkit_kernels.dispatch import activation_dtype

Turns = Mapping[str, tuple[Tensor, Tensor]]


class Attention:
    """Self-attention of one layer.

    Args:
        qkv: [T, (H + 2 H_kv) D] from [T, K].
        output: [T, K] from [T, H D].
        layer: its number, window, scaling and softcap.
        config: of the decoder.
        dtype: of keys and values.
        head_norms: weights of the norms over each query's and each key's numbers; None for none.

    Attributes:
        qkv: as given.
        output: as given.
        layer: as given.
        head_norms: as given.
        rope: the frequencies by which heads are turned; None for none.
        takes_codes: as `Projection.takes_codes`.
    """

    def __init__(
        self,
        qkv: Projection,
        output: Projection,
        layer: Layer,
        config: DecoderConfig,
        dtype: torch.dtype,
        head_norms: tuple[Tensor, Tensor] | None,
    ) -> None:
        self.qkv, self.output, self.layer, self.head_norms = qkv, output, layer, head_norms
        self.rope, self._eps = config.rope[layer.number], config.eps
        self._num_heads, self._num_kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._dtype = dtype
        self.takes_codes = qkv.takes_codes

    def __call__(self, x: Rows, turns: Turns, metadata: AttentionMetadata | PagedStep) -> Tensor:
        """[T, K] from [T, K]."""
        heads, kv_heads = self._num_heads, self._num_kv_heads
        qkv = self.qkv(x).unflatten(1, (-1, self._head_dim))
        both = heads + kv_heads
        query, key, value = qkv[:, :heads], qkv[:, heads:both], qkv[:, both:]
        if self.head_norms is not None:
            for part, weight in zip((query, key), self.head_norms, strict=True):
                part.copy_(rms_norm(part.reshape(-1, self._head_dim), weight, self._eps).view(part.shape))
        if self.rope is not None:
            rotary_embedding(query, key, *turns[self.rope])
        if self._dtype != qkv.dtype:
            narrow = qkv[:, heads:].to(self._dtype)
            key, value = narrow[:, :kv_heads], narrow[:, kv_heads:]
        return self.output(attend(query, key, value, self.layer, metadata).flatten(1))


@dataclass(slots=True)
class DecoderLayer:
    """Attention and feed-forward, each with a norm before it, and in some families one behind it.

    Attributes:
        attention: see `Attention`.
        feed_forward: [T, K] from [T, K].
        attention_norm: weight of the norm before attention, with its offset added, float32; likewise the others.
        feed_forward_norm: before the feed-forward layer.
        behind_attention: after attention; None for none.
        behind_feed_forward: after the feed-forward layer.
        eps: of the norms.
    """

    attention: Attention
    feed_forward: FeedForward | Experts
    attention_norm: Tensor
    feed_forward_norm: Tensor
    behind_attention: Tensor | None
    behind_feed_forward: Tensor | None
    eps: float

    def __call__(
        self, x: Tensor, residual: Tensor | None, turns: Turns, metadata: AttentionMetadata | PagedStep
    ) -> tuple[Tensor, Tensor]:
        """What the layer adds, and what it is added to, both [T, K]; from the same of the layer before."""
        coded = self.attention.takes_codes
        rows, residual = norm(x, self.attention_norm, self.eps, residual, coded=coded)
        x = self.attention(rows, turns, metadata)
        if self.behind_attention is not None:
            x = rms_norm(x, self.behind_attention, self.eps)
        coded = self.feed_forward.takes_codes
        rows, residual = norm(x, self.feed_forward_norm, self.eps, residual, coded=coded)
        x = self.feed_forward(rows)
        if self.behind_feed_forward is not None:
            x = rms_norm(x, self.behind_feed_forward, self.eps)
        return x, residual


class Decoder(nn.Module):
    """A causal decoder. Made by `build_decoder.build_decoder`.

    Args:
        config: what it does.
        layers: in order.
        embedding: [V, K].
        norm: weight of the last norm, with its offset added, float32.
        head: [R, V] from [R, K].
        frequencies: of the rotary embedding.
        projections: all products that the model is made of.
        others: name -> parameters that are in none of them.
        compiled: the layers as one call, or why they are none.

    Attributes:
        compiled: as given.
        dtype: of the model: of keys and values.
        activation_dtype: of everything else.
        bodies: (operation, body, reason) -> how many products.
        weight_bytes: memory of all weights.
        takes_codes: some products take rows that are 8-bit codes.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layers: list[DecoderLayer],
        embedding: Tensor,
        norm: Tensor,
        head: Projection,
        frequencies: RotaryFrequencies,
        projections: list[Projection],
        others: Mapping[str, Tensor],
        compiled: CompiledLayers | NotCompiledError,
    ) -> None:
        super().__init__()
        self.dtype = embedding.dtype
        self.activation_dtype = activation_dtype(embedding.device, embedding.dtype)
        self._config, self._layers, self._embedding, self._norm = config, layers, embedding, norm
        self._head, self._frequencies, self.compiled = head, frequencies, compiled
        self._embedding_scale = None
        if config.embedding_scale is not None:  # rounded as the model was trained with it
            self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=embedding.dtype))
        self._stored = dict(others)
        for projection in projections:
            self._stored |= projection.parameters
        self.bodies = Counter(body for projection in projections for body in projection.bodies)
        self.takes_codes = any(projection.takes_codes for projection in projections)
        shared = [parameter.data_ptr() for parameter in head.parameters.values()]
        is_tied = embedding.data_ptr() in shared
        self.weight_bytes = sum(parameter.nbytes for parameter in others.values())
        self.weight_bytes += sum(projection.nbytes for projection in projections) - is_tied * embedding.nbytes

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights that are kept as they are stored, by the names that transformers gives them."""
        seen: set[int] = set()
        for name, tensor in self._stored.items():
            if not remove_duplicate or tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield prefix + name, nn.Parameter(tensor, requires_grad=False)

    @property
    def is_capturable(self) -> bool:
        """Whether a step may be a CUDA graph; with experts the host must know how many tokens each gets."""
        return self._config.num_experts_per_token == 0

    @property
    def decodes_apart(self) -> bool:
        """Whether a request's logits in a step of one token each are the same, to the bit, whoever else is in it."""
        head = self._head.products
        return isinstance(self.compiled, CompiledLayers) and all(isinstance(part, NativeWeight) for part in head)

    @property
    def shapes(self) -> tuple[KVShape, ...]:
        """Of the keys and values, one a layer."""
        config = self._config
        return (KVShape(config.num_kv_heads, config.head_dim, config.head_dim),) * len(self._layers)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata | PagedStep,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Compute a step.

        Args:
            input_ids: [T] int64.
            positions: [T] int64, place of each token in its request.
            metadata: who attends to what; its masks are in ``activation_dtype``.
            rows: [R] int64 tokens whose logits are wanted; None for all.

        Returns:
            [R, V] logits in ``activation_dtype``.
        """
        x = F.embedding(input_ids, self._embedding).to(self.activation_dtype)
        if self._embedding_scale is not None:
            x *= self._embedding_scale
        turns = self._frequencies.at(positions)
        residual: Tensor | None = None
        if isinstance(self.compiled, CompiledLayers) and self.compiled.takes(metadata):
            x, residual = self.compiled(x, turns, metadata)
        else:
            for layer in self._layers:
                x, residual = layer(x, residual, turns, metadata)
        assert residual is not None, "a decoder has layers"
        if rows is not None:
            x, residual = x.index_select(0, rows), residual.index_select(0, rows)
        logits: Tensor = self._head(rms_norm(x, self._norm, self._config.eps, residual=residual)[0])
        cap = self._config.logits_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

"""Models without weights: built on the meta device, filled from the checkpoint one part at a time.

transformers renames and fuses tensors while it loads (Mixtral's experts are one 3-D parameter in memory and one tensor
per expert and projection on disk). `WeightMap` is that correspondence for one model, by transformers' own rules, and
for `experts.LinearExperts`, which are not fused, by what they know of the disk.
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import WeightConverter, dot_natural_key

from quantkit.errors import SourceError
from quantkit.formats.safetensors_file import TensorSpec
from quantkit.source.experts import linear_experts
from quantkit.source.tensor_renaming import TensorRenaming

PACKED_SUFFIXES = (
    *("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),  # compressed-tensors
    *("weight", "input_scale", "input_zero_point"),  # the same, for 8-bit inputs
    *("qweight", "qzeros", "scales", "g_idx"),  # GPTQ and AWQ
)


def code_tensors(tensors: Mapping[str, torch.dtype]) -> dict[str, list[str]]:
    """The layers whose codes are stored in the place of a weight, by their name on disk, and their tensors.

    Args:
        tensors: name -> dtype of every tensor on disk.
    """

    def is_codes(name: str) -> bool:
        dtype = tensors[name]
        return not (dtype.is_floating_point and dtype.itemsize > 1)

    layers: dict[str, list[str]] = {}
    for name in tensors:
        layer, _, suffix = name.rpartition(".")
        coded_weight = suffix == "weight" and is_codes(name) and f"{layer}.weight_scale" in tensors
        if suffix in ("weight_packed", "qweight") or coded_weight:
            names = [f"{layer}.{suffix}" for suffix in PACKED_SUFFIXES if f"{layer}.{suffix}" in tensors]
            layers[layer] = [name for name in names if not name.endswith(".weight") or is_codes(name)]
    return layers


def build_skeleton(config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    """A causal decoder whose parameters have shapes and no data; buffers are real, tied weights are one parameter.

    Args:
        config: the model's configuration; a quantization_config in it is left aside.
        dtype: type of the parameters.
    """
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # moving each parameter to meta has untied them
    skeleton: nn.Module = model.eval().requires_grad_(False)
    return skeleton


@dataclass(slots=True)
class _Stored:
    """How parameters come from the tensors on disk; ``converter`` is None for a tensor that is read as it is."""

    converter: WeightConverter | None = None
    sources: list[tuple[str, str]] = field(default_factory=list)  # (tensor on disk, the converter's pattern)

    def convert(self, target: str, model: nn.Module, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The parameters, by name, that these tensors make."""
        if self.converter is None:
            return {target: read(self.sources[0][0])}
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.sources:
            converter.add_tensor(target, name, pattern, read(name))
        made = converter.convert(target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class WeightMap:
    """Which tensors on disk make which parameters of a model.

    Args:
        model: from `build_skeleton`.
        tensors: what is on disk.

    Attributes:
        names: parameter (or persistent buffer) -> the tensors on disk that it is made of; one for most of them.
            A tied parameter is listed under each of its names.
        packed: parameter -> the name on disk of its layer, whose codes are stored instead of a weight.
        unused: tensors on disk that no parameter takes, in order; a checkpoint must still carry them.

    Raises:
        SourceError: a tensor has another shape than the parameter, or cannot be converted; or the tensors have whole
            decoder blocks more than the model.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, TensorSpec]) -> None:
        self.names: dict[str, tuple[str, ...]] = {}
        self.packed: dict[str, str] = {}
        self._stored: dict[str, tuple[str, _Stored]] = {}  # parameter -> (converter's target, how it is stored)
        state = model.state_dict(keep_vars=True)
        renaming = TensorRenaming(model)
        of_experts = _expert_weights(model)
        stored: dict[str, _Stored] = {}
        left: list[str] = []
        coded = code_tensors({name: spec.dtype for name, spec in tensors.items()})
        codes = {name for names in coded.values() for name in names}
        for name in sorted(tensors, key=dot_natural_key):
            if name in codes:
                continue
            target, pattern = (of_experts[name], None) if name in of_experts else renaming.rename(name)
            if target not in state and name in state:
                target, pattern = name, None
            if target in state:
                converter = None if pattern is None else renaming.converter(pattern)
                stored.setdefault(target, _Stored(converter)).sources.append((name, pattern or ""))
            else:
                left.append(name)
        self._collect(model, stored, tensors, state)
        for layer, code_names in coded.items():
            target = of_experts.get(f"{layer}.weight") or renaming.rename(f"{layer}.weight")[0]
            if target in state and target not in self.names:
                self.packed[target] = layer
            else:
                left += code_names
        self.unused = left
        self._share_tied(state)
        _refuse_lost_blocks(model, tensors.keys() - set(left), left)

    def _collect(
        self,
        model: nn.Module,
        stored: Mapping[str, _Stored],
        tensors: Mapping[str, TensorSpec],
        state: Mapping[str, Tensor],
    ) -> None:
        """Run every conversion on shapes alone: it says which parameters come out, and whether they fit."""

        def on_meta(name: str) -> Tensor:
            return torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta")

        for target, entry in stored.items():
            names = tuple(name for name, _ in entry.sources)
            try:
                made = entry.convert(target, model, on_meta)
            except (RuntimeError, ValueError, KeyError, IndexError) as error:
                raise SourceError(f"the tensor {names[0]} cannot be made into {target}: {error}") from error
            for parameter, value in made.items():
                if parameter not in state:
                    raise SourceError(f"the tensor {names[0]} makes {parameter}, which this model does not have")
                if value.shape != state[parameter].shape:
                    use = "" if names == (parameter,) else f" as {parameter}"
                    raise SourceError(
                        f"the tensor {names[0]} has the shape {list(value.shape)}{use}, "
                        f"config.json asks for {list(state[parameter].shape)}"
                    )
                self.names[parameter] = names
                self._stored[parameter] = (target, entry)

    def _share_tied(self, state: Mapping[str, Tensor]) -> None:
        """List a tied parameter that is stored once under its other names too."""
        groups: dict[int, list[str]] = {}
        for name, value in state.items():
            groups.setdefault(id(value), []).append(name)
        for group in groups.values():
            source = next((name for name in group if name in self.names), None)
            if source is not None:
                for name in group:
                    self.names.setdefault(name, self.names[source])
                    self._stored.setdefault(name, self._stored[source])

    def tensor_name(self, parameter: str) -> str:
        """The one tensor on disk that is this parameter, unchanged.

        Raises:
            SourceError: it is made of several tensors, or of none.
        """
        names = self.names.get(parameter, ())
        if len(names) != 1 or self._stored[parameter][1].converter is not None:
            made_of = f"{len(names)} tensors ({names[0]} ...)" if names else "no tensor"
            raise SourceError(f"{parameter} is made of {made_of} on disk and has no name of its own there")
        return names[0]

    def materialize(
        self, model: nn.Module, read: Callable[[str], Tensor], *, prefix: str = "", dtype: torch.dtype | None = None
    ) -> None:
        """Give the parameters under ``prefix`` that are still on meta their data; packed layers stay as they are.

        Args:
            model: the model that this map was made for.
            read: gives a tensor on disk by name.
            prefix: a module's name, or "" for all; tied parameters get their data wherever they are.
            dtype: convert to it; None keeps the stored type.

        Raises:
            SourceError: a parameter is not on disk.
        """
        state = model.state_dict(keep_vars=True)
        tied: dict[int, list[str]] = {}
        for name, value in state.items():
            tied.setdefault(id(value), []).append(name)
        wanted = [name for name in state if not prefix or name == prefix or name.startswith(f"{prefix}.")]
        done: set[int] = set()
        for name in wanted:
            value = state[name]
            if not value.is_meta or id(value) in done or name in self.packed:
                continue
            if name not in self._stored:
                raise SourceError(f"the model has no tensor for {name}", fix="The download may be incomplete")
            target, entry = self._stored[name]
            for made_name, data in entry.convert(target, model, read).items():
                old = state[made_name]
                data = data.to(dtype) if dtype is not None and data.is_floating_point() else data
                _assign(model, tied[id(old)], data, old)
                done.add(id(old))


def _expert_weights(model: nn.Module) -> dict[str, str]:
    """Name on disk of every weight of linear experts -> parameter."""
    return {
        f"{on_disk}.weight": f"{name}.{layer}.weight"
        for name, experts in linear_experts(model).items()
        for layer, on_disk in experts.stored.items()
    }


def _refuse_lost_blocks(model: nn.Module, used: Iterable[str], unused: Iterable[str]) -> None:
    """A whole block that the model does not have is no extra, but a model that config.json cuts short.

    Raises:
        SourceError: naming the block, unless transformers itself leaves it out.
    """
    known, lost = _by_number(used), _by_number(unused)
    left_out = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    for (stem, number), names in lost.items():
        wholes = [parts for (other, _), parts in known.items() if other == stem]
        first = f"{stem}.{number}.{min(names)}"
        if any(parts <= names for parts in wholes) and not any(pattern.search(first) for pattern in left_out):
            raise SourceError(
                f"the weight files hold the block {stem}.{number}, and config.json asks for {len(wholes)} blocks only",
                fix="Set num_hidden_layers in config.json to what is stored",
            )


def _by_number(names: Iterable[str]) -> dict[tuple[str, str], set[str]]:
    """``model.layers.3.mlp.up_proj.weight`` -> (``model.layers``, ``3``): {``mlp.up_proj.weight``, ...}."""
    blocks: dict[tuple[str, str], set[str]] = {}
    for name in names:
        found = re.fullmatch(r"(.+?)\.(\d+)\.(.+)", name)
        if found:
            blocks.setdefault((found[1], found[2]), set()).add(found[3])
    return blocks


def _assign(model: nn.Module, names: Iterable[str], data: Tensor, old: Tensor) -> None:
    """Put one tensor under all the names of a parameter or persistent buffer."""
    new: Any = nn.Parameter(data, requires_grad=False) if isinstance(old, nn.Parameter) else data
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new)

"""What a recipe will do to a model, layer by layer, from names and shapes alone: no weight is read."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from quantkit.architectures import ARCHITECTURES, DecoderBlocks, find_decoder_blocks
from quantkit.errors import RecipeError, SourceError
from quantkit.formats.compressed_tensors import layer_specs
from quantkit.formats.safetensors_file import TensorSpec
from quantkit.recipe import Quantization, Recipe
from quantkit.scheme import GROUP_SIZES, QuantScheme
from quantkit.source import ModelSource, open_source


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A layer that will be quantized.

    Attributes:
        name: of the module.
        block: index of the decoder block it is in.
        shape: [out_features, in_features].
        scheme: how its weight will be stored.
        bytes_before: of its weight in the source.
        bytes_after: of codes, scales and shape in the checkpoint.
    """

    name: str
    block: int
    shape: tuple[int, int]
    scheme: QuantScheme
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided before the work starts.

    Attributes:
        source: the model.
        model: its skeleton, parameters on meta.
        decoder: its decoder blocks.
        layers: what is quantized, in the order of the model.
        ignored: linear layers that stay as they are.
        specs: every tensor of the checkpoint.
        notes: what the user should know.
    """

    source: ModelSource
    model: nn.Module
    decoder: DecoderBlocks
    layers: tuple[LayerPlan, ...]
    ignored: tuple[str, ...]
    specs: Mapping[str, TensorSpec]
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def schemes(self) -> dict[str, QuantScheme]:
        """Layer name -> scheme."""
        return {layer.name: layer.scheme for layer in self.layers}

    @property
    def copied(self) -> tuple[str, ...]:
        """Tensors that go from the source to the checkpoint byte for byte."""
        return tuple(name for name in self.specs if name in self.source.tensors)

    @property
    def bytes_before(self) -> int:
        """Tensor bytes of the source."""
        return sum(info.nbytes for info in self.source.tensors.values())

    @property
    def bytes_after(self) -> int:
        """Tensor bytes of the checkpoint."""
        return sum(spec.nbytes for spec in self.specs.values())

    @property
    def bits_per_weight(self) -> float:
        """Stored bits for each quantized weight, scales included."""
        weights = sum(layer.shape[0] * layer.shape[1] for layer in self.layers)
        return 8 * sum(layer.bytes_after for layer in self.layers) / weights

    def in_block(self, index: int) -> list[LayerPlan]:
        """The layers of one decoder block."""
        return [layer for layer in self.layers if layer.block == index]

    def to_dict(self) -> dict[str, Any]:
        """The plan as one JSON document."""
        return {
            "model": self.source.name,
            "layers": [asdict(layer) | {"scheme": str(layer.scheme)} for layer in self.layers],
            "ignored": list(self.ignored),
            "copied_tensors": len(self.copied),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bits_per_quantized_weight": self.bits_per_weight,
            "notes": list(self.notes),
        }


def make_plan(recipe: Recipe, source: ModelSource | None = None) -> Plan:
    """Decide what happens to every tensor of the model.

    Args:
        recipe: with a quantization section.
        source: the recipe's model, if it is open already.

    Raises:
        RecipeError: a pattern that matches nothing, a group size that does not divide, a layer that cannot be taken.
        SourceError: the model cannot be read, or is quantized already.
    """
    if recipe.quantization is None:
        raise RecipeError("the recipe has no `quantization` section, so there is nothing to plan")
    source = source or open_source(recipe.require_model())
    if source.quantization is not None:
        method = source.quantization.get("quant_method", "unknown method")
        raise SourceError(f"{source.name} is quantized already ({method})", fix="Give the original model")
    model = source.skeleton()
    decoder = find_decoder_blocks(model, source.config.model_type)
    linears, others = _weighty_modules(model, decoder)
    ignored = _ignored(recipe.quantization.ignore, [*linears, *others])
    _refuse_what_stays_unsaid(linears, others, ignored, decoder)
    targets = {name: module for name, module in linears.items() if name not in ignored}
    if not targets:
        raise RecipeError("quantization.ignore leaves no layer to quantize")
    _check_fused_units(source.config.model_type, decoder, targets)
    scheme = recipe.quantization.scheme(_group_size(recipe.quantization, targets))
    return _lay_out(source, model, decoder, targets, tuple(n for n in linears if n in ignored), scheme)


def _weighty_modules(model: nn.Module, decoder: DecoderBlocks) -> tuple[dict[str, nn.Linear], list[str]]:
    """All linear layers, and the other modules inside decoder blocks that own a matrix."""
    linears, others = {}, []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            linears[name] = module
        elif name.startswith(f"{decoder.name}.") and any(p.dim() > 1 for p in module.parameters(recurse=False)):
            others.append(name)
    return linears, others


def _ignored(patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    """Names that a pattern matches: the exact name, or a regular expression that matches all of it."""
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if name == pattern or re.fullmatch(pattern, name)}
        if not matched:
            raise RecipeError(
                f"quantization.ignore: {pattern!r} matches no layer of the model",
                fix=f"Layers are called {names[0]} ... {names[-1]}; a pattern must match the whole name",
            )
        found |= matched
    return found


def _refuse_what_stays_unsaid(
    linears: Mapping[str, nn.Linear], others: Sequence[str], ignored: set[str], decoder: DecoderBlocks
) -> None:
    """Whatever could be quantized and cannot be yet must be ignored by name, so that it is no surprise."""
    outside = [name for name in linears if name not in ignored and not name.startswith(f"{decoder.name}.")]
    if outside:
        raise RecipeError(
            f"quantizing {outside[0]}, which is outside the decoder blocks, is not supported yet",
            fix="Add it to quantization.ignore",
        )
    matrices = [name for name in others if name not in ignored]
    if matrices:
        raise RecipeError(
            f"quantizing {matrices[0]}, which holds matrices but is no linear layer, is not supported yet "
            f"({len(matrices)} such modules)",
            fix="Add them to quantization.ignore to keep them as they are",
        )


def _check_fused_units(model_type: str, decoder: DecoderBlocks, targets: Mapping[str, nn.Linear]) -> None:
    """An engine joins these layers into one matrix: all of them are quantized or none."""
    facts = ARCHITECTURES.get(model_type)
    for index in range(len(decoder.blocks)):
        for unit in facts.fused_units if facts else ():
            names = [f"{decoder.name}.{index}.{part}" for part in unit]
            taken = [name for name in names if name in targets]
            if taken and len(taken) < len(names):
                left = next(name for name in names if name not in targets)
                raise RecipeError(
                    f"quantization.ignore splits a unit that engines fuse: {left} is ignored and {taken[0]} is not",
                    fix=f"Ignore all of {', '.join(part.rpartition('.')[2] for part in unit)}, or none",
                )


def _group_size(quantization: Quantization, targets: Mapping[str, nn.Linear]) -> int:
    """The recipe's group size if it divides every layer; for ``auto`` the largest that does."""
    asked = quantization.group_size
    if asked == "auto":
        for size in GROUP_SIZES:
            if all(module.in_features % size == 0 for module in targets.values()):
                return size
        name, module = next((n, m) for n, m in targets.items() if m.in_features % GROUP_SIZES[-1])
        raise RecipeError(
            f"quantization.group_size: auto found none of {', '.join(map(str, GROUP_SIZES))} that divides every layer "
            f"({name} has {module.in_features} input columns)",
            fix="Use group_size: channel, or ignore that layer",
        )
    wrong = [name for name, module in targets.items() if asked > 0 and module.in_features % asked]
    if wrong:
        raise RecipeError(
            f"quantization.group_size: {asked} does not divide the {targets[wrong[0]].in_features} input columns of "
            f"{wrong[0]} (and {len(wrong) - 1} more layers)",
            fix="Use group_size: auto",
        )
    return asked


def _lay_out(
    source: ModelSource,
    model: nn.Module,
    decoder: DecoderBlocks,
    targets: Mapping[str, nn.Linear],
    ignored: tuple[str, ...],
    scheme: QuantScheme,
) -> Plan:
    """Every tensor of the checkpoint in the order of the source, codes in the place of their weight."""
    names_on_disk = source.weight_map(model)
    layer_of = {names_on_disk.tensor_name(f"{name}.weight"): name for name in targets}
    specs: dict[str, TensorSpec] = {}
    layers: dict[str, LayerPlan] = {}
    for tensor, info in source.tensors.items():
        name = layer_of.get(tensor)
        if name is None:
            specs[tensor] = TensorSpec(info.dtype, info.shape)
            continue
        shape = (info.shape[0], info.shape[1])
        made = layer_specs(tensor.removesuffix(".weight"), shape, scheme, info.dtype)
        specs |= made
        bytes_after = sum(spec.nbytes for spec in made.values())
        block = int(name.removeprefix(f"{decoder.name}.").split(".")[0])
        layers[name] = LayerPlan(name, block, shape, scheme, info.nbytes, bytes_after)
    notes = () if decoder.known else (f"family {source.config.model_type} is not in the table; blocks: {decoder.name}",)
    return Plan(source, model, decoder, tuple(layers[name] for name in targets), ignored, specs, notes)

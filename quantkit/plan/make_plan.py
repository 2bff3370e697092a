"""What a recipe will do to a model, layer by layer, from names and shapes alone: no weight is read."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from quantkit.architectures import DecoderBlocks, find_decoder_blocks
from quantkit.errors import RecipeError, SourceError
from quantkit.formats import Format
from quantkit.formats.expert_names import experts_of
from quantkit.formats.holds import why_not_experts
from quantkit.formats.safetensors_file import TensorSpec
from quantkit.plan.kv_scales import attention_on_disk, scale_specs
from quantkit.plan.layers import (
    IGNORED,
    check_experts,
    check_fused_units,
    matching,
    refuse_what_stays_unsaid,
    weighty_modules,
)
from quantkit.plan.schemes import choose_schemes
from quantkit.recipe import CheckpointOutput, Quantization, Recipe, name_places
from quantkit.recipe.quantization import ROUTED, Experts
from quantkit.scheme import QuantScheme
from quantkit.source import ModelSource, TensorInfo, open_model
from quantkit.source.experts import linear_experts, router_names
from quantkit.transforms import Transform, fold_notes, load_transform, rewritten_parameters
from quantkit.tuning.small_parameter import small_parameters

NAMED = 3  # tensors that a note names before it counts the rest


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A layer that will be quantized.

    Attributes:
        name: of the module.
        block: index of the decoder block it is in.
        shape: [out_features, in_features].
        scheme: how its weight will be stored.
        bytes_before: of its weight in the source.
        bytes_after: of codes, scales and what belongs to them in the first output.
    """

    name: str
    block: int
    shape: tuple[int, int]
    scheme: QuantScheme
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """A checkpoint that will be written.

    Attributes:
        output: as the recipe has it.
        format: of the quantized layers.
        specs: every tensor of the checkpoint, in the order of the source.
    """

    output: CheckpointOutput
    format: Format
    specs: Mapping[str, TensorSpec]

    @property
    def nbytes(self) -> int:
        """Tensor bytes of the checkpoint."""
        return sum(spec.nbytes for spec in self.specs.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided before the work starts.

    Attributes:
        source: the model.
        model: its skeleton, parameters on meta.
        decoder: its decoder blocks.
        layers: what is quantized, in the order of the model.
        ignored: linear layers and routers of experts that stay as they are.
        outputs: the checkpoints; all hold the same codes and scales.
        rewritten: parameters that transforms or tuning may change and that are therefore not copied.
        notes: what the user should know.
        transforms: of the recipe, in its order.
        input_observer: what finds static input scales.
        experts: which tokens the experts of mixture models are calibrated with.
        attention: module whose keys and values get static scales -> its name on disk; none unless the recipe asks.
    """

    source: ModelSource
    model: nn.Module
    decoder: DecoderBlocks
    layers: tuple[LayerPlan, ...]
    ignored: tuple[str, ...]
    outputs: tuple[OutputPlan, ...]
    rewritten: frozenset[str] = frozenset()
    notes: tuple[str, ...] = field(default_factory=tuple)
    transforms: tuple[Transform, ...] = ()
    input_observer: str = "minmax"
    experts: Experts = ROUTED
    attention: Mapping[str, str] = field(default_factory=dict)

    @property
    def schemes(self) -> dict[str, QuantScheme]:
        """Layer name -> scheme."""
        return {layer.name: layer.scheme for layer in self.layers}

    @property
    def scale_dtype(self) -> torch.dtype:
        """In which scales are found, so that every output stores them without loss."""
        dtypes = {output.format.scale_dtype(self.source.dtype) for output in self.outputs}
        return torch.float16 if torch.float16 in dtypes else self.source.dtype

    @property
    def has_float16_scales(self) -> bool:
        """Whether an output stores scales in float16 whatever the model's type is."""
        return any(output.format.name != "compressed-tensors" for output in self.outputs)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor of the first output."""
        return self.outputs[0].specs

    def tensor_name(self, parameter: str) -> str:
        """The name on disk of a parameter that has one of its own there."""
        return self.source.weight_map(self.model).tensor_name(parameter)

    def name_on_disk(self, layer: str) -> str:
        """The name of a layer's tensors, without ``.weight``."""
        return self.tensor_name(f"{layer}.weight").removesuffix(".weight")

    def engine_name(self, layer: str) -> str:
        """What engines call a layer that is not quantized: as on disk, if it is in a block and has a name there."""
        names = self.source.weight_map(self.model).names.get(f"{layer}.weight", ())
        is_inside = layer.startswith(f"{self.decoder.name}.")
        return names[0].removesuffix(".weight") if is_inside and len(names) == 1 else layer

    @property
    def copied(self) -> tuple[str, ...]:
        """Tensors that go from the source to the checkpoint byte for byte."""
        written = {self.tensor_name(f"{layer.name}.weight") for layer in self.layers}
        written |= {self.tensor_name(parameter) for parameter in self.rewritten}
        return tuple(name for name in self.source.tensors if name not in written)

    @property
    def bytes_before(self) -> int:
        """Tensor bytes of the source."""
        return sum(info.nbytes for info in self.source.tensors.values())

    @property
    def bytes_after(self) -> int:
        """Tensor bytes of the first output."""
        return self.outputs[0].nbytes

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
            "outputs": [
                {"format": entry.format.name, "path": str(entry.output.path), "bytes": entry.nbytes}
                for entry in self.outputs
            ],
            "notes": list(self.notes),
        }


def make_plan(
    recipe: Recipe, source: ModelSource | None = None, *, schemes: Mapping[str, QuantScheme] | None = None
) -> Plan:
    """Decide what happens to every tensor of the model.

    Args:
        recipe: with a quantization section.
        source: the recipe's model, if it is open already.
        schemes: what an allocation has chosen for the layers that are quantized; None: what the recipe says.

    Raises:
        RecipeError: a pattern that matches nothing, a group size that does not divide, a layer that cannot be taken.
        SourceError: the model cannot be read, or is quantized already.
    """
    if recipe.quantization is None:
        raise RecipeError("the recipe has no `quantization` section, so there is nothing to plan")
    with name_places(recipe):
        return _decide(recipe, recipe.quantization, source or open_model(recipe), schemes)


def _decide(
    recipe: Recipe, quantization: Quantization, source: ModelSource, schemes: Mapping[str, QuantScheme] | None
) -> Plan:
    """The plan of a recipe; its errors know their keys."""
    if source.quantization is not None:
        method = source.quantization.get("quant_method", "unknown method")
        raise SourceError(f"{source.name} is quantized already ({method})", fix="Give the original model")
    model = source.skeleton(use_linear_experts=True)
    decoder = find_decoder_blocks(model, source.config.model_type)
    linears, others = weighty_modules(model, decoder)
    routers = dict.fromkeys(router_names(model))
    ignored = matching(quantization.ignore, [*linears, *others], list(linear_experts(model)))
    refuse_what_stays_unsaid(linears, {name: others[name] for name in others if name not in routers}, ignored, decoder)
    ignored |= set(routers)
    targets = {name: module for name, module in linears.items() if name not in ignored}
    schemes = schemes or choose_schemes(quantization, targets)
    if not schemes:
        raise RecipeError(
            "quantization.ignore (with overrides to none) leaves no layer to quantize", keys=("quantization", "ignore")
        )
    stays = dict.fromkeys(ignored, IGNORED) | {name: "kept by an override" for name in targets if name not in schemes}
    check_experts(model, schemes, stays)
    check_fused_units(schemes, stays)
    kept = tuple(name for name in (*linears, *(name for name in routers if name in others)) if name not in schemes)
    return _lay_out(recipe, source, model, decoder, schemes, kept)


def _lay_out(
    recipe: Recipe,
    source: ModelSource,
    model: nn.Module,
    decoder: DecoderBlocks,
    schemes: Mapping[str, QuantScheme],
    ignored: tuple[str, ...],
) -> Plan:
    """Every tensor of every checkpoint in the order of the source, codes in the place of their weight."""
    names_on_disk = source.weight_map(model)
    layer_of = {names_on_disk.tensor_name(f"{name}.weight"): name for name in schemes}
    has_kv_scales = recipe.require_quantization().kv_cache is not None
    attention = attention_on_disk(decoder, names_on_disk.names) if has_kv_scales else {}
    outputs = []
    for output in recipe.checkpoints:
        number = recipe.outputs.index(output)
        form = Format(output.format, tuple(output.format_options.items()))
        specs: dict[str, TensorSpec] = {}
        for tensor, info in source.tensors.items():
            name = layer_of.get(tensor)
            if name is None:
                specs[tensor] = TensorSpec(info.dtype, info.shape)
            else:
                specs |= _layer_specs(number, form, tensor.removesuffix(".weight"), info, schemes[name])
        for module in attention.values():
            specs |= scale_specs(module, source.dtype)
        if form.name == "awq" and len(set(schemes.values())) > 1:
            both = " and ".join(map(str, list(dict.fromkeys(schemes.values()))[:2]))
            raise RecipeError(
                f"outputs[{number}]: awq holds one scheme for all layers, and the recipe has {both}",
                keys=("outputs", number, "format"),
            )
        outputs.append(OutputPlan(output, form, specs))
    layers: dict[str, LayerPlan] = {}
    for tensor, name in layer_of.items():
        info = source.tensors[tensor]
        made = _layer_specs(0, outputs[0].format, tensor.removesuffix(".weight"), info, schemes[name])
        block = int(name.removeprefix(f"{decoder.name}.").split(".")[0])
        bytes_after = sum(spec.nbytes for spec in made.values())
        shape = (info.shape[0], info.shape[1])
        layers[name] = LayerPlan(name, block, shape, schemes[name], info.nbytes, bytes_after)
    notes: tuple[str, ...] = (
        () if decoder.known else (f"family {source.config.model_type} is not in the table; blocks: {decoder.name}",)
    )
    notes += _unread_note(names_on_disk.unused)
    notes += (source.gguf.note(source.name),) if source.gguf is not None and source.gguf.codes else ()
    in_order = tuple(layers[name] for name in schemes)
    quantization = recipe.require_quantization()
    transforms = tuple(load_transform(t.name, t.model_dump(exclude={"name"})) for t in quantization.transforms)
    family = source.config.model_type
    rewritten = rewritten_parameters(transforms, decoder, schemes, family)
    if quantization.has_target:
        notes += ("the target decides: schemes are chosen once sensitivities are measured; these are the recipe's own",)
    if quantization.tuning is not None:
        rewritten |= frozenset(small_parameters(model))
    notes += fold_notes(transforms, decoder, schemes, family)
    observer, experts = quantization.input_observer, quantization.experts
    written, more = tuple(outputs), (transforms, observer, experts, attention)
    return Plan(source, model, decoder, in_order, ignored, written, rewritten, notes, *more)


def _unread_note(names: Sequence[str]) -> tuple[str, ...]:
    """Tensors that no parameter of the model takes go over unchanged; the user may take them for a part of it."""
    if not names:
        return ()
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return (f"transformers does not load {', '.join(names[:NAMED])}{more}: copied as they are",)


def _layer_specs(number: int, form: Format, name: str, info: TensorInfo, scheme: QuantScheme) -> dict[str, TensorSpec]:
    """The tensors of a layer in one output.

    Raises:
        RecipeError: the format has no place for this shape, or no engine reads it from there.
    """
    problem = why_not_experts(form.name, scheme) if experts_of(name) else None
    if problem is not None:
        raise RecipeError(
            f"outputs[{number}]: {problem}, and {name} is {scheme}",
            fix=f"Give {experts_of(name)} another scheme by an override, such as W4A16 or W8A8"
            + (", or write gptq" if scheme.input is None else ""),
            keys=("outputs", number, "format"),
        )
    try:
        return form.layer_specs(name, (info.shape[0], info.shape[1]), scheme, info.dtype)
    except ValueError as error:
        raise RecipeError(
            f"outputs[{number}]: {error}, and {name} has [{info.shape[0]}, {info.shape[1]}]",
            fix="Add it to quantization.ignore, or write another format",
            keys=("outputs", number, "format"),
        ) from error

"""By which names transformers looks for tensors on disk, and which it puts together into one parameter."""

from collections.abc import Mapping

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


class TensorRenaming:
    """transformers' own rules for one model.

    Args:
        model: of transformers; its parameters decide whether the base model's prefix is added or taken away.
    """

    def __init__(self, model: nn.Module) -> None:
        transforms = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
        self._by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}
        self._prefix = model.base_model_prefix
        self._state: Mapping[str, Tensor] = model.state_dict(keep_vars=True)

    def rename(self, name: str) -> tuple[str, str | None]:
        """The parameter that a tensor on disk goes to, and the pattern of the converter that takes it, if one does."""
        target, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._state)
        return target, pattern

    def converter(self, pattern: str) -> WeightConverter:
        """What makes a parameter of tensors whose names match a pattern."""
        return self._by_pattern[pattern]

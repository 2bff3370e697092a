"""Why a model's logits are not finite: a broken weight is named."""

import torch
from torch import nn


def why_not_finite(name: str, model: nn.Module) -> str:
    """One line for the user of a model whose logits are NaN or infinite.

    Args:
        name: of the model.
        model: as the engine runs it; scales of packed layers were found finite when they were read.
    """
    line = f"the logits of {name} are not finite (NaN or infinity)"
    for parameter, value in model.named_parameters():
        count = int((~torch.isfinite(value)).sum())
        if count:
            return f"{line}: {parameter} holds {count} such values. Download or make the model again"
    return f"{line}, and its weights are: its activations overflow. Give a model that does not in this dtype"

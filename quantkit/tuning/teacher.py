"""What the original says to the tuning windows, kept as the output of its last block: a row a token, no logits."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantkit.calibration.activations import enter_blocks, forget_weights
from quantkit.plan import Plan
from quantkit.tuning.windows import Windows

TARGET_DTYPE = torch.bfloat16  # logits of a row that is rounded so differ by far less than those of any 8-bit model


@torch.inference_mode()
def original_outputs(plan: Plan, batches: Sequence[Windows], progress: Callable[[int, int], None]) -> list[Tensor]:
    """Run the original block by block over all windows; one block is in memory at a time.

    Args:
        plan: of the model; everything outside its blocks has its weights, the blocks have none and have none after it.
        batches: the windows.
        progress: is called with (blocks done, all blocks).

    Returns:
        [B, T, hidden] bfloat16 output of the last block for every batch.
    """
    model, decoder = plan.model, plan.decoder
    entered = enter_blocks(model, decoder, [(batch.token_ids, batch.token_mask) for batch in batches])
    hidden = [batch.hidden for batch in entered]
    for index, block in enumerate(decoder.blocks):
        plan.source.materialize(model, prefix=f"{decoder.name}.{index}", dtype=torch.float32)
        for number, batch in enumerate(entered):
            output = block(hidden[number], **batch.kwargs[index])
            hidden[number] = output[0] if isinstance(output, tuple) else output
        forget_weights([block])
        progress(index + 1, len(decoder.blocks))
    return [tensor.to(TARGET_DTYPE) for tensor in hidden]

"""What a configuration and a model must be for the kernels of a device, checked before weights are read."""

from transformers import PretrainedConfig

from quantkit.errors import EngineError, UsageError
from quantkit.serve.config import EngineConfig
from quantkit.serve.models.decoder_config import UnknownDecoderError, read_decoder_config
from quantkit_kernels.reference import BLOCK_SIZES, HEAD_DIM_STEP, MAX_HEAD_DIM
from quantkit_kernels.reference.attention import is_head_dim

FIX = "give device=cpu"


def check_device_limits(config: EngineConfig, model: PretrainedConfig) -> None:
    """See that attention over the paged cache runs on a device.

    Args:
        config: of the engine.
        model: the model's configuration; one that no decoder of ours knows is left to `load_model`.

    Raises:
        UsageError: the blocks of the cache have another size than the kernels take.
        EngineError: the heads of the model have.
    """
    if config.kv_block_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        raise UsageError(
            f"kv_block_size={config.kv_block_size} is not one of {sizes}, which the kernels of a GPU take",
            fix=f"Choose one of them, or {FIX}",
        )
    try:
        head_dim = read_decoder_config(model).head_dim
    except UnknownDecoderError:
        return
    if not is_head_dim(head_dim):
        raise EngineError(
            f"{model.model_type} has head_dim={head_dim}, and the kernels of a GPU take "
            f"multiples of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to {MAX_HEAD_DIM}",
            fix=FIX,
        )

"""The cache of an engine and everything that keeps its books, put together."""

from quantkit.serve.block_mover import BlockMover
from quantkit.serve.block_pool import BlockPool
from quantkit.serve.block_tables import BlockTables
from quantkit.serve.cache_size import make_cache, make_swap_space
from quantkit.serve.config import EngineConfig
from quantkit.serve.models.loader import LoadedModel
from quantkit.serve.preemption import PreemptionCost


class PagedMemory:
    """Memory for keys and values.

    Args:
        config: of the engine.
        loaded: the model.
        max_model_len: most tokens of a request.

    Attributes:
        cache: the keys and values.
        pool: which blocks are in use.
        mover: copies blocks, to host memory too.
        tables: gives blocks to requests.

    Raises:
        EngineError: there is no room for a block.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel, max_model_len: int) -> None:
        self.cache = make_cache(config, loaded, max_model_len)
        self.pool = BlockPool(self.cache.num_blocks, self.cache.kv_block_size)
        self.mover = BlockMover(self.cache, make_swap_space(config, loaded))
        cost = PreemptionCost(
            block_bytes=self.cache.nbytes // self.cache.num_blocks,
            weight_bytes=loaded.weight_bytes,
            num_parameters=loaded.weight_bytes // loaded.dtype.itemsize,  # at least; packed weights hold more
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self.tables = BlockTables(
            self.pool,
            enable_prefix_caching=config.enable_prefix_caching,
            chunk=config.chunk if config.deterministic else None,
            mover=self.mover,
            cost=cost if config.swap_space else None,
        )

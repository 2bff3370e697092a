"""config.json and the headers of a hub id: config.json whole, of weight files the headers by range requests.

What a snapshot in the hub's cache holds is read there. Without network that is all there is; what is missing is counted
from the configuration and said so.
"""

from pathlib import Path

from quantkit.capacity.stored_tensors import StoredTensor
from quantkit.errors import SourceError

CONFIG = "config.json"
NOTE = "parameters are counted from config.json"


def download_config(name: str) -> Path:
    """config.json in the hub's cache, fetched if need be.

    Args:
        name: hub id.

    Raises:
        SourceError: there is no such model, it may not be read, or the hub cannot be reached; one line.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is that of the client below
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(hf_hub_download(name, CONFIG))
    except GatedRepoError as error:
        raise SourceError(
            f"{name} is gated", fix="Accept its terms on the hub and log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"no folder and no hub model is called {name}",
            fix="Check the name; if it is private, log in with `hf auth login`",
        ) from error
    except HFValidationError as error:
        raise SourceError(f"no such folder: {name}, and it is no valid hub id") from error
    except LocalEntryNotFoundError as error:
        raise SourceError(
            f"no folder is called {name}, and the hub {_why(error)} and its cache does not hold {name}",
            fix="Check the name, go online once, or give the model's config.json",
        ) from error
    except EntryNotFoundError as error:
        raise SourceError(f"{name} has no {CONFIG} on the hub", fix="It is no transformers model") from error
    except (HTTPError, OSError) as error:
        raise SourceError(f"cannot download {name}/{CONFIG}: {_first_line(error)}") from error


def hub_headers(name: str) -> tuple[tuple[StoredTensor, ...] | None, str | None]:
    """The tensors of a hub model by the headers of its weight files, or None and a note why there are none."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # as above
        HTTPError,
        NotASafetensorsRepoError,
        SafetensorsParsingError,
    )

    try:
        metadata = HfApi().get_safetensors_metadata(name)
    except NotASafetensorsRepoError:
        return None, f"{name} has no safetensors files: {NOTE}"
    except (HTTPError, SafetensorsParsingError, OSError, ValueError) as error:
        return None, f"no header could be read ({_first_line(error)[:80]}): {NOTE}"
    tensors = tuple(
        StoredTensor(tensor, tuple(info.shape), info.data_offsets[1] - info.data_offsets[0])
        for shard in metadata.files_metadata.values()
        for tensor, info in shard.tensors.items()
    )
    return tensors, None


def _why(error: BaseException) -> str:
    """What kept the hub from answering, as far as it is known."""
    cause = error.__cause__
    response = getattr(cause, "response", None)
    if response is not None:
        return f"answered {response.status_code}"
    return "took too long to answer" if "timeout" in type(cause).__name__.lower() else "cannot be reached"


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]

"""The optional packages of quantkit's extras, by the names under which pip installs them.

The name quantkit on PyPI is another project's, so no fix may tell a user to install an extra of that name.
"""

import shlex
from importlib import metadata


def install_command(extra: str) -> str:
    """The command that installs what an extra needs: ``pip install 'fastapi>=0.115' 'uvicorn>=0.30'``.

    Args:
        extra: a name of ``project.optional-dependencies`` in pyproject.toml.

    Returns:
        The packages that the installed quantkit lists; a clone that is not installed lists none, and is named itself.
    """
    try:
        listed = metadata.requires("quantkit") or []
    except metadata.PackageNotFoundError:
        listed = []
    packages = [name for name, _, marker in (line.partition("; ") for line in listed) if _is_of(marker, extra)]
    if not packages:
        return f"pip install '.[{extra}]' in the clone of quantkit's repository"
    return shlex.join(["pip", "install", *packages])


def _is_of(marker: str, extra: str) -> bool:
    return marker.replace('"', "'").endswith(f"extra == '{extra}'")

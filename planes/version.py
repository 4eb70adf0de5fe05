"""The version of the installed distribution."""

from importlib import metadata
from typing import Final


def version() -> str:
    """Return the version; a checkout that is not installed says so."""
    try:
        return metadata.version("sluicegate")
    except metadata.PackageNotFoundError:
        return "0+unknown"


USER_AGENT: Final = f"sluicegate/{version()}"

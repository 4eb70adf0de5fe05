"""The backend of the settings (D6.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planes.settings import Decision
    from relay.deciders.base import DecisionBackend


def backend_of(settings: Decision) -> DecisionBackend | None:
    """Return what decides, None if nothing is configured or it is not served yet."""
    return None

"""The backend of the settings, and what it lets clients ask (D6.5, D4.4)."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from encoders.decision_chat import LABELS
from encoders.decision_served import ModelLimits, Served
from encoders.systemone import url_of as systemone_url
from planes.settings import (
    ChatLogprobsBackend,
    LocalProvider,
    SystemOneBackend,
    SystemZeroBackend,
)
from planes.version import USER_AGENT
from relay.deciders import chat_logprobs, system_zero, systemone
from relay.deciders.endpoint import Endpoint
from relay.deciders.logged import LoggedBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from planes.settings import Settings
    from relay.attempts import Dialler
    from relay.deciders.base import DecisionBackend
    from relay.routing import Router

_NO_LIMITS: Final = ModelLimits()
_IMAGES: Final = ("image",)


def backend_of(
    settings: Settings, *, router: Callable[[], Router], dialler: Dialler
) -> DecisionBackend | None:
    """Return what decides, None if the plane is off.

    Args:
        router: the gateway's routes as they are now. dialler: who dials them.
    """
    backend = _backend(settings, router, dialler)
    return None if backend is None else LoggedBackend(backend)


def _backend(
    settings: Settings, router: Callable[[], Router], dialler: Dialler
) -> DecisionBackend | None:
    match settings.decision.backend:
        case ChatLogprobsBackend() as chat:
            return chat_logprobs.ChatLogprobsBackend(
                chat.model,
                router,
                dialler,
                top_logprobs=_top_logprobs(chat, settings),
                questions_at_once=chat.questions_at_once,
            )
        case SystemOneBackend() as wire:
            url = systemone_url(wire.base_url)
            return systemone.SystemOneBackend(_endpoint(wire, url, "systemone"), wire.model)
        case SystemZeroBackend() as service:
            url = system_zero.url_of(service.base_url)
            return system_zero.SystemZeroBackend(
                _endpoint(service, url, "system-zero"), own_credential=service.api_key is not None
            )
        case _:
            return None


def served_of(settings: Settings) -> Served:
    """Return what is refused before the backend is asked: the smaller limit of the model's and the
    backend's, and the kinds of attachments that both take.
    """
    backend, decision = settings.decision.backend, settings.decision
    most = _NO_LIMITS
    media = decision.media
    if isinstance(backend, ChatLogprobsBackend):
        listed = min(_top_logprobs(backend, settings), len(LABELS))
        most = ModelLimits(
            questions=backend.max_questions,
            choice_options=listed,
            score_levels=min(listed, _NO_LIMITS.score_levels),
        )
    if isinstance(backend, ChatLogprobsBackend | SystemOneBackend):
        media = tuple(kind for kind in media if kind in _IMAGES and backend.images)
    models = {
        name: ModelLimits(
            **{key: min(limit, int(model.limits.get(key, limit))) for key, limit in caps.items()}
        )
        for caps in [asdict(most)]
        for model in decision.models
        for name in (model.id, *model.aliases)
    }
    return Served(models=models, media=media)


def _top_logprobs(backend: ChatLogprobsBackend, settings: Settings) -> int:
    if backend.top_logprobs is not None:
        return backend.top_logprobs
    names = {candidate.provider for candidate in settings.candidates_of(backend.model)}
    local = all(isinstance(settings.providers[name], LocalProvider) for name in names)
    return chat_logprobs.LOCAL_TOP_LOGPROBS if local else chat_logprobs.HOSTED_TOP_LOGPROBS


def _endpoint(backend: SystemOneBackend | SystemZeroBackend, url: str, name: str) -> Endpoint:
    return Endpoint(
        f"the {name} server",
        url,
        api_key=backend.api_key.get_secret_value() if backend.api_key else "",
        timeout_s=backend.timeout_s,
        user_agent=USER_AGENT,
    )

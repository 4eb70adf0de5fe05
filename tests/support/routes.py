"""Routes with candidates of their own, for tests of failover on one shared gateway.

What a gateway learns of a candidate it keeps; so each test takes a route that no other has used.

    routes = Routes(up, {"plain": {}, "peek": {"peek_first_event_s": 0.5}}, count=20)
    GatewayProcess(config_for(up, **routes.config()))
    route = routes.take("peek")
    route.script("a", *json_answer({}, status=500))     # the first candidate
    route.script("b", *openai_stream(["Hi"]))           # the second
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tests.support.gateway import UPSTREAM_KEY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.fake_upstream import FakeUpstream, RecordedRequest, Step

LETTERS: Final = "abc"


@dataclass(frozen=True)
class Route:
    """One slug with the candidates a, b and c; the fake provider plays all of them."""

    slug: str
    up: FakeUpstream

    def name(self, letter: str) -> str:
        """The provider's name of a candidate, and its model's."""
        return f"{self.slug}-{letter}"

    def script(self, letter: str, *steps: Step, repeat: bool = False) -> None:
        """Sets a candidate's answer to one more request, or with repeat=True to all."""
        self.up.script_for(self.name(letter), *steps, repeat=repeat)

    def asked(self, letter: str) -> list[RecordedRequest]:
        """The requests that a candidate got."""
        return [r for r in self.up.requests if r.json["model"] == self.name(letter)]

    @property
    def order(self) -> str:
        """Who was asked, in order, since the route was made."""
        names = {self.name(letter): letter for letter in LETTERS}
        asked = (request.json["model"] for request in self.up.requests)
        return "".join(names[model] for model in asked if model in names)


class Routes:
    """All routes of one gateway.

    Args:
        kinds: settings of the providers of a route, by the kind's name; those under the key of a
            letter are for that candidate alone.
        count: how many routes of each kind there are.
        more: where it is another number, by kind.
    """

    def __init__(
        self,
        up: FakeUpstream,
        kinds: Mapping[str, Mapping[str, Any]],
        *,
        count: int,
        more: Mapping[str, int] | None = None,
    ) -> None:
        self.up = up
        self._kinds = kinds
        self._count = dict.fromkeys(kinds, count) | dict(more or {})
        self._taken: Counter[str] = Counter()

    def config(self) -> dict[str, Any]:
        """The `providers` and `models` of the configuration."""
        providers: dict[str, Any] = {}
        models: dict[str, Any] = {}
        for kind, settings in self._kinds.items():
            for number in range(self._count[kind]):
                route = Route(f"{kind}-{number}", self.up)
                names = [route.name(letter) for letter in LETTERS]
                for letter, name in zip(LETTERS, names, strict=True):
                    common = {k: v for k, v in settings.items() if k not in LETTERS}
                    base = {"shape": "openai", "base_url": self.up.base_url}
                    own = settings.get(letter, {})
                    providers[name] = base | {"api_key": UPSTREAM_KEY} | common | own
                models[route.slug] = {"candidates": [{"provider": n, "model": n} for n in names]}
        return {"providers": providers, "models": models}

    def take(self, kind: str) -> Route:
        """A route of that kind that no other test has."""
        number = self._taken[kind]
        assert number < self._count[kind], f"more than {number} routes of the kind {kind}"
        self._taken[kind] += 1
        return Route(f"{kind}-{number}", self.up)

"""M2.2, M3.3: which candidates serve a slug."""

from __future__ import annotations

import pytest

from relay.errors import ModelNotFound
from relay.routing import Candidate, Provider, Router
from relay.upstreams.unavailable import UnavailableUpstream


def provider(name: str) -> Provider:
    return Provider(name=name, upstream=UnavailableUpstream(name, "never started"))


ONE, TWO = provider("one"), provider("two")
FAST = (Candidate(provider=TWO, model="a"), Candidate(provider=ONE, model="b"))
ROUTER = Router(
    {"one": ONE, "two": TWO}, {"fast": FAST, "gone": ()}, {"openai": "api_key is empty"}
)


def test_a_listed_slug_has_its_candidates_in_order() -> None:
    assert ROUTER.resolve("fast") == FAST
    assert list(ROUTER.slugs()) == [("fast", "two")]


def test_any_model_of_a_provider_that_is_on_can_be_named() -> None:
    (candidate,) = ROUTER.resolve("one/org/model:x")
    assert (candidate.provider.name, candidate.model) == ("one", "org/model:x")


@pytest.mark.parametrize(
    ("slug", "told"),
    [
        ("nobody", "is not served here"),
        ("three/x", "is not served here"),
        ("one/", "is not served here"),
        ("/x", "is not served here"),
        ("gone", "switched off"),
        ("openai/gpt-4o", "the provider openai is off: api_key is empty"),
        ("one/" + "x" * 10_000, "is not served here"),
    ],
)
def test_what_is_not_served_says_why(slug: str, told: str) -> None:
    with pytest.raises(ModelNotFound) as error:
        ROUTER.resolve(slug)
    assert told in error.value.message
    assert len(error.value.message) < 1000
    assert (error.value.status, error.value.param) == (404, "model")

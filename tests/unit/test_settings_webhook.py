"""`billing.webhook` (O3, M4.3): its defaults, and what is refused."""

import pytest
from pydantic import SecretStr, ValidationError

from planes.settings import Settings, Webhook, explain, notices

HOOK = {"url": "https://h/hook/?tenant=1", "secret": "hush"}


def problem(webhook: object) -> str:
    """Return the one thing that is wrong with it, as `path: message`."""
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"billing": {"webhook": webhook}})
    ((path, message),) = explain(caught.value)
    return f"{'.'.join(map(str, path))}: {message}"


def test_it_has_the_contracts_defaults_and_keeps_its_url() -> None:
    """The URL is called as it is written, query and trailing slash too."""
    hook = Webhook.model_validate(HOOK)
    assert (hook.url, hook.secret) == (HOOK["url"], SecretStr("hush"))
    assert (hook.timeout_s, hook.authorize) == (5, False)
    assert not any(
        "webhook" in n for n in notices(Settings.model_validate({"billing": {"webhook": HOOK}}))
    )


@pytest.mark.parametrize(
    ("webhook", "complaint"),
    [
        ("https://h", "billing.webhook: must be a mapping"),
        (HOOK | {"url": "ftp://h"}, "billing.webhook.url: must begin with http:// or https://"),
        (HOOK | {"url": "http://h#x"}, "billing.webhook.url: must not have a fragment"),
        (HOOK | {"url": "http://u@h"}, "billing.webhook.url: must not hold a user or password"),
        ({"url": "http://h"}, "billing.webhook.secret: is missing"),
        (HOOK | {"secret": " "}, "billing.webhook.secret: must not be empty"),
        (HOOK | {"secret": None}, "billing.webhook.secret: must be text"),
        (HOOK | {"secret": "whsec_?"}, "billing.webhook.secret: must be base64 after `whsec_`"),
        (HOOK | {"secret": "whsec_"}, "billing.webhook.secret: must not be empty after `whsec_`"),
        (HOOK | {"timeout_s": 0}, "billing.webhook.timeout_s: must be more than 0"),
        (HOOK | {"authorise": True}, "billing.webhook.authorise: unknown key `authorise` (did"),
    ],
)
def test_a_wrong_one_is_refused(webhook: object, complaint: str) -> None:
    """One problem, at its place, in the file's words."""
    assert problem(webhook).startswith(complaint)


def test_a_secret_of_the_standard_form_is_taken() -> None:
    """`whsec_` and base64, as the Standard Webhooks specification writes it."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    assert Webhook.model_validate(HOOK | {"secret": secret}).secret == SecretStr(secret)

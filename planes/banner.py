"""What `serve` prints once it serves: the address, and a command to paste (O1.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planes.version import version

if TYPE_CHECKING:
    from planes.settings import Settings
    from relay.routing import Router

_KEY_VARIABLE: Final = "$SLUICEGATE_KEY"

_TEXT: Final = """
  sluicegate {version} serves on {base}

  key    {key}
  model  {model}, by {provider}

  A stream, token by token:

    curl -N {base}/v1/chat/completions \\
      -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' \\
      -d '{{"model": "{model}", "stream": true,
           "messages": [{{"role": "user", "content": "Say hi"}}]}}'

  The OpenAI SDK: OpenAI(base_url="{base}/v1", api_key="{key}")
"""


def banner(settings: Settings, host: str, port: int, router: Router, *, embedded: bool) -> str:
    """Return the text.

    The development key of the built-in defaults is shown; a key of the user's never is.
    """
    shown = f"[{host}]" if ":" in host else host
    base = f"http://{'127.0.0.1' if shown == '0.0.0.0' else shown}:{port}"
    model, provider = next(iter(router.slugs()), ("<model>", "nobody: no model is on"))
    key = settings.keys[0].key.get_secret_value() if embedded and settings.keys else _KEY_VARIABLE
    text = _TEXT.format(version=version(), base=base, key=key, model=model, provider=provider)
    # a shell expands a variable in double quotes only
    return text.replace(
        f"'Authorization: Bearer {_KEY_VARIABLE}'", f'"Authorization: Bearer {_KEY_VARIABLE}"'
    )

"""What `serve` prints once it serves: the address, and a command to paste (O1.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planes.version import version

if TYPE_CHECKING:
    from planes.settings import Settings
    from relay.routing import Router

_TEXT: Final = """
  sluicegate {version} serves on {base}

  key    {key}
  model  {model}, by {provider}

  A stream, token by token:

    curl -N {base}/v1/chat/completions \\
      -H {header} -H 'Content-Type: application/json' \\
      -d '{{"model": "{model}", "stream": true,
           "messages": [{{"role": "user", "content": "Say hi"}}]}}'

  The OpenAI SDK: OpenAI(base_url="{base}/v1", api_key={argument})
"""


def banner(settings: Settings, host: str, port: int, router: Router, *, embedded: bool) -> str:
    """Return the text.

    The development key of the built-in defaults is shown; a key of the user's never is.
    """
    shown = f"[{host}]" if ":" in host else host
    base = f"http://{'127.0.0.1' if shown == '0.0.0.0' else shown}:{port}"
    model, provider = next(iter(router.slugs()), ("<model>", "nobody: no model is on"))
    if embedded and settings.keys:
        key = settings.keys[0].key.get_secret_value()
        header, argument = f"'Authorization: Bearer {key}'", f'"{key}"'
    else:
        key = "one of the configuration; the lines below take it from $SLUICEGATE_KEY"
        header = '"Authorization: Bearer $SLUICEGATE_KEY"'  # a shell expands it in these quotes
        argument = 'os.environ["SLUICEGATE_KEY"]'
    return _TEXT.format(
        version=version(),
        base=base,
        key=key,
        header=header,
        argument=argument,
        model=model,
        provider=provider,
    )

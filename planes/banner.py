"""What `serve` prints once it serves: the address, and a command to paste (O1.1)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from planes.settings import LocalProvider
from planes.version import version

if TYPE_CHECKING:
    from planes.settings import Settings
    from relay.routing import Router

_TEXT: Final = """
  sluicegate {version} serves on {base}

  key    {key}
  model  {model}, by {provider}
  store  {store}

  A stream, token by token:

    curl -N {base}/v1/chat/completions \\
      -H {header} -H 'Content-Type: application/json' \\
      -d '{{"model": "{model}", "stream": true,
           "messages": [{{"role": "user", "content": "Say hi"}}]}}'

{more}  The OpenAI SDK: OpenAI(base_url="{base}/v1", api_key={argument})
{agent}"""
_WORKFLOW: Final = """\
  A workflow:

    curl -N {base}/v1/workflows/execute-stream \\
      -H {header} -H 'Content-Type: application/yaml' --data-binary \\
      'workflow: {{name: hi, tasks: [{{type: task, id: t1, agent: {agent}, prompt: say hi}}]}}'

"""
_DECISION: Final = """\
  A decision:

    curl {base}/v1/system-zero/decide \\
      -H {header} -H 'Content-Type: application/json' \\
      -d '{{"model": "{decider}", "state": "It arrived broken.",
           "questions": {{"angry": {{"type": "boolean", "instructions": "Is it bad?"}}}}}}'

"""
_AGENT: Final = """  The same of an agent: OpenAI(base_url="{base}/v1/agents/{agent}", …)
"""


def banner(settings: Settings, host: str, port: int, router: Router, *, embedded: bool) -> str:
    """Return the text.

    The development key of the built-in defaults is shown; a key of the user's never is.
    """
    shown = f"[{host}]" if ":" in host else host
    base = f"http://{'127.0.0.1' if shown == '0.0.0.0' else shown}:{port}"
    model, provider = _model(settings, router)
    if embedded and settings.keys:
        key = settings.keys[0].key.get_secret_value()
        header, argument = f"'Authorization: Bearer {key}'", f'"{key}"'
    else:
        key = "one of the configuration; the lines below take it from $SLUICEGATE_KEY"
        header = '"Authorization: Bearer $SLUICEGATE_KEY"'  # a shell expands it in these quotes
        argument = 'os.environ["SLUICEGATE_KEY"]'
    agent = next(iter(settings.agents), None)
    decider = settings.decision.models[0].id if settings.decision.backend is not None else None
    more = "" if agent is None else _WORKFLOW.format(base=base, header=header, agent=agent)
    if decider is not None:
        more += _DECISION.format(base=base, header=header, decider=decider)
    return _TEXT.format(
        more=more,
        agent="" if agent is None else _AGENT.format(base=base, agent=agent),
        version=version(),
        base=base,
        key=key,
        header=header,
        argument=argument,
        model=model,
        provider=provider,
        store=Path(settings.store.sqlite_path).absolute(),
    )


def _model(settings: Settings, router: Router) -> tuple[str, str]:
    """Return a model to ask for and who serves it, and that there are more."""
    listed = list(router.slugs())
    if listed:
        (model, provider), more = listed[0], len(listed) - 1
        return model, f"{provider} (and {more} more: GET /v1/models)" if more else provider
    on = [name for name in settings.providers if settings.provider_off_reason(name) is None]
    if not on:
        return "<model>", "nobody: no provider is on"
    entry = settings.providers[on[0]]
    model = entry.model if isinstance(entry, LocalProvider) else "<model>"
    return f"{on[0]}/{model}", on[0]

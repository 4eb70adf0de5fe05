"""The command line `sluicegate` (O2).

Exit codes: 0; 1 a failure at run time, or problems found by `check`; 2 a wrong command line or
configuration. Problems and errors go to standard error, one line each, never as a traceback.

The parts that take long to import (aiohttp, the planes) are imported by the command that needs
them, so that `check` and `--help` stay fast.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import orjson
from pydantic import ValidationError

from planes import cli_balance, cli_decide, cli_keys, cli_run, cli_usage
from planes.cli_common import (
    FAILED,
    OK,
    USAGE,
    WHERE,
    Commands,
    add_command,
    add_config,
    load_settings,
)
from planes.config_file import ConfigError
from planes.settings import Server, Settings, cannot_start, explain, notices, risks
from planes.version import version


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; a wrong command line exits with 2 (O2)."""
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code = _run(options)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        print(error, file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # `sluicegate models | head`: the reader has seen enough. Python would complain again when
        # it flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _run(options: argparse.Namespace) -> int:
    match options.command:
        case "serve":
            return _serve(options)
        case "check":
            return _check(options)
        case "models":
            return _models(options)
        case "keys":
            return cli_keys.run(options)
        case "balance":
            return cli_balance.run(options)
        case "usage":
            return cli_usage.run(options)
        case "decide" | "stream":
            return cli_decide.run(options)
        case "run":
            return cli_run.run(options)
        case _:
            print(f"sluicegate {version()}")
            return OK


def _serve(options: argparse.Namespace) -> int:
    settings, path = load_settings(options.config)
    settings = _with_flags(settings, options)
    try:
        from planes.server import run

        return run(settings, embedded=path is None)
    except KeyboardInterrupt:
        return FAILED
    except Exception as error:  # noqa: BLE001  the process's border: told in one line (O2)
        from planes.logs import redact

        text = redact(str(error)) or "no further details"
        print(f"sluicegate: {type(error).__name__}: {text}", file=sys.stderr)
        return FAILED


def _with_flags(settings: Settings, options: argparse.Namespace) -> Settings:
    """Return the settings with what the command line says over the file.

    Exits with 2 if a flag's value is not one that the file could hold.
    """
    flags = {"host": options.host, "port": options.port, "workers": options.workers}
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        server = Server.model_validate(settings.server.model_dump() | given)
    except ValidationError as error:
        for path, message in explain(error, Server):
            print(f"sluicegate serve: --{path[0]}: {message}", file=sys.stderr)
        raise SystemExit(USAGE) from None
    return settings.model_copy(update={"server": server})


def _check(options: argparse.Namespace) -> int:
    if options.file is not None and options.config is not None:
        options.parser.error("FILE and --config are the same: give one")
    try:
        settings, path = load_settings(options.file or options.config, also=cannot_start)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return FAILED
    source = path or "built-in defaults"
    for notice in notices(settings):
        print(f"{source}: notice: {notice}")
    if any(model.price is None for model in settings.models.values()):
        # Imported here: it takes a third of a second to load the bundled prices.
        from planes.price_list import price_warning

        warning = price_warning(settings)
        if warning is not None:
            print(f"{source}: warning: {warning}")
    for risk in risks(settings):
        print(f"{source}: warning: {risk}")
    print(f"{source}: ok")
    return OK


def _models(options: argparse.Namespace) -> int:
    settings, _ = load_settings(options.config)
    off = {name: settings.provider_off_reason(name) for name in settings.providers}
    if options.json:
        print(orjson.dumps(_models_document(settings, off), option=orjson.OPT_INDENT_2).decode())
        return OK
    rows = [("MODEL", "CANDIDATES")]
    for slug, model in settings.models.items():
        names = [f"{c.provider}/{c.model}{_off(off[c.provider])}" for c in model.candidates]
        rows.append((slug, ", ".join(names)))
    if not settings.models:
        rows.append(("none", "<provider>/<model> names any model of a provider that is on"))
    rows.extend([("", ""), ("PROVIDER", "STATE")])
    rows.extend((name, f"off: {why}" if why else "on") for name, why in off.items())
    width = max(len(first) for first, _ in rows)
    for first, second in rows:
        print(f"{first:<{width}}  {second}".rstrip())
    return OK


def _off(reason: str | None) -> str:
    return f" (off: {reason})" if reason else ""


def _models_document(settings: Settings, off: dict[str, str | None]) -> dict[str, object]:
    def state(name: str) -> dict[str, object]:
        return {"on": off[name] is None, "why": off[name]}

    models = {
        slug: [
            {"provider": c.provider, "model": c.model, **state(c.provider)}
            for c in model.candidates
        ]
        for slug, model in settings.models.items()
    }
    return {"models": models, "providers": {name: state(name) for name in off}}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sluicegate",
        description="A self-hosted streaming gateway: chat completions, workflows, agents and "
        "decisions.",
        epilog="""\
examples:
  sluicegate serve                          with ./sluicegate.yaml, or built-in defaults
  sluicegate check sluicegate.yaml          every problem of a configuration, with its line
  sluicegate keys create --org acme         a key for a client
  sluicegate balance acme --add-usd 25      what it has left, and more of it
  sluicegate usage --since 1d               what it was used for
  sluicegate run workflow.yaml              a workflow on a gateway that runs
  sluicegate decide question.json           one decision of a gateway that runs
  sluicegate serve --help                   what a command takes
""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sluicegate {version()}")
    _add_commands(parser.add_subparsers(dest="command", metavar="COMMAND", required=True))
    return parser


def _add_commands(commands: Commands) -> None:
    serve = add_command(
        commands,
        "serve",
        "Serve until SIGTERM or SIGINT; running streams are drained, a second signal stops at "
        f"once.\n\n{WHERE}",
        """\
  sluicegate serve
  sluicegate serve --config /etc/sluicegate.yaml
  sluicegate serve --host 0.0.0.0 --port 9000""",
    )
    add_config(serve)
    serve.add_argument("--host", metavar="H", help="address to listen on, over the file's")
    serve.add_argument("--port", metavar="P", type=int, help="port to listen on, over the file's")
    serve.add_argument("--workers", metavar="N", type=int, help="processes, over the file's")
    check = add_command(
        commands,
        "check",
        "Check a configuration: every problem with its line (exit 1), or what is off, not served "
        "yet or\nwithout a price, then `ok` (exit 0). Nothing is started; ${ENV} is taken from the "
        f"environment.\n\nFILE is the same as --config FILE.\n{WHERE}",
        """\
  sluicegate check
  sluicegate check sluicegate.yaml
  OPENAI_API_KEY=sk-example sluicegate check sluicegate.yaml""",
    )
    check.add_argument("file", metavar="FILE", nargs="?", help="the YAML file to check")
    add_config(check)
    models = add_command(
        commands,
        "models",
        f"List the models, who serves them, and which providers are on.\n\n{WHERE}",
        """\
  sluicegate models
  sluicegate models --config sluicegate.yaml --json""",
    )
    add_config(models)
    models.add_argument("--json", action="store_true", help="as one JSON document")
    cli_keys.add_commands(commands)
    cli_balance.add_commands(commands)
    cli_usage.add_commands(commands)
    cli_run.add_commands(commands)
    cli_decide.add_commands(commands)
    add_command(commands, "version", "Print the version.", "  sluicegate version")


if __name__ == "__main__":
    sys.exit(main())

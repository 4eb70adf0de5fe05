"""The configuration file: YAML with `${ENV}`, read so that every problem has its line (O2, O3).

    text --compose--> nodes with marks --_Builder--> plain value + place of each path
                                                          |
                                  Settings.model_validate + explain --> problems at their lines

All problems are reported at once, sorted by line, but for a file that is not YAML: its first
syntax error is the only one. No message holds a value of the file or of the environment.

Substitution happens in scalar values, never in keys or comments: `${NAME}` (unset is an error),
`${NAME:-default}` (for unset or empty, as in a shell), and `$${` for a literal `${`. What is put
in is not looked at again. A plain scalar is then typed again (`port: ${PORT:-8080}` is a number);
a quoted one stays text.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import yaml
from pydantic import ValidationError

from planes.settings import Complaint, Settings, explain

FILE_NAME = "sluicegate.yaml"
FILE_VARIABLE = "SLUICEGATE_CONFIG"

_MAX_NODES = 100_000  # aliases of aliases grow exponentially
_TAG = "tag:yaml.org,2002:"
_REFERENCE = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(?:(:-)([^}]*))?\})?")

Place = tuple[int | str, ...]
Further = Callable[[Settings], list[Complaint]]
Spot = tuple[int, int]  # line and column, from 1
_Entry = tuple[yaml.Node, yaml.ScalarNode, yaml.Node]  # the mapping it is written in, key, value


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a file.

    Attributes:
        line: from 1; None when the file as a whole is meant.
        column: from 1; None likewise.
        path: where in the file, as `models.a/b.candidates[0].provider`; "" for its syntax.
        message: what is wrong; never holds a value.
        source: the file's name as it was given.
    """

    line: int | None
    column: int | None
    path: str
    message: str
    source: str = FILE_NAME

    def __str__(self) -> str:
        """Return `sluicegate.yaml:12: path: message`; for syntax, line and column."""
        place = self.source
        if self.line is not None:
            place += f":{self.line}"
            if not self.path and self.column is not None:
                place += f":{self.column}"
        return ": ".join(part for part in (place, self.path, self.message) if part)


class ConfigError(Exception):
    """The file cannot be used; `problems` are all that is wrong with it, in the file's order."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = sorted(problems, key=lambda p: (p.line or 0, p.column or 0))
        super().__init__("\n".join(str(problem) for problem in self.problems))


def find_config(flag: str | Path | None, env: Mapping[str, str], cwd: Path) -> Path | None:
    """Return the file to load: `--config`, then SLUICEGATE_CONFIG, then ./sluicegate.yaml (O2).

    A file that was named is returned whether it exists or not: missing is an error of `load`, not
    a reason to run with something else. None means that the built-in defaults apply.
    """
    named = flag or env.get(FILE_VARIABLE)
    if named:
        return cwd / named
    path = cwd / FILE_NAME
    return path if path.exists() else None


def load(path: Path, env: Mapping[str, str], *, also: Further | None = None) -> Settings:
    """Read the file at `path`.

    Args:
        also: finds further problems of a file that has none by itself.

    Raises:
        ConfigError: it cannot be read or used.
    """
    source = str(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError([Problem(None, None, "", f"cannot be read: {reason}", source)]) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError([Problem(line, None, "", "is not UTF-8", source)]) from None
    return load_text(text, env, source=source, also=also)


def load_defaults(env: Mapping[str, str]) -> Settings:
    """Return the settings that apply when there is no file (O1.1)."""
    text = resources.files("planes").joinpath("defaults.yaml").read_text("utf-8")
    return load_text(text, env, source="defaults.yaml")


def load_text(
    text: str,
    env: Mapping[str, str],
    *,
    source: str = FILE_NAME,
    also: Further | None = None,
) -> Settings:
    """Read a configuration from its text; see `load`.

    Raises:
        ConfigError: it cannot be used.
    """
    builder = _Builder(text, env, source)
    value = builder.build(_compose(text, source), ())
    settings = None
    try:
        settings = Settings.model_validate({} if value is None else value)
    except ValidationError as error:
        for complaint in explain(error):
            builder.complain(complaint.path, complaint.message)
    if settings is not None and also is not None:
        for complaint in also(settings):
            builder.complain(complaint.path, complaint.message)
    if settings is None or builder.problems:
        raise ConfigError(builder.problems)
    return settings


class _Loader(yaml.SafeLoader):
    """SafeLoader with fewer surprises in plain scalars.

    Dates are text: nothing here is one. Only true and false are booleans, so that `org: no` is
    text; a setting that is a boolean understands yes, no, on and off all the same.
    """


_Loader.yaml_implicit_resolvers = {
    first: [(t, r) for t, r in resolvers if t not in (_TAG + "timestamp", _TAG + "bool")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _TAG + "bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


# What YAML's own words mean to someone who writes a configuration, by a part of them.
_HINTS = (
    ("'\\t'", "; indent with spaces, not tabs"),
    ("expected <block end>", "; is this line indented as those beside it?"),
    ("mapping values are not allowed", "; a value that holds `: ` needs quotes"),
)


def _compose(text: str, source: str) -> yaml.Node | None:
    """Return the document's node.

    Raises:
        ConfigError: the text is not one YAML document.
    """
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(filter(None, (error.context, error.problem))) or "syntax error"
        # PyYAML would go on with the name, and a key that begins with `*` looks like an alias.
        what = re.sub(r"(alias|anchor|tag|handle) '.*", r"\1", what, flags=re.DOTALL)
        here = "".join(text.splitlines()[mark.line : mark.line + 1]) if mark else ""
        what += next((hint for sign, hint in _HINTS if sign in what), "")
        if "${" in here:
            what += "; put a value with ${…} in quotes inside {…} or […]"
        line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
        problem = Problem(line, column, "", f"is not YAML: {what}", source)
    except yaml.reader.ReaderError as error:
        number = text.count("\n", 0, error.position) + 1
        problem = Problem(number, None, "", "is not YAML: a control character", source)
    except RecursionError:
        problem = Problem(None, None, "", "is nested too deeply", source)
    finally:
        if loader is not None:
            loader.dispose()
    raise ConfigError([problem])


class _Builder:
    """Makes plain values of nodes, keeps where each stood, and collects problems."""

    def __init__(self, text: str, env: Mapping[str, str], source: str) -> None:
        self.problems: list[Problem] = []
        self._lines = text.splitlines()
        self._env = env
        self._source = source
        self._spots: dict[Place, Spot] = {(): (1, 1)}
        self._broken: set[Place] = set()
        self._open: set[int] = set()  # ids of the nodes being built: an alias to one is a loop
        self._nodes = 0
        self._resolver = _Loader("")

    def complain(self, place: Place, message: str) -> None:
        """Add a problem at the nearest place that is in the file.

        Silent below a value that could not be made: its own problem is reported already.
        """
        if any(place[:length] in self._broken for length in range(len(place) + 1)):
            return
        near = place
        while near not in self._spots:
            near = near[:-1]
        self._add(self._spots[near], place, message)

    def build(self, node: yaml.Node | None, place: Place) -> object:
        """Return the plain value of `node`; None, and a problem, if it has none."""
        if node is None:
            return None
        if id(node) in self._open:
            return self._fail(node, place, "is an alias of what it stands in")
        self._count(node, place)
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.ScalarNode):
                return self._scalar(node, place)
            if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
                return self._sequence(node, place)
            if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
                return self._mapping(node, place)
            return self._fail(node, place, "has a tag (`!…`) that is not allowed")
        finally:
            self._open.discard(id(node))

    def _count(self, node: yaml.Node, place: Place) -> None:
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            # Every further node would be a problem: this one is the last.
            self._add(_spot(node), place, "is too large: aliases repeat too much")
            raise ConfigError(self.problems)

    def _sequence(self, node: yaml.SequenceNode, place: Place) -> list[object]:
        values = []
        for index, item in enumerate(node.value):
            inner = (*place, index)
            self._spots[inner] = _spot(item)
            values.append(self.build(item, inner))
        return values

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, object]:
        values: dict[str, object] = {}
        for origin, key, item in self._entries(node, place):
            name = key.value
            if name not in values:
                self._spots[(*place, name)] = _spot(key)
                values[name] = self.build(item, (*place, name))
            elif origin is node:
                self._add(_spot(key), (*place, name), "is set twice in one mapping")
        return values

    def _entries(self, node: yaml.MappingNode, place: Place) -> list[_Entry]:
        """Return the entries of `node` itself, then those that `<<` merges into it.

        So own keys win over merged ones, and the first merge over the next.
        """
        own: list[_Entry] = []
        merged: list[_Entry] = []
        for key, item in node.value:
            self._count(key, place)
            if not isinstance(key, yaml.ScalarNode):
                self._add(_spot(key), place, "a key must be text")
            elif key.tag == _TAG + "merge":
                for source in item.value if isinstance(item, yaml.SequenceNode) else [item]:
                    merged += self._merged(source, place)
            else:
                own.append((node, key, item))
        return own + merged

    def _merged(self, source: yaml.Node, place: Place) -> list[_Entry]:
        if not isinstance(source, yaml.MappingNode) or id(source) in self._open:
            self._add(_spot(source), place, "`<<` must name a mapping, or a list of them")
            return []
        self._open.add(id(source))
        entries = self._entries(source, place)
        self._open.discard(id(source))
        return entries

    def _scalar(self, node: yaml.ScalarNode, place: Place) -> object:
        text, tag = node.value, node.tag
        if "${" in text:
            try:
                text = substitute(text, self._env)
            except SubstitutionError as error:
                spot = self._reference_spot(node, error.reference)
                return self._break(spot, place, str(error))
            if node.style is None:
                tag = self._resolve(text)
        kind = tag.removeprefix(_TAG)
        if kind in ("str", "merge", "value"):  # `<<` and `=` are text where a value stands
            return text
        if kind not in ("null", "bool", "int", "float"):
            return self._fail(node, place, "has a tag (`!…`) that is not allowed")
        try:
            construct = getattr(self._resolver, f"construct_yaml_{kind}")
            value: object = construct(yaml.ScalarNode(tag, text))
        except (ValueError, KeyError):
            return self._fail(node, place, "does not fit its tag")
        return value

    def _resolve(self, text: str) -> str:
        tag: str = self._resolver.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        return tag

    def _reference_spot(self, node: yaml.ScalarNode, reference: str) -> Spot:
        """Return where `reference` stands: a block of text begins lines before it."""
        line, column = _spot(node)
        for number in range(line, node.end_mark.line + 2):
            if reference in "".join(self._lines[number - 1 : number]):
                return number, column if number == line else 1
        return line, column

    def _fail(self, node: yaml.Node, place: Place, message: str) -> object:
        return self._break(_spot(node), place, message)

    def _break(self, spot: Spot, place: Place, message: str) -> object:
        self._broken.add(place)
        self._add(spot, place, message)
        return None

    def _add(self, spot: Spot, place: Place, message: str) -> None:
        problem = Problem(*spot, _path(place), message, self._source)
        if problem not in self.problems:  # an alias brings its anchor's problems again
            self.problems.append(problem)


class SubstitutionError(ValueError):
    """A reference cannot be replaced; `reference` is its text up to the name."""

    def __init__(self, reference: str, message: str) -> None:
        super().__init__(message)
        self.reference = reference


def substitute(text: str, env: Mapping[str, str]) -> str:
    """Replace the references in `text` by values of `env`; once, from left to right.

    Raises:
        SubstitutionError: a variable is unset and has no default, or a `${` names none.
    """

    def replace(match: re.Match[str]) -> str:
        whole, (name, has_default, default) = match[0], match.groups()
        if whole == "$${":
            return "${"
        if name is None:
            hint = "write ${NAME}, ${NAME:-default}, or $${ for a literal ${"
            raise SubstitutionError("${", f"has a `${{` that names no variable: {hint}")
        value = env.get(name)
        if has_default:
            return value or default
        if value is None:
            raise SubstitutionError(
                f"${{{name}",
                f"environment variable {name} is not set; ${{{name}:-…}} has a default",
            )
        return value

    return _REFERENCE.sub(replace, text)


def _spot(node: yaml.Node) -> Spot:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _path(place: Place) -> str:
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text

"""`${NAME}`, `${NAME:-default}` and `$${` in `planes.config_file`, bare and in a file (O3)."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planes.config_file import ConfigError, SubstitutionError, load_text, substitute


def system(text: str, env: dict[str, str]) -> str:
    """Return what `text` becomes in quotes, where a file may hold any text."""
    agent = f"agents: {{a: {{provider: p, system: {json.dumps(text)}}}}}"
    whole = load_text(f"{agent}\nproviders: {{p: {{kind: replay}}}}", env)
    return whole.agents["a"].system


@pytest.mark.parametrize("text", ["${", "${}", "${1A}", "${A B}", "${A-x}", "${A:-x", "${A"])
def test_a_reference_that_names_no_variable_is_an_error(text: str) -> None:
    """Better than to pass it on as text: `$${` is there for that."""
    with pytest.raises(SubstitutionError, match="names no variable"):
        substitute(text, {"A": "a"})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${UNSET:-x}", "x"),
        ("${EMPTY:-x}", "x"),
        ("${UNSET:-}", ""),
        ("${EMPTY}", ""),
        ("${A:-x}", "a"),
        ("${UNSET:-a:-b${A}", "a:-b${A"),
        ("$${A} $${", "${A} ${"),
        ("$A $$ {A}", "$A $$ {A}"),
    ],
)
def test_defaults_are_for_unset_and_empty(text: str, value: str) -> None:
    """As in a shell; what is not `${` is text."""
    assert substitute(text, {"A": "a", "EMPTY": ""}) == value


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
# YAML's own line breaks and unprintables are none of substitution's business.
CHARACTERS = st.characters(min_codepoint=0x20, max_codepoint=0xD7FF, exclude_categories=["C", "Z"])
PLAIN = st.text(st.one_of(CHARACTERS, st.sampled_from("${}:-\\\"' "))).filter(
    lambda text: "${" not in text and not text.endswith("$")
)
PIECES = st.one_of(
    st.tuples(st.just("text"), PLAIN, st.just("")),
    st.tuples(st.just("escape"), st.just(""), st.just("")),
    st.tuples(st.just("name"), NAMES, st.just("")),
    st.tuples(st.just("default"), NAMES, PLAIN.map(lambda text: text.replace("}", ""))),
)


def written(piece: tuple[str, str, str]) -> str:
    """Return how a piece stands in the file."""
    match piece:
        case ("text", text, _):
            return text
        case ("escape", _, _):
            return "$${"
        case ("name", name, _):
            return f"${{{name}}}"
        case (_, name, default):
            return f"${{{name}:-{default}}}"


def meant(piece: tuple[str, str, str], env: dict[str, str]) -> str | None:
    """Return what a piece means; None if its variable is unset."""
    match piece:
        case ("text", text, _):
            return text
        case ("escape", _, _):
            return "${"
        case ("name", name, _):
            return env.get(name)
        case (_, name, default):
            return env.get(name) or default


@given(pieces=st.lists(PIECES), env=st.dictionaries(NAMES, PLAIN), data=st.data())
def test_substitution_is_piece_by_piece(
    pieces: list[tuple[str, str, str]], env: dict[str, str], data: st.DataObject
) -> None:
    """O3: any mixture of text, escapes and references, in quotes in a file or bare."""
    for piece in pieces:
        if piece[0] in ("name", "default") and data.draw(st.booleans()):
            env[piece[1]] = data.draw(PLAIN)
    text = "".join(map(written, pieces))
    expected = [meant(piece, env) for piece in pieces]
    if None in expected:
        missing = pieces[expected.index(None)][1]
        with pytest.raises(SubstitutionError, match=f"environment variable {missing} is not set"):
            substitute(text, env)
        with pytest.raises(ConfigError, match=f"yaml:1: .*: environment variable {missing} is"):
            system(text, env)
    else:
        whole = "".join(part for part in expected if part is not None)
        assert substitute(text, env) == whole
        assert system(text, env) == whole

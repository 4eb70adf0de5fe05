"""What `serve` prints once it serves (O1.1): true whatever is configured."""

from pathlib import Path

import pytest

from planes.banner import banner
from planes.providers import Providers
from planes.settings import Settings

ON = {"shape": "openai", "base_url": "http://127.0.0.1:9000/v1"}
OFF = ON | {"base_url": "https://api.example.com/v1", "api_key": ""}


def shown(**sections: object) -> str:
    settings = Settings.model_validate({"keys": [{"key": "ozk_secret", "org": "dev"}]} | sections)
    return banner(settings, "127.0.0.1", 8080, Providers(settings).router(), embedded=False)


def test_without_models_a_provider_shows_how_its_models_are_named() -> None:
    text = shown(providers={"off": OFF, "up": ON})
    assert "model  up/<model>, by up\n" in text
    assert '"model": "up/<model>"' in text
    assert "model  local/smollm2-135m, by local\n" in shown(providers={"local": {"kind": "local"}})


def test_nothing_that_is_on_is_said() -> None:
    assert "nobody: no provider is on" in shown(providers={"off": OFF})


def test_further_models_are_counted() -> None:
    candidates = {"candidates": [{"provider": "up", "model": "m"}]}
    one = shown(providers={"up": ON}, models={"a": candidates})
    assert "model  a, by up\n" in one
    more = shown(providers={"up": ON}, models=dict.fromkeys("abc", candidates))
    assert "model  a, by up (and 2 more: GET /v1/models)\n" in more


def test_the_store_is_named_and_the_key_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = shown(providers={"up": ON})
    assert f"store  {tmp_path}/sluicegate.db\n" in text
    assert "ozk_secret" not in text


def test_each_plane_that_exists_has_a_command_to_paste() -> None:
    bare = shown(providers={"up": ON})
    assert "workflow" not in bare
    assert "agent" not in bare
    assert "decide" not in bare
    full = shown(
        providers={"up": ON},
        agents={"helper": {"model": "up/m"}},
        decision={"backend": {"kind": "chat-logprobs", "model": "up/m"}},
    )
    assert "/v1/workflows/execute-stream" in full
    assert "agent: helper" in full
    assert 'base_url="http://127.0.0.1:8080/v1/agents/helper"' in full
    assert '"model": "rightnow-decision"' in full
    assert "{" not in full.replace("{name", "").replace("{type", "").replace('{"', "")

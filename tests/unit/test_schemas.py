"""What is wrong with a request is said in plain words (M1.2)."""

import pytest

from planes.models.schemas import parse
from relay.errors import BadRequest


def test_a_list_that_is_too_short() -> None:
    with pytest.raises(BadRequest) as caught:
        parse(b'{"model": "m", "messages": []}', request_id="req_1", created=0)
    assert caught.value.message == "`messages`: must have at least 1 item"
    assert caught.value.param == "messages"

"""Requests made from the server's own description: whatever is sent, the answer is no 5xx, and there is one."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings


@pytest.fixture(scope="module")
def small_server(make_server: Any) -> Any:
    return make_server(max_model_len=48, kv_block_size=16)


@pytest.fixture(scope="module")
def description(small_server: Any) -> Any:
    return schemathesis.openapi.from_url(f"{small_server.url}/openapi.json")


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/completions", "POST"),
        ("/v1/chat/completions", "POST"),
        ("/tokenize", "POST"),
        ("/detokenize", "POST"),
        ("/v1/models", "GET"),
        ("/v1/models/{name}", "GET"),
    ],
)
def test_no_server_error_and_no_hang(description: Any, small_server: Any, path: str, method: str) -> None:
    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(description[path][method].as_strategy())
    def send(case: schemathesis.Case) -> None:
        response = case.call(timeout=60)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert response.json()["error"]["message"]

    send()
    small_server.wait_until_idle()


def test_the_description_names_what_is_served(small_server: Any) -> None:
    paths = set(small_server.http.get("/openapi.json").json()["paths"])
    assert paths == {
        "/health",
        "/metrics",
        "/v1/models",
        "/v1/models/{name}",
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
    }
    small_server.wait_until_idle()


def test_a_wrong_request_is_described_as_it_is_answered(small_server: Any) -> None:
    described = small_server.http.get("/openapi.json").json()
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        responses = described["paths"][path]["post"]["responses"]
        assert "422" not in responses
        assert responses["400"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Error"}
    assert "HTTPValidationError" not in str(described)

from typing import Any

from quantkit.serve.http.token_text import completion_logprobs


class Texts:
    """Four tokens that look alike, and one that does not."""

    def bytes_of(self, token_id: int) -> bytes:
        return {1: b"\xf0", 2: b"\xf1", 3: b"a", 4: b"\xf0"}[token_id]

    def text_of(self, token_id: int) -> str:
        return self.bytes_of(token_id).decode(errors="replace")


def test_tokens_that_look_alike_keep_their_own_logprobs() -> None:
    texts: Any = Texts()
    entry = {2: (-2.0, 3), 1: (-0.5, 1), 3: (-1.0, 2), 4: (-3.0, 4)}
    found = completion_logprobs(texts, [2], [entry], 0)
    assert found["tokens"] == ["\ufffd"]
    assert found["token_logprobs"] == [-2.0]
    assert found["top_logprobs"] == [{"bytes:\\xf0": -0.5, "a": -1.0, "\ufffd": -2.0, "token_id:4": -3.0}]

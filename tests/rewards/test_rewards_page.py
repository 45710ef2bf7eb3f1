"""The functions on docs/rewards.md do what the page says."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from ppo_rlhf.core.errors import RewardError
from ppo_rlhf.rewards.functions import call_reward_function
from tests.tiny_models import save, tiny_model

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
_, BY_TOKEN, BY_HTTP = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


class Server(HTTPServer):
    """A server that answers 503 a given number of times, then the lengths of the responses as scores."""

    failures = 0
    requests = 0


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests += 1
        self.send_response(503 if self.server.requests <= self.server.failures else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"scores": [len(text) for text in texts["completions"]]}).encode())

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("localhost", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def scores_of(port: int) -> list[float]:
    """Return the result of the page's function, with shorter pauses between requests."""
    names: dict[str, Any] = {}
    faster = BY_HTTP.replace("backoff_factor=0.5", "backoff_factor=0.001").replace("8000", str(port))
    exec(compile(faster, "docs/rewards.md", "exec"), names)
    return call_reward_function(names["score"], "score", ["p", "p"], ["long one", "short"], {})


def test_the_reward_over_http_asks_again_while_the_server_fails(server: Server) -> None:
    server.failures = 2
    assert scores_of(server.server_port) == [8.0, 5.0]
    assert server.requests == 3


def test_a_server_that_never_answers_is_named_in_one_line(server: Server) -> None:
    server.failures = 100
    with pytest.raises(RewardError, match=f"score raised RetryError: .*{server.server_port}.* 503 ") as caught:
        scores_of(server.server_port)
    assert server.requests == 6
    assert "\n" not in str(caught.value)
    port = server.server_port
    server.server_close()
    with pytest.raises(RewardError, match=f"score raised ConnectionError: .*{port}.*refused"):
        scores_of(port)


def test_the_reward_by_token_pays_each_token_on_its_own(tmp_path: Path) -> None:
    save(tmp_path, tiny_model("gpt2"))
    names: dict[str, Any] = {}
    here = BY_TOKEN.replace("models/my-sft", str(tmp_path)).replace(" please", "c")
    exec(compile(here, "docs/rewards.md", "exec"), names)
    c = names["tokenizer"].convert_tokens_to_ids("c")
    found = call_reward_function(names["politeness"], "politeness", ["p"] * 2, ["x"] * 2, {}, [[c, 5, c], [5]])
    assert found == [[1.0, 0.0, 1.0], [0.0]]

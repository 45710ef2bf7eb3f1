"""The reward function of docs/converting.md that asks a server as LLaMA-Factory does, with a server in its place."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[2] / "docs" / "converting.md").read_text()


class Server(BaseHTTPRequestHandler):
    """Scores each message by its length, as `/v1/score/evaluation` answers."""

    bodies: list[Any] = []  # noqa: RUF012  # http.server makes an object for each request

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        scores = [float(len(message)) for message in self.bodies[-1]["messages"]]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"model": "model", "scores": scores}).encode())

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def test_the_function_of_the_page_asks_the_server_for_one_score_a_response():
    (script,) = re.findall(r"```python\n(# reward_server\.py\n.*?)```", PAGE, re.DOTALL)
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        names: dict[str, Any] = {}
        exec(script, names)  # as Python imports the module
        names["URL"] = f"http://127.0.0.1:{server.server_port}/v1/score/evaluation"
        assert names["score"](["ab", "c"], ["d", "efg"], answer=[1, 2]) == [3.0, 4.0]
        server.shutdown()
    assert Server.bodies == [{"model": "model", "messages": ["abd", "cefg"]}]

"""A stand-in of a server that speaks OpenAI's chat API: it answers `/v1/chat/completions` by a function of a test's."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from ppo_rlhf.judge.llm_judge import in_use

KEY = "sk-of-the-stand-in-4711"


@dataclass
class Flood:
    """A body of 300 megabytes, sent with a code."""

    code: int
    part: bytes = b"page " * 20_000
    times: int = 3_000


class ChatServer(ThreadingHTTPServer):
    """Answers a user's text by `answer`: a text, a code with the message of an error, or a whole body with status 200,
    as a dictionary or as bytes of `content_type`; or a `Flood`. It ignores `response_format`, or obeys or refuses it.
    """

    daemon_threads = True

    def __init__(self, answer: Callable[[str], Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.answer = answer
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.sent: list[dict[str, str]] = []  # the headers of each request
        self.finish_reason = "stop"
        self.pause_s = 0.0
        self.content_type = "application/json"
        self.form: Literal["ignored", "obeyed", "refused"] = "ignored"
        self.headers = {"retry-after": "0.001"}  # so that tests do not wait
        self.drip_s: float | None = None  # the pause between two bytes of an answer
        self.under_way = self.most_under_way = 0
        self.lock = threading.Lock()

    @property
    def texts(self) -> list[str]:
        """What it was asked, in the order of arrival, repetitions included."""
        return [body["messages"][0]["content"] for body in self.bodies]


class _Request(BaseHTTPRequestHandler):
    server: ChatServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.bodies.append(body)
            server.keys.add(self.headers["Authorization"])
            server.sent.append({name.lower(): value for name, value in self.headers.items()})
            server.under_way += 1
            server.most_under_way = max(server.most_under_way, server.under_way)
        time.sleep(server.pause_s)
        text = body["messages"][0]["content"]
        answer = server.answer(text) if self.path == "/v1/chat/completions" else (404, "no such page")
        if "response_format" in body:
            answer = self._in_form(answer, body["response_format"]["json_schema"]["schema"])
        with server.lock:
            server.under_way -= 1
        if isinstance(answer, tuple):
            self._send(answer[0], {"error": {"message": answer[1]}})
            return
        if isinstance(answer, Flood):
            self._send(answer.code, answer.part, answer.times)
            return
        if isinstance(answer, dict | bytes):
            self._send(200, answer)
            return
        message = {"role": "assistant", "content": answer}
        self._send(
            200,
            {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": server.finish_reason}],
                "usage": {"prompt_tokens": len(text.split()), "completion_tokens": 3, "total_tokens": 0},
            },
        )

    def _in_form(self, answer: Any, schema: dict[str, Any]) -> Any:
        """The answer of a server that obeys or refuses a schema; one that obeys turns a last line into JSON."""
        if self.server.form == "refused":
            return 400, "'response_format' of type 'json_schema' is not supported with this model."
        if self.server.form == "ignored" or not isinstance(answer, str):
            return answer
        *reason, last = answer.split("\n")
        label, value = last.split(": ")
        fields = {"reason": "\n".join(reason), label.lower(): float(value) if label == "Score" else value}
        assert fields.keys() == schema["properties"].keys() == set(schema["required"])
        return json.dumps(fields)

    def _send(self, code: int, content: dict[str, Any] | bytes, times: int = 1) -> None:
        sent = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", self.server.content_type)
        self.send_header("Content-Length", str(len(sent) * times))
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        pause_s = self.server.drip_s
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # who asked did not wait
            for part in [sent] * times if pause_s is None else [sent[place : place + 1] for place in range(len(sent))]:
                self.wfile.write(part)
                time.sleep(pause_s or 0.0)

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@contextlib.contextmanager
def running_chat(answer: Callable[[str], Any]) -> Iterator[ChatServer]:
    """Run a server until the block ends; judges that were made in it are forgotten."""
    with ChatServer(answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()
    in_use.clear()


def between(text: str, tag: str) -> str:
    """What a template of the project shows between a tag and its end."""
    return text.split(f"<{tag}>\n")[1].split(f"\n</{tag}>")[0]

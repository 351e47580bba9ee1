"""A real server for tests: `slipstream serve` in its own process on a free port, ended by a signal as users end it.

@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as running:
        yield running
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI

START_S = 120.0
STOP_S = 60.0
MODEL = "smollm2"
PERSON = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "age"],
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
}
WEATHER_ARGUMENTS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


@dataclass(slots=True)
class Server:
    """A running server, and the usual ways to send it requests."""

    url: str
    process: subprocess.Popen[str]
    log: Path
    lines: list[dict[str, Any]] = field(default_factory=list)  # the lines that it printed on stdout

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    def openai(self, **settings: Any) -> OpenAI:
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **settings})

    def anthropic(self, **settings: Any) -> Anthropic:
        from anthropic import Anthropic

        return Anthropic(base_url=self.url, **{"api_key": "none", "max_retries": 0, **settings})

    def ask(
        self,
        path: str,
        body: object = None,
        *,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one plain HTTP exchange; bytes are sent as they are, anything else as JSON."""
        connection = http.client.HTTPConnection(*self.address, timeout=timeout)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} if data is not None else {}
        try:
            connection.request(method or ("GET" if data is None else "POST"), path, data, {**sent, **(headers or {})})
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def get(self, path: str, **options: Any) -> Any:
        """The JSON or text of a path that must answer with 200."""
        status, headers, body = self.ask(path, **options)
        assert status == 200, f"{path} answered {status}: {body[:500]!r}"
        return json.loads(body) if "json" in headers.get("content-type", "") else body.decode()

    def post(self, path: str, body: object, **options: Any) -> Any:
        status, _, answer = self.ask(path, body, **options)
        assert status == 200, f"{path} answered {status}: {answer[:500]!r}"
        return json.loads(answer)

    def events(self, path: str, body: object, timeout: float = 60.0) -> list[Any]:
        """All events of a stream as JSON, without `[DONE]`."""
        return [json.loads(line) for line in self.stream_lines(path, body, timeout) if line != "[DONE]"]

    def stream_lines(self, path: str, body: object, timeout: float = 60.0) -> list[str]:
        """The data of every event of a stream, in order."""
        status, headers, answer = self.ask(path, body, timeout=timeout)
        assert status == 200, f"{path} answered {status}: {answer[:500]!r}"
        assert headers["content-type"].startswith("text/event-stream")
        lines = answer.decode().split("\n")
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    def open_stream(self, path: str, body: object) -> socket.socket:
        """A raw connection that has requested a stream and read nothing yet."""
        data = json.dumps(body).encode()
        raw = socket.create_connection(self.address, timeout=60)
        head = [
            f"POST {path} HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
        ]
        raw.sendall("\r\n".join([*head, "", ""]).encode() + data)
        return raw

    def wait_idle(self, seconds: float = 20.0) -> None:
        """Waits until no request holds a slot or waits for one."""
        deadline = time.monotonic() + seconds
        while (busy := self.busy()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not busy, f"still at work after {seconds} s: {busy}"

    def busy(self) -> list[Any]:
        """All requests that run or wait, as /slots lists them."""
        models = self.get("/slots")["models"]
        return [slot for model in models for slot in model["slots"]] + [m for m in models if m["waiting"]]

    def cpu_seconds(self) -> float:
        """Processor time that the server has used: a clock that other programs on the machine do not move."""
        return float(sum(psutil.Process(self.process.pid).cpu_times()[:2]))

    def health(self) -> dict[str, Any]:
        return dict(json.loads(self.ask("/health")[2]))

    def wait_ready(self, seconds: float = START_S) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):  # the server may have ended at this moment
                if self.health()["phase"] == "ready":
                    return
            time.sleep(0.05)
        raise AssertionError(f"the server did not get ready: {self.log.read_text()[-4000:]}")

    def stop(self, sig: int = signal.SIGTERM, seconds: float = STOP_S) -> int:
        """Ends the server and returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not end: {self.log.read_text()[-4000:]}") from None


@contextlib.contextmanager
def serve(
    *options: str,
    model: str | None = MODEL,
    ready: bool = True,
    environment: Mapping[str, str] | None = None,
    files: int | None = None,
) -> Iterator[Server]:
    """Starts `slipstream serve MODEL OPTIONS` (no MODEL if None), waits until it listens or is ready, and ends it.

    `files` is how many files it may have open.
    """
    names = [model] if model is not None else []
    command = [sys.executable, "-m", "slipstream.cli.main", "serve", *names, "--port", "0", "--json", *options]
    if files is not None:
        command = ["sh", "-c", 'ulimit -n "$0"; exec "$@"', str(files), *command]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **(environment or {})}
            )
        output = process.stdout
        assert output is not None
        first = output.readline()
        if not first:
            process.wait()
            raise AssertionError(f"the server did not start: {log.read_text()[-4000:]}")
        start = json.loads(first)
        server = Server(start["url"], process, log, [start])
        reader = threading.Thread(target=lambda: server.lines.extend(map(json.loads, output)), daemon=True)
        reader.start()
        try:
            if ready:
                server.wait_ready()
            yield server
        finally:
            server.stop()
            reader.join(5)
            output.close()

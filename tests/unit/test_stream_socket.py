"""The stream socket around a tiny pair: frames by their ids, pauses, refusals, slow and vanishing readers, its file."""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

import asyncio
import json
import socket
import stat
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.server.apis import stream_frames, stream_socket
from slipstream.server.apis.stream_frames import Outbox
from slipstream.server.apis.stream_socket import StreamSocket
from slipstream.server.operations.metrics import Metrics
from slipstream.server.operations.server_state import ServerSettings, ServerState
from slipstream.server.serving.model_files import ModelSpec
from slipstream.server.serving.router import ModelRouter
from slipstream.server.serving.worker import EngineWorker

pytestmark = pytest.mark.usefixtures("threads")
WAIT_S = 30.0
SETTINGS: dict[str, Any] = {"model": "tiny", "ignore_eos": True, "max_tokens": 40, "temperature": 0.9, "seed": 5}


def encoded(operation: dict[str, Any]) -> bytes:
    return json.dumps(operation).encode() + b"\n"


class Client:
    """One connection; frames of other requests are kept until a test asks for them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._kept: list[dict[str, Any]] = []

    def send(self, *operations: dict[str, Any] | bytes) -> None:
        for each in operations:
            self.writer.write(each if isinstance(each, bytes) else encoded(each))

    def start(self, name: str, prompt: str = "hello", **settings: Any) -> None:
        self.send({"op": "start", "id": name, "prompt": prompt, **SETTINGS, **settings})

    async def next(self, name: str | None) -> dict[str, Any]:
        for frame in self._kept:
            if frame["id"] == name:
                self._kept.remove(frame)
                return frame
        while True:
            frame = json.loads(await asyncio.wait_for(self._reader.readline(), WAIT_S))
            if frame["id"] == name:
                return dict(frame)
            self._kept.append(frame)

    async def until(self, name: str, *types: str) -> tuple[str, dict[str, Any]]:
        """The text up to a frame of one of these types, and that frame."""
        text = ""
        while (frame := await self.next(name))["type"] not in types:
            assert frame["type"] == "token", frame
            assert len(frame["drafted"]) == len(frame["tokens"])
            text += frame["text"]
        return text, frame

    async def text(self, name: str) -> str:
        text, last = await self.until(name, "done")
        assert last["finish_reason"] in ("length", "stop") and last["timings"]["predicted_n"] > 0
        return text


class Bench:
    """A running socket over one tiny model."""

    def __init__(self, state: ServerState, path: Path) -> None:
        self.state, self.path = state, path

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_unix_connection(str(self.path))
        try:
            yield Client(reader, writer)
        finally:
            writer.close()

    @property
    def worker(self) -> EngineWorker:
        return self.state.router.residents()[0].worker

    async def idle(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.worker.snapshot().slots or self.worker.snapshot().waiting:
                await asyncio.sleep(0.005)


def run(
    folder: Path,
    path: Path,
    test: Callable[[Bench], Awaitable[None]],
    *,
    draft: bool = False,
    max_frames: int = 256,
    **settings: Any,
) -> None:
    async def main() -> None:
        engine = EngineConfig(
            weight_format="int8",
            check_integrity=True,
            max_context=512,
            cache_tokens=32 * 64,
            max_sequences=2,
            prefill_chunk=64,
            step_rows=128,
            threads=1,
        )
        spec = ModelSpec("tiny", str(folder / "target"), str(folder / "draft") if draft else "none", engine)
        state = ServerState(ServerSettings(**settings), ModelRouter([spec]), Metrics(), phase="ready")
        served = StreamSocket(state, path, max_frames)
        await served.start()
        try:
            await test(Bench(state, path))
        finally:
            await served.close()
            await state.router.close(0.0)

    asyncio.run(main())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.sock"


def test_requests_share_a_connection_and_each_gets_the_text_it_gets_alone(folder: Path, path: Path) -> None:
    prompts = {f"r{index}": "the quick brown fox "[: 3 + 2 * index] for index in range(6)}

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            alone = {}
            for name, prompt in prompts.items():
                client.start(name, prompt, speculative={"mode": "plain"})
                alone[name] = await client.text(name)
            for index, (name, prompt) in enumerate(prompts.items()):
                mode = ("chain", "tree", "plain")[index % 3]
                client.start(name, prompt, speculative={"mode": mode}, priority=index % 2)
            assert {name: await client.text(name) for name in prompts} == alone
            assert len(set(alone.values())) > 1
            client.send({"op": "list", "id": "l"})
            assert (await client.next("l")) == {"id": "l", "type": "done", "requests": []}

    run(folder, path, test, draft=True, allow_priority=True)


def test_a_quantum_pauses_and_only_its_own_epoch_goes_on(folder: Path, path: Path) -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.start("whole")
            whole = await client.text("whole")
            client.start("r", quantum=10)
            text, paused = await client.until("r", "continue")
            assert (paused["generated"], paused["epoch"], paused["reason"]) == (10, 1, "quantum")
            client.send({"op": "list", "id": "l"})
            (listed,) = (await client.next("l"))["requests"]
            assert (listed["id"], listed["phase"], listed["epoch"], listed["generated"]) == ("r", "paused", 1, 10)
            client.send({"op": "continue", "id": "r", "epoch": 0})
            stale = await client.next("r")
            assert (stale["type"], stale["status"], stale["over"]) == ("error", 409, False)
            assert stale["error"]["code"] == "stale_epoch"
            client.send({"op": "continue", "id": "r", "epoch": 1})
            more, paused = await client.until("r", "continue")
            assert (paused["generated"], paused["epoch"]) == (20, 2)
            client.send({"op": "continue", "id": "r", "epoch": 2, "quantum": 0})
            assert text + more + await client.text("r") == whole

    run(folder, path, test)


def test_a_request_is_paused_and_cancelled_on_demand(folder: Path, path: Path) -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.start("r", max_tokens=400)
            await client.next("r")
            client.send({"op": "pause", "id": "r"})
            _, paused = await client.until("r", "continue")
            assert paused["reason"] == "paused" and paused["generated"] < 400
            client.start("other")
            await client.text("other")
            client.send({"op": "cancel", "id": "r", "epoch": paused["epoch"] + 1})
            assert (await client.next("r"))["error"]["code"] == "stale_epoch"
            client.send({"op": "cancel", "id": "r", "epoch": paused["epoch"]})
            last = await client.next("r")
            assert (last["type"], last["finish_reason"]) == ("done", "cancelled")
            client.start("r")
            await client.text("r")

    run(folder, path, test)


BAD: list[tuple[bytes | dict[str, Any], str | None, int, str, bool]] = [
    (b"{no json\n", None, 400, "is not JSON", False),
    (b"\xff\xfe\n", None, 400, "not UTF-8", False),
    (b"[1]\n", None, 400, "must be a JSON object", False),
    (b"[" * 500 + b"]" * 500 + b"\n", None, 400, "nested deeper", False),
    (b'{"op": "list", "id": "' + b"x" * 5000 + b'"}\n', None, 413, "longer than 4096 bytes", False),
    ({"op": "dance", "id": "a"}, "a", 400, "use start, continue, pause, cancel or list", False),
    ({"id": "a"}, "a", 400, "unknown op null", False),
    ({"op": "list"}, None, 400, "'id' is missing", False),
    ({"op": "list", "id": 7}, None, 400, "'id'", False),
    ({"op": "list", "id": "a", "extra": 1}, "a", 400, "'extra' is not supported", False),
    ({"op": "cancel", "id": "a"}, "a", 404, "no request 'a' is open", False),
    ({"op": "continue", "id": "a", "epoch": 1}, "a", 404, "no request 'a' is open", False),
    ({"op": "start", "id": "a", "model": "tiny"}, "a", 400, "'prompt' is missing", True),
    ({"op": "start", "id": "a", "model": "tiny", "prompt": "x", "n": 2}, "a", 400, "'n' has no meaning", True),
    ({"op": "start", "id": "a", "model": "tiny", "prompt": ["x", "y"]}, "a", 400, "must be one prompt", True),
    ({"op": "start", "id": "a", "model": "tiny", "prompt": "x", "max_tokens": -1}, "a", 400, "'max_tokens'", True),
    ({"op": "start", "id": "a", "model": "tiny", "prompt": "x", "quantum": -1}, "a", 400, "'quantum'", False),
    ({"op": "start", "id": "a", "model": "tiny", "prompt": "x", "wings": 2}, "a", 400, "'wings' is not", True),
    ({"op": "start", "id": "a", "model": "tiny", "prompt": [271, 400]}, "a", 400, "token 400", True),
    ({"op": "start", "id": "a", "model": "nobody", "prompt": "x"}, "a", 404, "nobody", True),
    ({"op": "start", "id": "busy", "model": "tiny", "prompt": "x"}, "busy", 409, "'busy' is open already", False),
]


def test_what_is_refused_says_why_and_harms_nobody(folder: Path, path: Path) -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.start("busy", max_tokens=4, quantum=1)
            text, paused = await client.until("busy", "continue")
            for sent, name, status, said, over in BAD:
                client.send(sent)
                frame = await client.next(name)
                assert (frame["type"], frame["status"], frame["over"]) == ("error", status, over), (sent, frame)
                assert said in frame["error"]["message"], (sent, frame)
            client.send(b"\n  \n", {"op": "continue", "id": "busy", "epoch": paused["epoch"], "quantum": 0})
            assert len(text + await client.text("busy")) > 0

    run(folder, path, test, max_body_bytes=4096)


def test_a_list_looks_at_the_engine_once_and_takes_room_by_its_size(
    folder: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            names = [f"r{index}" for index in range(12)]
            for name in names:
                client.start(name, quantum=1)
            for name in names:
                await client.until(name, "continue")
            looks: list[EngineWorker] = []
            look = EngineWorker.snapshot
            monkeypatch.setattr(EngineWorker, "snapshot", lambda worker: looks.append(worker) or look(worker))
            client.send({"op": "list", "id": "all"})
            listed = (await client.next("all"))["requests"]
            assert {entry["id"]: entry["phase"] for entry in listed} == dict.fromkeys(names, "paused")
            assert len(looks) == 1

    run(folder, path, test)

    async def weigh() -> None:
        outbox = Outbox(8)
        outbox.put({}, 7)
        assert not outbox.full
        outbox.put({})
        assert outbox.full
        await outbox.take()
        assert not outbox.full

    asyncio.run(weigh())


def test_the_open_requests_of_all_connections_are_bounded(
    folder: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_socket, "MAX_REQUESTS", 3)

    async def test(bench: Bench) -> None:
        async with bench.client() as one, bench.client() as other:
            for client, name in ((one, "a"), (one, "b"), (other, "a")):
                client.start(name, quantum=1)
                await client.until(name, "continue")
            other.start("b")
            _, refused = await other.until("b", "error")
            assert (refused["status"], refused["over"]) == (429, True)
            assert "3 requests are open on this socket" in refused["error"]["message"]
            one.send({"op": "cancel", "id": "a"})
            await one.until("a", "done")
            other.start("b")
            await other.text("b")

    run(folder, path, test)


def test_long_lines_are_read_beside_the_event_loop(folder: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[str] = []
    read = stream_frames.read
    monkeypatch.setattr(
        stream_frames, "read", lambda *args: readers.append(threading.current_thread().name) or read(*args)
    )

    async def test(bench: Bench) -> None:
        async with bench.client() as client:
            client.start("long", "word " * 100_000)
            _, refused = await client.until("long", "error")
            assert (refused["status"], refused["over"]) == (400, True)
            assert "the context holds 512" in refused["error"]["message"]
            client.start("wrong", ["no tokens"] * 100_000)  # type: ignore[arg-type]
            _, refused = await client.until("wrong", "error")
            assert refused["status"] == 400 and refused["over"]
            client.start("short")
            await client.text("short")
        assert "MainThread" not in readers[:2] and readers[2] == "MainThread"

    run(folder, path, test)


def test_a_client_that_goes_takes_its_requests_along(folder: Path, path: Path) -> None:
    async def test(bench: Bench) -> None:
        async with bench.client() as stays:
            async with bench.client() as goes:
                for name in "abc":
                    goes.start(name, max_tokens=450)
                goes.start("paused", max_tokens=450, quantum=1)
                await goes.until("paused", "continue")
                stays.start("mine")
            await bench.idle()
            assert await stays.text("mine")

    run(folder, path, test)


def test_a_slow_reader_is_held_and_loses_nothing_while_others_go_on(folder: Path, path: Path) -> None:
    async def test(bench: Bench) -> None:
        settings = {"max_tokens": 250}
        async with bench.client() as other:
            other.start("whole", **settings)
            whole = await other.text("whole")
            line = socket.socket(socket.AF_UNIX)  # nothing reads from it before a client is made of it
            line.connect(str(bench.path))
            line.sendall(encoded({"op": "start", "id": "r", "prompt": "hello", **SETTINGS, "logprobs": 20, **settings}))
            generated = -1
            async with asyncio.timeout(WAIT_S):
                while True:  # until it comes to rest before its end
                    await asyncio.sleep(0.2)
                    slots = bench.worker.snapshot().slots
                    assert slots, "it ran to its end although nobody read"
                    if generated == slots[0].generated and slots[0].phase == "paused":
                        break
                    generated = slots[0].generated
            assert 0 < generated < 250 and slots[0].paused is False
            other.start("whole", **settings)
            assert await other.text("whole") == whole, "nobody else is held up"
            assert bench.worker.snapshot().slots[0].generated == generated
            line.setblocking(False)
            reader, writer = await asyncio.open_unix_connection(sock=line)
            text, last = await Client(reader, writer).until("r", "done")
            assert text == whole and last["finish_reason"] == "length"
            writer.close()

    run(folder, path, test, max_frames=8)


def test_a_draining_server_ends_what_is_paused_and_starts_nothing(folder: Path, path: Path) -> None:
    async def main() -> None:
        spec = ModelSpec("tiny", str(folder / "target"), "none", EngineConfig(max_context=256, cache_tokens=1024))
        state = ServerState(ServerSettings(), ModelRouter([spec]), Metrics(), phase="ready")
        served = StreamSocket(state, path)
        await served.start()
        reader, writer = await asyncio.open_unix_connection(str(path))
        client = Client(reader, writer)
        client.start("paused", quantum=1)
        await client.until("paused", "continue")
        state.phase = "draining"
        served.drain()
        assert (await client.next("paused"))["finish_reason"] == "cancelled"
        client.start("late")
        assert (await client.next("late"))["error"]["code"] == "draining"
        await state.router.close(0.0)
        await served.close()
        assert await reader.read() == b"" and not path.exists()

    asyncio.run(main())


def test_the_documented_session_speaks_the_protocol() -> None:
    text = (Path(__file__).parents[2] / "docs" / "stream-socket.md").read_text(encoding="utf-8")
    lines = [line[2:].encode() for line in text.splitlines() if line.startswith("> ")]
    asked = [stream_frames.read(line, ServerSettings()) for line in lines]
    told = [json.loads(line[2:]) for line in text.splitlines() if line.startswith("< ")]
    assert {getattr(one.operation, "op", None) for one in asked} == {"start", "continue", "cancel", "list"}
    assert {frame["type"] for frame in told} == {"token", "continue", "done", "error"}
    assert {frame["id"] for frame in told} == {one.id for one in asked}


def test_the_socket_file_is_its_owners_and_goes_with_the_server(folder: Path, path: Path) -> None:
    async def test(bench: Bench) -> None:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_ISSOCK(path.stat().st_mode)
        with pytest.raises(ConfigError, match="another server listens"):
            await StreamSocket(bench.state, path).start()

    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists(), "left behind by a server that was killed"
    run(folder, path, test)
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is no socket"):
        run(folder, path, test)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot be made"):
        run(folder, path.parent / ("long" * 40), test)

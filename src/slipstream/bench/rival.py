"""Runs llama.cpp in its own process, which answers one request at a time and sleeps in between.

llama.cpp comes as the package `xllamacpp` or as a `llama-server` program built for this machine. Both run with the same
settings: the engine's number of threads, no prompt cache, one slot, and the default of everything that affects speed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from slipstream.errors import RequestError, SlipstreamError
from slipstream.stats import RequestStats

NAME = "llama.cpp"
PACKAGE = "xllamacpp"
HOW_TO_GET = f"pip install {PACKAGE}"
# Pause before each side's turn. Worker threads spin for some milliseconds after their last work before they sleep; with
# a shorter pause they would take processor time from the side that is measured.
SETTLE_SECONDS = 0.05
# The start has failed after this time. If it is too short, large models on slow disks never start.
_START_SECONDS = 120
_STOP_SECONDS = 10  # A process that has not ended by itself after this time is killed.


def stats_of(timings: Mapping[str, float]) -> RequestStats:
    """llama.cpp's own timings of one request; as in this engine, the first token belongs to the prompt."""
    if timings.get("cache_n"):
        raise SlipstreamError(f"{NAME} answered from its prompt cache", "its prompt speed would mean nothing")
    return RequestStats(
        prompt_tokens=int(timings["prompt_n"]),
        ttft_ms=float(timings["prompt_ms"]),
        committed=max(0, int(timings["predicted_n"]) - 1),
        decode_ms=float(timings["predicted_ms"]),
    )


def available() -> bool:
    """Whether the package is installed; finding out imports nothing."""
    return importlib.util.find_spec(PACKAGE) is not None


def completion_body(prompt_ids: Sequence[int], max_tokens: int, temperature: float, seed: int) -> dict[str, object]:
    """A request for the same work as ours: the same ids, all requested tokens, and sampling by temperature alone.

    Greedy choice uses top-k 1, the cheapest way of llama.cpp, because its temperature 0 ranks the whole vocabulary.
    """
    chosen: dict[str, object] = (
        {"samplers": ["temperature"], "temperature": temperature, "seed": seed}
        if temperature > 0
        else {"samplers": ["top_k"], "top_k": 1, "temperature": 1.0, "seed": seed}
    )
    return {
        "prompt": list(prompt_ids),
        "n_predict": max_tokens,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": False,
        **chosen,
    }


class Rival(ABC):
    """One running llama.cpp process; the caller closes it."""

    version = ""
    system = ""  # the instruction sets that it was built for, in llama.cpp's own words

    def __init__(self, command: Sequence[str], stdin: int, stdout: int) -> None:
        self.process = subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, text=True, encoding="utf-8"
        )

    @abstractmethod
    def await_start(self) -> None:
        """Returns when it can be asked, and knows its version then; refuses a process that has failed."""

    @abstractmethod
    def ask(self, body: Mapping[str, object]) -> Mapping[str, object]: ...

    def complete(
        self, prompt_ids: Sequence[int], max_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> RequestStats:
        reply = self.ask(completion_body(prompt_ids, max_tokens, temperature, seed))
        timings = reply.get("timings")
        if not isinstance(timings, dict):
            raise SlipstreamError(f"{NAME} failed: {str(reply.get('error', reply))[:200]}")
        return stats_of(timings)

    def cpu_seconds(self) -> float:
        """Processor time it has used so far, which shows that it sleeps while another side runs; NaN if unknown."""
        return process_seconds(self.process.pid)

    def describe(self) -> dict[str, object]:
        return {"name": NAME, "version": self.version, "system": self.system}

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                # A question that a dead process did not read is still in the pipe's buffer and cannot be flushed.
                with contextlib.suppress(OSError):
                    pipe.close()
        self.process.terminate()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Rival:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class PackageRival(Rival):
    """The package, served by this module in a child process over two pipes."""

    def __init__(self, model: Path, threads: int, context: int) -> None:
        super().__init__(
            [sys.executable, "-m", "slipstream.bench.rival", str(model), str(threads), str(context)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def await_start(self) -> None:
        ready = self._read()
        if "error" in ready:
            raise SlipstreamError(f"{NAME} did not start: {ready['error']}")
        self.version, self.system = str(ready["version"]), str(ready["system"])

    def ask(self, body: Mapping[str, object]) -> Mapping[str, object]:
        assert self.process.stdin is not None
        try:
            print(json.dumps(body), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise _gone() from None
        return self._read()

    def _read(self) -> dict[str, object]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise _gone()
        found: dict[str, object] = json.loads(line)
        return found


class ServerRival(Rival):
    """A `llama-server` program, which is asked over HTTP on this machine."""

    def __init__(self, program: str, model: Path, threads: int, context: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        super().__init__(
            [
                *(program, "--model", str(model), "--threads", str(threads), "--threads-batch", str(threads)),
                *("--ctx-size", str(context), "--parallel", "1", "--cache-ram", "0"),
                *("--host", "127.0.0.1", "--port", str(port)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        self.system = f"as {Path(program).name} was built"

    def await_start(self) -> None:
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise _gone()
            try:
                self._get("/health")
            except SlipstreamError:
                time.sleep(0.1)
            else:
                self.version = str(self._get("/props").get("build_info", "unknown"))
                return
        raise SlipstreamError(f"{NAME} was not ready after {_START_SECONDS} seconds")

    def _get(self, path: str, body: Mapping[str, object] | None = None) -> dict[str, object]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data, {"Content-Type": "application/json"})
        # No proxy is used, even if the environment names one, because the server runs on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request) as reply:
                found: dict[str, object] = json.loads(reply.read())
        except urllib.error.HTTPError as error:
            raise SlipstreamError(f"{NAME} failed: {error.read().decode(errors='replace')[:200]}") from None
        except (OSError, ValueError):
            raise _gone() from None
        return found

    def ask(self, body: Mapping[str, object]) -> Mapping[str, object]:
        return self._get("/completion", body)


def find(program: str = PACKAGE) -> str:
    """The package's name if it is installed, or the path of a `llama-server`; it refuses what does not exist."""
    if program == PACKAGE:
        if not available():
            raise RequestError(f"{PACKAGE} is not installed", HOW_TO_GET)
        return PACKAGE
    found = shutil.which(program)
    if found is None:
        raise RequestError(f"there is no program {program}", f"name a llama-server or '{PACKAGE}'")
    return found


def start(model: Path, threads: int, context: int, program: str = PACKAGE) -> Rival:
    """Starts llama.cpp on a GGUF file."""
    if model.suffix != ".gguf" or not model.is_file():
        raise RequestError(f"{NAME} cannot read {model.name}", "choose a target that is a single .gguf file")
    found = find(program)
    package = found == PACKAGE
    rival = PackageRival(model, threads, context) if package else ServerRival(found, model, threads, context)
    try:
        rival.await_start()
    except BaseException:
        rival.close()
        raise
    return rival


def process_seconds(pid: int) -> float:
    """Processor time of all threads of a process, as Linux counts it; NaN elsewhere."""
    counts = Path(f"/proc/{pid}/stat")
    if not counts.is_file():
        return math.nan
    # The name in parentheses may contain spaces; the times are the 12th and 13th field after it.
    user, system = counts.read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def machine_seconds() -> float:
    """Processor time that all processes of this machine have used, as Linux counts it; NaN elsewhere."""
    counts = Path("/proc/stat")
    if not counts.is_file():
        return math.nan
    user, nice, system, _idle, _waiting, *interrupts = map(int, counts.read_text().split("\n", 1)[0].split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def _gone() -> SlipstreamError:
    return SlipstreamError(f"{NAME} ended unexpectedly", "start its program by itself to see why it cannot run here")


def serve(model: str, threads: int, context: int) -> None:
    """Runs in the child process: it answers each line of JSON with one line of JSON until the input ends."""
    # llama.cpp prints on file descriptor 1, which must not end up between the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path = model
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
        settings.n_ctx, settings.n_parallel = context, 1
        settings.cache_prompt, settings.cache_ram_mib = False, 0
        settings.verbosity = 0
        server = xllamacpp.Server(settings)
        version = getattr(xllamacpp, "__version__", None) or importlib.metadata.version(PACKAGE)
        ready = {"version": f"{PACKAGE} {version}", "system": xllamacpp.get_system_info()}
    except Exception as error:  # the parent process must learn of any error
        ready = {"error": str(error) or type(error).__name__}
    print(json.dumps(ready), file=replies, flush=True)
    if "error" in ready:
        return
    for line in sys.stdin:
        try:
            reply = server.handle_completions(json.loads(line))
        except Exception as error:
            reply = {"error": str(error) or type(error).__name__}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

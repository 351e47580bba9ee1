"""Holds connections that send nothing, from several processes, and measures what a new client and a stream notice.

python -m tests.hostile.idle [CONNECTIONS] [--seconds S]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.e2e.serving import Server, serve
from tests.hostile.neighbour import Neighbour

HEALTH_LIMIT_S = 1.0
LOG_LIMIT_BYTES = 1 << 20
SILENCE_LIMIT_MS = 250.0
_EACH_PROCESS = 2500
# Keeps `count` connections open until its input ends; connections that the server closes are opened again, about 200
# per second.
_HOLDER = """
import resource, select, socket, sys, time
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
held, poll = {}, select.poll()
poll.register(0, select.POLLIN | select.POLLHUP)
said = False
while True:
    for _ in range(min(20, count - len(held)) if said else count):
        one = socket.socket()
        one.settimeout(10)
        try:
            one.connect((host, port))
        except OSError:
            one.close()
            break
        held[one.fileno()] = one
        poll.register(one, select.POLLIN | select.POLLHUP)
    if not said:
        said = True
        print(len(held), flush=True)
    time.sleep(0.1)
    for number, _ in poll.poll(0):
        if number == 0:
            sys.exit()
        poll.unregister(number)
        held.pop(number).close()
"""


@contextlib.contextmanager
def idle_connections(server: Server, count: int) -> Iterator[int]:
    """Holds `count` connections that never send anything, in as many processes as needed; yields how many opened."""
    shares = [min(_EACH_PROCESS, count - start) for start in range(0, count, _EACH_PROCESS)]
    host, port = server.address
    holders = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", _HOLDER, host, str(port), str(share)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for share in shares
    ]
    try:
        yield sum(int(holder.stdout.readline() or 0) for holder in holders if holder.stdout is not None)
    finally:
        for holder in holders:
            holder.communicate()


@dataclass(slots=True)
class Idle:
    """What was measured while idle connections were held."""

    connections: int
    health_s: list[float] = field(default_factory=list)
    failed: int = 0
    silence_ms: float = 0.0
    log_bytes: int = 0

    @property
    def ok(self) -> bool:
        quiet = self.log_bytes < LOG_LIMIT_BYTES and self.silence_ms <= SILENCE_LIMIT_MS
        return quiet and not self.failed and max(self.health_s, default=99.0) < HEALTH_LIMIT_S

    def row(self) -> str:
        return (
            f"{self.connections} idle connections: {len(self.health_s)} x /health, the slowest "
            f"{max(self.health_s, default=0):.3f} s, {self.failed} failed; a stream's longest silence "
            f"{self.silence_ms:.0f} ms; {self.log_bytes} bytes of log"
        )


def beside_idle(server: Server, connections: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> Idle:
    """Holds idle connections for so long, asks /health as a newcomer every 50 ms, and listens to one stream.

    `clock` measures the answers and the silences; a server's processor time keeps other programs out of both.
    """
    with Neighbour(server, clock) as neighbour:
        log_before, began, end = server.log.stat().st_size, clock(), time.monotonic() + seconds
        with idle_connections(server, connections) as opened:
            seen = Idle(opened)
            while time.monotonic() < end:
                asked = clock()
                try:
                    ok = server.ask("/health", timeout=10)[0] == 200
                except (OSError, http.client.HTTPException):
                    ok = False
                seen.failed += not ok
                seen.health_s.append(clock() - asked)
                time.sleep(0.05)
        seen.silence_ms = neighbour.longest_silence_ms(began, clock())
        seen.log_bytes = server.log.stat().st_size - log_before
    return seen


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("connections", nargs="?", type=int, default=10_000)
    options.add_argument("--seconds", type=float, default=30.0)
    options.add_argument("--files", type=int, help="how many files the server may open")
    said = options.parse_args()
    with serve(files=said.files) as server:
        print(beside_idle(server, said.connections, said.seconds).row(), flush=True)


if __name__ == "__main__":
    main()

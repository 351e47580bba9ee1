"""The work that tests give to a helper's child process, which imports it by name."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

from slipstream.errors import RequestError


def worker(greeting: str = "hello") -> Callable[[str, Any], Any]:
    def work(task: str, value: Any) -> Any:
        return greeting if task == "greet" else _TASKS[task](value)

    return work


def refused() -> Callable[[], None]:
    raise RuntimeError("no such luck")


def _raise(value: str) -> None:
    raise RequestError(value, "a hint") if value != "foreign" else KeyError(value)


def _surroundings(_: Any) -> dict[str, Any]:
    names = {number: os.readlink(f"/proc/self/fd/{number}") for number in range(256) if _is_open(number)}
    return {
        "descriptors": names,
        "environment": dict(os.environ),
        "session": os.getsid(0),
        "pid": os.getpid(),
        "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
    }


def _raise_signals(numbers: list[int]) -> None:
    for number in numbers:
        signal.raise_signal(number)


def _is_open(number: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


_TASKS: dict[str, Callable[[Any], Any]] = {
    "echo": lambda value: value,
    "signal": lambda value: os.kill(os.getpid(), value),
    "power": lambda value: len(str(value ** (value**8))),
    "repeat": lambda value: len("a" * value),
    "long": lambda value: "é" * value,
    "exit": os._exit,
    "abort": lambda value: os.abort(),
    "sleep": lambda value: time.sleep(value),
    "raise": _raise,
    "surroundings": _surroundings,
    "ignored": lambda value: _raise_signals(value),
}

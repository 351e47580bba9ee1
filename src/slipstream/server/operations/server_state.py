"""The settings and the state that all parts of one server share; settings of a model belong to its `ModelSpec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.server.operations.metrics import Metrics
    from slipstream.server.operations.recording import Recorder
    from slipstream.server.serving.router import ModelRouter

Phase = Literal["loading", "ready", "draining"]

KEY_VARIABLE = "SLIPSTREAM_API_KEY"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_JSON_DEPTH = 128  # levels of nesting in a body; deeper values could overflow the stack of code that walks them
MAX_CHOICES = 64  # answers to one HTTP request, of all its prompts together; each is a request of the engine
RETRY_AFTER_S = 5  # for requests refused while the server drains, and for /health while it is not ready
MIN_BODY_BYTES_PER_S = 64 << 10  # half a megabit per second; a slower body would hold memory that other bodies need


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the whole server; a request cannot change them, it may only ask for less time."""

    host: str = "127.0.0.1"
    port: int = 8080  # 0 takes any free port
    api_keys: tuple[str, ...] = ()  # without any, no request needs a key
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # names that a Host header may have besides this machine's; "*" allows any
    allow_priority: bool = False  # whether a request may ask for a priority above 0
    max_body_bytes: int = 4 << 20
    timeout_s: float | None = None  # the longest time that a request may take; None sets no limit
    grace_s: float = 30.0  # how long running requests may go on after the server was asked to end
    keep_alive_s: float = 5.0  # silence on a stream after which a comment is sent
    stall_s: float = 60.0  # how long a client may pause while it sends a body or reads a response
    log_prompts: bool = False
    draft_lora_folder: Path | None = None  # the folder of adapters that clients may load; None allows none

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} does not exist", "give one from 0 (any free one) to 65535")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body is {self.max_body_bytes}", "it must be 1 byte or more")
        if self.timeout_s is not None and not 0 < self.timeout_s < float("inf"):
            raise ConfigError(f"timeout is {self.timeout_s}", "it must be above 0 seconds")
        if not 0 <= self.grace_s < float("inf"):
            raise ConfigError(f"grace is {self.grace_s}", "it must be 0 seconds or more")
        if self.draft_lora_folder is not None and not self.draft_lora_folder.is_dir():
            raise ConfigError(f"there is no folder {self.draft_lora_folder}", "name the one your adapters are in")
        for name in ("keep_alive_s", "stall_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}", "it must be above 0 seconds")
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise ConfigError("an API key has characters that a header cannot carry", "use printable ASCII, no spaces")
        for name in self.allowed_hosts:
            if not name or "/" in name or any(mark.isspace() for mark in name):
                raise ConfigError(f"'{name}' is not a host", "write it as it stands in an address, without http://")
        for origin in self.cors_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ConfigError(f"'{origin}' is not an origin", "write it as https://host or https://host:port")

    @property
    def is_local(self) -> bool:
        return self.host in LOOPBACK

    @property
    def checks_pages(self) -> bool:
        """Whether Host and Origin are checked to refuse web pages of other sites.

        They are not checked if the server listens beyond this machine and has keys, because such pages have no key.
        """
        return self.is_local or not self.api_keys

    @property
    def body_s(self) -> float:
        """The longest time that a body may take to arrive."""
        return self.stall_s + self.max_body_bytes / MIN_BODY_BYTES_PER_S

    def deadline(self, asked_s: float | None) -> float | None:
        """The seconds that a request may take: what it asked for, but never more than the server allows."""
        return min((limit for limit in (asked_s, self.timeout_s) if limit is not None), default=None)


def read_api_keys(given: Sequence[str], file: Path | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Keys from options, a file (one per line, # begins a comment) and the environment, each key once.

    A source that was given and holds no key is refused, because otherwise the server would run without keys by mistake.
    """
    if not all(given):
        raise ConfigError("an --api-key is empty", "give a key, or leave the option out to ask for none")
    keys = [*given, *filter(None, environment.get(KEY_VARIABLE, "").split(","))]
    if KEY_VARIABLE in environment and len(keys) == len(given):
        raise ConfigError(f"{KEY_VARIABLE} is set and holds no key", "give one, or unset it to ask for none")
    if file is not None:
        try:
            lines = file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the key file {file} cannot be read: {error}", "write one key a line") from None
        in_file = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not in_file:
            raise ConfigError(f"the key file {file} holds no key", "write one key a line")
        keys += in_file
    return tuple(dict.fromkeys(keys))


def parse_binary_size(text: str) -> int:
    """Reads a size such as 4194304, 512K, 4M or 2G (binary multiples)."""
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    short = text.strip().upper().removesuffix("B").removesuffix("I")
    number, unit = (short[:-1], short[-1]) if short and short[-1].isalpha() else (short, "")
    try:
        size = float(number) * units[unit]
        if not 1 <= size < float(1 << 60):
            raise ValueError
    except (KeyError, ValueError):
        raise ConfigError(f"'{text}' is not a size", "write it like 512K, 4M or 2G") from None
    return int(size)


@dataclass(slots=True)
class ServerState:
    """The parts of one server that its APIs share.

    `phase` is "loading" until each model with `preload` is loaded or has failed, and "draining" once the server was
    asked to end.
    """

    settings: ServerSettings
    router: ModelRouter
    metrics: Metrics
    recorder: Recorder | None = None  # None if nothing is recorded
    phase: Phase = "loading"

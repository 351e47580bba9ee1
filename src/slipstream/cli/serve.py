"""`slipstream serve`: a long-running server for clients of OpenAI's and Anthropic's APIs and for a browser.

`slipstream serve smollm2`, or `slipstream serve --models models.toml --port 8000`
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import options as o
from slipstream.cli.ui import Ui
from slipstream.config import Device, EngineConfig, Kernels, WeightFormat
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.server.operations.server_state import ServerSettings
    from slipstream.server.serving.model_files import ModelSpec
    from slipstream.server.serving.router import ModelRouter

_LISTENING, _LIMITS, _MODELS, _RECORDS = "Listening", "Limits", "Model", "Records"
_DEFAULT_MODEL = "smollm2"
# Requests that may wait. Each waiting request holds its prompt in memory; a client that gets 429 tries again later.
_DEFAULT_QUEUE = 256


ModelName = Annotated[
    str | None,
    typer.Argument(help="The model: a short name, a folder, a .gguf file or a hub id.", show_default=_DEFAULT_MODEL),
]
ModelsFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Serve the models of a TOML or YAML file instead.", rich_help_panel=_MODELS),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="The drafter, named like MODEL; also 'auto', 'suffix' (drafts from the text alone) or 'none'.",
        show_default="auto",
        rich_help_panel=_MODELS,
    ),
]
DraftLora = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]PATH[@SCALE]",
        rich_help_panel=_MODELS,
        help="A LoRA adapter as a variant of the drafter; repeatable. Requests name it in the field draft_lora.",
    ),
]
DraftLoraFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        show_default="nowhere",
        rich_help_panel=_MODELS,
        help="Let clients add adapters from this folder, and remove draft variants, while the server runs.",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        show_default="what is free",
        rich_help_panel=_MODELS,
        help="Memory for all models together, such as 4G; the least recently used model is unloaded to make room.",
    ),
]
Idle = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        show_default="never",
        rich_help_panel=_MODELS,
        help="Unload a model after this time without requests; the next request loads it again.",
    ),
]
MaxSequences = Annotated[
    int | None, typer.Option(help="Requests that run at the same time.", show_default="8", rich_help_panel=_LIMITS)
]
MaxQueue = Annotated[
    int | None,
    typer.Option(
        help="Requests that may wait; the server answers further ones with 429.",
        show_default=str(_DEFAULT_QUEUE),
        rich_help_panel=_LIMITS,
    ),
]
MaxBody = Annotated[
    str, typer.Option(metavar="SIZE", help="The largest request body that is accepted.", rich_help_panel=_LIMITS)
]
Timeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", help="The longest a request may take.", show_default="no limit", rich_help_panel=_LIMITS
    ),
]
Grace = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="How long running requests may go on after SIGTERM.", rich_help_panel=_LIMITS),
]
Host = Annotated[str, typer.Option(help="The address to listen on.", rich_help_panel=_LISTENING)]
Port = Annotated[int, typer.Option(help="The port to listen on; 0 takes a free one.", rich_help_panel=_LISTENING)]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        rich_help_panel=_LISTENING,
        help="Require this key; repeatable. SLIPSTREAM_API_KEY does the same and appears in no process list.",
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Require one of the keys in this file, one per line.", rich_help_panel=_LISTENING
    ),
]
Cors = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN", help="Let web pages of this origin send requests; repeatable.", rich_help_panel=_LISTENING
    ),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=_LISTENING,
        help="Also answer requests for this host name, such as that of a proxy; repeatable. * allows any.",
    ),
]
AllowPriority = Annotated[
    bool, typer.Option("--allow-priority", help="Let requests ask to run before others.", rich_help_panel=_LIMITS)
]
StreamSocket = Annotated[
    Path | None, typer.Option(metavar="PATH", help="Also serve NDJSON on this Unix socket.", rich_help_panel=_LISTENING)
]
Record = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        rich_help_panel=_RECORDS,
        show_default="off",
        help="Write every conversation, with prompts and answers, into this folder.",
    ),
]
LogPrompts = Annotated[
    bool, typer.Option("--log-prompts", help="Let prompts and answers appear in the log.", rich_help_panel=_RECORDS)
]
JsonLines = Annotated[bool, typer.Option("--json", help="Print start lines and log lines as JSON.")]


@dataclass(frozen=True, slots=True)
class SingleModelOptions:
    """The options that describe the model of a server of one model; a models file describes several models instead."""

    model: str | None = None
    draft: str | None = None
    mode: str | None = None
    dtype: WeightFormat = "auto"
    device: Device = "auto"
    kernels: Kernels = "triton"
    no_graphs: bool = False
    exact: bool = False
    no_text_drafts: bool = False
    threads: int = 0
    max_context: int = 0
    max_sequences: int | None = None
    max_queue: int | None = None
    draft_lora: Sequence[str] = ()

    def first_given(self) -> str | None:
        """The name on the command line of the first option that does not have its default; None without any."""
        given = (field.name for field in fields(self) if getattr(self, field.name) != field.default)
        name = next(given, None)
        return name if name is None else "MODEL" if name == "model" else f"--{name.replace('_', '-')}"

    def spec(self) -> ModelSpec:
        """What the router needs to load the model, which it does at the start."""
        from slipstream.server.serving.model_files import ModelSpec, served_name

        config = o.engine_config(
            self.dtype, self.threads, self.max_context, None, self.device, self.kernels, self.no_graphs, self.exact
        )
        engine = replace(
            config,
            text_drafts=not self.no_text_drafts,
            max_sequences=EngineConfig().max_sequences if self.max_sequences is None else self.max_sequences,
            max_waiting=_DEFAULT_QUEUE if self.max_queue is None else self.max_queue,
        )
        defaults = {} if self.mode is None else {"mode": str(o.speculation(self.mode).mode)}
        target, draft = self.model or _DEFAULT_MODEL, self.draft or "auto"
        lora = tuple(self.draft_lora)
        return ModelSpec(served_name(target), target, draft, engine, defaults, preload=True, draft_lora=lora)


def command(
    model: ModelName = None,
    models: ModelsFile = None,
    draft: Drafter = None,
    draft_lora: DraftLora = None,
    draft_lora_folder: DraftLoraFolder = None,
    mode: o.ModeName = None,
    dtype: o.Dtype = "auto",
    device: o.DeviceName = "auto",
    kernels: o.KernelChoice = "triton",
    no_graphs: o.NoGraphs = False,
    exact: o.Exact = False,
    no_text_drafts: o.NoTextDrafts = False,
    threads: o.Threads = 0,
    max_context: o.MaxContext = 0,
    max_sequences: MaxSequences = None,
    max_queue: MaxQueue = None,
    memory: Memory = None,
    idle: Idle = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    api_key: ApiKeys = None,
    api_key_file: ApiKeyFile = None,
    cors: Cors = None,
    allow_host: AllowHost = None,
    allow_priority: AllowPriority = False,
    stream_socket: StreamSocket = None,
    max_body: MaxBody = "4M",
    timeout: Timeout = None,
    grace: Grace = 30.0,
    record: Record = None,
    log_prompts: LogPrompts = False,
    json_output: JsonLines = False,
) -> None:
    """Serve one or several models until SIGTERM or Ctrl-C; a second one ends running requests at once."""
    from slipstream.server.operations.server_state import ServerSettings, parse_binary_size, read_api_keys

    options = SingleModelOptions(
        model,
        draft,
        mode,
        dtype,
        device,
        kernels,
        no_graphs,
        exact,
        no_text_drafts,
        threads,
        max_context,
        max_sequences,
        max_queue,
        tuple(draft_lora or ()),
    )

    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=read_api_keys(api_key or (), api_key_file, os.environ),
        cors_origins=tuple(cors or ()),
        allowed_hosts=tuple(allow_host or ()),
        allow_priority=allow_priority,
        max_body_bytes=parse_binary_size(max_body),
        timeout_s=timeout,
        grace_s=grace,
        log_prompts=log_prompts,
        draft_lora_folder=draft_lora_folder,
    )
    router = _router(options, models, None if memory is None else parse_binary_size(memory), idle)
    _serve(Ui(json_output), settings, router, must_load=models is None, record=record, stream_socket=stream_socket)


def _router(options: SingleModelOptions, models: Path | None, budget: int | None, idle: float | None) -> ModelRouter:
    from slipstream.server.serving.router import ModelRouter

    if models is None:
        return ModelRouter([options.spec()], memory_budget=budget, idle_s=idle or 0.0)
    misplaced = options.first_given()
    if misplaced is not None:
        raise ConfigError(f"{misplaced} is for a server of one model", f"set it for the model in {models}")
    return ModelRouter.from_file(models, memory_budget=budget, idle_s=idle)


def _serve(
    ui: Ui,
    settings: ServerSettings,
    router: ModelRouter,
    *,
    must_load: bool,
    record: Path | None,
    stream_socket: Path | None,
) -> None:
    from slipstream.server.lifecycle import Service, listen, url_of
    from slipstream.server.operations.metrics import Metrics
    from slipstream.server.operations.recording import Recorder
    from slipstream.server.operations.server_state import LOOPBACK, ServerState

    listener = listen(settings.host, settings.port)
    url = url_of(listener)
    names = [model.name for model in router.describe()]
    state = ServerState(settings, router, Metrics(), None if record is None else Recorder(record))

    def ready() -> None:
        if ui.json_output:
            ui.print_json({"event": "ready", "url": url})
        else:
            ui.note(f"Ready. Chat at {url}/, OpenAI's API at {url}/v1, Anthropic's at {url}.")

    service = Service(
        state,
        stream_socket=stream_socket,
        must_load=must_load,
        log_style="json" if ui.json_output else "text",
        on_ready=ready,
    )
    if settings.host not in LOOPBACK and not settings.api_keys:
        ui.warn(f"Anyone who can reach {settings.host} may use this server; --api-key makes it require a key.")
    if state.recorder is not None:
        state.recorder.start()
    if ui.json_output:
        ui.print_json({"event": "listening", "url": url, "pid": os.getpid(), "models": names})
    else:
        ui.note(f"Listening on {url}, loading {', '.join(names)} ..." if must_load else f"Listening on {url}.")
    service.run(sockets=[listener])
    if service.failure is not None:
        raise service.failure

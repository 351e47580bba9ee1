"""`slipstream serve`: a long-running server for clients of OpenAI's and Anthropic's APIs and for a browser.

`slipstream serve smollm2`, or `slipstream serve --models models.toml --port 8000`
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import options as o
from slipstream.cli.ui import Ui
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.server.operations.server_state import ServerSettings
    from slipstream.server.serving.model_files import ModelSpec
    from slipstream.server.serving.router import ModelRouter

_listening, _limits, _model, _records = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Listening", "Limits", "Model", "Records")
)
_DEFAULT_MODEL = "smollm2"
# Requests that may wait. Each waiting request holds its prompt in memory; a client that gets 429 tries again later.
_DEFAULT_QUEUE = 256


ModelName = Annotated[
    str | None,
    typer.Argument(help="The model: a short name, a folder, a .gguf file or a hub id.", show_default=_DEFAULT_MODEL),
]
ModelsFile = Annotated[Path | None, _model(metavar="FILE", help="Serve the models of a TOML or YAML file instead.")]
Drafter = Annotated[
    str | None,
    _model(
        help="The drafter, named like MODEL; also 'auto', 'suffix' (drafts from the text alone) or 'none'.",
        show_default="auto",
    ),
]
DraftLora = Annotated[
    list[str] | None,
    _model(
        metavar="[NAME=]PATH[@SCALE]",
        help="A LoRA adapter as a variant of the drafter; repeatable. Requests name it in the field draft_lora.",
    ),
]
DraftLoraFolder = Annotated[
    Path | None,
    _model(
        metavar="FOLDER",
        show_default="nowhere",
        help="Let clients add adapters from this folder, and remove draft variants, while the server runs.",
    ),
]
Memory = Annotated[
    str | None,
    _model(
        metavar="SIZE",
        show_default="what is free",
        help="Memory for all models together, such as 4G; the least recently used model is unloaded to make room.",
    ),
]
Idle = Annotated[
    float | None,
    _model(
        metavar="SECONDS",
        show_default="never",
        help="Unload a model after this time without requests; the next request loads it again.",
    ),
]
MaxSequences = Annotated[int | None, _limits(help="Requests that run at the same time.", show_default="8")]
MaxQueue = Annotated[
    int | None,
    _limits(help="Requests that may wait; the server answers further ones with 429.", show_default=str(_DEFAULT_QUEUE)),
]
MaxBody = Annotated[str, _limits(metavar="SIZE", help="The largest request body that is accepted.")]
Timeout = Annotated[
    float | None, _limits(metavar="SECONDS", help="The longest a request may take.", show_default="no limit")
]
Grace = Annotated[float, _limits(metavar="SECONDS", help="How long running requests may go on after SIGTERM.")]
Host = Annotated[str, _listening(help="The address to listen on.")]
Port = Annotated[int, _listening(help="The port to listen on; 0 takes a free one.")]
ApiKeys = Annotated[
    list[str] | None,
    _listening(
        metavar="KEY",
        help="Require this key; repeatable. SLIPSTREAM_API_KEY does the same and appears in no process list.",
    ),
]
ApiKeyFile = Annotated[
    Path | None, _listening(metavar="FILE", help="Require one of the keys in this file, one per line.")
]
Cors = Annotated[
    list[str] | None, _listening(metavar="ORIGIN", help="Let web pages of this origin send requests; repeatable.")
]
AllowHost = Annotated[
    list[str] | None,
    _listening(
        metavar="NAME",
        help="Also answer requests for this host name, such as that of a proxy; repeatable. * allows any.",
    ),
]
AllowPriority = Annotated[bool, _limits("--allow-priority", help="Let requests ask to run before others.")]
StreamSocket = Annotated[Path | None, _listening(metavar="PATH", help="Also serve NDJSON on this Unix socket.")]
Record = Annotated[
    Path | None,
    _records(
        metavar="FOLDER",
        show_default="off",
        help="Write every conversation, with prompts and answers, into this folder.",
    ),
]
LogPrompts = Annotated[bool, _records("--log-prompts", help="Let prompts and answers appear in the log.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print start lines and log lines as JSON.")]


# The options that describe the model of a server of one model; a models file describes several models instead.
_OF_ONE_MODEL = (
    *("model", "draft", "mode", "dtype", "device", "kernels", "no_graphs", "exact", "no_text_drafts"),
    *("threads", "max_context", "max_sequences", "max_queue", "draft_lora"),
)


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
    from slipstream.server.serving.router import ModelRouter

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
    budget = None if memory is None else parse_binary_size(memory)
    if models is not None:
        _refuse_beside_models_file(models, locals())  # `locals` holds this verb's options by name
        router = ModelRouter.from_file(models, memory_budget=budget, idle_s=idle)
    else:
        config = o.engine_config(dtype, threads, max_context, None, device, kernels, no_graphs, exact, no_text_drafts)
        sequences = config.max_sequences if max_sequences is None else max_sequences
        waiting = _DEFAULT_QUEUE if max_queue is None else max_queue
        config = replace(config, max_sequences=sequences, max_waiting=waiting)
        spec = single_model(model or _DEFAULT_MODEL, draft or "auto", mode, config, draft_lora or ())
        router = ModelRouter([spec], memory_budget=budget, idle_s=idle or 0.0)
    _serve(Ui(json_output), settings, router, must_load=models is None, record=record, stream_socket=stream_socket)


def single_model(
    target: str, draft: str, mode: str | None, engine: EngineConfig, draft_lora: Sequence[str] = ()
) -> ModelSpec:
    """What the router needs to serve one model, which it loads at the start."""
    from slipstream.server.serving.model_files import ModelSpec, served_name

    defaults = {} if mode is None else {"mode": str(o.speculation(mode).mode)}
    lora = tuple(draft_lora)
    return ModelSpec(served_name(target), target, draft, engine, defaults, preload=True, draft_lora=lora)


def _refuse_beside_models_file(models: Path, options: Mapping[str, object]) -> None:
    """Refuses the first option of one model that does not have its default."""
    defaults = signature(command).parameters
    for name in _OF_ONE_MODEL:
        if options[name] not in (defaults[name].default, []):
            shown = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
            raise ConfigError(f"{shown} is for a server of one model", f"set it for the model in {models}")


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

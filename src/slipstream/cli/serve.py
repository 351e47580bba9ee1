"""`slipstream serve`: the server people leave running, for OpenAI's and Anthropic's clients and a browser.

`slipstream serve smollm2`, or `slipstream serve --models models.toml --port 8000`
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
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

_LISTENING, _LIMITS, _MODELS, _RECORDS = "Listening", "Limits", "Model", "Records"
_DEFAULT_MODEL = "smollm2"
_DEFAULT_QUEUE = 256


ModelName = Annotated[
    str | None, typer.Argument(help="A short name, a folder, a .gguf file or a hub id.", show_default=_DEFAULT_MODEL)
]
ModelsFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Serve the models of a TOML or YAML file instead.", rich_help_panel=_MODELS),
]
Drafter = Annotated[
    str | None,
    typer.Option(help="Drafter: like MODEL; 'auto' or 'none'.", show_default="auto", rich_help_panel=_MODELS),
]
DraftLora = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]PATH[@SCALE]",
        rich_help_panel=_MODELS,
        help="A LoRA adapter as a variant of the drafter (may be given again); requests name it as draft_lora.",
    ),
]
DraftLoraFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        show_default="nowhere",
        rich_help_panel=_MODELS,
        help="Let clients add adapters from this folder, and remove variants, while the server runs.",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        show_default="what is free",
        rich_help_panel=_MODELS,
        help="Memory for all models together, like 4G; the least recently used one makes room.",
    ),
]
Idle = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        show_default="never",
        rich_help_panel=_MODELS,
        help="Put a model to sleep after so long without requests.",
    ),
]
MaxSequences = Annotated[
    int | None, typer.Option(help="Requests that run at the same time.", show_default="8", rich_help_panel=_LIMITS)
]
MaxQueue = Annotated[
    int | None,
    typer.Option(
        help="Requests that may wait; more get 429.", show_default=str(_DEFAULT_QUEUE), rich_help_panel=_LIMITS
    ),
]
MaxBody = Annotated[str, typer.Option(metavar="SIZE", help="Largest request body.", rich_help_panel=_LIMITS)]
Timeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", help="Longest a request may take.", show_default="no limit", rich_help_panel=_LIMITS
    ),
]
Grace = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="How long running requests may go on after SIGTERM.", rich_help_panel=_LIMITS),
]
Host = Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_LISTENING)]
Port = Annotated[int, typer.Option(help="Port; 0 is a free one.", rich_help_panel=_LISTENING)]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        rich_help_panel=_LISTENING,
        help="Ask for this key (may be given again). SLIPSTREAM_API_KEY does the same and shows in no process list.",
    ),
]
ApiKeyFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Ask for one of these keys, one a line.", rich_help_panel=_LISTENING)
]
Cors = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN", help="Let web pages of this origin ask (may be given again).", rich_help_panel=_LISTENING
    ),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=_LISTENING,
        help="Answer under this name as well, as a proxy or your DNS calls it (may be given again); * is any.",
    ),
]
AllowPriority = Annotated[
    bool, typer.Option("--allow-priority", help="Let requests ask to go before others.", rich_help_panel=_LIMITS)
]
StreamSocket = Annotated[
    Path | None, typer.Option(metavar="PATH", help="Also speak NDJSON on this Unix socket.", rich_help_panel=_LISTENING)
]
Record = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        rich_help_panel=_RECORDS,
        show_default="off",
        help="Write every conversation, prompts and answers included, into this folder.",
    ),
]
LogPrompts = Annotated[
    bool, typer.Option("--log-prompts", help="Let prompts and answers into the log.", rich_help_panel=_RECORDS)
]
JsonLines = Annotated[bool, typer.Option("--json", help="Start lines and log lines as JSON.")]


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
    """Serve a model, or several, until SIGTERM or Ctrl-C; a second one does not wait for running requests."""
    from slipstream.server.operations.server_state import ServerSettings, read_api_keys, read_bytes
    from slipstream.server.serving.router import ModelRouter

    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=read_api_keys(api_key or (), api_key_file, os.environ),
        cors_origins=tuple(cors or ()),
        allowed_hosts=tuple(allow_host or ()),
        allow_priority=allow_priority,
        max_body_bytes=read_bytes(max_body),
        timeout_s=timeout,
        grace_s=grace,
        log_prompts=log_prompts,
        draft_lora_folder=draft_lora_folder,
    )
    budget = None if memory is None else read_bytes(memory)
    ui = Ui(json_output)
    if models is not None:
        said: dict[str, object] = {
            "MODEL": model,
            "--draft": draft,
            "--mode": mode,
            "--dtype": dtype != "auto" or None,
            "--device": device != "auto" or None,
            "--kernels": kernels != "triton" or None,
            "--no-graphs": no_graphs or None,
            "--exact": exact or None,
            "--threads": threads or None,
            "--max-context": max_context or None,
            "--max-sequences": max_sequences,
            "--max-queue": max_queue,
            "--draft-lora": draft_lora or None,
        }
        router = _several(models, said, budget, idle)
    else:
        engine = replace(
            o.engine_config(dtype, threads, max_context, None, device, kernels, no_graphs, exact),
            max_sequences=EngineConfig().max_sequences if max_sequences is None else max_sequences,
            max_waiting=_DEFAULT_QUEUE if max_queue is None else max_queue,
        )
        spec = _single(model or _DEFAULT_MODEL, draft or "auto", draft_lora or (), mode, engine)
        router = ModelRouter([spec], memory_budget=budget, idle_s=idle or 0.0)
    _serve(ui, settings, router, must_load=models is None, record=record, stream_socket=stream_socket)


def _several(models: Path, said: dict[str, object], budget: int | None, idle: float | None) -> ModelRouter:
    from slipstream.server.serving.router import ModelRouter

    misplaced = next((name for name, value in said.items() if value is not None), None)
    if misplaced is not None:
        raise ConfigError(f"{misplaced} is for a server of one model", f"say it in {models}, for the model it is for")
    return ModelRouter.from_file(models, memory_budget=budget, idle_s=idle)


def _single(target: str, draft: str, draft_lora: Sequence[str], mode: str | None, engine: EngineConfig) -> ModelSpec:
    from slipstream.server.serving.model_files import ModelSpec

    defaults = {} if mode is None else {"mode": str(o.speculation(mode).mode)}
    return ModelSpec.from_options(target, draft, engine=engine, defaults=defaults, draft_lora=draft_lora)


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
    state = ServerState(settings, router, Metrics(), Recorder(record))

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
        ui.warn(f"Everybody who can reach {settings.host} may use this server; --api-key asks for a key.")
    assert state.recorder is not None
    state.recorder.start()
    if ui.json_output:
        ui.print_json({"event": "listening", "url": url, "pid": os.getpid(), "models": names})
    else:
        ui.note(f"Listening on {url}, loading {', '.join(names)} ..." if must_load else f"Listening on {url}.")
    service.run(sockets=[listener])
    if service.failure is not None:
        raise service.failure

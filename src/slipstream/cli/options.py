"""The options several verbs share, declared once, and the step from options to a loaded engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.ui import Ui
from slipstream.config import EngineConfig, WeightFormat
from slipstream.errors import RequestError
from slipstream.types import Mode

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

_MODEL, _SAMPLING = "Model", "Sampling"

Target = Annotated[
    str, typer.Option(help="Target model: a short name, a folder, a .gguf file or a hub id.", rich_help_panel=_MODEL)
]
Draft = Annotated[
    str,
    typer.Option(help="Drafter: like --target; 'auto' is the pair's own, 'none' is none.", rich_help_panel=_MODEL),
]
Dtype = Annotated[
    WeightFormat, typer.Option("--dtype", help="Weight format; 'auto' measures.", rich_help_panel=_MODEL)
]
Threads = Annotated[int, typer.Option(help="CPU threads; 0 is every core it may use.", rich_help_panel=_MODEL)]
MaxContext = Annotated[
    int, typer.Option(help="Tokens a sequence may hold; 0 is what the target allows.", rich_help_panel=_MODEL)
]
DraftWindow = Annotated[
    int | None,
    typer.Option(
        help="Context tokens the drafter sees; 0 is all.", show_default="the drafter's own", rich_help_panel=_MODEL
    ),
]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
MaxTokens = Annotated[int, typer.Option(help="Tokens to write at most.")]
ModeName = Annotated[
    str | None,
    typer.Option(
        "--mode", metavar="NAME", help="plain, chain or chain:ROWS.", show_default="chain with a drafter, else plain"
    ),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.", rich_help_panel=_SAMPLING)]
TopK = Annotated[int, typer.Option(help="Keep the K likeliest tokens; 0 is off.", rich_help_panel=_SAMPLING)]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.", rich_help_panel=_SAMPLING)]
MinP = Annotated[float, typer.Option(help="Keep tokens this likely relative to the best.", rich_help_panel=_SAMPLING)]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1 discourages; 1 is off.", rich_help_panel=_SAMPLING)]
PresencePenalty = Annotated[float, typer.Option(help="Off a logit once a token was used.", rich_help_panel=_SAMPLING)]
FrequencyPenalty = Annotated[float, typer.Option(help="Off a logit per use of a token.", rich_help_panel=_SAMPLING)]


def engine_config(dtype: WeightFormat, threads: int, max_context: int, draft_window: int | None) -> EngineConfig:
    return EngineConfig(
        weight_format=dtype, threads=threads, max_context=max_context, draft_window=draft_window
    )


def load(ui: Ui, target: str, draft: str, config: EngineConfig) -> LLM:
    """The engine for a pair, with a progress bar for whatever takes long."""
    with ui.loading() as progress:
        # Imported here: the engine brings torch, which `--help` and bad options must not wait for.
        from slipstream.engine.llm import LLM

        return LLM(target, None if draft == "none" else draft, config=config, progress=progress)


def mode_settings(mode: str | None, plain: bool) -> dict[str, str]:
    """The `mode` setting of a request; empty leaves the choice to the engine."""
    if plain:
        if mode is not None and mode != "plain":
            raise RequestError(f"--plain contradicts --mode {mode}", "give one of them")
        mode = "plain"
    return {} if mode is None else {"mode": str(Mode.parse(mode))}

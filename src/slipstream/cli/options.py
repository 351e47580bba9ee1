"""The options that several verbs share, declared once, and the way from options to a loaded engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.ui import Ui
from slipstream.config import Device, EngineConfig, Kernels, WeightFormat
from slipstream.errors import RequestError
from slipstream.types import BASE_VARIANT, Gate, Mode, Request

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

_MODEL, _SAMPLING, _SPECULATION = "Model", "Sampling", "Speculation"

Target = Annotated[
    str,
    typer.Option(help="The target model: a short name, a folder, a .gguf file or a hub id.", rich_help_panel=_MODEL),
]
Draft = Annotated[
    str,
    typer.Option(
        help="The drafter, named like --target; 'auto' is the pair's own, 'suffix' drafts from the text alone, 'none' "
        "drafts nothing.",
        rich_help_panel=_MODEL,
    ),
]
Dtype = Annotated[
    WeightFormat,
    typer.Option("--dtype", help="The weight format; 'auto' measures and takes the fastest.", rich_help_panel=_MODEL),
]
DeviceName = Annotated[
    Device,
    typer.Option("--device", help="The device to run on; 'auto' takes a GPU if there is one.", rich_help_panel=_MODEL),
]
KernelChoice = Annotated[
    Kernels,
    typer.Option(
        "--kernels",
        rich_help_panel=_MODEL,
        help="Which kernels a GPU runs: Triton's, or plain torch operations, which are slow and serve for comparison.",
    ),
]
NoGraphs = Annotated[
    bool,
    typer.Option(
        "--no-graphs",
        help="On a GPU, launch every kernel by itself instead of replaying captured graphs.",
        rich_help_panel=_MODEL,
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        rich_help_panel=_MODEL,
        help="On a GPU, keep batches so small that speculative text equals plain text to the bit.",
    ),
]
Threads = Annotated[int, typer.Option(help="CPU threads; 0 uses every core it may use.", rich_help_panel=_MODEL)]
MaxContext = Annotated[
    int, typer.Option(help="Tokens that one sequence may hold; 0 is what the target allows.", rich_help_panel=_MODEL)
]
DraftWindow = Annotated[
    int | None,
    typer.Option(
        help="Context tokens that the drafter sees; 0 shows it all.",
        show_default="the drafter's own",
        rich_help_panel=_MODEL,
    ),
]
NoTextDrafts = Annotated[
    bool,
    typer.Option(
        "--no-text-drafts",
        help="Do not draft from the text itself: auto uses only the drafter, and tree:ROWS:text is refused.",
        rich_help_panel=_MODEL,
    ),
]
DraftLora = Annotated[
    list[str] | None,
    typer.Option(
        "--draft-lora",
        metavar="[NAME=]PATH[@SCALE]",
        rich_help_panel=_MODEL,
        help="A LoRA adapter for the drafter; repeatable. The last one drafts; 'base' is the drafter without any.",
    ),
]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
MaxTokens = Annotated[int, typer.Option(help="The most tokens to write.")]
ModeName = Annotated[
    str | None,
    typer.Option(
        "--mode",
        metavar="NAME",
        rich_help_panel=_SPECULATION,
        show_default="auto if anything drafts, else plain",
        help="plain, chain, chain:ROWS, tree:ROWS, tree:ROWS:seed (begins with the likeliest chain), "
        "tree:ROWS:text (with drafts from the text itself) or auto.",
    ),
]
GateName = Annotated[
    str | None,
    typer.Option(
        "--gate",
        metavar="NAME",
        rich_help_panel=_SPECULATION,
        show_default="auto in mode auto, else off",
        help="The rule that ends speculation: entropy, ema, auto or off; KIND:name=value,... sets thresholds. "
        "With one other than auto, the default of --mode is chain.",
    ),
]
Confidence = Annotated[
    float | None,
    typer.Option(
        "--confidence",
        metavar="X",
        rich_help_panel=_SPECULATION,
        show_default="0, off",
        help="Draft only up to the first token that the drafter's confidence head trusts less than this.",
    ),
]
ShowDrafts = Annotated[
    bool,
    typer.Option(
        "--show-drafts",
        rich_help_panel=_SPECULATION,
        help="Draw the drafts of each step and which of them were kept, on stderr; with --json, list the steps.",
    ),
]
TraceFile = Annotated[
    str | None,
    typer.Option(
        "--trace", metavar="FILE", rich_help_panel=_SPECULATION, help="Write one JSON line per decoding step."
    ),
]
Temperature = Annotated[
    float, typer.Option(help="Sampling temperature; 0 always takes the likeliest token.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.", rich_help_panel=_SAMPLING)]
TopK = Annotated[int, typer.Option(help="Keep the K likeliest tokens; 0 keeps all.", rich_help_panel=_SAMPLING)]
TopP = Annotated[
    float, typer.Option(help="Keep the likeliest tokens up to this total probability.", rich_help_panel=_SAMPLING)
]
MinP = Annotated[
    float, typer.Option(help="Keep tokens at least this likely relative to the best one.", rich_help_panel=_SAMPLING)
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1 it makes used tokens less likely; 1 is off.", rich_help_panel=_SAMPLING)
]
PresencePenalty = Annotated[
    float, typer.Option(help="Subtracted from a token's logit once the token was used.", rich_help_panel=_SAMPLING)
]
FrequencyPenalty = Annotated[
    float, typer.Option(help="Subtracted from a token's logit for every use of it.", rich_help_panel=_SAMPLING)
]


def engine_config(
    dtype: WeightFormat = "auto",
    threads: int = 0,
    max_context: int = 0,
    draft_window: int | None = None,
    device: Device = "auto",
    kernels: Kernels = "triton",
    no_graphs: bool = False,
    exact: bool = False,
    no_text_drafts: bool = False,
) -> EngineConfig:
    return EngineConfig(
        weight_format=dtype,
        threads=threads,
        max_context=max_context,
        draft_window=draft_window,
        device=device,
        kernels=kernels,
        graphs=not no_graphs,
        exact=exact,
        text_drafts=not no_text_drafts,
    )


def refuse_beside(chosen: str, others: Mapping[str, bool]) -> None:
    """Refuses the first of the other options that was given, before a model is loaded in vain."""
    for option, given in others.items():
        if given:
            raise RequestError(f"{option} does not go with {chosen}", "leave one of them out")


def load(ui: Ui, target: str, draft: str, config: EngineConfig, draft_lora: Sequence[str] = ()) -> LLM:
    """Loads the engine for a pair and its adapters, and shows a progress bar for work that takes long."""
    with ui.loading() as progress:
        # The engine imports torch, which takes seconds; `--help` and refused options must not wait for it.
        from slipstream.engine.llm import LLM

        adapters = [source for source in draft_lora if source != BASE_VARIANT]
        pair = target, None if draft == "none" else draft
        llm = LLM(*pair, draft_lora=adapters, config=config, progress=progress)
    if not llm.compiled:
        ui.note(f"Running on {llm.kernels}.")
    return llm


def chosen_variant(llm: LLM, draft_lora: Sequence[str]) -> str:
    """The name of the draft variant that the last --draft-lora asked for."""
    return llm.draft_variants[-1] if draft_lora and draft_lora[-1] != BASE_VARIANT else BASE_VARIANT


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """The speculation settings that the user gave; the engine chooses the others."""

    mode: Mode | None = None
    gate: Gate | None = None
    min_confidence: float | None = None

    def __post_init__(self) -> None:
        mode = self.resolved_mode(speculates=True)
        gate = self.gate or Gate("auto" if mode.kind == "auto" else "off")
        # The engine would refuse bad settings too, but only after a model was loaded in vain.
        Request("check", (0,), mode=mode, gate=gate, min_confidence=self.min_confidence or 0.0)

    def resolved_mode(self, speculates: bool) -> Mode:
        """The mode that a request will run in: a gate other than 'auto' needs a fixed mode, which is then 'chain'."""
        if self.mode is not None:
            return self.mode
        if not speculates:
            return Mode("plain")
        return Mode("auto" if self.gate is None or self.gate.kind == "auto" else "chain")

    def settings(self) -> dict[str, object]:
        """The settings of a request, without those that are left to the engine."""
        said = {"mode": self.mode, "gate": self.gate}
        settings: dict[str, object] = {name: str(value) for name, value in said.items() if value is not None}
        if self.min_confidence is not None:
            settings["min_confidence"] = self.min_confidence
        return settings


def speculation(
    mode: str | None, gate: str | None = None, confidence: float | None = None, plain: bool = False
) -> SpeculationOptions:
    """Reads the options and refuses bad or contradictory values."""
    if plain:
        if mode is not None and mode != "plain":
            raise RequestError(f"--plain contradicts --mode {mode}", "give one of them")
        mode = "plain"
    return SpeculationOptions(
        None if mode is None else Mode.parse(mode), None if gate is None else Gate.parse(gate), confidence
    )

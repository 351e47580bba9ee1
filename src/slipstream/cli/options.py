"""Declares the options that several verbs share, and turns options into settings and a loaded engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.ui import Ui
from slipstream.config import Device, EngineConfig, Kernels, WeightFormat
from slipstream.errors import RequestError
from slipstream.types import BASE_VARIANT, Gate, Mode, Request

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

_model, _sampling, _speculation = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Model", "Sampling", "Speculation")
)

Target = Annotated[str, _model(help="The target model: a short name, a folder, a .gguf file or a hub id.")]
Draft = Annotated[
    str,
    _model(
        help="The drafter, named like --target; 'auto' is the pair's own, 'suffix' drafts from the text alone, 'none' "
        "drafts nothing."
    ),
]
Dtype = Annotated[WeightFormat, _model("--dtype", help="The weight format; 'auto' measures and takes the fastest.")]
DeviceName = Annotated[Device, _model("--device", help="The device to run on; 'auto' takes a GPU if there is one.")]
KernelChoice = Annotated[
    Kernels,
    _model(
        "--kernels",
        help="Which kernels a GPU runs: Triton's, or plain torch operations, which are slow and serve for comparison.",
    ),
]
NoGraphs = Annotated[
    bool, _model("--no-graphs", help="On a GPU, launch every kernel by itself instead of replaying captured graphs.")
]
Exact = Annotated[
    bool, _model("--exact", help="On a GPU, keep batches so small that speculative text equals plain text to the bit.")
]
Threads = Annotated[int, _model(help="CPU threads; 0 uses every core it may use.")]
MaxContext = Annotated[int, _model(help="Tokens that one sequence may hold; 0 is what the target allows.")]
DraftWindow = Annotated[
    int | None, _model(help="Context tokens that the drafter sees; 0 shows it all.", show_default="the drafter's own")
]
NoTextDrafts = Annotated[
    bool,
    _model(
        "--no-text-drafts",
        help="Do not draft from the text itself: auto uses only the drafter, and tree:ROWS:text is refused.",
    ),
]
DraftLora = Annotated[
    list[str] | None,
    _model(
        "--draft-lora",
        metavar="[NAME=]PATH[@SCALE]",
        help="A LoRA adapter for the drafter; repeatable. The last one drafts; 'base' is the drafter without any.",
    ),
]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
MaxTokens = Annotated[int, typer.Option(help="The most tokens to write.")]
ModeName = Annotated[
    str | None,
    _speculation(
        "--mode",
        metavar="NAME",
        show_default="auto if anything drafts, else plain",
        help="plain, chain, chain:ROWS, tree:ROWS, tree:ROWS:seed (begins with the likeliest chain), "
        "tree:ROWS:text (with drafts from the text itself) or auto.",
    ),
]
GateName = Annotated[
    str | None,
    _speculation(
        "--gate",
        metavar="NAME",
        show_default="auto in mode auto, else off",
        help="The rule that ends speculation: entropy, ema, auto or off; KIND:name=value,... sets thresholds. "
        "With one other than auto, the default of --mode is chain.",
    ),
]
Confidence = Annotated[
    float | None,
    _speculation(
        "--confidence",
        metavar="X",
        show_default="0, off",
        help="Draft only up to the first token that the drafter's confidence head trusts less than this.",
    ),
]
ShowDrafts = Annotated[
    bool,
    _speculation(
        "--show-drafts",
        help="Draw the drafts of each step and which of them were kept, on stderr; with --json, list the steps.",
    ),
]
TraceFile = Annotated[
    str | None, _speculation("--trace", metavar="FILE", help="Write one JSON line per decoding step.")
]
Temperature = Annotated[float, _sampling(help="Sampling temperature; 0 always takes the likeliest token.")]
Seed = Annotated[int, _sampling(help="The same seed gives the same text.")]
TopK = Annotated[int, _sampling(help="Keep the K likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, _sampling(help="Keep the likeliest tokens up to this total probability.")]
MinP = Annotated[float, _sampling(help="Keep tokens at least this likely relative to the best one.")]
RepetitionPenalty = Annotated[float, _sampling(help="Above 1 it makes used tokens less likely; 1 is off.")]
PresencePenalty = Annotated[float, _sampling(help="Subtracted from a token's logit once the token was used.")]
FrequencyPenalty = Annotated[float, _sampling(help="Subtracted from a token's logit for every use of it.")]


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
    """Refuses the first other option that was given, before a model is loaded in vain."""
    for option, given in others.items():
        if given and option != chosen:
            raise RequestError(f"{option} does not go with {chosen}", "leave one of them out")


def load(ui: Ui, target: str, draft: str, config: EngineConfig, draft_lora: Sequence[str] = ()) -> LLM:
    """Loads the engine for a pair and its adapters, and shows a progress bar for work that takes long."""
    with ui.loading() as progress:
        # The engine imports torch, which takes seconds; `--help` and refused options must not wait for it.
        from slipstream.engine.llm import LLM

        llm = LLM(
            target,
            None if draft == "none" else draft,
            draft_lora=[source for source in draft_lora if source != BASE_VARIANT],
            config=config,
            progress=progress,
        )
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
        given = {
            "mode": self.mode and str(self.mode),
            "gate": self.gate and str(self.gate),
            "min_confidence": self.min_confidence,
        }
        return {name: value for name, value in given.items() if value is not None}


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

"""`slipstream generate`: continues or answers one prompt.

`slipstream generate --prompt "The capital of France is" --max-tokens 32 --json`
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.bench.measure import AnswerEvents
from slipstream.cli import options as o
from slipstream.cli.draft_drawing import show_steps
from slipstream.cli.trace import Trace
from slipstream.cli.ui import Ui, footer
from slipstream.errors import RequestError, SourceError
from slipstream.types import GenEvent, SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM


def command(
    target: o.Target = "smollm2",
    draft: o.Draft = "auto",
    draft_lora: o.DraftLora = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt; it is raw text unless --chat is given.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help="Read the prompt from a file; - is stdin.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    max_tokens: o.MaxTokens = 256,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before these characters; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    mode: o.ModeName = None,
    plain: Annotated[bool, typer.Option("--plain", help="The same as --mode plain.")] = False,
    gate: o.GateName = None,
    confidence: o.Confidence = None,
    show_drafts: o.ShowDrafts = False,
    trace: o.TraceFile = None,
    temperature: o.Temperature = 0.0,
    seed: o.Seed = 0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    presence_penalty: o.PresencePenalty = 0.0,
    frequency_penalty: o.FrequencyPenalty = 0.0,
    logprobs: Annotated[
        int | None, typer.Option(help="Report each token's log-probability and the N likeliest tokens (with --json).")
    ] = None,
    dtype: o.Dtype = "auto",
    device: o.DeviceName = "auto",
    kernels: o.KernelChoice = "triton",
    no_graphs: o.NoGraphs = False,
    exact: o.Exact = False,
    threads: o.Threads = 0,
    max_context: o.MaxContext = 0,
    draft_window: o.DraftWindow = None,
    no_text_drafts: o.NoTextDrafts = False,
    json_output: o.JsonOutput = False,
) -> None:
    """Continue a prompt, or answer it with --chat."""
    ui = Ui(json_output)
    text = read_prompt(prompt, prompt_file)
    if logprobs is not None and not json_output:
        raise RequestError("--logprobs has nowhere to go", "add --json")
    # The values are checked here, before a model is loaded in vain.
    sampling: dict[str, object] = {
        "temperature": temperature,
        "seed": seed,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logprobs": logprobs,
    }
    SamplingParams(**sampling)  # type: ignore[arg-type]
    how = o.speculation(mode, gate, confidence, plain)
    limits = {"max_tokens": max_tokens, "stop": tuple(stop or ()), "ignore_eos": ignore_eos}
    config = o.engine_config(
        dtype, threads, max_context, draft_window, device, kernels, no_graphs, exact, no_text_drafts
    )
    with Trace(trace) as steps_file, o.load(ui, target, draft, config, draft_lora or ()) as llm:
        mode_name = str(how.resolved_mode(llm.speculates))
        settings = {**limits, **how.settings(), **sampling, "draft_lora": o.chosen_variant(llm, draft_lora or ())}
        stream = llm.stream(text, chat=chat, **settings)
        _write(ui, llm, stream, steps_file, mode_name, show_drafts, logprobs is not None)


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise RequestError("the prompt must come from exactly one place", "give --prompt or --prompt-file")
    if prompt is not None:
        return prompt
    try:
        if prompt_file == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        with open(str(prompt_file), encoding="utf-8", newline="") as file:
            return file.read()
    except OSError as error:
        raise SourceError(f"cannot read the prompt file {prompt_file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"the prompt in {prompt_file} is not UTF-8 text", "save it as UTF-8") from error


def _write(
    ui: Ui, llm: LLM, stream: Iterator[GenEvent], trace: Trace, mode: str, show_drafts: bool, logprobs: bool
) -> None:
    answer = AnswerEvents()
    try:
        for event in answer.follow(stream):
            trace.record(mode, event, llm.tokenizer)
            ui.write(event.text)
    except KeyboardInterrupt:
        ui.write("\n")
        raise
    if ui.json_output:
        result = answer.to_json(draft=None if mode == "plain" else llm.draft_label)
        if logprobs:
            result["logprobs"] = [
                {
                    "token_id": token.id,
                    "logprob": token.logprob,
                    "top_logprobs": [{"token_id": other, "logprob": logprob} for other, logprob in token.top_logprobs],
                }
                for token in answer.tokens
            ]
        if show_drafts:
            result["steps"] = [step.to_json() for step in answer.steps]
        ui.print_json(result)
        return
    ui.write("\n")
    if show_drafts:
        show_steps(ui, llm, answer.steps, answer.stats)
    ui.note(footer(answer.stats))

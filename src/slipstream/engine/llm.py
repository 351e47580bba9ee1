"""The public Python API: `LLM` loads a pair and generates, chats and streams with it."""

from __future__ import annotations

import functools
import gc
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, overload

import torch

from slipstream.config import DRAFT_WINDOW_LIMIT, EngineConfig, WeightFormat
from slipstream.engine.devices import chosen_gpu, make_executor
from slipstream.engine.engine import Engine
from slipstream.engine.profiler import Profiler, make_profiler
from slipstream.engine.profiler import StepProfile as StepProfile
from slipstream.engine.request_settings import make_request
from slipstream.engine.variants import DrafterFile, DraftVariant
from slipstream.errors import RequestError
from slipstream.formats.adapters import parse_source
from slipstream.formats.sources import NO_DRAFT, SUFFIX, drafter_source, resolve
from slipstream.kernels.cpu.native_library import availability, library, set_threads
from slipstream.kernels.machine import int8_peak, prepare_torch, read_bandwidth
from slipstream.models.dflash import DFlashDrafter, check_pair
from slipstream.models.loading import load_target
from slipstream.models.weights import Weights
from slipstream.stats import RequestStats
from slipstream.text.chat_template import helper, render
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import FinishReason, GenEvent, Progress, Request, TokenOut

Messages = Sequence[Mapping[str, object]]
DraftSource = Literal["drafter", "suffix"]  # a drafter (and beside it the text), or the text alone


@dataclass(slots=True)
class Completion:
    """The whole answer to one prompt."""

    text: str
    token_ids: list[int]
    tokens: list[TokenOut]
    finish_reason: FinishReason
    stats: RequestStats
    step_sizes: list[int]
    error: str | None = None


class LLM:
    """A target and, if there is one, its drafter, ready to generate.

    >>> llm = LLM("smollm2")
    >>> llm.generate("The capital of France is", max_tokens=8).text

    `draft` names the drafter. `auto` is the drafter that was made for a named target; for any other target it means
    `suffix`, which drafts from the text alone. `none`, or None, drafts nothing. A folder whose name is one of these
    words is given as a path, such as ./suffix.

    Each `draft_lora` is an adapter for the drafter, [NAME=]PATH[@SCALE]; a request names the one that drafts for it.
    """

    def __init__(
        self,
        target: str = "smollm2",
        draft: str | None = "auto",
        *,
        draft_lora: Sequence[str] = (),
        config: EngineConfig | None = None,
        progress: Progress | None = None,
    ) -> None:
        _spare_the_collector()
        self.config = config or EngineConfig()
        if draft in (None, NO_DRAFT):
            self.config = replace(self.config, text_drafts=False)
        self.threads = prepare_torch(self.config.threads)
        self._gpu = chosen_gpu(self.config)
        self.config = replace(self.config, prefill_chunk=self.config.chunk_rows(self._gpu is not None))
        self.target_source = resolve(target, progress=progress)
        elsewhere = self._gpu.weights if self._gpu is not None else None
        with self.target_source.checked():
            loaded = load_target(self.target_source.path, self.config.weight_format, progress, elsewhere)
        self._target, self.format_choice = loaded.model, loaded.format_reason
        if self._target.weight_format == "native" and self._gpu is None:
            # Torch computes only small things then, and its threads would spin on the cores that our threads need.
            set_threads(self.threads)
            torch.set_num_threads(1)
        self.tokenizer = Tokenizer.load(self.target_source.path, loaded.metadata)
        self._templates = helper()  # kept here, so that the process that renders templates outlives a single prompt
        self._progress = progress
        self._draft_file = self._load_drafter(target, draft, progress)
        self.max_context = self.config.max_context or self._target.config.max_positions
        self.engine = self._build_engine()
        self._ids = itertools.count()
        self._inbox: dict[str, deque[GenEvent]] = {}
        for source in draft_lora:
            self.add_draft_lora(source)

    def _load_drafter(self, target: str, draft: str | None, progress: Progress | None) -> DrafterFile | None:
        wanted = drafter_source(target, draft)
        self._drafter_label: str | None = None
        if wanted is None:
            return None
        source = resolve(wanted, progress=progress)
        file = DrafterFile(
            source.path, self._draft_format(), progress, self._gpu.weights if self._gpu is not None else Weights
        )
        check_pair(self._target.config, file.base)
        self._drafter_label = source.label
        return file

    @property
    def _drafter(self) -> DFlashDrafter | None:
        return self._draft_file.base if self._draft_file is not None else None

    def _draft_format(self) -> WeightFormat:
        """Drafts may be approximate, so a 4-bit target's drafter runs in int8, the faster format for whole blocks."""
        return "int8" if self._target.weight_format in ("int4", "int8") else self._target.weight_format

    def _build_engine(self) -> Engine:
        executor = make_executor(
            self._gpu, self._target, self._drafter, self.config, self.max_context, self.draft_window, self._progress
        )
        key = self._draft_file.key if self._draft_file else None
        return Engine(executor, self.tokenizer, self.config, self.max_context, key)

    def measure_costs(self) -> dict[str, object]:
        """Returns the step costs that the policy decides with; measures them now if no request has needed them yet."""
        return self.engine.proposer.policy.costs.to_json()

    def prepare_batches(self) -> None:
        """Captures now what the first batch of requests would wait for on a GPU; on a CPU it does nothing."""
        self.engine.executor.prepare_batches()

    @property
    def has_draft(self) -> bool:
        """Whether there is a drafter; without one, requests may still speculate from their own text."""
        return self._drafter is not None

    @property
    def draft_source(self) -> DraftSource | None:
        """Where drafts come from: a drafter, the text alone, or nowhere, so that every request decodes plainly."""
        if self.has_draft:
            return "drafter"
        return "suffix" if self.engine.proposer.text_drafts else None

    @property
    def speculates(self) -> bool:
        """Whether requests may speculate; those that name no mode then run in mode `auto`."""
        return self.draft_source is not None

    @property
    def draft_label(self) -> str | None:
        """The name of what drafts: the drafter's, `suffix`, or None."""
        return SUFFIX if self.draft_source == "suffix" else self._drafter_label

    @property
    def draft_variants(self) -> list[str]:
        """The names for `draft_lora`: the drafter's, then those of its adapters; empty without a drafter."""
        return self.engine.executor.variants.names

    def add_draft_lora(self, source: str) -> str:
        """Loads and installs an adapter given as [NAME=]PATH[@SCALE]; returns the name by which requests use it."""
        return self.install_draft_lora(self.load_draft_lora(source))

    def load_draft_lora(self, source: str) -> DraftVariant:
        """Does the slow part of adding an adapter; any thread may call it, and requests go on meanwhile."""
        if self._draft_file is None:
            raise RequestError("without a drafter there is nothing to adapt", "load one with --draft")
        parsed = parse_source(source)
        self.engine.executor.variants.check_free(parsed.name)
        return self._draft_file.variant(parsed, self.engine.executor.blocks, self._progress)

    def install_draft_lora(self, variant: DraftVariant) -> str:
        """Lets requests use a loaded variant by its name; only the thread that steps the engine may do this."""
        self.engine.executor.variants.install(variant)
        return variant.name

    def remove_draft_lora(self, name: str) -> None:
        """Forgets a variant that no open request drafts with; only the thread that steps the engine may do this."""
        self.engine.remove_variant(name)

    @property
    def expected_tau(self) -> dict[str, float]:
        """The tokens per step that the drafter promises by class of prompts (full chains, greedy); may be empty."""
        return dict(self._drafter.config.expected_tau) if self._drafter is not None else {}

    @property
    def proposals(self) -> int:
        """The tokens that one block of the drafter proposes; 0 without a drafter."""
        return self._drafter.config.proposals if self._drafter is not None else 0

    @property
    def compiled(self) -> bool:
        """Whether there are compiled kernels; a configuration may still ask for a format that torch runs."""
        return self._gpu is not None or library() is not None

    @property
    def kernels(self) -> str:
        """Says which kernels run, and why those."""
        return self._gpu.label if self._gpu is not None else availability().reason

    @property
    def exact(self) -> bool:
        """Whether speculative text equals plain text to the bit; if not, the texts may differ at near-ties."""
        return self.engine.executor.exact

    @property
    def draft_window(self) -> int:
        """How many tokens back the drafter looks: as configured, or as far as it was trained to; 0 means no limit."""
        if self.config.draft_window is not None:
            return self.config.draft_window
        trained = self._drafter.config.trained_length if self._drafter else 0
        return min(trained or DRAFT_WINDOW_LIMIT, DRAFT_WINDOW_LIMIT)

    def describe(self) -> dict[str, object]:
        """Returns what was loaded and how, and the floor of a step: the time that reading every weight once takes."""
        bandwidth = self._gpu.read_bandwidth() if self._gpu is not None else read_bandwidth()
        return {
            "target": self.target_source.label,
            "draft": self.draft_label,
            "weight_format": self._target.weight_format,
            "format_choice": self.format_choice,
            "kernels": self.kernels,
            "exact": self.exact,
            "threads": self.threads,
            "max_context": self.max_context,
            "block_size": self._drafter.config.block_size if self._drafter else None,
            "draft_window": self.draft_window if self._drafter else None,
            "weight_bytes": self._target.step_bytes,
            "draft_bytes": self._drafter.step_bytes if self._drafter else 0,
            "bandwidth_gbs": round(bandwidth / 1e9, 2),
            "floor_ms": round(1e3 * self._target.step_bytes / bandwidth, 3),
            "graph_bytes": self._gpu.graphs.bytes if self._gpu is not None else None,
            "row_products": self._target.row_products,
            "peak_products": (int8_peak() if self._target.weight_format == "native" and self._gpu is None else None),
        }

    @overload
    def generate(self, prompts: str, *, chat: bool = False, **settings: object) -> Completion: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompts: Sequence[str], *, chat: bool = False, **settings: object) -> list[Completion]: ...
    def generate(
        self, prompts: str | Sequence[str], *, chat: bool = False, **settings: object
    ) -> Completion | list[Completion]:
        """Completes one prompt, or several at once; `chat` wraps each as a user message."""
        many = [prompts] if isinstance(prompts, str) else list(prompts)
        requests = [self.request(self.prompt_ids(prompt, chat=chat), **settings) for prompt in many]
        completions = self.run(requests)
        return completions[0] if isinstance(prompts, str) else completions

    def chat(self, messages: Messages, **settings: object) -> Completion:
        return self.run([self.request(self.prompt_ids(messages, chat=True), **settings)])[0]

    def stream(self, prompt: str | Messages, *, chat: bool = False, **settings: object) -> EventStream:
        """Starts a request and returns an iterator over its events, one per step; closing it cancels the request."""
        request = self.request(self.prompt_ids(prompt, chat=chat or not isinstance(prompt, str)), **settings)
        self._start(request)
        return EventStream(self, request.id)

    def _start(self, request: Request) -> None:
        self.engine.add(request)
        self._inbox[request.id] = deque()

    def next_event(self, request_id: str) -> GenEvent:
        """Returns the next event of a started request.

        It steps the engine until there is one; events of other started requests are kept until they are asked for.
        """
        inbox = self._inbox[request_id]
        while not inbox:
            for event in self.engine.step():
                waiting = self._inbox.get(event.request_id)
                if waiting is not None:
                    waiting.append(event)
        event = inbox.popleft()
        if event.finish_reason is not None:
            del self._inbox[request_id]
        return event

    def cancel(self, request_id: str) -> None:
        """Ends a started request and drops its events; a finished request is left alone."""
        if self.engine.cancel(request_id):
            while self.next_event(request_id).finish_reason is None:
                pass
        self._inbox.pop(request_id, None)

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Runs prepared requests together and returns their completions in order."""
        try:
            for request in requests:
                self._start(request)
            return [self._gather(request.id) for request in requests]
        finally:
            for request in requests:
                self.cancel(request.id)

    def _gather(self, request_id: str) -> Completion:
        completion = Completion("", [], [], "error", RequestStats(), [])
        finished = False
        while not finished:
            event = self.next_event(request_id)
            _collect(completion, event)
            finished = event.finish_reason is not None
        return completion

    def profiler(self) -> Profiler:
        """Returns a profiler that clocks decoding steps while it is entered; requests must run alone then."""
        return make_profiler(self.engine)

    def prompt_ids(self, prompt: str | Messages, *, chat: bool = False, limit: int | None = None) -> list[int]:
        """Returns the token ids of raw text, or of messages through the chat template; refuses more than `limit`."""
        if chat:
            messages: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            text = render(
                self.tokenizer.chat_template,
                messages,
                bos_token=self.tokenizer.bos_token,
                eos_token=self.tokenizer.eos_token,
            )
            return self.tokenizer.encode(text, add_bos=False, limit=limit)
        if not isinstance(prompt, str):
            raise RequestError("messages were given where raw text is expected", "use chat=True or chat()")
        ids = self.tokenizer.encode(prompt, limit=limit)
        if not ids:
            # The target needs at least one token to continue from.
            starts = [self.tokenizer.bos_id] if self.tokenizer.bos_id is not None else sorted(self.tokenizer.eos_ids)
            if not starts:
                raise RequestError("the prompt is empty and this tokenizer has no BOS token", "give some text")
            ids = starts[:1]
        return ids

    def request(self, prompt_ids: Sequence[int], **settings: object) -> Request:
        """Returns a request from keyword settings; refuses a setting that is unknown or impossible."""
        name = f"request-{next(self._ids)}"
        request = make_request(name, prompt_ids, settings, self.tokenizer.eos_ids, self.speculates)
        if request.constraint is not None:
            # It is compiled in the caller's thread, because it would delay every request in the engine's thread.
            self.engine.grammars.prepare(request.constraint, request.thinking)
        return request

    def close(self) -> None:
        """Drops models and caches; the object cannot be used afterwards."""
        self.engine.grammars.close()
        del self.engine, self._target, self._draft_file, self._gpu, self._templates

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> Literal[False]:
        self.close()
        return False


@functools.cache
def _spare_the_collector() -> None:
    """Exempts the objects that imports have made from garbage collection, once per process.

    Otherwise a full collection in the middle of a step walks hundreds of thousands of torch's objects.
    """
    gc.freeze()


class EventStream(Iterator[GenEvent]):
    """Iterates over the events of one request as they come; closing it early cancels the request."""

    def __init__(self, llm: LLM, request_id: str) -> None:
        self._llm = llm
        self._request_id = request_id
        self._open = True

    def __next__(self) -> GenEvent:
        if not self._open:
            raise StopIteration
        event = self._llm.next_event(self._request_id)
        self._open = event.finish_reason is None
        return event

    def close(self) -> None:
        if self._open:
            self._open = False
            self._llm.cancel(self._request_id)

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _collect(completion: Completion, event: GenEvent) -> None:
    if completion.tokens:
        completion.step_sizes.append(len(event.tokens))
    completion.text += event.text
    completion.tokens += event.tokens
    completion.token_ids += [token.id for token in event.tokens]
    if event.finish_reason is not None:
        completion.finish_reason = event.finish_reason
    completion.error = event.error
    if event.stats is not None:
        completion.stats = event.stats

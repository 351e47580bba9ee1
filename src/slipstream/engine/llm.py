"""The public Python API: load a pair, generate, chat, stream."""

from __future__ import annotations

import functools
import gc
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, overload

import torch

from slipstream.cache.cpu.page_pools import KvPools, PoolShape
from slipstream.cache.pages import PageTable
from slipstream.config import DRAFT_WINDOW_LIMIT, PAGE_TOKENS, EngineConfig, WeightFormat
from slipstream.engine.costing import measure_costs
from slipstream.engine.devices import gpu_backend
from slipstream.engine.engine import Engine
from slipstream.engine.memory import StateRoom, pool_pages
from slipstream.engine.profile import Profiler, make_profiler
from slipstream.engine.profile import StepProfile as StepProfile
from slipstream.engine.runner import Runner
from slipstream.engine.settings import make_request
from slipstream.engine.variants import DrafterFile, DraftVariant
from slipstream.errors import RequestError
from slipstream.formats.adapters import parse_source
from slipstream.formats.sources import pair_draft, resolve
from slipstream.kernels.cpu.delta_rule import delta_is_exact
from slipstream.kernels.cpu.exactness import ROW_INVARIANT_FORMATS, attention_is_exact, matrix_is_exact
from slipstream.kernels.cpu.native_library import availability, library
from slipstream.kernels.cpu.native_threads import set_threads
from slipstream.kernels.machine import int8_peak, prepare_torch, read_bandwidth
from slipstream.lazy import cached_property
from slipstream.models.dflash import DFlashDrafter
from slipstream.models.loading import load_target
from slipstream.models.pair import check_pair
from slipstream.models.weights import Weights
from slipstream.speculative.costs import CostTable
from slipstream.speculative.draft import BlockDrafter
from slipstream.stats import RequestStats
from slipstream.text.chat_template import helper, render
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import FinishReason, GenEvent, Request, TokenOut

Progress = Callable[[str, int, int], None]
Messages = Sequence[Mapping[str, object]]


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
    """A target and, where there is one, its drafter, ready to generate.

    >>> llm = LLM("smollm2")
    >>> llm.generate("The capital of France is", max_tokens=8).text

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
        self.threads = prepare_torch(self.config.threads)
        self._gpu = gpu_backend(self.config)
        self.config = replace(self.config, prefill_chunk=self.config.chunk_rows(self._gpu is not None))
        self.target_source = resolve(target, progress=progress)
        elsewhere = self._gpu.weights if self._gpu is not None else None
        with self.target_source.checked():
            loaded = load_target(self.target_source.path, self.config.weight_format, progress, elsewhere)
        self._target, self.format_choice = loaded.model, loaded.format_reason
        if self._target.weight_format == "native" and self._gpu is None:
            # what is left to torch is small, and its threads would go on spinning where ours want to work
            set_threads(self.threads)
            torch.set_num_threads(1)
        self.tokenizer = Tokenizer.load(self.target_source.path, loaded.metadata)
        self._templates = helper()  # held, so that its process outlives a single prompt
        self._progress = progress
        self._draft_file = self._load_drafter(target, draft, progress)
        self.max_context = self.config.max_context or self._target.config.max_positions
        self._engine = self._build_engine()
        self._ids = itertools.count()
        self._inbox: dict[str, deque[GenEvent]] = {}
        for source in draft_lora:
            self.add_draft_lora(source)

    def _load_drafter(self, target: str, draft: str | None, progress: Progress | None) -> DrafterFile | None:
        wanted = pair_draft(target) if draft == "auto" else draft
        self.draft_label: str | None = None
        if wanted is None or wanted == "none":
            return None
        source = resolve(wanted, progress=progress)
        file = DrafterFile(
            source.path, self._draft_format(), progress, self._gpu.weights if self._gpu is not None else Weights
        )
        check_pair(self._target.config, file.base)
        self.draft_label = source.label
        return file

    @property
    def _drafter(self) -> DFlashDrafter | None:
        return self._draft_file.base if self._draft_file is not None else None

    def _draft_format(self) -> WeightFormat:
        """Drafts may be approximate, so a 4-bit target's drafter runs in int8, the faster format for whole blocks."""
        return "int8" if self._target.weight_format in ("int4", "int8") else self._target.weight_format

    def _pool_shapes(self) -> tuple[PoolShape, PoolShape | None]:
        shape, draft = self._target.config, self._drafter.config if self._drafter is not None else None
        return (
            PoolShape(shape.kv_shapes, shape.states),
            PoolShape.alike(draft.layers, draft.kv_heads, draft.head_dim) if draft is not None else None,
        )

    def _build_engine(self) -> Engine:
        key = self._draft_file.key if self._draft_file else None
        target_pool, draft_pool = self._pool_shapes()
        if self._gpu is not None:
            return self._gpu.build(
                self._target,
                self._drafter,
                (target_pool, draft_pool),
                self.tokenizer,
                self.max_context,
                self.draft_window,
                key,
                self._progress,
            )
        per_token = target_pool.bytes_per_token() + (draft_pool.bytes_per_token() if draft_pool else 0)
        room = StateRoom.plan(target_pool.states, self.config, PAGE_TOKENS, per_token)
        pages = pool_pages(
            self.config.cache_tokens, self.max_context, PAGE_TOKENS, per_token + room.token_bytes, room.reserved_bytes
        )
        self._pools = KvPools(pages, PAGE_TOKENS, target_pool, draft_pool, room.slots(pages), room.stride)
        blocks = self._in_blocks(self._drafter) if self._drafter is not None else None
        return Engine(
            Runner(self._target, self._pools, PAGE_TOKENS, blocks),
            self._pools,
            PageTable(pages),
            self.tokenizer,
            self.config,
            self.max_context,
            key,
            self.exact,
            self._measure_costs,
        )

    def _in_blocks(self, drafter: DFlashDrafter) -> BlockDrafter:
        if self._gpu is not None:
            return self._gpu.in_blocks(drafter)
        return BlockDrafter(self._target, drafter, self._pools, PAGE_TOKENS, self.draft_window)

    def _measure_costs(self) -> CostTable:
        assert self._drafter is not None, "only speculation asks for costs"
        shapes = self._pool_shapes()
        return measure_costs(
            self._target, self._drafter, lambda pages: KvPools(pages, PAGE_TOKENS, *shapes), PAGE_TOKENS, self._progress
        )

    def measure_costs(self) -> dict[str, object]:
        """The step costs the policy decides with; measured now if no request has needed them yet."""
        return self._engine.proposer.policy.costs.to_json()

    def prepare_batches(self) -> None:
        """Does now what several requests at once would first have to wait for on a GPU; nothing on a CPU."""
        if self._gpu is not None:
            self._gpu.capture_batches()

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def has_draft(self) -> bool:
        return self._drafter is not None

    @property
    def draft_variants(self) -> list[str]:
        """What a request's `draft_lora` may name: the drafter itself, then its adapters; empty without a drafter."""
        return self._engine.variants

    def add_draft_lora(self, source: str) -> str:
        """Loads and installs an adapter given as [NAME=]PATH[@SCALE]; returns the name requests call it by."""
        return self.install_draft_lora(self.load_draft_lora(source))

    def load_draft_lora(self, source: str) -> DraftVariant:
        """The slow part of adding an adapter, for any thread: requests go on meanwhile."""
        if self._draft_file is None:
            raise RequestError("without a drafter there is nothing to adapt", "load one with --draft")
        parsed = parse_source(source)
        self._engine.check_new_variant(parsed.name)
        return self._draft_file.variant(parsed, self._in_blocks, self._progress)

    def install_draft_lora(self, variant: DraftVariant) -> str:
        """Lets requests use a loaded variant by its name; only the thread that steps the engine may do this."""
        self._engine.add_variant(variant)
        return variant.name

    def remove_draft_lora(self, name: str) -> None:
        """Forgets a variant that no open request drafts with; only the thread that steps the engine may do this."""
        self._engine.remove_variant(name)

    @property
    def expected_tau(self) -> dict[str, float]:
        """Tokens per step the drafter promises by class of prompts (full chains, greedy); empty: nothing."""
        return dict(self._drafter.config.expected_tau) if self._drafter is not None else {}

    @property
    def proposals(self) -> int:
        """Tokens one block of the drafter proposes; 0 without a drafter."""
        return self._drafter.config.proposals if self._drafter is not None else 0

    @property
    def compiled(self) -> bool:
        """Whether compiled kernels are at hand; a torch format may be asked for all the same."""
        return self._gpu is not None or library() is not None

    @property
    def kernels(self) -> str:
        """Which kernels serve, and why those."""
        return self._gpu.label if self._gpu is not None else availability().reason

    @cached_property
    def exact(self) -> bool:
        """Whether speculative text equals plain text to the bit here; otherwise near-ties may differ."""
        if self._gpu is not None:
            return self._gpu.exact
        config, layers = self._target.config, self._target.layers
        one_of_each = {layer.kind: layer for layer in layers}.values()
        heads = {(one.heads, one.kv_heads, one.head_dim) for one in map(config.layer, range(config.layers))}
        return (
            self._target.weight_format in ROW_INVARIANT_FORMATS
            and all(matrix_is_exact(matrix) for layer in one_of_each for matrix in layer.matrices)
            and all(attention_is_exact(*shape, PAGE_TOKENS) for shape in heads)
            and (config.states is None or delta_is_exact(config.states))
        )

    @property
    def draft_window(self) -> int:
        """How far back the drafter looks: as asked, or no further than it was trained to (0: no limit)."""
        if self.config.draft_window is not None:
            return self.config.draft_window
        trained = self._drafter.config.trained_length if self._drafter else 0
        return min(trained or DRAFT_WINDOW_LIMIT, DRAFT_WINDOW_LIMIT)

    def describe(self) -> dict[str, object]:
        """What was loaded and how, and the floor under a step: every weight read once at this machine's bandwidth."""
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
        """An iterator over events, one per step; closing it cancels the request."""
        request = self.request(self.prompt_ids(prompt, chat=chat or not isinstance(prompt, str)), **settings)
        self._start(request)
        return EventStream(self, request.id)

    def _start(self, request: Request) -> None:
        self._engine.add(request)
        self._inbox[request.id] = deque()

    def next_event(self, request_id: str) -> GenEvent:
        """The next event of a started request; steps the engine until there is one, for everybody."""
        inbox = self._inbox[request_id]
        while not inbox:
            for event in self._engine.step():
                waiting = self._inbox.get(event.request_id)
                if waiting is not None:
                    waiting.append(event)
        event = inbox.popleft()
        if event.finish_reason is not None:
            del self._inbox[request_id]
        return event

    def cancel(self, request_id: str) -> None:
        """Ends a started request and forgets what it had still to say; a finished one is left alone."""
        if self._engine.cancel(request_id):
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
        """Clocks decoding steps while it is entered; requests must run alone meanwhile."""
        return make_profiler(self._engine, self._gpu)

    def prompt_ids(self, prompt: str | Messages, *, chat: bool = False, limit: int | None = None) -> list[int]:
        """Token ids of raw text, or of messages through the chat template; more than `limit` are refused."""
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
            # an empty prompt still needs one token for the target to speak after
            starts = [self.tokenizer.bos_id] if self.tokenizer.bos_id is not None else sorted(self.tokenizer.eos_ids)
            if not starts:
                raise RequestError("the prompt is empty and this tokenizer has no BOS token", "give some text")
            ids = starts[:1]
        return ids

    def request(self, prompt_ids: Sequence[int], **settings: object) -> Request:
        """A request from keyword settings; an unknown or impossible setting is refused."""
        name = f"request-{next(self._ids)}"
        request = make_request(name, prompt_ids, settings, self.tokenizer.eos_ids, self.has_draft)
        if request.constraint is not None:
            # compiled here and now: the thread that steps the engine has better things to do
            self._engine.grammars.prepare(request.constraint, request.thinking)
        return request

    def close(self) -> None:
        """Drops models and caches; the object cannot be used afterwards."""
        self._engine.grammars.close()
        del self._engine, self._target, self._draft_file, self._gpu, self._templates
        vars(self).pop("_pools", None)  # a GPU's belong to its backend

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> Literal[False]:
        self.close()
        return False


@functools.cache
def _spare_the_collector() -> None:
    """Once per process: what the imports left behind stays, so Python need not look through it again and again.

    A full collection walks hundreds of thousands of torch's objects, in the middle of a step.
    """
    gc.freeze()


class EventStream(Iterator[GenEvent]):
    """The events of one request as they come; closing it early cancels the request."""

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

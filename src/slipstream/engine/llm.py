"""The public Python API: load a pair, generate, chat, stream."""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, overload

import torch

from slipstream.cache.pages import PageTable
from slipstream.cache.pools import KvPools, PoolShape
from slipstream.config import DRAFT_WINDOW_LIMIT, PAGE_TOKENS, EngineConfig, WeightFormat
from slipstream.engine.costing import measure_costs
from slipstream.engine.engine import Engine
from slipstream.engine.memory import StateRoom, pool_pages
from slipstream.engine.runner import Runner
from slipstream.errors import RequestError
from slipstream.formats.sources import pair_draft, resolve
from slipstream.kernels.delta import delta_is_exact
from slipstream.kernels.exactness import ROW_INVARIANT_FORMATS, attention_is_exact, matrix_is_exact
from slipstream.kernels.machine import int8_peak, prepare_torch, read_bandwidth
from slipstream.kernels.native.library import availability, library
from slipstream.kernels.native.threads import set_threads
from slipstream.models.dflash import DFlashDrafter, load_drafter
from slipstream.models.loading import load_target
from slipstream.models.pair import check_pair
from slipstream.speculative.costs import CostTable
from slipstream.speculative.draft import BlockDrafter
from slipstream.text.chat_template import render
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import (
    MAX_SEED,
    FinishReason,
    Gate,
    GenEvent,
    Mode,
    Request,
    RequestStats,
    SamplingParams,
    TokenOut,
)

Progress = Callable[[str, int, int], None]
Messages = Sequence[Mapping[str, object]]
_SAMPLING = tuple(f.name for f in fields(SamplingParams))
_DIRECT = ("max_tokens", "min_confidence", "share_noise", "cache_prompt", "constraint", "thinking")
_OTHER = (*_DIRECT, "stop", "mode", "gate", "ignore_eos")


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
    """

    def __init__(
        self,
        target: str = "smollm2",
        draft: str | None = "auto",
        *,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
    ) -> None:
        _spare_the_collector()
        self.config = config or EngineConfig()
        self.threads = prepare_torch(self.config.threads)
        self.target_source = resolve(target, progress=progress)
        loaded = load_target(self.target_source.path, self.config.weight_format, progress)
        self._target, self.format_choice = loaded.model, loaded.format_reason
        if self._target.weight_format == "native":
            # what is left to torch is small, and its threads would go on spinning where ours want to work
            set_threads(self.threads)
            torch.set_num_threads(1)
        self.tokenizer = Tokenizer.load(self.target_source.path, loaded.metadata)
        self._progress = progress
        self._drafter = self._load_drafter(target, draft, progress)
        self.max_context = self.config.max_context or self._target.config.max_positions
        self._engine = self._build_engine()
        self._ids = itertools.count()
        self._inbox: dict[str, deque[GenEvent]] = {}

    def _load_drafter(self, target: str, draft: str | None, progress: Progress | None) -> DFlashDrafter | None:
        wanted = pair_draft(target) if draft == "auto" else draft
        self.draft_label: str | None = None
        if wanted is None or wanted == "none":
            return None
        source = resolve(wanted, progress=progress)
        drafter = load_drafter(source.path, self._draft_format(), progress)
        check_pair(self._target.config, drafter)
        self.draft_label = source.label
        self._draft_key = _fingerprint(source.path)
        return drafter

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
        target_pool, draft_pool = self._pool_shapes()
        per_token = target_pool.bytes_per_token() + (draft_pool.bytes_per_token() if draft_pool else 0)
        room = StateRoom.plan(target_pool.states, self.config, PAGE_TOKENS, per_token)
        pages = pool_pages(
            self.config.cache_tokens, self.max_context, PAGE_TOKENS, per_token + room.token_bytes, room.reserved_bytes
        )
        pools = KvPools(pages, PAGE_TOKENS, target_pool, draft_pool, room.slots(pages), room.stride)
        block_drafter = None
        if self._drafter is not None:
            block_drafter = BlockDrafter(self._target, self._drafter, pools, PAGE_TOKENS, self.draft_window)
        return Engine(
            Runner(self._target, pools, PAGE_TOKENS, block_drafter), pools, PageTable(pages), self.tokenizer,
            self.config, self.max_context, self._draft_key if self._drafter else None, self.exact,
            self._measure_costs,
        )

    def _measure_costs(self) -> CostTable:
        assert self._drafter is not None, "only speculation asks for costs"
        shapes = self._pool_shapes()
        return measure_costs(
            self._target, self._drafter, lambda pages: KvPools(pages, PAGE_TOKENS, *shapes), PAGE_TOKENS,
            self._progress,
        )

    def measure_costs(self) -> dict[str, object]:
        """The step costs the policy decides with; measured now if no request has needed them yet."""
        return self._engine.proposer.policy.costs.to_json()

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def has_draft(self) -> bool:
        return self._drafter is not None

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
        return library() is not None

    @property
    def kernels(self) -> str:
        """Which kernels serve, and why those."""
        return availability().reason

    @cached_property
    def exact(self) -> bool:
        """Whether speculative text equals plain text to the bit here; otherwise near-ties may differ."""
        config, layers = self._target.config, self._target.layers
        one_of_each = {type(layer): layer for layer in layers}.values()
        heads = {(layer.shape.heads, layer.shape.kv_heads, layer.shape.head_dim) for layer in layers}
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
        bandwidth = read_bandwidth()
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
            "row_products": self._target.row_products,
            "peak_products": int8_peak() if self._target.weight_format == "native" else None,
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

    def prompt_ids(self, prompt: str | Messages, *, chat: bool = False) -> list[int]:
        """Token ids of raw text, or of messages through the chat template."""
        if chat:
            messages: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            text = render(
                self.tokenizer.chat_template, messages,
                bos_token=self.tokenizer.bos_token, eos_token=self.tokenizer.eos_token,
            )
            return self.tokenizer.encode(text, add_bos=False)
        if not isinstance(prompt, str):
            raise RequestError("messages were given where raw text is expected", "use chat=True or chat()")
        ids = self.tokenizer.encode(prompt)
        if not ids:
            # an empty prompt still needs one token for the target to speak after
            starts = [self.tokenizer.bos_id] if self.tokenizer.bos_id is not None else sorted(self.tokenizer.eos_ids)
            if not starts:
                raise RequestError("the prompt is empty and this tokenizer has no BOS token", "give some text")
            ids = starts[:1]
        return ids

    def request(self, prompt_ids: Sequence[int], **settings: object) -> Request:
        """A request from keyword settings; an unknown or impossible setting is refused."""
        unknown = [name for name in settings if name not in (*_SAMPLING, *_OTHER)]
        if unknown:
            raise RequestError(f"unknown setting '{unknown[0]}'", f"known: {', '.join((*_SAMPLING, *_OTHER))}")
        sampling = {name: settings[name] for name in _SAMPLING if name in settings}
        if sampling.get("seed") is None:
            sampling["seed"] = random.SystemRandom().randint(0, MAX_SEED)
        if "logit_bias" in sampling:
            sampling["logit_bias"] = _bias(sampling["logit_bias"])
        mode, gate = _mode_and_gate(settings.get("mode"), settings.get("gate"), self.has_draft)
        stop = settings.get("stop", ())
        base = Request(
            id=f"request-{next(self._ids)}",
            prompt_ids=tuple(prompt_ids),
            sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
            mode=mode,
            gate=gate,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),  # type: ignore[arg-type]
            stop_token_ids=frozenset() if settings.get("ignore_eos") else self.tokenizer.eos_ids,
        )
        rest = {name: settings[name] for name in _DIRECT if name in settings}
        request = replace(base, **rest)  # type: ignore[arg-type]
        if request.constraint is not None:
            # compiled here and now: the thread that steps the engine has better things to do
            self._engine.grammars.prepare(request.constraint, request.thinking)
        return request

    def close(self) -> None:
        """Drops models and caches; the object cannot be used afterwards."""
        del self._engine, self._target, self._drafter

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


def _bias(given: object) -> tuple[tuple[int, float], ...]:
    """What is added to which tokens' logits, from a mapping as APIs have it or from pairs."""
    try:
        pairs = given.items() if isinstance(given, Mapping) else given or ()
        return tuple(sorted((int(token), float(value)) for token, value in pairs))  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise RequestError(f"logit_bias is {given}", "give a number for each of some token ids") from None


def _mode_and_gate(mode: object, gate: object, has_draft: bool) -> tuple[Mode, Gate]:
    """What was asked for; an unnamed mode is the best the pair can do, an unnamed gate leaves a named mode alone."""
    asked = None if gate is None else Gate.parse(str(gate))
    if mode is not None:
        chosen = Mode.parse(str(mode))
    elif not has_draft:
        chosen = Mode("plain")
    else:
        chosen = Mode("auto" if asked is None or asked.kind == "auto" else "chain")
    return chosen, asked or Gate("auto" if chosen.kind == "auto" else "off")


def _fingerprint(path: Path) -> str:
    """Names the weights behind a draft context, so that another drafter never reads it."""
    stat = path.stat()
    return hashlib.sha256(f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()[:16]

"""A tiny random pair on disk, an engine around it, and a driver that runs random operations on that engine.

python -c "from tests.tiny import random_operations; print(random_operations(1000, seed=0))"
"""

# mypy: disable-error-code="attr-defined, unused-ignore"

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

from slipstream.cache.pages import OutOfPages, PageTable
from slipstream.cache.sequence import SequenceState
from slipstream.config import PAGE_TOKENS, EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.llm import LLM
from slipstream.types import Gate, GenEvent, Mode, Request, SamplingParams

VOCAB = 272
EOS = 256
MASK = 257
BLOCK = 8
HIDDEN = 32
MODES = ("plain", "chain", "chain:2", "chain:5", "tree:2", "tree:16", "tree:40", "tree:5:seed", "tree:24:seed", "auto")
LIKELY = (65, 66, 67, 68)  # tokens that both models prefer, so that drafts are sometimes accepted
_LAYERS, _HEADS, _KV_HEADS, _DIM, _INNER = 2, 4, 2, 8, 48


def write_pair(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Writes a llama target with a byte-level tokenizer and a DFlash drafter for it; returns both folders."""
    generator = torch.Generator().manual_seed(seed)
    target, draft = folder / "target", folder / "draft"
    for path in (target, draft):
        path.mkdir(parents=True, exist_ok=True)
    save_file(_target_tensors(generator), target / "model.safetensors")
    save_file(_draft_tensors(generator), draft / "model.safetensors")
    shape = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _DIM,
        "intermediate_size": _INNER,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    }
    (target / "config.json").write_text(json.dumps({**shape, "model_type": "llama", "eos_token_id": EOS}))
    speculation = {"target_layer_ids": [0, 1], "mask_token_id": MASK}
    layer_types = ["sliding_attention", "full_attention"]
    (draft / "config.json").write_text(
        json.dumps(
            {
                **shape,
                "architectures": ["DFlashDraftModel"],
                "block_size": BLOCK,
                "dflash_config": speculation,
                "num_target_layers": _LAYERS,
                "layer_types": layer_types,
                "sliding_window": 48,
            }
        )
    )
    byte_tokenizer().save(str(target / "tokenizer.json"))
    return target, draft


def tiny_llm(folder: Path, *, draft: bool | str = True, **settings: object) -> LLM:
    """An LLM around the tiny pair, which is written into `folder` on first use; settings are EngineConfig's.

    `draft` is whether the pair's drafter drafts, or another word for LLM, such as suffix.
    """
    if not (folder / "target").is_dir():
        write_pair(folder)
    chosen: dict[str, object] = {
        "weight_format": "fp32",
        "check_integrity": True,
        "max_context": 512,
        "cache_tokens": 24 * PAGE_TOKENS,
        "max_sequences": 4,
        "prefill_chunk": 64,
        "step_rows": 128,
        "threads": 1,
        **settings,
    }
    config = EngineConfig(**chosen)  # type: ignore[arg-type]
    drafter = draft if isinstance(draft, str) else str(folder / "draft") if draft else None
    return LLM(str(folder / "target"), drafter, config=config)


@contextmanager
def keep_threads() -> Iterator[None]:
    """Restores torch's threads, which an LLM sets for the whole process (tiny ones use one)."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gate_for(mode: Mode) -> Gate:
    """The gate that a mode has if a request does not ask for one."""
    return Gate("auto" if mode.kind == "auto" else "off")


def page_table(engine: Engine) -> PageTable:
    return engine.table


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def ask(
    name: str, ids: tuple[int, ...], sampling: SamplingParams | None = None, mode: str = "chain", max_tokens: int = 30
) -> Request:
    """A request in a named mode, without a gate unless the mode is auto."""
    parsed = Mode.parse(mode)
    return Request(name, ids, sampling or SamplingParams(), parsed, gate_for(parsed), max_tokens=max_tokens)


def assert_idle(llm: LLM) -> None:
    """Checks that nothing runs, and that every page is free after the prefix cache is emptied."""
    assert_engine_idle(llm.engine)


def assert_engine_idle(engine: Engine) -> None:
    assert not engine.has_work
    engine.scheduler.check()
    if engine.prefix is not None:
        engine.prefix.clear()
    assert page_table(engine).free == page_table(engine).total


def mixed_requests(mode: str) -> list[Request]:
    """Eight requests with different settings, some of them at the edges of pages and chunks."""
    greedy, sampled = SamplingParams(), SamplingParams(temperature=0.8, top_p=0.95, seed=7)
    shaped = SamplingParams(temperature=1.2, repetition_penalty=1.1, presence_penalty=0.2, seed=3, logprobs=2)
    requests = [
        Request("a", prompt(3, 1), greedy, max_tokens=30),
        Request("b", prompt(PAGE_TOKENS, 2), sampled, max_tokens=40),
        Request("c", prompt(PAGE_TOKENS + 1, 3), shaped, max_tokens=33),
        Request("d", prompt(2 * PAGE_TOKENS, 4), greedy, max_tokens=25),
        Request("e", prompt(150, 5), sampled, max_tokens=50, stop_token_ids=frozenset({EOS})),
        Request("f", prompt(1, 6), sampled, max_tokens=PAGE_TOKENS + 5, stop=("CCCC",)),
        Request("g", prompt(40, 7), shaped, max_tokens=1),
        Request("h", prompt(40, 8), SamplingParams(frequency_penalty=0.5), max_tokens=20),
    ]
    parsed = Mode.parse(mode)
    return [replace(request, mode=parsed, gate=gate_for(parsed)) for request in requests]


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one token for each byte, and one that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return tokenizer


def _layer(prefix: str, generator: torch.Generator, strength: float) -> dict[str, Tensor]:
    queries, keys = _HEADS * _DIM, _KV_HEADS * _DIM
    shapes = {
        "self_attn.q_proj": (queries, HIDDEN),
        "self_attn.k_proj": (keys, HIDDEN),
        "self_attn.v_proj": (keys, HIDDEN),
        "self_attn.o_proj": (HIDDEN, queries),
        "mlp.gate_proj": (_INNER, HIDDEN),
        "mlp.up_proj": (_INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, _INNER),
    }
    tensors = {}
    for name, shape in shapes.items():
        size = strength if name in ("self_attn.o_proj", "mlp.down_proj") else 0.2
        tensors[f"{prefix}{name}.weight"] = size * torch.randn(shape, generator=generator)
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}{name}.weight"] = torch.ones(HIDDEN)
    return tensors


def _target_tensors(generator: torch.Generator) -> dict[str, Tensor]:
    embed = 0.5 * torch.randn(VOCAB, HIDDEN, generator=generator)
    embed[MASK] = 0.0
    embed[:, 0] = 3.0  # every position has a constant, for which the head prefers the tokens of LIKELY
    head = 0.25 * torch.randn(VOCAB, HIDDEN, generator=generator)
    head[:, 0] = 0.0
    head[list(LIKELY), 0] = torch.tensor([2.0, 2.0, 2.1, 2.0])
    head[EOS, 0] = 1.6
    tensors = {"model.embed_tokens.weight": embed, "model.norm.weight": torch.ones(HIDDEN), "lm_head.weight": head}
    for index in range(_LAYERS):
        tensors |= _layer(f"model.layers.{index}.", generator, 0.12)
    return tensors


def _draft_tensors(generator: torch.Generator) -> dict[str, Tensor]:
    tensors = {
        "fc.weight": 0.2 * torch.randn(HIDDEN, 2 * HIDDEN, generator=generator),
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
    }
    for index in range(_LAYERS):
        tensors |= _layer(f"layers.{index}.", generator, 0.06)
        for name in ("q_norm", "k_norm"):
            tensors[f"layers.{index}.self_attn.{name}.weight"] = torch.ones(_DIM)
    return tensors


@dataclass(slots=True)
class Operations:
    """What a run of random operations did, and the pages that were left; `free == total` means no leak."""

    done: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    branched: int = 0  # steps that verified a tree that is not a chain
    drafted: int = 0
    accepted: int = 0
    cached_tokens: int = 0
    hits: int = 0
    failed_restores: int = 0
    largest_batch: int = 0
    free: int = 0
    total: int = 0


def random_operations(count: int, seed: int) -> Operations:
    """Runs `count` random add, cancel, fork, release and step operations, and accounts for every page after each."""
    with tempfile.TemporaryDirectory() as folder, keep_threads():
        # The scheduler does not know the pages that live forks hold. There are few pages, so that refusals happen too.
        llm = tiny_llm(Path(folder), check_integrity=False, cache_tokens=16 * PAGE_TOKENS)
        return Driver(llm.engine, random.Random(seed)).run(count)


class Driver:
    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self.engine = engine
        self.table = page_table(engine)
        self.rng = rng
        self.report = Operations()
        self.live: dict[str, int] = {}  # request -> the most tokens that it may produce
        self.tokens: Counter[str] = Counter()
        self.forks: list[tuple[SequenceState, list[Tensor]]] = []
        self.shared = [[rng.randrange(256) for _ in range(210)] for _ in range(4)]

    def run(self, count: int) -> Operations:
        moves = [self._add] * 7 + [self._cancel] * 3 + [self._fork] * 3 + [self._release] * 3 + [self._step] * 4
        for _ in range(count):
            self.rng.choice(moves)()
            self.check()
            if self.rng.random() < 0.5:
                self._step()
        while self.forks:
            self._release()
        for request_id in list(self.live)[::2]:
            assert self.engine.cancel(request_id)
        for _ in range(10_000):
            if not self.engine.has_work:
                break
            self._step()
        assert not self.live, f"{len(self.live)} requests never ended"
        assert self.engine.prefix is not None
        self.report.hits, self.report.failed_restores = self.engine.prefix.hits, self.engine.prefix.failed_restores
        self.engine.prefix.clear()
        self.table.check([])
        self.report.free, self.report.total = self.table.free, self.table.total
        return self.report

    def check(self) -> None:
        """Checks that every page is held by exactly its known users: running requests, the prefix cache, our forks."""
        states = [ticket.state for ticket in self.engine.scheduler.running] + [state for state, _ in self.forks]
        held = [page for state in states for page in state.pages]
        self.table.check(held + (self.engine.prefix.held() if self.engine.prefix else []))
        for state in states:
            state.check()

    def _add(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.shared)[: rng.randrange(1, 210)]
        prompt += [rng.randrange(256) for _ in range(rng.randrange(6))]
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.8]),
            seed=rng.randrange(1000),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            logprobs=rng.choice([None, None, 2]),
        )
        mode = Mode.parse(rng.choice(MODES))
        gate = gate_for(mode)
        if mode.kind in ("chain", "tree"):
            gate = Gate(rng.choice(["off", "off", "ema", "entropy", "off" if mode.seeded else "auto"]))
        request = Request(
            id=f"r{sum(self.report.done.values())}",
            prompt_ids=tuple(prompt),
            sampling=sampling,
            mode=mode,
            gate=gate,
            max_tokens=rng.randrange(1, 20),
            stop=rng.choice([(), (), ("DD",)]),
            stop_token_ids=frozenset({EOS}),
            share_noise=rng.random() < 0.8,
            cache_prompt=rng.random() < 0.9,
        )
        if len(self.live) >= 10:
            self._step()
            return
        self.engine.add(request)
        self.live[request.id] = request.max_tokens
        self.report.done["add"] += 1

    def _cancel(self) -> None:
        known = bool(self.live) and self.rng.random() < 0.9
        request_id = self.rng.choice(list(self.live)) if known else "nobody"
        assert self.engine.cancel(request_id) == known
        self.report.done["cancel"] += 1

    def _fork(self) -> None:
        running = self.engine.scheduler.running
        if not running or len(self.forks) >= 4:
            self._step()
            return
        source = self.rng.choice(running).state
        try:
            twin = source.fork()
        except OutOfPages:
            self.report.done["fork refused"] += 1
            return
        assert twin.tokens == source.tokens
        self.forks.append((twin, self._contents(twin)))
        assert all(map(torch.equal, self.forks[-1][1], self._contents(source))), "a fork reads different keys"
        self.report.done["fork"] += 1

    def _release(self) -> None:
        if not self.forks:
            self._step()
            return
        twin, before = self.forks.pop(self.rng.randrange(len(self.forks)))
        assert all(map(torch.equal, before, self._contents(twin))), "another sequence wrote into a fork's pages"
        if self.rng.random() < 0.3:
            try:
                twin.truncate(self.rng.randrange(twin.length + 1))
            except OutOfPages:
                self.report.done["truncate refused"] += 1
        elif self.rng.random() < 0.3:
            try:
                twin.reserve(twin.length + 2 * PAGE_TOKENS)
            except OutOfPages:
                self.report.done["reserve refused"] += 1
        twin.release()
        self.report.done["release"] += 1

    def _contents(self, state: SequenceState) -> list[Tensor]:
        """Keys of every computed position, and the draft context that is written."""
        if not state.length:
            return []
        pages, offsets = torch.tensor([state.place(position) for position in range(state.length)]).unbind(1)
        pools = self.engine.executor.memory
        first, last = pools.target[0][0], pools.target[-1][1]
        parts = [first[pages, :, offsets], last[pages, :, offsets]]
        # Context of taps that wait is not written yet; a fork shares taps and page, so either of the two may write it.
        known = state.length - state.waiting_rows
        return parts + ([pools.draft_values[0][pages[:known], :, offsets[:known]]] if state.drafting else [])

    def _step(self) -> None:
        for event in self.engine.step():
            self._take(event)
        self.report.largest_batch = max(self.report.largest_batch, len(self.engine.scheduler.running))
        self.report.done["step"] += 1
        self.check()

    def _take(self, event: GenEvent) -> None:
        assert event.request_id in self.live, f"{event.request_id} sent an event after its end"
        self.tokens[event.request_id] += len(event.tokens)
        self.report.branched += event.step is not None and event.step.proposal.branching
        assert self.tokens[event.request_id] <= self.live[event.request_id]
        if event.finish_reason is None:
            return
        stats = event.stats
        assert stats is not None and stats.completion_tokens == self.tokens[event.request_id]
        if event.finish_reason == "length":
            assert stats.completion_tokens == self.live[event.request_id]
        del self.live[event.request_id]
        self.report.finished[event.finish_reason] += 1
        self.report.drafted += stats.drafted
        self.report.accepted += stats.accepted
        self.report.cached_tokens += stats.cached_tokens

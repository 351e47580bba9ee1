"""The models of the differential test: tiny random ones, one of them recurrent, and the default pair.

A world whose name ends with "suffix" has no drafter and drafts from the text alone.
"""

# mypy: disable-error-code="arg-type, method-assign, unused-ignore"

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.config import PAGE_TOKENS, EngineConfig, WeightFormat
from slipstream.engine.cpu.cpu_executor import CpuExecutor
from slipstream.engine.engine import Engine
from slipstream.engine.llm import LLM
from slipstream.engine.variants import DraftVariant
from slipstream.formats.sources import SUFFIX, pair_draft, resolve
from slipstream.grammar import notations as grammars
from slipstream.kernels.cpu.native_library import library
from slipstream.server.serving.jobs import Tool, ToolChoice
from slipstream.speculative.costs import CostTable
from slipstream.types import BASE_VARIANT, Constraint
from tests.adapters import write_random_adapter
from tests.tiny import write_pair

# Pages of 64 tokens. Two or three requests fit, so that others wait, and cached and paused requests lose their pages.
FEW_PAGES = 13
COMMON: dict[str, Any] = {
    "cache_tokens": FEW_PAGES * PAGE_TOKENS,
    "max_sequences": 3,
    "prefill_chunk": 48,
    "step_rows": 96,
    "threads": 1,
    "max_context": 384,
}
ALONE: dict[str, Any] = {"prefix_cache": False, "max_sequences": 1, "threads": 1, "max_context": 384}
EXACT: WeightFormat = "native" if library() is not None else "int8"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["b"],
    "additionalProperties": False,
}
TOOLS = [Tool("look", parameters=SCHEMA), Tool("wait")]


@dataclass(slots=True)
class World:
    """A pair under test, the same target alone, and the prompts and settings for both."""

    name: str
    llm: LLM  # has a drafter and its variants, or drafts from the text alone, and has few pages
    alone: LLM  # is plain, runs one request at a time and shares nothing
    variants: list[DraftVariant]
    prompt: Callable[[random.Random], tuple[int, ...]]
    constraints: Sequence[Constraint]
    stops: Sequence[tuple[str, ...]]
    tiny: bool
    most_tokens: int
    questions: int  # per episode; each is asked several times
    last_engine: Engine | None = None  # the engine of the episode that ran last

    @property
    def vocabulary(self) -> int:
        return self.llm.engine.executor.target.config.vocab_size

    def some_tokens(self, rng: random.Random) -> list[int]:
        return rng.sample(range(min(self.vocabulary, 400)), 8)

    def fresh_engine(self, costs: CostTable) -> Engine:
        """A new engine around the same weights, so that an episode depends on its seed alone, with given step costs."""
        llm = self.llm
        executor = llm.engine.executor
        if executor.device_steps is None:
            base = executor.variants.drafter
            drafter = base.drafter if base is not None else None
            executor = CpuExecutor.sized(executor.target, drafter, llm.config, llm.max_context, llm.draft_window, None)
            for variant in self.variants:
                executor.variants.install(replace(variant, drafter=executor.blocks(variant.drafter.drafter)))
        elif self.last_engine is not None and self.last_engine.prefix is not None:
            # Captured steps belong to the executor, which is too expensive to rebuild, so its memory is handed on.
            self.last_engine.prefix.clear()
        executor.measure_costs = lambda: costs
        self.last_engine = Engine(executor, llm.tokenizer, llm.config, llm.max_context, self.name)
        self.last_engine.grammars = llm.engine.grammars  # compiled grammars depend only on the tokenizer
        return self.last_engine


def open_world(name: str, folder: Path, device: str) -> World:
    return WORLDS[name].open(name, folder, device)


def _world(
    name: str,
    folder: Path,
    target: str,
    draft: Path,
    device: str,
    weight_format: WeightFormat,
    make_prompt: Callable[[LLM], Callable[[random.Random], tuple[int, ...]]],
    **rest: Any,
) -> World:
    """Loads both sides, and two adapters of the drafter, of which only one changes the draft context."""
    common = {"device": device, "weight_format": weight_format, "exact": device != "cpu"}
    drafter = SUFFIX if name.endswith(SUFFIX) else str(draft)
    llm = LLM(target, drafter, config=EngineConfig(**COMMON, **common, check_integrity=True))
    assert llm.exact, "texts are equal to the bit only if the engine's sums are exact"
    adapters = {"context": ("fc", "k_proj", "mlp"), "blocks": ("q_proj", "down_proj")}
    variants = []
    for number, (adapter, modules) in enumerate(adapters.items() if llm.has_draft else ()):
        path = write_random_adapter(folder / adapter, draft, modules, seed=number, size=0.2)
        variants.append(llm.load_draft_lora(f"{adapter}={path}"))
        llm.install_draft_lora(variants[-1])
    assert llm.draft_variants == ([BASE_VARIANT, *adapters] if llm.has_draft else [])
    # On a GPU a row's bits depend on how many rows a chunk of its prompt has, so both sides have the same chunks.
    chunk = {} if device == "cpu" else {"prefill_chunk": COMMON["prefill_chunk"]}
    alone = LLM(target, None, config=EngineConfig(**ALONE, **chunk, **common))
    return World(name, llm, alone, variants, make_prompt(llm), **rest)


def _constraints(letters: str) -> list[Constraint]:
    called = grammars.tool_constraint(TOOLS, ToolChoice("required"), parallel=False)
    offered = grammars.tool_constraint(TOOLS, ToolChoice())
    assert called is not None and offered is not None
    return [
        grammars.json_schema(SCHEMA),
        grammars.json_object(),
        grammars.regex(f"[{letters}]{{2,12}}( [0-9]+)?"),
        grammars.lark('start: item ("," item)*\nitem: /[a-z]{1,4}/ | "(" start ")"\n'),
        called,
        offered,
    ]


def _stems(tokens: range) -> Callable[[LLM], Callable[[random.Random], tuple[int, ...]]]:
    """Prompts of random tokens; many have the same first one to three pages, and many repeat a part of themselves."""
    chance = random.Random(5)
    stems = [[chance.choice(tokens) for _ in range(3 * PAGE_TOKENS + 9)] for _ in range(3)]

    def prompt(rng: random.Random) -> tuple[int, ...]:
        known = list(rng.choice(stems)[: rng.choice((0, 5, 64, 65, 127, 128, 150, 200))])
        if known and rng.random() < 0.3:
            # One token differs, often at the edge of a page or a chunk.
            known[min(rng.choice((0, 47, 63, 64, 127, rng.randrange(200))), len(known) - 1)] = rng.choice(tokens)
        ids = (*known, *[rng.choice(tokens) for _ in range(rng.randint(1, 9))])
        again = rng.randrange(len(ids))
        return (*ids, *ids[again : again + 24]) if rng.random() < 0.5 else ids

    return lambda llm: prompt


def _llama(name: str, folder: Path, device: str) -> World:
    target, draft = write_pair(folder)
    return _world(
        name,
        folder,
        str(target),
        draft,
        device,
        "int8" if name.endswith("int8") else EXACT,
        _stems(range(256)),
        constraints=_constraints("a-zA-Z"),
        stops=(("A",), ("bc", "c"), ("CCC", "zz")),
        tiny=True,
        most_tokens=40,
        questions=10,
    )


def _recurrent(name: str, folder: Path, device: str) -> World:
    from tests.families import write_family_pair
    from tests.models.test_qwen3_5 import hybrid
    from tests.oracles import FOLDER_VOCAB

    target, draft = write_family_pair(hybrid("pattern"), folder)
    return _world(
        name,
        folder,
        str(target),
        draft,
        device,
        EXACT,
        _stems(range(3, FOLDER_VOCAB)),
        constraints=(),
        stops=(("a",), ("B", "c")),
        tiny=True,
        most_tokens=16,
        questions=10,
    )


def _smollm2(name: str, folder: Path, device: str) -> World:
    from tests.checks import eval_prompts

    label = pair_draft("smollm2")
    assert label is not None
    # Prompts are letters after a stem that several of them share.
    stems = ("", "You answer in few words. " * 12, "Be brief, be kind, and never repeat yourself. " * 9)

    def prompts(llm: LLM) -> Callable[[random.Random], tuple[int, ...]]:
        texts = [text for text in eval_prompts(80) if len(text) < 200]

        def prompt(rng: random.Random) -> tuple[int, ...]:
            asked = rng.choice(stems) + rng.choice(texts)
            return tuple(llm.prompt_ids(asked, chat=rng.random() < 0.7))

        return prompt

    return _world(
        name,
        folder,
        "smollm2",
        resolve(label).path,
        device,
        "auto",
        prompts,
        constraints=_constraints("a-zA-Z ,"),
        stops=(("\n\n",), (" the", "."), (",",)),
        tiny=False,
        most_tokens=24,
        questions=6,
    )


class Kind(NamedTuple):
    open: Callable[[str, Path, str], World]
    share: float  # the world's share of all texts


WORLDS: dict[str, Kind] = {
    "llama": Kind(_llama, 0.4),
    "llama-int8": Kind(_llama, 0.1),
    "llama-suffix": Kind(_llama, 0.1),
    "recurrent": Kind(_recurrent, 0.25),
    "recurrent-suffix": Kind(_recurrent, 0.05),
    "smollm2": Kind(_smollm2, 0.1),
    "smollm2-suffix": Kind(_smollm2, 0.05),
}


def worlds_on(device: str) -> list[str]:
    """The worlds that run on a device: the heads of tiny models are too small for the matrix units of a GPU."""
    return [name for name in WORLDS if device == "cpu" or name.startswith("smollm2")]

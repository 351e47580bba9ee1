"""Runs the real pair end to end on a GPU: tokens per second of every mode, identical texts, batches, and
the same weights in `transformers` and in the authors' loop.

    python scripts/gpu/real_pair.py TARGET.gguf DRAFTER.gguf --out results.json
    python scripts/gpu/real_pair.py TARGET.gguf DRAFTER.gguf --parts modes --limit 4 --tokens 64

The parts are: modes (every mode on every evaluation set, texts compared), native (weights as the file stores them),
text (the target without a drafter), batches (throughput at 1, 4, 16 and 64 sequences), hosts (the host's share of each
step at these sizes), syncs (how often the host waits for the device), peers (transformers and the authors' loop).
"""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

import argparse
import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import Mock

import torch

from slipstream.bench.workloads import read_prompts
from slipstream.config import EngineConfig
from slipstream.engine.gpu.landed_report import ReportCopy
from slipstream.engine.llm import LLM, Completion

SETS = ("humaneval", "gsm8k", "mt-bench", "editing", "prose")
BATCH_SETS = SETS[:3]  # for batches, and for the programs of others
TEMPERATURES = (0.0, 0.8)
MODES = ("plain", "chain", "tree:16", "tree:64", "auto")
ROUNDS = 7  # runs of a batch in each mode; single runs differ by several percent
THEIR_PROMPTS, THEIR_TOKENS = 2, 96  # few of each set, because these programs are slow and their steps are all alike
Row = dict[str, object]


def load(options: argparse.Namespace, dtype: str, sequences: int = 4, draft: str = "") -> LLM:
    config = EngineConfig(
        weight_format=dtype,
        device=options.device,
        kernels=options.kernels,
        graphs=not options.no_graphs,  # type: ignore[arg-type]
        max_sequences=sequences,
        max_context=2048,
    )
    return LLM(str(options.target), draft or str(options.draft), config=config)


def prompts_of(llm: LLM, name: str, limit: int) -> list[list[int]]:
    texts = [turns[0] for turns in read_prompts(name, limit)]
    return [llm.prompt_ids(text, chat=True) for text in texts]


def prompts_by_batch(llm: LLM, options: argparse.Namespace) -> Iterator[tuple[int, list[list[int]]]]:
    """As many prompts as every size of batch takes; prompts are repeated if there are not enough."""
    everything = [ids for name in BATCH_SETS for ids in prompts_of(llm, name, options.limit)]
    for batch in options.batches:
        yield batch, (everything * (batch // len(everything) + 1))[:batch]


def settings(mode: str, tokens: int, temperature: float = 0.0) -> dict[str, object]:
    sampling: dict[str, object] = {"temperature": temperature, "seed": 1}
    rest = {} if mode == "auto" else {"gate": "off"}
    return {"mode": mode, "max_tokens": tokens, "ignore_eos": False, **sampling, **rest}


def one_by_one(llm: LLM, prompts: Sequence[list[int]], asked: dict[str, object]) -> list[Completion]:
    return [llm.run([llm.request(ids, **asked)])[0] for ids in prompts]


def speed(answers: Sequence[Completion]) -> float:
    """Tokens after the first, divided by the time from the first to the last."""
    tokens = sum(len(answer.token_ids) - 1 for answer in answers)
    return tokens / max(1e-9, sum(answer.stats.decode_ms for answer in answers) * 1e-3)


def modes(
    options: argparse.Namespace, dtype: str, names: Sequence[str] = MODES, sets: Sequence[str] = SETS, draft: str = ""
) -> list[Row]:
    llm = load(options, dtype, draft=draft)
    print(llm.kernels, "| weights", llm.describe()["weight_bytes"], flush=True)
    warm_up(llm, names)
    rows: list[Row] = []
    for name, temperature in itertools.product(sets, TEMPERATURES):
        prompts = prompts_of(llm, name, options.limit)
        plain: list[Completion] = []
        for mode in names:
            answers = one_by_one(llm, prompts, settings(mode, options.tokens, temperature))
            plain = plain or answers
            same = sum(a.token_ids == b.token_ids for a, b in zip(plain, answers, strict=True))
            steps = sum(answer.stats.steps for answer in answers)
            committed = sum(answer.stats.committed for answer in answers)
            rows.append(
                {
                    "weights": dtype,
                    "draft": llm.draft_source,
                    "set": name,
                    "temperature": temperature,
                    "mode": mode,
                    "tokens_per_s": round(speed(answers), 1),
                    "over_plain": round(speed(answers) / speed(plain), 3),
                    "tau": round(committed / max(1, steps), 3),
                    "ms_per_step": round(sum(a.stats.decode_ms for a in answers) / max(1, steps), 3),
                    "same_texts": f"{same}/{len(answers)}",
                    "tokens": sum(len(a.token_ids) for a in answers),
                }
            )
            print(rows[-1], flush=True)
    llm.close()
    return rows


def warm_up(llm: LLM, names: Sequence[str]) -> None:
    """Runs every shape once, because its kernels are compiled and its graphs captured when it first runs."""
    began = time.perf_counter()
    for mode in (*names, *names):
        llm.run([llm.request(llm.prompt_ids("Count to twenty.", chat=True), **settings(mode, 48))])
    print(f"warm after {time.perf_counter() - began:.1f} s", flush=True)


def batches(options: argparse.Namespace, dtype: str) -> list[Row]:
    llm = load(options, dtype, max(options.batches))
    llm.prepare_batches()
    rows: list[Row] = []
    for batch, chosen in prompts_by_batch(llm, options):
        speeds: dict[str, list[float]] = {"plain": [], "auto": []}
        for turn in range(1 + ROUNDS):  # modes take turns, so that a slow spell of the machine affects both
            for mode, seen in speeds.items():
                asked = {**settings(mode, options.tokens), "ignore_eos": True}
                requests = [llm.request(ids, **asked) for ids in chosen]
                began = time.perf_counter()
                tokens = sum(len(answer.token_ids) for answer in llm.run(requests))
                if turn:  # the first turn captures the graphs
                    seen.append(tokens / (time.perf_counter() - began))
        plain, auto = (median(speeds[mode]) for mode in ("plain", "auto"))
        each = [free / own for own, free in zip(speeds["plain"], speeds["auto"], strict=True)]
        rows.append(
            {
                "weights": dtype,
                "batch": batch,
                "plain": round(plain, 1),
                "auto": round(auto, 1),
                "auto_over_plain": round(auto / plain, 3),
                "of_rounds": [round(ratio, 3) for ratio in each],
            }
        )
        print(rows[-1], flush=True)
    llm.close()
    return rows


class StepClock:
    """Times engine steps that only decode: the whole step, and the part in which the host waited for the device.

    For all other steps it records only their total time.
    """

    def __init__(self, llm: LLM) -> None:
        self._engine: Any = llm.engine
        self._waited = 0.0
        self.prompts = 0.0  # seconds of all steps that also processed prompts
        self.steps: list[tuple[float, float, int, bool]] = []  # seconds, seconds waited, tokens, whether drafted

    def run(self, requests: Sequence[Any]) -> None:
        wait = ReportCopy.wait
        ReportCopy.wait = self._clocked(wait)  # type: ignore[method-assign]
        try:
            for request in requests:
                self._engine.add(request)
            while self._engine.has_work:
                self._step()
        finally:
            ReportCopy.wait = wait  # type: ignore[method-assign]

    def _step(self) -> None:
        line = self._engine.scheduler
        only_decodes = not line.waiting and not any(ticket.prefilling for ticket in line.running)
        self._waited, began = 0.0, time.perf_counter()
        events = self._engine.step()
        took = time.perf_counter() - began
        if only_decodes and events:
            drafted = any(event.step is not None and event.step.proposal.nodes for event in events)
            self.steps.append((took, self._waited, sum(len(event.tokens) for event in events), drafted))
        elif not only_decodes:
            self.prompts += took

    def _clocked(self, call: Callable[..., None]) -> Callable[..., None]:
        def clocked(*given: object) -> None:
            began = time.perf_counter()
            call(*given)
            self._waited += time.perf_counter() - began

        return clocked


def hosts(options: argparse.Namespace, dtype: str) -> list[Row]:
    """Shows where a step's time goes per size of batch; a host that works longer than it waits is the bottleneck."""
    llm = load(options, dtype, max(options.batches))
    llm.prepare_batches()
    rows: list[Row] = []
    for batch, chosen in prompts_by_batch(llm, options):
        speeds: dict[str, float] = {}
        for mode in ("plain", "auto"):
            asked = {**settings(mode, options.tokens), "ignore_eos": True}
            for _ in range(2):  # the first run captures the graphs
                clock = StepClock(llm)
                clock.run([llm.request(ids, **asked) for ids in chosen])
            whole, waited, tokens, drafted = (list(column) for column in zip(*clock.steps, strict=True))
            speeds[mode] = sum(tokens) / sum(whole)
            host = [all_of_it - idle for all_of_it, idle in zip(whole, waited, strict=True)]
            rows.append(
                {
                    "weights": dtype,
                    "batch": batch,
                    "mode": mode,
                    "tokens_per_s": round(speeds[mode], 1),
                    "over_plain": round(speeds[mode] / speeds["plain"], 3),
                    "step_ms": round(1e3 * median(whole), 3),
                    "host_ms": round(1e3 * median(host), 3),
                    "host_us_per_sequence": round(1e6 * median(host) / batch, 1),
                    "longest_ms": round(1e3 * max(whole), 1),
                    "steps": len(whole),
                    "drafted_steps": sum(drafted),
                    "prompts_ms": round(1e3 * clock.prompts, 1),
                }
            )
            print(rows[-1], flush=True)
    llm.close()
    return rows


def syncs(options: argparse.Namespace) -> list[Row]:
    """Counts the host's waits in steady decoding with torch's own warning; waits for events are counted by hand."""
    llm = load(options, "bf16")
    rows: list[Row] = []
    ids = prompts_of(llm, "humaneval", 1)[0]
    for mode in ("plain", "chain", "tree:64"):
        llm.run([llm.request(ids, **settings(mode, 64))])
        request = llm.request(ids, **{**settings(mode, 200), "ignore_eos": True})
        llm.engine.add(request)
        for _ in range(6):
            llm.engine.step()
        steps: Any = llm.engine.executor.device_steps
        land = steps.land
        steps.land = counted = Mock(side_effect=land)
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(20):
                llm.engine.step()
        torch.cuda.set_sync_debug_mode("default")
        steps.land = land
        llm.engine.cancel(request.id)
        while llm.engine.has_work:
            llm.engine.step()
        alarms = [str(warning.message) for warning in seen if "synchroniz" in str(warning.message)]
        rows.append({"mode": mode, "steps": 20, "events_waited_for": counted.call_count, "other_syncs": len(alarms)})
        print(rows[-1], *alarms[:2], flush=True)
    llm.close()
    return rows


def peers(options: argparse.Namespace) -> list[Row]:
    """Runs `transformers` and the authors' loop on the weights that `modes` ran in bf16."""
    from dflash.model import dflash_generate
    from peer_models import build_drafter, build_target

    device = torch.device(options.device)
    llm = load(options, "bf16")
    target = build_target(options.target, device)
    drafter = build_drafter(options.draft, device)
    stops = sorted(llm.tokenizer.eos_ids)
    rows: list[Row] = []
    for name in BATCH_SETS:
        few = prompts_of(llm, name, min(options.limit, THEIR_PROMPTS))
        prompts = [torch.tensor([ids], device=device) for ids in few]
        tokens_each = min(options.tokens, THEIR_TOKENS)
        results: dict[str, tuple[int, float, float]] = {}
        for label in ("transformers", "authors' loop"):
            tokens, seconds, steps = 0, 0.0, 0
            for turn, ids in enumerate([prompts[0], *prompts]):
                _wait(device)
                began = time.perf_counter()
                with torch.inference_mode():
                    if label == "transformers":
                        found = target.generate(
                            ids, max_new_tokens=tokens_each, do_sample=False, eos_token_id=stops, pad_token_id=0
                        )
                        count = taken = found.shape[1] - ids.shape[1]
                    else:
                        done = dflash_generate(drafter, target, ids, tokens_each, stops, return_stats=True)
                        count, taken = done.num_output_tokens, len(done.acceptance_lengths)
                _wait(device)
                if turn:  # the first turn is a warm-up
                    tokens, seconds, steps = tokens + count, seconds + time.perf_counter() - began, steps + taken
            results[label] = tokens, seconds, steps
            rows.append(
                {
                    "set": name,
                    "who": label,
                    "tokens_per_s": round(tokens / seconds, 1),
                    "ms_per_step": round(1e3 * seconds / steps, 2),
                    "tau": round(tokens / steps, 2),
                }
            )
            print(rows[-1], flush=True)
    llm.close()
    return rows


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--parts", default="modes,native,text,batches,hosts,syncs,peers")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16, 64])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--kernels", default="triton", choices=("triton", "reference"))
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.device == "cpu" and (only_there := {"hosts", "syncs"} & set(options.parts.split(","))):
        parser.error(f"{' and '.join(sorted(only_there))}: there are no device steps on a CPU, leave it out of --parts")
    found: dict[str, list[Row]] = {}
    for part in options.parts.split(","):
        began = time.perf_counter()
        if part == "modes":
            found[part] = modes(options, "bf16")
        elif part == "native":
            found[part] = modes(options, "auto", ("plain", "auto"), BATCH_SETS)
        elif part == "text":
            found[part] = modes(options, "bf16", ("plain", "tree:16:text", "auto"), ("editing", "prose"), "suffix")
        elif part == "batches":
            found[part] = batches(options, "bf16")
        elif part == "hosts":
            found[part] = hosts(options, "bf16")
        elif part == "syncs":
            found[part] = syncs(options)
        else:
            found[part] = peers(options)
        print(f"-- {part}: {time.perf_counter() - began:.0f} s", flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(found, indent=1))
    for part, rows in found.items():
        print(f"\n{part}")
        for row in rows:
            print("| " + " | ".join(str(value) for value in row.values()) + " |")


if __name__ == "__main__":
    main()

"""Times whole decoding steps on a GPU with random weights of the Qwen3-8B shape, beside the floor of their bytes.

python scripts/gpu/step_times.py                          bf16 at 1K context
python scripts/gpu/step_times.py --format Q8_0            the same quantised (Q4_K, Q4_0, Q6_K, ...)
python scripts/gpu/step_times.py --contexts 1024,8192,32768
python scripts/gpu/step_times.py --batches 1,4,16,64
python scripts/gpu/step_times.py --kernels                which kernels a step's time goes to
python scripts/gpu/step_times.py --tiny                   the same code at tiny sizes on a CPU, kernels in torch
"""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import torch
from shapes import QWEN3_8B, TINY, RandomWeights, drafter_config

from slipstream.cache.cpu.page_pools import PoolShape
from slipstream.config import PAGE_TOKENS, EngineConfig
from slipstream.engine.executor import BatchColumn, Wish
from slipstream.engine.gpu.decode_step import MOST_HELD_TURNS, bucket
from slipstream.engine.gpu.gpu_device import GpuDevice
from slipstream.engine.gpu.gpu_executor import GpuExecutor
from slipstream.engine.gpu.row_passes import GpuBlocks
from slipstream.kernels.gpu.packing import KINDS
from slipstream.kernels.rows import TREE
from slipstream.models.decoder import Decoder, DecoderConfig, FamilyNames
from slipstream.models.dflash import DFlashDrafter
from slipstream.models.weights import keep_name
from slipstream.types import BASE_VARIANT, SamplingParams

_SHOWN_KERNELS = 24
_THEIR_ROUNDS = 5  # these programs depend on the host, so that single rounds differ by a third


class Bench:
    """An engine for a pair of random weights, and a clock for its steps."""

    def __init__(self, options: argparse.Namespace, shape: DecoderConfig, device: torch.device) -> None:
        self.device = device
        self.shape = shape
        contexts, batches = options.contexts, options.batches
        most_tokens = max(batches) * 1024 + max(contexts) + 8192
        self.context_room = max(contexts) + 4096
        config = EngineConfig(
            kernels="reference" if options.tiny else "triton",
            graphs=not options.no_graphs,
            max_sequences=max(batches),
            max_context=self.context_room,
            cache_tokens=most_tokens,
        )
        self.device_side = GpuDevice(device, config)
        scratch = self.device_side.scratch
        weights = RandomWeights(scratch, options.format)
        names = FamilyNames(keep_name, lambda name: True)
        self.target = Decoder(shape, weights, names)
        draft_shape = drafter_config(shape, 2 if options.tiny else 5)
        taps = len(draft_shape.target_layer_ids) * shape.hidden_size
        draft_weights = RandomWeights(scratch, options.format, (shape.hidden_size, taps))
        self.drafter = DFlashDrafter(draft_shape, draft_weights)
        pools = (
            PoolShape.alike(shape.layers, shape.kv_heads, shape.head_dim),
            PoolShape.alike(draft_shape.layers, draft_shape.kv_heads, draft_shape.head_dim),
        )
        self.pages = -(-most_tokens // PAGE_TOKENS)
        self.executor = GpuExecutor(self.device_side, self.target, self.drafter, pools, self.context_room, 2048)
        blocks = self.executor.variants.drafter
        assert isinstance(blocks, GpuBlocks)
        self.gpu_drafter = blocks.gpu
        self.head_bytes = self.target.head.nbytes

    def step_ms(self, batch: int, context: int, nodes: int, drafter: bool = True, rounds: int = 30) -> float:
        """The median time of one step; several run in a row between two events, so that launches overlap as usual."""
        launch = self._launcher(batch, context, nodes, drafter)
        steps = MOST_HELD_TURNS if drafter and not nodes else 4  # so that context is written as often as in real use
        return statistics.median(self._timed(launch, steps) for _ in range(rounds))

    def verify_ms(self, batch: int, context: int, nodes: int, rounds: int = 30) -> float:
        """The time of the target's part of a drafting step, without what comes before and after it."""
        self._launcher(batch, context, nodes, True)()
        step, _ = self.executor.device_steps.step(bucket(batch), bucket(nodes + 1), self.gpu_drafter, True)
        run = self.device_side.graphs.runner(("verify", step), dict(step.phases)["verify"])
        return statistics.median(self._timed(run) for _ in range(rounds))

    def kernel_us(self, batch: int, context: int, nodes: int) -> dict[str, tuple[int, float]]:
        return kernel_times(self._launcher(batch, context, nodes, True), self.device)

    def _launcher(self, batch: int, context: int, nodes: int, drafter: bool) -> Callable[[], object]:
        """What starts one more step of these sequences; the first has been waited for."""
        loop = self.executor.device_steps
        each_pages = -(-(context + 2048) // PAGE_TOKENS)
        own = [
            BatchColumn(
                context, 5, [(s * each_pages + p) % self.pages for p in range(each_pages)], SamplingParams(), True
            )
            for s in range(batch)
        ]
        wishes = [Wish(nodes, self.gpu_drafter.proposals, TREE)] * batch if nodes else [Wish()] * batch
        loop.forget_batch()
        names = tuple(range(batch))
        used = self.executor.variants[BASE_VARIANT] if drafter else None
        loop.land(loop.launch(names, lambda: own, wishes, used))
        return lambda: loop.launch(names, lambda: own, wishes, used)

    def _timed(self, launch: Callable[[], object], steps: int = 4) -> float:
        if self.device.type != "cuda":
            began = time.perf_counter()
            launch()
            return (time.perf_counter() - began) * 1e3
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(steps):
            launch()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / steps

    def floor_ms(self, bandwidth: float, batch: int, context: int, drafting: bool) -> float:
        """The time of reading every weight, key and value once, at the measured bandwidth."""
        per_token = 2 * 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim
        moved = self.target.step_bytes + batch * context * per_token
        if drafting:
            draft = self.drafter.config
            moved += self.drafter.step_bytes + self.head_bytes
            moved += batch * min(context, 2048) * 2 * 2 * draft.layers * draft.kv_heads * draft.head_dim
        return moved / bandwidth * 1e3


def kernel_times(launch: Callable[[], object], device: torch.device, steps: int = 8) -> dict[str, tuple[int, float]]:
    """How often a step launches each kernel, and the total time of its launches, which may overlap."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if device.type == "cuda" else activity.CPU]) as profile:
        for _ in range(steps):
            launch()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    found = {
        event.key: (event.count // steps, (event.self_device_time_total or event.self_cpu_time_total) / steps)
        for event in profile.key_averages()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def reference_lines(options: argparse.Namespace, bench: Bench) -> list[dict[str, object]]:
    """Times a plain token of `transformers` and a step of the authors' loop, with random weights of the same shape."""
    from dflash.model import dflash_generate
    from peer_models import build_random_pair

    target, drafter = build_random_pair(bench.shape, bench.drafter.config, bench.device)
    ids = torch.randint(5, bench.shape.vocab_size, (1, options.contexts[0]), device=bench.device)
    tokens, lines = 40, []
    with torch.inference_mode():
        for label in ("transformers plain", "authors' draft + verify"):
            rounds = []
            for _ in range(1 + _THEIR_ROUNDS):
                took = []
                for count in (2, tokens + 2):
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    if label == "transformers plain":
                        target.generate(
                            ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
                        )
                        steps = count
                    else:
                        done = dflash_generate(drafter, target, ids, count, None, return_stats=True)
                        steps = len(done.acceptance_lengths)
                    torch.cuda.synchronize()
                    took.append((time.perf_counter() - began, steps))
                (short, few), (long, many) = took
                rounds.append((long - short) * 1e3 / max(1, many - few))
            ms = statistics.median(rounds[1:])  # the first round is a warm-up
            lines.append(
                {
                    "format": "bf16",
                    "batch": 1,
                    "context": options.contexts[0],
                    "step": label,
                    "ms": round(ms, 3),
                    "floor_ms": "",
                    "ratio": "",
                    "rounds": [round(each, 1) for each in rounds[1:]],
                }
            )
            print(lines[-1], flush=True)
    return lines


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes that a large copy reads and writes per second, which is the most that the memory delivers."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    if device.type != "cuda":
        began = time.perf_counter()
        target.copy_(source)
        return 2 * size / (time.perf_counter() - began)
    best = 0.0
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = max(best, 2 * size / (start.elapsed_time(end) * 1e-3))
    return best


def step_kinds(
    options: argparse.Namespace, bench: Bench, batch: int, context: int
) -> Iterator[tuple[str, float, bool]]:
    """Yields what a step does, its milliseconds, and whether it drafts."""
    rounds = 2 if options.tiny else 30
    yield "plain", bench.step_ms(batch, context, 0, False, rounds), False
    yield "plain, context kept", bench.step_ms(batch, context, 0, True, rounds), False
    for width in options.widths:
        if batch * width <= 256:
            yield f"draft + verify {width}", bench.step_ms(batch, context, width - 1, True, rounds), True
            yield f"verify {width} alone", bench.verify_ms(batch, context, width - 1, rounds), False


def print_kernels(options: argparse.Namespace, bench: Bench) -> None:
    """Prints the microseconds per step of each kernel, one column for each width."""
    batch, context = options.batches[0], options.contexts[0]
    columns = [bench.kernel_us(batch, context, width - 1) for width in options.widths]
    print("| kernel | " + " | ".join(f"{width} rows: launches | us" for width in options.widths) + " |")
    print("| --- |" + " --- | --- |" * len(columns))
    names = dict.fromkeys(name for column in columns for name in list(column)[:_SHOWN_KERNELS])
    for name in names:
        cells = [f"{column[name][0]} | {column[name][1]:.1f}" if name in column else " | " for column in columns]
        print(f"| {name[:60]} | " + " | ".join(cells) + " |")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", default="bf16", choices=("bf16", *KINDS))
    parser.add_argument("--contexts", type=numbers, default=[1024])
    parser.add_argument("--batches", type=numbers, default=[1])
    parser.add_argument("--widths", type=numbers, default=[16, 64])
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--reference", action="store_true", help="the authors' loop and transformers beside it")
    parser.add_argument("--kernels", action="store_true", help="the time of a drafting step by kernel, and no more")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    options = parser.parse_args()
    device = torch.device("cpu" if options.tiny else "cuda")
    began = time.perf_counter()
    bandwidth = copy_bandwidth(device, 2**24 if options.tiny else 2**32)
    bench = Bench(options, TINY if options.tiny else QWEN3_8B, device)
    print(
        f"loaded in {time.perf_counter() - began:.0f} s; copy {bandwidth / 1e12:.2f} TB/s; "
        f"weights {bench.target.step_bytes / 1e9:.2f} GB, drafter {bench.drafter.step_bytes / 1e9:.2f} GB"
    )
    if options.kernels:
        print_kernels(options, bench)
        return
    lines: list[dict[str, object]] = []
    for context in options.contexts:
        for batch in options.batches:
            for label, ms, drafting in step_kinds(options, bench, batch, context):
                floor = bench.floor_ms(bandwidth, batch, context, drafting)
                lines.append(
                    {
                        "format": options.format,
                        "batch": batch,
                        "context": context,
                        "step": label,
                        "ms": round(ms, 3),
                        "floor_ms": round(floor, 3),
                        "ratio": round(ms / floor, 2),
                    }
                )
                print(lines[-1], flush=True)
    if options.reference:
        lines += reference_lines(options, bench)
    graphs = bench.device_side.graphs
    print(f"graphs {len(graphs)}, {graphs.bytes / 2**20:.0f} MiB")
    if options.out is not None:
        options.out.write_text(json.dumps(lines, indent=1))
    print("\n| step | batch | context | ms | floor ms | ratio |\n| --- | --- | --- | --- | --- | --- |")
    columns = ("step", "batch", "context", "ms", "floor_ms", "ratio")
    for line in lines:
        print("| " + " | ".join(str(line[column]) for column in columns) + " |")


if __name__ == "__main__":
    main()

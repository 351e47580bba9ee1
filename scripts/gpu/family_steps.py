"""Times captured steps of hybrid and mixture targets on a GPU with random weights, beside the floor of their bytes.

    python scripts/gpu/family_steps.py                                  three shapes, bf16 and Q4_K, at 1K context
    python scripts/gpu/family_steps.py --shapes Laguna-XS.2 --formats bf16 --out out.json
    python scripts/gpu/family_steps.py --tiny                           small versions on a CPU, kernels in torch

Every shape and format runs in its own process. A step is everything except the drafter: the layout of rows, the
target's pass, the choice of tokens, and the commit. The bytes that it must read are counted with the experts that the
routing of this step chose.
"""

# mypy: disable-error-code="arg-type, unused-ignore"

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import torch
from shapes import FAMILIES, RandomWeights, tiny_family
from step_times import copy_bandwidth, kernel_times
from torch import Tensor

from slipstream.cache.cpu.page_pools import PoolShape
from slipstream.config import PAGE_TOKENS, EngineConfig
from slipstream.engine.executor import BatchColumn, Wish
from slipstream.engine.gpu.decode_step import DecodeStep
from slipstream.engine.gpu.gpu_device import GpuDevice
from slipstream.engine.gpu.gpu_executor import GpuExecutor
from slipstream.engine.gpu.row_passes import GpuBlocks
from slipstream.kernels.gpu.expert_mixture import ExpertStack, Routing
from slipstream.kernels.rows import CHAIN, TREE, AttentionPattern
from slipstream.models.decoder import DecoderConfig, FamilyNames
from slipstream.models.dflash import DFlashDrafter
from slipstream.models.dflash_config import DFlashConfig
from slipstream.models.laguna import Laguna, LagunaConfig
from slipstream.models.layers import Attention
from slipstream.models.moe import RoutedExperts, routed_experts
from slipstream.models.qwen3_5 import Qwen35
from slipstream.models.rope import RopeConfig
from slipstream.models.weights import keep_name
from slipstream.types import SamplingParams

NOT_TIMED = ("draft", "heads", "context write")  # phases of the drafter
STEPS = (("plain", 1, CHAIN), ("verify chain 16", 16, CHAIN), ("verify tree 64", 64, TREE))
BLOCK = 16
ROOM = 2048  # tokens that the timed steps may commit beyond the context
SHOWN_KERNELS = 22


class Touched:
    """A router's launches, which record the experts that each chose while recording is on."""

    def __init__(self, route: Callable[..., None]) -> None:
        self._route = route
        self.listening = False
        self.seen: list[Tensor] = []

    def __call__(self, *arguments: Any) -> None:
        self._route(*arguments)
        if self.listening:
            self.seen.append(cast(Routing, arguments[-1]).experts.clone())

    def counts(self) -> list[int]:
        """How many experts each launch chose since the last call."""
        found = [len(set(experts.flatten().tolist()) - {-1}) for experts in self.seen]
        self.seen = []
        return found


class Bench:
    """A target of one shape with random weights, and a small drafter whose proposals it verifies."""

    show_kernels = False

    def __init__(self, shape: DecoderConfig, kind: str, context: int, device: torch.device, tiny: bool) -> None:
        self.shape, self.context, self.device = shape, context, device
        tokens = context + 2 * ROOM
        config = EngineConfig(
            kernels="reference" if tiny else "triton", max_sequences=1, max_context=tokens, cache_tokens=tokens + 1024
        )
        self.device_side = GpuDevice(device, config)
        self.touched = Touched(self.device_side.kernels.route)
        self.device_side.kernels = replace(self.device_side.kernels, route=self.touched)
        model = Laguna if isinstance(shape, LagunaConfig) else Qwen35
        weights = RandomWeights(self.device_side.scratch, kind)
        self.target = model(shape, weights, FamilyNames(keep_name, lambda name: True))
        draft_shape = small_drafter(shape)
        taps = len(draft_shape.target_layer_ids) * shape.hidden_size
        drafter = DFlashDrafter(draft_shape, RandomWeights(self.device_side.scratch, kind, (shape.hidden_size, taps)))
        pools = (
            PoolShape(shape.kv_shapes, shape.states),
            PoolShape.alike(draft_shape.layers, draft_shape.kv_heads, draft_shape.head_dim),
        )
        self.executor = GpuExecutor(self.device_side, self.target, drafter, pools, tokens, ROOM)
        blocks = self.executor.variants.drafter
        assert isinstance(blocks, GpuBlocks)
        self.drafter = blocks.gpu

    def load(self, rows: int, kind: int) -> None:
        """Loads one sequence of the context's length that proposes as many tokens as its rows have room for."""
        pages = range(-(-(self.context + ROOM) // PAGE_TOKENS))
        state = self.executor.device_steps.state
        slots = None if self.shape.states is None else (0, 1)
        state.load([BatchColumn(self.context, 5, list(pages), SamplingParams(), True, slots)])
        state.wish([Wish(rows - 1, BLOCK - 1, kind) if rows > 1 else Wish()])

    def step(self, rows: int) -> DecodeStep:
        """The engine's own step; proposals are tokens drawn at random, likelier ones first."""
        step = self.executor.device_steps.make_step(1, rows, self.drafter if rows > 1 else None, rows > 1)
        if step.draft is not None:
            found = step.draft.candidates
            found.tokens.random_(0, self.shape.vocab_size)
            ranks = torch.arange(found.scores.shape[-1], device=self.device)
            found.scores.copy_((-0.2 - 0.5 * ranks).expand_as(found.scores))
        return step

    @torch.inference_mode()
    def measure(self, label: str, rows: int, kind: int, rounds: int) -> dict[str, object]:
        step = self.step(rows)
        phases = [run for name, run in step.phases if name not in NOT_TIMED]

        def launches() -> None:
            for run in phases:
                run()

        self.load(rows, kind)
        self.touched.listening = True
        launches()
        self.touched.listening = False
        used = 1 + int(step.report.grown.counts[0])
        assert used == rows, f"{used} of {rows} rows are used: the table would be of another step"
        moved, experts = self.bytes_moved(rows, self.touched.counts())
        self.executor.device_steps.state.clear()  # a capture runs its launches too
        run = self.device_side.graphs.runner(("measured", label), launches)
        self.load(rows, kind)
        times = [self._timed(run) for _ in range(rounds)]
        if self.show_kernels:
            for name, (count, us) in list(kernel_times(run, self.device).items())[:SHOWN_KERNELS]:
                print(f"    {name[:70]:70} {count:5} launches {us:9.1f} us", flush=True)
        return {"step": label, "ms": statistics.median(times), "bytes": moved, "experts": experts}

    def _timed(self, run: Callable[[], None], steps: int = 4) -> float:
        if self.device.type != "cuda":
            began = time.perf_counter()
            run()
            return (time.perf_counter() - began) * 1e3
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(steps):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / steps

    def bytes_moved(self, rows: int, touched: list[int]) -> tuple[int, float]:
        """What a step must read or write, and how many experts of a layer it touches on average."""
        layers = self.target.layers
        mixtures = routed_experts(layers)
        assert len(mixtures) == len(touched), "every mixture was routed once"
        moved = self.target.step_bytes
        for routed, count in zip(mixtures, touched, strict=True):
            usual, each = expert_bytes(routed)
            moved += count * each - usual
        for part in (part for layer in layers for part in layer.parts if isinstance(part, Attention)):
            window = part.pattern.window
            seen = min(self.context, window) if window else self.context
            moved += (seen + rows) * 2 * part.kv_heads * part.head_dim * torch.bfloat16.itemsize
        if self.shape.states is not None:
            moved += 2 * self.shape.states.state_bytes
        return moved, sum(touched) / max(1, len(touched))


def expert_bytes(routed: RoutedExperts) -> tuple[int, int]:
    """What a layer's experts count for in the bytes of a step of one row, and what one of them has."""
    stacks = [cast(ExpertStack, routed.gate_up), cast(ExpertStack, routed.down)]
    whole, count = sum(stack.nbytes for stack in stacks), stacks[0].experts
    return whole * (routed.shape.active + routed.has_shared) // count, whole // count


def small_drafter(target: DecoderConfig) -> DFlashConfig:
    """A drafter with five taps and blocks of 16, so that steps have all phases; its own phases are not timed."""
    taps = tuple(sorted({round((target.layers - 3) * i / 4) + 1 for i in range(5)}))
    return DFlashConfig(
        label="random",
        hidden_size=target.hidden_size,
        layers=1,
        heads=4,
        kv_heads=2,
        head_dim=64,
        intermediate_size=256,
        vocab_size=target.vocab_size,
        rms_eps=target.rms_eps,
        rope=RopeConfig(1e6, 64),
        attention_bias=False,
        block_size=BLOCK,
        mask_token_id=3,
        target_layer_ids=taps,
        num_target_layers=target.layers,
        patterns=(AttentionPattern(causal=False),),
        trained_length=0,
    )


def measure_one(name: str, kind: str, context: int, tiny: bool, show_kernels: bool) -> list[dict[str, object]]:
    device = torch.device("cpu" if tiny else "cuda")
    began = time.perf_counter()
    bandwidth = copy_bandwidth(device, 2**24 if tiny else 2**32)
    bench = Bench(tiny_family(name) if tiny else FAMILIES[name], kind, context, device, tiny)
    bench.show_kernels = show_kernels
    print(f"{name} {kind}: built in {time.perf_counter() - began:.0f} s; copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    lines = []
    for label, rows, shape in STEPS:
        line = bench.measure(label, rows, shape, 2 if tiny else 30)
        ms, floor = cast(float, line["ms"]), cast(int, line["bytes"]) / bandwidth * 1e3
        line |= {"shape": name, "format": kind, "context": context, "floor_ms": floor, "ratio": ms / floor}
        lines.append(line)
        print(shown(line), flush=True)
    if device.type == "cuda":
        print(f"  most memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    return lines


def shown(line: dict[str, Any]) -> str:
    return (
        f"| {line['shape']} | {line['format']} | {line['step']} | {line['ms']:.3f} | {line['bytes'] / 1e9:.3f} | "
        f"{line['experts']:.1f} | {line['floor_ms']:.3f} | {line['ratio']:.2f} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(FAMILIES))
    parser.add_argument("--formats", default="bf16,Q4_K")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--limit", type=int, default=240, help="seconds that one shape in one format may take")
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    parser.add_argument("--kernels", action="store_true", help="also which kernels a step's time goes to")
    parser.add_argument("--here", action="store_true", help="measure in this process")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    jobs = [(name, kind) for kind in options.formats.split(",") for name in options.shapes.split(",")]
    lines: list[dict[str, Any]] = []
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name, kind in jobs:
            if options.here:
                lines += measure_one(name, kind, options.context, options.tiny, options.kernels)
                continue
            out = Path(folder) / "lines.json"
            command = [sys.executable, __file__, "--here", "--shapes", name, "--formats", kind, "--out", str(out)]
            command += ["--context", str(options.context), *(["--tiny"] if options.tiny else [])]
            command += ["--kernels"] if options.kernels else []
            try:
                subprocess.run(command, check=True, timeout=options.limit)
                lines += json.loads(out.read_text())
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as problem:
                failed.append(f"{name} {kind}: {type(problem).__name__}")
    if options.out is not None:
        options.out.write_text(json.dumps(lines, indent=1))
    if not options.here:
        print("\n| shape | format | step | ms | GB | experts a layer | floor ms | ratio |\n|" + " --- |" * 8)
        print("\n".join(map(shown, lines)))
        print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

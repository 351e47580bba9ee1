"""The profile of device steps, on the CPU with torch's kernels: replays tell the phases and leave no trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.engine import devices
from slipstream.engine.gpu.gpu_executor import GpuExecutor
from slipstream.engine.gpu.gpu_profiler import count_launches
from slipstream.engine.llm import LLM
from slipstream.engine.profiler import PHASES, StepProfile
from tests.fakes import cli
from tests.tiny import assert_idle, keep_threads, prompt, tiny_llm, write_pair

__all__ = ["cli"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LLM:
    monkeypatch.setattr(devices, "gpu_device", lambda: DEVICE)
    with keep_threads():
        return tiny_llm(tmp_path, weight_format="bf16", device="cuda", kernels="reference")


def profiled(llm: LLM, **settings: object) -> tuple[list[int], dict[str, StepProfile]]:
    profiler = llm.profiler()
    with profiler:
        answer = llm.run([llm.request(prompt(40, 7), max_tokens=24, cache_prompt=False, **settings)])[0]
    profiles = profiler.profiles()
    assert sum(profile.steps for profile in profiles.values()) == answer.stats.steps
    return answer.token_ids, profiles


@pytest.mark.parametrize(
    ("mode", "phases"),
    [("plain", ["tree", "verify", "accept"]), ("tree:16", ["draft", "tree", "verify", "accept", "context write"])],
)
def test_phases_are_replayed_and_nothing_moves(llm: LLM, mode: str, phases: list[str]) -> None:
    engine = llm.engine
    assert isinstance(engine.executor, GpuExecutor)
    settings = {"mode": mode, "gate": "off"}
    request = llm.request(prompt(40, 7), max_tokens=24, cache_prompt=False, **settings)
    expected = llm.run([request])[0].token_ids
    found, profiles = profiled(llm, **settings)
    assert found == expected
    profile = profiles["plain" if mode == "plain" else "drafting"]
    assert list(profile.phases_ms) == list(PHASES)
    assert [name for name in PHASES[:-1] if profile.phases_ms[name] > 0] == phases
    device = profile.device
    assert device is not None and device.busy_ms > 0
    assert profile.phases_ms["host"] == pytest.approx(max(0.0, profile.step_ms - device.busy_ms))
    assert list(device.launches) == phases and min(device.launches.values()) > 0
    # a replayed step moves the sequence on, and is taken back
    assert 40 < device.replay_context == int(engine.executor.device_steps.state.length[0])
    again = llm.run([llm.request(prompt(40, 7), max_tokens=24, cache_prompt=False, **settings)])[0].token_ids
    assert again == expected
    assert_idle(llm)


def test_steps_that_ask_the_host_are_clocked_there(llm: LLM) -> None:
    _, profiles = profiled(llm, mode="chain", gate="off", logprobs=1)
    drafting = profiles["drafting"]
    assert drafting.device is None
    assert min(drafting.phases_ms[name] for name in ("draft", "tree", "verify", "accept", "context write")) > 0
    assert sum(drafting.phases_ms.values()) == pytest.approx(drafting.step_ms)


def test_a_failed_answer_is_not_replayed(llm: LLM) -> None:
    profiler = llm.profiler()
    with pytest.raises(KeyboardInterrupt), profiler:
        llm.run([llm.request(prompt(40, 7), max_tokens=8, mode="chain", gate="off")])
        raise KeyboardInterrupt
    assert all(profile.device is None for profile in profiler.profiles().values())


def test_the_command_tells_launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: Any) -> None:
    monkeypatch.setattr(devices, "gpu_device", lambda: DEVICE)
    target, draft = write_pair(tmp_path)
    (target / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"turns": ["hello"]}) + "\n")
    with keep_threads():
        done = cli(
            "bench",
            "--profile",
            "--target",
            str(target),
            "--draft",
            str(draft),
            "--prompts",
            str(prompts),
            "--max-tokens",
            "8",
            "--modes",
            "chain",
            "--device",
            "cuda",
            "--kernels",
            "reference",
            "--threads",
            "1",
        )
    assert done.code == 0, done.err
    assert "launched by a step, as torch.profiler counts them" in done.out
    assert "device busy" in done.out and "replayed one by one" in done.out


def test_launches_are_counted_one_by_one() -> None:
    tensor = torch.ones(4, 4, device=DEVICE)

    def two() -> None:
        tensor.mul_(2.0)
        tensor.add_(1.0)

    assert count_launches(two, DEVICE) == 2
    assert count_launches(lambda: None, DEVICE) == 0

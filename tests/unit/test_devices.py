"""Where a pair runs, and what is refused before anything is loaded."""

import pytest
import torch

from slipstream.config import EngineConfig
from slipstream.engine import devices
from slipstream.errors import ConfigError


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_device", lambda: None)


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_a_gpu_the_cpu_serves(no_gpu: None, device: str) -> None:
    assert devices.chosen_gpu(EngineConfig(device=device)) is None  # type: ignore[arg-type]


def test_a_gpu_that_is_not_there_is_said_so(no_gpu: None) -> None:
    with pytest.raises(ConfigError, match="no GPU"):
        devices.chosen_gpu(EngineConfig(device="cuda"))


@pytest.mark.parametrize(
    ("setting", "said"),
    [({"kernels": "reference"}, "--kernels"), ({"graphs": False}, "--no-graphs"), ({"exact": True}, "--exact")],
)
def test_what_only_a_gpu_can_do_is_refused_on_a_cpu(no_gpu: None, setting: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        devices.chosen_gpu(EngineConfig(**setting))  # type: ignore[arg-type]


def test_more_sequences_than_an_exact_step_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_device", lambda: torch.device("cpu"))
    with pytest.raises(ConfigError, match="do not fit into an exact step"):
        devices.chosen_gpu(EngineConfig(device="cuda", exact=True, max_sequences=65))


@pytest.mark.parametrize("setting", [{"device": "tpu"}, {"kernels": "fast"}])
def test_unknown_choices_are_refused(setting: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="unknown"):
        EngineConfig(**setting)  # type: ignore[arg-type]

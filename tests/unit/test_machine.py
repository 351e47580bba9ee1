"""What the machine can do is measured, never assumed, and a probe that dies is remembered."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipstream.config import WeightFormat
from slipstream.kernels import machine
from slipstream.kernels.cpu.linear import Matrix

LIVES, DIES = "exit 0", "kill -ILL $$"  # what the interpreter does that runs a probe, as a shell script


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provides a separate cache folder, no cap from the environment, and restores torch's threads."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")  # so that monkeypatch restores whatever a test leaves
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    threads = torch.get_num_threads()
    yield tmp_path / "cache"
    torch.set_num_threads(threads)


def test_usable_cores_stay_within_affinity_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= machine.usable_cores() <= (os.cpu_count() or 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert machine.usable_cores() == 1


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("250000 100000", 3), ("10000 100000", 1), ("", 8)])
def test_a_containers_quota_counts(monkeypatch: pytest.MonkeyPatch, quota: str, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(Path, "is_file", lambda path: str(path) == "/sys/fs/cgroup/cpu.max")
    monkeypatch.setattr(Path, "read_text", lambda path: quota + "\n")
    assert machine.usable_cores() == cores


def test_threads_are_those_asked_for_or_the_cores() -> None:
    assert machine.prepare_torch(1) == 1 and torch.get_num_threads() == 1
    assert machine.prepare_torch(0) == machine.usable_cores() == torch.get_num_threads()


def run_probes_by(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a script stand in for Python: it may die like a Python whose matrix library uses a forbidden instruction."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(path))


def count_probes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the exit codes of the probes that were really run."""
    codes: list[int] = []
    run = machine.subprocess.run

    def counted(*arguments: object, **settings: object) -> object:
        done = run(*arguments, **settings)  # type: ignore[call-overload]
        codes.append(done.returncode)
        return done

    monkeypatch.setattr(machine.subprocess, "run", counted)
    return codes


def test_a_crashing_probe_caps_the_instruction_set_and_is_remembered(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path, tmp_path: Path
) -> None:
    run_probes_by(DIES, tmp_path, monkeypatch)
    monkeypatch.setattr(machine, "advertises_amx", lambda: True)
    codes = count_probes(monkeypatch)
    machine.prepare_torch(1)
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"
    assert len(codes) == 1 and codes[0] != 0
    assert list(json.loads((own_cache / "machine.json").read_text()).values()) == [False]
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    machine.prepare_torch(1)
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"
    assert len(codes) == 1, "the second start asks the file, not the machine"


def test_a_probe_that_lives_changes_nothing_and_is_remembered(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path, tmp_path: Path
) -> None:
    run_probes_by(LIVES, tmp_path, monkeypatch)
    monkeypatch.setattr(machine, "advertises_amx", lambda: True)
    codes = count_probes(monkeypatch)
    machine.prepare_torch(1)
    machine.prepare_torch(1)
    assert codes == [0]
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
    assert [path.name for path in own_cache.iterdir()] == ["machine.json"], "no scratch file stays behind"


def test_another_torch_asks_again_and_keeps_what_was_known(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path, tmp_path: Path
) -> None:
    run_probes_by(LIVES, tmp_path, monkeypatch)
    codes = count_probes(monkeypatch)
    assert machine.amx_survives()
    monkeypatch.setattr(torch, "__version__", "99.0")
    run_probes_by(DIES, tmp_path, monkeypatch)
    assert not machine.amx_survives()
    assert len(codes) == 2
    assert sorted(json.loads((own_cache / "machine.json").read_text()).values()) == [False, True]


@pytest.mark.parametrize("damaged", ["{ not json", "[1]", "null"])
def test_a_damaged_memory_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path, tmp_path: Path, damaged: str
) -> None:
    own_cache.mkdir()
    (own_cache / "machine.json").write_text(damaged)
    run_probes_by(LIVES, tmp_path, monkeypatch)
    assert machine.amx_survives()
    assert list(json.loads((own_cache / "machine.json").read_text()).values()) == [True]


def test_where_nothing_can_be_stored_the_probe_still_answers(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path, tmp_path: Path
) -> None:
    own_cache.write_text("a file where the folder should be")
    run_probes_by(LIVES, tmp_path, monkeypatch)
    assert machine.amx_survives()


def test_without_amx_or_with_a_cap_of_the_users_nothing_is_probed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    codes = count_probes(monkeypatch)
    run_probes_by(DIES, tmp_path, monkeypatch)
    monkeypatch.setattr(machine, "advertises_amx", lambda: False)
    machine.prepare_torch(1)
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
    monkeypatch.setattr(machine, "advertises_amx", lambda: True)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    machine.prepare_torch(1)
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert codes == []


@pytest.mark.parametrize(("text", "amx"), [("flags : fpu avx512f amx_tile", True), ("flags : fpu avx2", False)])
def test_amx_is_read_from_the_cpu_flags(monkeypatch: pytest.MonkeyPatch, text: str, amx: bool) -> None:
    info = {"/proc/cpuinfo": f"model name\t: Some CPU @ 2GHz\n{text}\n"}
    monkeypatch.setattr(Path, "is_file", lambda path: str(path) in info)
    monkeypatch.setattr(Path, "read_text", lambda path: info[str(path)])
    assert machine.advertises_amx() is amx
    assert machine.cpu_name() == "Some CPU @ 2GHz"


@pytest.mark.parametrize(
    ("measured", "best"),
    [
        ({"fp32": (4.0, 5.0), "int8": (2.0, 3.0), "int4": (1.0, 9.0)}, "int4"),
        ({"fp32": (4.0, 5.0), "int8": (1.05, 3.0), "int4": (1.0, 9.0)}, "int8"),
        ({"int8": (1.2, 3.0), "int4": (1.0, 9.0)}, "int4"),
        ({"fp32": (1.0, 1.0)}, "fp32"),
    ],
)
def test_the_fastest_single_row_wins_and_near_equals_are_split_by_sixteen(
    measured: dict[WeightFormat, tuple[float, float]], best: str
) -> None:
    assert machine.pick_format(measured) == best


def test_every_format_is_measured_for_one_and_for_sixteen_rows() -> None:
    measured = machine.measure_formats(["fp32", "int8", "int4"], 64, 64)
    assert list(measured) == ["fp32", "int8", "int4"]
    assert all(0 < one < 1000 and 0 < many < 1000 for one, many in measured.values())


def test_a_format_without_a_kernel_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    make = machine.random_matrix

    def limited(weight_format: WeightFormat, outputs: int, inputs: int) -> Matrix:
        matrix = make(weight_format, outputs, inputs)
        return Broken() if weight_format == "int8" else matrix

    class Broken(Matrix):
        in_features = 64

        def __call__(self, rows: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no kernel")

    monkeypatch.setattr(machine, "random_matrix", limited)
    assert list(machine.measure_formats(["int8", "fp32"], 64, 64)) == ["fp32"]


def test_a_format_that_cannot_even_be_packed_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    make = machine.random_matrix

    def limited(weight_format: WeightFormat, outputs: int, inputs: int) -> Matrix:
        if weight_format == "int4":
            raise RuntimeError("no packing on this CPU")
        return make(weight_format, outputs, inputs)

    monkeypatch.setattr(machine, "random_matrix", limited)
    assert list(machine.measure_formats(["int4", "fp32"], 64, 64)) == ["fp32"]


def test_bandwidth_is_measured_once() -> None:
    first = machine.read_bandwidth()
    assert first > 1e8
    assert machine.read_bandwidth() == first

"""Fixtures every unit test may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.engine.llm import LLM
from tests.fakes import cli, fake_engine
from tests.tiny import keep_threads, tiny_llm, write_pair

__all__ = ["cli", "fake_engine"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random pair on disk."""
    path = tmp_path_factory.mktemp("pair")
    write_pair(path)
    return path


@pytest.fixture
def threads() -> Iterator[None]:
    with keep_threads():
        yield


@pytest.fixture
def llm(folder: Path) -> LLM:
    """The pair in int8, where speculative text must equal plain text to the bit."""
    return tiny_llm(folder, weight_format="int8")

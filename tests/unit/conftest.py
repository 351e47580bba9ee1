"""Fixtures every unit test may use."""

from tests.fakes import cli, fake_engine

__all__ = ["cli", "fake_engine"]

"""What configurations claim, before anything is built from it."""

from __future__ import annotations

import pytest

from slipstream.errors import ConfigError
from slipstream.models.config_reading import ConfigReader
from slipstream.models.dflash_config import llama_cpp_keys


def test_a_claim_of_endless_layers_allocates_nothing() -> None:
    reader = ConfigReader({"dflash.block_count": 2**31}, "drafter")
    with pytest.raises(ConfigError, match="no model has more"):
        reader.layers("dflash.block_count")
    assert ConfigReader({"layers": 80}, "big").layers("layers") == 80


def test_tap_ids_of_another_writer_that_are_no_numbers_are_refused() -> None:
    renamed = llama_cpp_keys({"x.dflash.target_layer_ids": ["a", 2]}, "x")
    with pytest.raises(ConfigError, match="not a list of whole numbers"):
        ConfigReader(renamed, "drafter").integers("dflash.target_layers")
    assert llama_cpp_keys({"x.dflash.target_layer_ids": [1, 2]}, "x")["dflash.target_layers"] == [2, 3]

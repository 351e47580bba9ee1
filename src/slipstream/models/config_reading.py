"""Strict reading of model configurations: a missing or nonsensical value is an error, never a silent default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import ConfigError

MOST_LAYERS = 4096  # far more than any model has; without a limit a damaged file could take all memory
SLIDING, FULL = "sliding_attention", "full_attention"  # the types of layers with attention in config.json files
# The keys of the numbers that every model has: that of config.json files, and that of GGUF files without the
# architecture and the dot before it.
_LAYERS, _RMS_EPS = ("num_hidden_layers", "block_count"), ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
_COMMON_KEYS = {
    "hidden_size": ("hidden_size", "embedding_length"),
    "heads": ("num_attention_heads", "attention.head_count"),
    "kv_heads": ("num_key_value_heads", "attention.head_count_kv"),
    "head_dim": ("head_dim", "attention.key_length"),
    "intermediate_size": ("intermediate_size", "feed_forward_length"),
    "vocab_size": ("vocab_size", "vocab_size"),
}


class ConfigReader:
    """Reads typed values from a config; every error names the key and the model."""

    def __init__(self, values: Mapping[str, object], label: str) -> None:
        self.values = values
        self.label = label

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def is_of(self, arch: str) -> bool:
        """Whether a GGUF file has keys of this architecture."""
        return any(key.startswith(f"{arch}.") for key in self.values)

    def layers(self, key: str) -> int:
        """Reads a number of layers, with a limit, because a damaged file must not decide how much is allocated."""
        found = self.integer(key)
        if found > MOST_LAYERS:
            raise ConfigError(f"{self.label}: '{key}' is {found}, no model has more than {MOST_LAYERS} layers")
        return found

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value: int = self._typed(key, default, int, "a whole number")
        if value < least:
            raise ConfigError(f"{self.label}: '{key}' is {value}, it must be at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._typed(key, default, (int, float), "a number"))

    def boolean(self, key: str, default: bool | None = None) -> bool:
        return bool(self._typed(key, default, bool, "true or false"))

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._typed(key, default, str, "text"))

    def integers(self, key: str, default: Sequence[int] | None = None) -> list[int]:
        value = self._get(key, default)
        if not isinstance(value, list | tuple) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise ConfigError(f"{self.label}: '{key}' is {value!r}, not a list of whole numbers")
        return list(value)

    def each_layer(self, key: str, layers: int, default: int | None = None) -> tuple[int, ...]:
        """Returns a whole number for every layer; files have either one number for all layers or a list."""
        if not isinstance(self.values.get(key), list | tuple):
            return (self.integer(key, default),) * layers
        found = self.integers(key)
        if len(found) != layers or min(found) < 1:
            raise ConfigError(f"{self.label}: '{key}' must give a positive number for each of {layers} layers")
        return tuple(found)

    def layer_kinds(self, key: str, layers: int, known: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the kind of every layer, and refuses one that is not among `known`."""
        found = self._get(key, None)
        if not isinstance(found, list) or len(found) != layers or any(kind not in known for kind in found):
            raise ConfigError(f"{self.label}: {key} must name {layers} layers, each one of {', '.join(known)}")
        return tuple(found)

    def section(self, key: str) -> ConfigReader:
        """Returns a reader of a nested object, which is empty if the value is absent, null or no object."""
        value = self.values.get(key)
        return ConfigReader(value if isinstance(value, Mapping) else {}, f"{self.label}: {key}")

    def text_part(self) -> ConfigReader:
        """Returns the section of a multimodal config about its language model, or the whole config of a text model."""
        return self.section("text_config") if self.has("text_config") else self

    def numbers(self, keys: Mapping[str, tuple[str, str]], arch: str = "", **own: Any) -> dict[str, Any]:
        """Returns whole numbers by the names of our configs, and those in `own`, which are not read.

        `keys` has two keys for each name: that of config.json files, and that of GGUF files, which stands there after
        the architecture `arch`.
        """
        read = {name: self.integer(_key(both, arch)) for name, both in keys.items() if name not in own}
        return read | own

    def common(self, arch: str = "", even_heads: bool = False, **own: Any) -> dict[str, Any]:
        """Returns the numbers that every model has, by our configs' names, and those in `own`, which are not read.

        With `even_heads`, heads that the config does not describe share the width evenly and have keys of their own,
        as the formats of Llama-like models define it.
        """
        layers, eps = self.layers(_key(_LAYERS, arch)), self.number(_key(_RMS_EPS, arch))
        if even_heads:
            hidden, heads = (self.integer(_key(_COMMON_KEYS[name], arch)) for name in ("hidden_size", "heads"))
            head_dim = self.integer(_key(_COMMON_KEYS["head_dim"], arch), hidden // heads)
            kv_heads = self.integer(_key(_COMMON_KEYS["kv_heads"], arch), heads)
            own = {"head_dim": head_dim, "kv_heads": kv_heads} | own
        return self.numbers(_COMMON_KEYS, arch, **{"layers": layers, "rms_eps": eps} | own)

    def flags(self, key: str, count: int) -> tuple[bool, ...]:
        """Returns a flag for every layer."""
        found = self.values.get(key)
        if not isinstance(found, list) or len(found) != count:
            raise ConfigError(f"{self.label}: '{key}' must have {count} entries")
        return tuple(map(bool, found))

    def require(self, key: str, allowed: tuple[object, ...], what: str) -> None:
        """Refuses a value outside `allowed`, which we would compute wrongly; a key may be absent or null."""
        value = self.values.get(key)
        if value is not None and value not in allowed:
            raise ConfigError(f"{self.label}: {what} ('{key}': {value!r}) is not supported")

    def _typed(self, key: str, default: object, kinds: type | tuple[type, ...], called: str) -> Any:
        value = self._get(key, default)
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise ConfigError(f"{self.label}: '{key}' is {value!r}, not {called}")
        return value

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        found = default if value is None else value
        if found is None:
            raise ConfigError(f"{self.label}: the config has no '{key}'", "the file is incomplete or not this kind")
        return found


def _key(both: tuple[str, str], arch: str) -> str:
    return f"{arch}.{both[1]}" if arch else both[0]

"""Strict reading of model configurations: a missing or nonsensical value is an error, never a silent default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.errors import ConfigError

MOST_LAYERS = 4096  # far more than any model has; without a limit a damaged file could make us allocate everything
_MISSING = object()


class ConfigReader:
    """Reads typed values from a config; every error names the key and the model."""

    def __init__(self, values: Mapping[str, object], label: str) -> None:
        self.values = values
        self.label = label

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def layers(self, key: str) -> int:
        """A number of layers, with a limit, because a damaged file must not decide how much is allocated."""
        found = self.integer(key)
        if found > MOST_LAYERS:
            raise ConfigError(f"{self.label}: '{key}' is {found}, no model has more than {MOST_LAYERS} layers")
        return found

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{self.label}: '{key}' is {value!r}, not a whole number")
        if value < least:
            raise ConfigError(f"{self.label}: '{key}' is {value}, it must be at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.label}: '{key}' is {value!r}, not a number")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.label}: '{key}' is {value!r}, not true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ConfigError(f"{self.label}: '{key}' is {value!r}, not text")
        return value

    def integers(self, key: str, default: Sequence[int] | None = None) -> list[int]:
        value = self._get(key, default)
        if not isinstance(value, list | tuple) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise ConfigError(f"{self.label}: '{key}' is {value!r}, not a list of whole numbers")
        return list(value)

    def each_layer(self, key: str, layers: int, default: int | None = None) -> tuple[int, ...]:
        """A whole number for every layer, of which files give one for all layers or a list."""
        if not isinstance(self.values.get(key), list | tuple):
            return (self.integer(key, default),) * layers
        found = self.integers(key)
        if len(found) != layers or min(found) < 1:
            raise ConfigError(f"{self.label}: '{key}' must give a positive number for each of {layers} layers")
        return tuple(found)

    def layer_kinds(self, key: str, layers: int, known: tuple[str, ...]) -> tuple[str, ...]:
        """The kind of every layer, each of which must be among `known`."""
        found = self._get(key, None)
        if not isinstance(found, list) or len(found) != layers or any(kind not in known for kind in found):
            raise ConfigError(f"{self.label}: {key} must name {layers} layers, each one of {', '.join(known)}")
        return tuple(found)

    def section(self, key: str) -> ConfigReader:
        """A nested object; a value that is absent, null or no object reads as an empty one."""
        value = self.values.get(key)
        return ConfigReader(value if isinstance(value, Mapping) else {}, f"{self.label}: {key}")

    def text_part(self) -> ConfigReader:
        """The section of a multimodal config about its language model, or the whole config of a text model."""
        return self.section("text_config") if self.has("text_config") else self

    def require(self, key: str, allowed: tuple[object, ...], what: str) -> None:
        """Refuses a config that asks for behaviour which we would compute wrongly; absent and null are allowed."""
        value = self.values.get(key)
        if value is not None and value not in allowed:
            raise ConfigError(f"{self.label}: {what} ('{key}': {value!r}) is not supported")

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key, _MISSING)
        if value is _MISSING or value is None:
            if default is None:
                raise ConfigError(f"{self.label}: the config has no '{key}'", "the file is incomplete or not this kind")
            return default
        return value

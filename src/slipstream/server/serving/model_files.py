"""Which models a server offers: one spec per name, from options or from a TOML or YAML file that is read strictly."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.formats.adapters import parse_source
from slipstream.formats.sources import NAMED_DRAFTS, NO_DRAFT, PAIRS, SUFFIX
from slipstream.server.operations.server_state import parse_binary_size
from slipstream.types import BASE_VARIANT, Gate, Mode, Request, SamplingParams

ANY = "any"  # the name by which a request asks for the model that was used last
MAX_NAME = 200  # characters; names stand in URLs, metrics labels and log lines, which longer names would bloat

_ENGINE: dict[str, type] = {
    "weight_format": str,
    "max_context": int,
    "max_sequences": int,
    "cache_tokens": int,
    "prefill_chunk": int,
    "step_rows": int,
    "max_waiting": int,
    "draft_window": int,
    "text_drafts": bool,
    "prefix_cache": bool,
    "threads": int,
}
_REQUEST: dict[str, type] = {
    "mode": str,
    "gate": str,
    "max_tokens": int,
    "min_confidence": float,
    "cache_prompt": bool,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
    "stop": list,
    "draft_lora": str,
}
_MODEL: dict[str, type] = {
    "target": str,
    "draft": str,
    "draft_lora": list,
    "preload": bool,
    "idle_s": float,
    "engine": dict,
    "request": dict,
}
_FILE: dict[str, type] = {"memory_budget": str, "idle_s": float, "models": dict}
_SAMPLING = {item.name for item in fields(SamplingParams)}
_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list of texts",
    dict: "a table of settings",
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One name that a client may ask for: a pair of models, the settings of its engine, and defaults of its requests.

    `defaults` are keywords of `LLM.request`; the settings of a request take precedence over them.
    """

    name: str
    target: str
    draft: str = "auto"  # a source as for LLM, `auto` (what is best for this target), `suffix` or `none`
    engine: EngineConfig = field(default_factory=EngineConfig)
    defaults: Mapping[str, object] = field(default_factory=dict)
    idle_s: float | None = None  # None: the router's value holds; 0: the model never sleeps
    preload: bool = False
    draft_lora: tuple[str, ...] = ()  # adapters of the drafter, each as `[NAME=]PATH[@SCALE]`

    def __post_init__(self) -> None:
        if not self.name.strip() or len(self.name) > MAX_NAME or not self.name.isprintable():
            shown = self.name[:40].encode("unicode_escape").decode()
            raise ConfigError(f"'{shown}' cannot be a model's name", f"use 1 to {MAX_NAME} printable characters")
        if self.name == ANY:
            raise ConfigError(f"a model cannot be called '{ANY}'", "that name asks for the model used last")
        if not self.target:
            raise ConfigError(f"model '{self.name}' has no target", "name a model, a folder or a file")
        if self.idle_s is not None and not 0 <= self.idle_s < float("inf"):
            raise ConfigError(f"model '{self.name}': idle_s is {self.idle_s}", "it must be 0 (never) seconds or more")
        if self.draft_lora and self.draft in (NO_DRAFT, SUFFIX):
            raise ConfigError(f"model '{self.name}' has adapters, but draft is '{self.draft}'", "leave draft_lora out")
        if len(self.adapters) != len(self.draft_lora):
            raise ConfigError(f"two adapters of model '{self.name}' have one name", "name them apart: NAME=PATH")
        _check_defaults(self)

    @property
    def adapters(self) -> dict[str, str]:
        """The sources of the drafter's adapters by the names that requests give as `draft_lora`."""
        return {parse_source(source).name: source for source in self.draft_lora}

    @property
    def draft_in_effect(self) -> str | None:
        """The name of what will draft once the model is loaded; None if nothing will."""
        if self.draft == "auto":
            return NAMED_DRAFTS[PAIRS[self.target].draft] if self.target in PAIRS else SUFFIX
        if self.draft in (NO_DRAFT, SUFFIX):
            return None if self.draft == NO_DRAFT else SUFFIX
        path = Path(self.draft).expanduser()
        return path.name if path.exists() else self.draft

    @property
    def mode_in_effect(self) -> str:
        """The mode of a request that names no mode, as long as the model is not loaded."""
        return self.mode_with(self.draft_in_effect is not None)

    def mode_with(self, speculates: bool) -> str:
        """The mode of a request that names no mode; `speculates` says whether the model can draft at all."""
        if self.defaults.get("mode"):
            return str(self.defaults["mode"])
        if not speculates:
            return "plain"
        gate = self.defaults.get("gate")
        return "auto" if gate is None or Gate.parse(str(gate)).kind == "auto" else "chain"

    def loads_like(self, other: ModelSpec) -> bool:
        """Whether an engine that was built for the other spec can serve this one too."""
        names = ("target", "draft", "draft_lora", "engine")
        return all(getattr(self, name) == getattr(other, name) for name in names)


@dataclass(frozen=True, slots=True)
class ModelsFile:
    """The models of a file and its settings for all of them; a setting is None if the file does not have it."""

    models: tuple[ModelSpec, ...]
    memory_budget: int | None = None
    idle_s: float | None = None


def served_name(target: str) -> str:
    """The name of a model that was given none: a short name or hub id as it is, or the name of its file or folder."""
    path = Path(target).expanduser()
    if not path.exists():
        return target
    return path.stem if path.is_file() else path.resolve().name


def read_models(path: Path) -> ModelsFile:
    """Reads a models file; an unknown key or an impossible value is refused with the file, the model and the key."""
    table = _checked(_parse(path), _FILE, str(path))
    if not table.get("models"):
        raise ConfigError(f"{path} names no models", "add a table such as [models.smollm2] with a target")
    idle_s = table.get("idle_s")
    if idle_s is not None and not 0 <= idle_s < float("inf"):
        raise ConfigError(f"{path}: idle_s is {idle_s}", "it must be 0 (never) seconds or more")
    try:
        budget = parse_binary_size(table["memory_budget"]) if "memory_budget" in table else None
    except ConfigError as error:
        raise ConfigError(f"{path}: memory_budget: {error.message}", error.hint) from None
    return ModelsFile(tuple(_model(path, name, entry) for name, entry in table["models"].items()), budget, idle_s)


def _model(path: Path, name: object, entry: object) -> ModelSpec:
    where = f"{path}: model '{name}'"
    if not isinstance(name, str):
        raise ConfigError(f"{where} is not named by a text", "put its name in quotes")
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} is not a table of settings", "give it at least a target")
    table = _checked(entry, _MODEL, where)
    if "target" not in table:
        raise ConfigError(f"{where} has no target", "name a model, a folder or a file")
    engine = _checked(table.get("engine", {}), _ENGINE, f"{where}, engine")
    defaults = _checked(table.get("request", {}), _REQUEST, f"{where}, request")
    if "stop" in defaults:
        defaults["stop"] = tuple(defaults["stop"])
    try:
        return ModelSpec(
            name,
            _beside(path, table["target"]),
            _beside(path, table.get("draft", "auto")),
            EngineConfig(**engine),
            defaults,
            table.get("idle_s"),
            table.get("preload", False),
            tuple(_adapter_beside(path, source) for source in table.get("draft_lora", ())),
        )
    except SlipstreamError as error:
        raise ConfigError(f"{where}: {error.message}", error.hint) from None


def _beside(path: Path, source: str) -> str:
    """Resolves a relative path from the file's own folder, so that the server's working folder does not matter."""
    return str((path.parent / source).resolve()) if source.startswith(("./", "../")) else source


def _adapter_beside(path: Path, source: str) -> str:
    name, mark, place = source.partition("=")
    return f"{name}={_beside(path, place)}" if mark and "/" not in name else _beside(path, source)


def _check_defaults(spec: ModelSpec) -> None:
    """Refuses defaults that no request could run with; otherwise every request would be refused later."""
    said = dict(spec.defaults)
    mode = Mode.parse(spec.mode_in_effect)
    gate = said.get("gate")
    drafts = mode.kind == "plain" or spec.draft != NO_DRAFT and (spec.draft != SUFFIX or mode.reads_text)
    if not drafts:
        raise ConfigError(f"mode '{mode}' needs a drafter, and draft is '{spec.draft}'", "leave the mode out")
    if mode.text and not spec.engine.text_drafts:
        raise ConfigError(f"mode '{mode}' needs drafts from the text", "leave text_drafts out")
    variants = (BASE_VARIANT, *spec.adapters)
    if said.get("draft_lora", BASE_VARIANT) not in variants:
        raise ConfigError(f"there is no draft variant '{said['draft_lora']}'", f"draft_lora has {', '.join(variants)}")
    rest = {name: said[name] for name in ("max_tokens", "stop", "min_confidence", "draft_lora") if name in said}
    Request(
        "defaults",
        (0,),
        SamplingParams(**{name: said[name] for name in said if name in _SAMPLING}),  # type: ignore[arg-type]
        mode,
        Gate.parse(str(gate)) if gate is not None else Gate("auto" if mode.kind == "auto" else "off"),
        **rest,  # type: ignore[arg-type]
    )


def _checked(table: Mapping[str, Any], known: Mapping[str, type], where: str) -> dict[str, Any]:
    """The table itself, after a check that every key is known and every value has the type of its key."""
    for key, value in table.items():
        if key not in known:
            hint = f"known: {', '.join(known)}"
            if isinstance(value, Mapping) and known is _MODEL:
                hint = f"a name with a dot is written in quotes; {hint}"
            raise ConfigError(f"{where}: unknown key '{key}'", hint)
        if not _is_a(value, known[key]):
            raise ConfigError(f"{where}: {key} is {value!r}", f"it must be {_WORDS[known[key]]}")
    return dict(table)


def _is_a(value: object, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind is list:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return isinstance(value, int | float if kind is float else kind)


def _parse(path: Path) -> dict[str, Any]:
    if path.suffix.lower() not in (".toml", ".yaml", ".yml"):
        raise ConfigError(f"{path} is neither TOML nor YAML by its name", "call it .toml, .yaml or .yml")
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"the models file {path} cannot be read: {reason}", "give a TOML or YAML file") from None
    try:
        parsed = tomllib.loads(text) if path.suffix.lower() == ".toml" else yaml.load(text, _StrictLoader)
    except (tomllib.TOMLDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{path} cannot be understood: {reason}", "see docs/models-file.md") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path} is not a table of settings", "see docs/models-file.md")
    return parsed


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe subset, but a key that appears twice is an error, as it is in TOML; plain YAML takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key}' stands there twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

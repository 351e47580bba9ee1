"""Models files: what TOML and YAML mean, and that whatever is wrong in them is named by file, model and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.serve import single_model
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.server.serving.model_files import ModelSpec, read_models, served_name

TOML = """
memory_budget = "6G"
idle_s = 900

[models.smollm2]
target = "smollm2"
preload = true

[models."small.plain"]
target = "smollm2"
draft = "none"
idle_s = 0
engine = { max_sequences = 2, cache_tokens = 4096 }
request = { temperature = 1, max_tokens = 64, stop = ["END"] }

[models.old]
target = "./old.gguf"
draft = "smollm2-dflash"
draft_lora = ["code=./a/code.gguf", "./german@0.5", "fr=/adapters/french"]
request = { mode = "tree:16", seed = 7, draft_lora = "german" }
"""

YAML = """
memory_budget: 6G
idle_s: 900
models:
  smollm2: {target: smollm2, preload: true}
  small.plain:
    target: smollm2
    draft: none
    idle_s: 0
    engine: {max_sequences: 2, cache_tokens: 4096}
    request: {temperature: 1, max_tokens: 64, stop: [END]}
  old:
    target: ./old.gguf
    draft: smollm2-dflash
    draft_lora: [code=./a/code.gguf, ./german@0.5, fr=/adapters/french]
    request: {mode: "tree:16", seed: 7, draft_lora: german}
"""


def write(folder: Path, text: str, suffix: str = "toml") -> Path:
    path = folder / f"models.{suffix}"
    path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize(("text", "suffix"), [(TOML, "toml"), (YAML, "yaml"), (YAML, "YML")])
def test_both_formats_say_the_same(tmp_path: Path, text: str, suffix: str) -> None:
    file = read_models(write(tmp_path, text, suffix))
    assert (file.memory_budget, file.idle_s) == (6 << 30, 900)
    assert file.models == (
        ModelSpec("smollm2", "smollm2", preload=True),
        ModelSpec(
            "small.plain",
            "smollm2",
            "none",
            EngineConfig(max_sequences=2, cache_tokens=4096),
            {"temperature": 1, "max_tokens": 64, "stop": ("END",)},
            idle_s=0,
        ),
        ModelSpec(
            "old",
            str(tmp_path / "old.gguf"),
            "smollm2-dflash",
            defaults={"mode": "tree:16", "seed": 7, "draft_lora": "german"},
            draft_lora=(f"code={tmp_path}/a/code.gguf", f"{tmp_path}/german@0.5", "fr=/adapters/french"),
        ),
    )
    assert list(file.models[2].adapters) == ["code", "german", "fr"]


def test_what_is_in_effect(tmp_path: Path) -> None:
    default, plain, old = read_models(write(tmp_path, TOML)).models
    assert (default.draft_in_effect, default.mode_in_effect) == ("smollm2-135m-dspark.Q8_0.gguf", "auto")
    assert (plain.draft_in_effect, plain.mode_in_effect) == (None, "plain")
    assert (old.draft_in_effect, old.mode_in_effect) == ("smollm2-dflash", "tree:16")
    gated = ModelSpec("gated", "smollm2", defaults={"gate": "ema"})
    assert gated.mode_in_effect == "chain"
    alone = ModelSpec("alone", "/somewhere/model.gguf")
    assert (alone.draft_in_effect, alone.mode_in_effect, alone.mode_with(speculates=False)) == (
        "suffix",
        "auto",
        "plain",
    )
    text = ModelSpec("text", "smollm2", "suffix")
    assert (text.draft_in_effect, text.mode_in_effect) == ("suffix", "auto")


@pytest.mark.parametrize(
    ("draft", "more", "said"),
    [
        ("none", {"defaults": {"mode": "auto"}}, "mode 'auto' needs a drafter, and draft is 'none'"),
        ("suffix", {"defaults": {"mode": "chain"}}, "mode 'chain' needs a drafter, and draft is 'suffix'"),
        (
            "auto",
            {"defaults": {"mode": "tree:8:text"}, "engine": EngineConfig(text_drafts=False)},
            "leave text_drafts out",
        ),
        ("suffix", {"defaults": {"gate": "ema"}}, "mode 'chain' needs a drafter"),
        ("suffix", {"draft_lora": ("a=b",)}, "has adapters, but draft is 'suffix'"),
    ],
)
def test_what_needs_a_drafter_is_refused_without_one(draft: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ModelSpec("m", "smollm2", draft, **more)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models = 3", ["models is 3"]),
        ("", ["names no models"]),
        ("[models]", ["names no models"]),
        ("[models.a]\ntarget = 'x'\n[model.b]", ["unknown key 'model'"]),
        ("[models.a]\ndraft = 'none'", ["model 'a'", "no target"]),
        ("[models.a]\ntarget = ''", ["model 'a'", "no target"]),
        ("[models.a]\ntarget = 3", ["model 'a'", "target is 3", "text"]),
        ("[models.a]\ntarget = 'x'\ntemprature = 1", ["model 'a'", "'temprature'"]),
        ("[models.a]\ntarget = 'x'\nrequest.temprature = 1", ["model 'a', request", "'temprature'"]),
        ("[models.a]\ntarget = 'x'\nrequest.logprobs = 1", ["model 'a', request", "'logprobs'"]),
        ("[models.a]\ntarget = 'x'\nrequest.temperature = -1", ["model 'a'", "temperature is -1"]),
        ("[models.a]\ntarget = 'x'\nrequest.temperature = true", ["model 'a'", "temperature is True", "a number"]),
        ("[models.a]\ntarget = 'x'\nrequest.max_tokens = 0", ["model 'a'", "max_tokens is 0"]),
        ("[models.a]\ntarget = 'x'\nrequest.max_tokens = 1.5", ["max_tokens is 1.5", "whole number"]),
        ("[models.a]\ntarget = 'x'\nrequest.stop = ['a', 3]", ["stop", "list of texts"]),
        ("[models.a]\ntarget = 'x'\nrequest.stop = ['']", ["model 'a'", "stop string is empty"]),
        ("[models.a]\ntarget = 'x'\nrequest.mode = 'fast'", ["model 'a'", "unknown mode 'fast'"]),
        ("[models.a]\ntarget = 'x'\nrequest.gate = 'slow'", ["model 'a'", "unknown gate 'slow'"]),
        ("[models.a]\ntarget='x'\ndraft='y'\nrequest={mode='auto', gate='ema'}", ["model 'a'", "contradicts"]),
        ("[models.a]\ntarget = 'x'\ndraft = 'none'\nrequest.mode = 'auto'", ["model 'a'", "needs a drafter"]),
        ("[models.a]\ntarget = 'x'\ndraft_lora = 'b.gguf'", ["model 'a'", "draft_lora is 'b.gguf'", "list of texts"]),
        ("[models.a]\ntarget = 'x'\ndraft_lora = ['b.gguf', './b']", ["model 'a'", "one name"]),
        ("[models.a]\ntarget = 'x'\ndraft_lora = ['base=b.gguf']", ["model 'a'", "cannot be called 'base'"]),
        ("[models.a]\ntarget = 'x'\ndraft = 'none'\ndraft_lora = ['b.gguf']", ["model 'a'", "draft is 'none'"]),
        ("[models.a]\ntarget='x'\ndraft_lora=['b.gguf']\nrequest.draft_lora='c'", ["model 'a'", "'c'", "base, b"]),
        ("[models.a]\ntarget = 'x'\nengine.max_sequences = 0", ["model 'a'", "max_sequences is 0"]),
        ("[models.a]\ntarget = 'x'\nengine.speed = 9", ["model 'a', engine", "'speed'"]),
        ("[models.a]\ntarget = 'x'\nengine.weight_format = 'fp8'", ["model 'a'", "fp8"]),
        ("[models.a]\ntarget = 'x'\nidle_s = -1", ["model 'a'", "idle_s is -1"]),
        ("[models.a]\ntarget = 'x'\nidle_s = nan", ["model 'a'", "idle_s is nan"]),
        ("idle_s = -1\n[models.a]\ntarget = 'x'", ["idle_s is -1"]),
        ("memory_budget = 'much'\n[models.a]\ntarget = 'x'", ["memory_budget", "'much'"]),
        ("[models.any]\ntarget = 'x'", ["'any'"]),
        ("[models.' ']\ntarget = 'x'", ["cannot be a model's name"]),
        ("[models.llama-3.2]\ntarget = 'x'", ["model 'llama-3'", "unknown key '2'", "in quotes"]),
        ("[models.a]\ntarget = 'x'\n[models.a]\ntarget = 'y'", ["cannot be understood", "line 3"]),
        ("[models.a\n", ["cannot be understood", "line 1"]),
    ],
)
def test_toml_mistakes_are_named(tmp_path: Path, text: str, words: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SlipstreamError) as caught:
        read_models(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models:\n  a: {target: x}\n  a: {target: y}", ["the key 'a' stands there twice", "line 3"]),
        ("models:\n  a: {target: x, target: y}", ["the key 'target' stands there twice"]),
        ("models: [a, b]", ["models is ['a', 'b']"]),
        ("- a", ["not a table"]),
        ("models:\n  3: {target: x}", ["model '3'", "in quotes"]),
        ("models:\n  a: x", ["model 'a'", "not a table"]),
        ("models:\n  a: {target: x, draft: null}", ["draft is None", "text"]),
        ("models:\n  a: {target: x, draft: no}", ["draft is False", "text"]),
        ("models: !!python/object/apply:os.system ['true']", ["cannot be understood"]),
        ("models: {", ["cannot be understood"]),
    ],
)
def test_yaml_mistakes_are_named(tmp_path: Path, text: str, words: list[str]) -> None:
    path = write(tmp_path, text, "yaml")
    with pytest.raises(ConfigError) as caught:
        read_models(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_models(tmp_path / "models.toml")
    with pytest.raises(ConfigError, match="neither TOML nor YAML"):
        read_models(write(tmp_path, TOML, "json"))
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_models(tmp_path / "latin.toml")


def test_one_model_from_options(tmp_path: Path) -> None:
    (tmp_path / "tiny.Q4_0.gguf").write_bytes(b"")
    assert served_name(str(tmp_path / "tiny.Q4_0.gguf")) == "tiny.Q4_0"
    assert served_name(str(tmp_path)) == tmp_path.name
    assert (served_name("smollm2"), served_name("owner/name")) == ("smollm2", "owner/name")
    spec = single_model("smollm2", "none", "plain", EngineConfig())
    assert (spec.name, spec.draft, spec.preload, spec.defaults) == ("smollm2", "none", True, {"mode": "plain"})
    with pytest.raises(ConfigError, match="cannot be called 'any'"):
        ModelSpec("any", "smollm2")


def test_only_the_pair_and_the_engine_need_another_load() -> None:
    spec = ModelSpec("a", "smollm2", defaults={"temperature": 0.5})
    assert spec.loads_like(ModelSpec("a", "smollm2", idle_s=3, preload=True))
    for other in (
        ModelSpec("a", "other"),
        ModelSpec("a", "smollm2", "none"),
        ModelSpec("a", "smollm2", engine=EngineConfig(max_sequences=2)),
        ModelSpec("a", "smollm2", draft_lora=("b",)),
    ):
        assert not spec.loads_like(other)

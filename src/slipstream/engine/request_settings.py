"""Builds requests from the keyword settings that the Python API takes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from slipstream.errors import RequestError
from slipstream.types import MAX_SEED, Gate, Mode, Request, SamplingParams

_SAMPLING = tuple(f.name for f in fields(SamplingParams))
_DIRECT = ("max_tokens", "min_confidence", "share_noise", "cache_prompt", "constraint", "thinking", "draft_lora")
_OTHER = (*_DIRECT, "stop", "mode", "gate", "ignore_eos")


def make_request(
    name: str, prompt_ids: Sequence[int], settings: Mapping[str, object], eos_ids: frozenset[int], speculates: bool
) -> Request:
    """Returns a request with these settings; refuses a setting that is unknown or impossible."""
    unknown = [key for key in settings if key not in (*_SAMPLING, *_OTHER)]
    if unknown:
        raise RequestError(f"unknown setting '{unknown[0]}'", f"known: {', '.join((*_SAMPLING, *_OTHER))}")
    sampling = {key: settings[key] for key in _SAMPLING if key in settings}
    if sampling.get("seed") is None:
        sampling["seed"] = random.SystemRandom().randint(0, MAX_SEED)
    if "logit_bias" in sampling:
        sampling["logit_bias"] = _bias(sampling["logit_bias"])
    mode, gate = _mode_and_gate(settings.get("mode"), settings.get("gate"), speculates)
    stop = settings.get("stop", ())
    base = Request(
        id=name,
        prompt_ids=tuple(prompt_ids),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        mode=mode,
        gate=gate,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),  # type: ignore[arg-type]
        stop_token_ids=frozenset() if settings.get("ignore_eos") else eos_ids,
    )
    return replace(base, **{key: settings[key] for key in _DIRECT if key in settings})  # type: ignore[arg-type]


def _bias(given: object) -> tuple[tuple[int, float], ...]:
    """Returns (token, value added to its logit), sorted, from a mapping as HTTP APIs have it or from pairs."""
    try:
        pairs = given.items() if isinstance(given, Mapping) else given or ()
        return tuple(sorted((int(token), float(value)) for token, value in pairs))  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise RequestError(f"logit_bias is {given}", "give a number for each of some token ids") from None


def _mode_and_gate(mode: object, gate: object, speculates: bool) -> tuple[Mode, Gate]:
    """Returns the mode and the gate that were asked for, or their defaults.

    Without a mode the best one is taken: `plain` where nothing can draft, `chain` with a gate other than `auto`, `auto`
    otherwise. Without a gate, `auto` has the gate `auto` and every other mode has none.
    """
    asked = None if gate is None else Gate.parse(str(gate))
    if mode is not None:
        chosen = Mode.parse(str(mode))
    elif not speculates:
        chosen = Mode("plain")
    else:
        chosen = Mode("auto" if asked is None or asked.kind == "auto" else "chain")
    return chosen, asked or Gate("auto" if chosen.kind == "auto" else "off")

"""Measures per mode how long each phase of a decoding step takes, and in what time its bytes could be read at best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.bench.floors import number_in
from slipstream.bench.measure import BenchPlan, play
from slipstream.bench.workloads import Conversation
from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM, StepProfile

_RARE_SHARE = 0.1  # A kind of step gets no column if it is less than this share of a mode's steps.


@dataclass(frozen=True, slots=True)
class Profiled:
    """The phases of steps, by mode and kind of step (plain, drafting)."""

    modes: dict[str, dict[str, StepProfile]]
    describe: dict[str, object]  # the engine's description, with the bandwidth that this run measured
    turns: int  # each mode answered each of them

    @property
    def bandwidth(self) -> float:
        """Bytes per second that this machine reads."""
        return 1e9 * number_in(self.describe, "bandwidth_gbs")

    @property
    def columns(self) -> dict[str, StepProfile]:
        """The kinds of steps that are frequent enough for a column; a mode with one such kind has just its name."""
        found = {}
        for mode, kinds in self.modes.items():
            steps = sum(profile.steps for profile in kinds.values())
            common = {kind: profile for kind, profile in kinds.items() if profile.steps >= _RARE_SHARE * steps}
            for kind, profile in common.items():
                found[mode if len(common) == 1 else f"{mode}, {kind}"] = profile
        return found

    def floor_ms(self, profile: StepProfile) -> float:
        return 1e3 * profile.read_bytes / self.bandwidth

    def to_json(self) -> dict[str, object]:
        return {
            "answers": self.turns,
            "draft": self.describe["draft"],
            "describe": self.describe,
            "modes": {
                mode: {kind: self._profile_json(profile) for kind, profile in kinds.items()}
                for mode, kinds in self.modes.items()
            },
        }

    def _profile_json(self, profile: StepProfile) -> dict[str, object]:
        return {
            **profile.to_json(),
            "achieved_gbs": round(_achieved(profile) / 1e9, 2),
            "floor_ms": round(self.floor_ms(profile), 4),
            "floor_share": round(self.floor_ms(profile) / profile.step_ms, 4),
        }


def profile_modes(
    llm: LLM, conversations: Sequence[Conversation], plan: BenchPlan, on_turn: Callable[[], None] = lambda: None
) -> Profiled:
    """Decodes every turn in every mode, each request alone and without the prompt cache, and returns their phases."""
    if not llm.speculates:
        raise RequestError("without drafts there is only plain decoding to profile", "name a drafter with --draft")
    profilers = {mode: llm.profiler() for mode in plan.modes}
    turns = 0
    for _ in play(llm, conversations, plan, profilers.__getitem__):
        turns += 1
        on_turn()
    return Profiled({mode: profiler.profiles() for mode, profiler in profilers.items()}, llm.describe(), turns)


def phase_rows(result: Profiled) -> list[tuple[str, ...]]:
    """The rows of the table, with one column per entry of `result.columns`: milliseconds, share of the step, floor."""
    profiles = list(result.columns.values())
    names = dict.fromkeys(name for each in profiles for name in each.phases_ms)
    taken = [name for name in names if any(each.phases_ms[name] for each in profiles)]
    rows = [(name, *(_part(each.phases_ms[name], each) for each in profiles)) for name in taken]
    rest: list[tuple[str, Callable[[StepProfile], str]]] = [
        ("whole step", lambda each: _part(each.step_ms, each)),
        ("device busy", lambda each: _part(each.device.busy_ms, each) if each.device is not None else ""),
        ("floor", lambda each: _part(result.floor_ms(each), each)),
        ("reads, MB", lambda each: f"{each.read_bytes / 1e6:.1f}"),
        ("GB/s", lambda each: f"{_achieved(each) / 1e9:.1f}"),
        ("rows verified", lambda each: f"{each.rows:.1f}"),
        ("context, tokens", lambda each: f"{each.context:.0f}"),
        ("steps", lambda each: str(each.steps)),
    ]
    rows += [(name, *map(cell, profiles)) for name, cell in rest]
    return [row for row in rows if any(row[1:])]


def _part(ms: float, profile: StepProfile) -> str:
    digits = 3 if ms < 10 else 2 if ms < 100 else 1
    return f"{ms:.{digits}f} {ms / profile.step_ms:.0%}"


def launch_rows(result: Profiled) -> list[tuple[str, ...]]:
    """Launches by phase, with one column per entry of `result.columns`; empty if no step ran on a device."""
    counts = [each.device.launches if each.device is not None else {} for each in result.columns.values()]
    if not any(counts):
        return []
    rows = [
        (name, *(str(count.get(name, "-")) for count in counts))
        for name in dict.fromkeys(name for count in counts for name in count)
    ]
    return [*rows, ("whole step", *(str(sum(count.values())) if count else "-" for count in counts))]


def launch_title(result: Profiled) -> str:
    kinds = {each.device.launch_kind for each in result.columns.values() if each.device is not None}
    return f"{', '.join(sorted(kinds))} launched by a step, as torch.profiler counts them".capitalize()


def sentences(result: Profiled) -> list[str]:
    """Explains the numbers to a first-time reader."""
    found = [
        "The floor is the time to read every weight that a step uses, and the keys and values that it sees, once, at "
        f"the {result.bandwidth / 1e9:.1f} GB/s measured in this run."
    ]
    devices = [each.device for each in result.columns.values() if each.device is not None]
    if devices:
        where = sorted({device.replay_context for device in devices})
        context = f"{where[0]}" if len(where) == 1 else f"{where[0]} to {where[-1]}"
        found.append(
            f"Phases were replayed one by one on the device at a context of {context} tokens; the row host is the "
            "part of a real step's time in which the device was not busy."
        )
        if not any(device.launches for device in devices):
            found.append("torch.profiler recorded no kernels here, so none are counted.")
    return found


def _achieved(profile: StepProfile) -> float:
    """Bytes per second at which the step read what it must read."""
    return 1e3 * profile.read_bytes / profile.step_ms

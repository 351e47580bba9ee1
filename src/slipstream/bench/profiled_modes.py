"""Measures where the time of decoding steps goes, per mode, beside the time that reading the weights must take."""

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
    answers: int

    @property
    def bandwidth(self) -> float:
        """Bytes per second that this machine reads."""
        return 1e9 * number_in(self.describe, "bandwidth_gbs")

    @property
    def columns(self) -> dict[str, StepProfile]:
        """The kinds of steps that are frequent enough for a column; a mode with one kind has the mode's name."""
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
            "answers": self.answers,
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
    """Decodes every prompt in every mode, each request alone and without the prompt cache."""
    if not llm.speculates:
        raise RequestError("without drafts there is only plain decoding to profile", "name a drafter with --draft")
    profilers = {mode: llm.profiler() for mode in plan.modes}
    answers = 0
    for _ in play(llm, conversations, plan, profilers.__getitem__):
        answers += 1
        on_turn()
    return Profiled({mode: profiler.profiles() for mode, profiler in profilers.items()}, llm.describe(), answers)


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
        f"The floor is the time to read every weight and the context's keys and values once, at the "
        f"{result.bandwidth / 1e9:.1f} GB/s measured in this run."
    ]
    devices = [each.device for each in result.columns.values() if each.device is not None]
    if devices:
        where = sorted({device.replay_context for device in devices})
        context = f"{where[0]}" if len(where) == 1 else f"{where[0]} to {where[-1]}"
        found.append(
            f"Phases were replayed one by one on the device at a context of {context} tokens; host is the time of a "
            "real step beyond the device's busy time."
        )
        if not any(device.launches for device in devices):
            found.append("torch.profiler saw no kernels here, so none are counted.")
    return found


def _achieved(profile: StepProfile) -> float:
    """Bytes per second at which the step read what it must read."""
    return 1e3 * profile.read_bytes / profile.step_ms

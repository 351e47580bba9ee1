"""Checks of a running server as a stranger makes them: over HTTP, trusting only what it answers.

What a server does not offer is skipped and said so; what it offers must hold.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from slipstream.errors import SlipstreamError
from slipstream.tools.smoke_http import Broken, Client, JsonObject, Refused, Run, Unreachable, models, running

Verdict = Literal["pass", "fail", "skip"]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOKENS = 64
LONG_PROMPT_TOKENS = 512
ENDLESS_TOKENS = 1024
FEWEST_CHUNKS = 3  # a stream is left once it is certainly under way
SLOT_FREE_S = 3.0
REPEATS = 5
# Of the text, how much came from drafts: a cached prompt must keep at least this part of it. Without its draft context
# next to nothing is left, while what else differs between two runs stays well inside.
KEPT_AFTER_HIT = 0.5
TELLING_SHARE = 0.1
# Code has many words that follow from those before, so that any drafter worth the name has some of them accepted.
TASK = "Write a Python function that checks whether a word is a palindrome."
BEGINNING = "def is_palindrome(word):\n"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one check found, in a sentence."""

    verdict: Verdict
    sentence: str


@dataclass(frozen=True, slots=True)
class CheckResult:
    name: str
    verdict: Verdict
    sentence: str
    seconds: float


@dataclass(slots=True)
class ServerReport:
    """Everything found out about one server; `unreachable` is the reason why nothing was."""

    url: str
    model: str | None = None
    unreachable: str | None = None
    checks: list[CheckResult] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(check.verdict == "fail" for check in self.checks)

    def to_json(self) -> dict[str, object]:
        return asdict(self)


class _Skip(Exception):
    """The server does not offer what a check is about."""


@dataclass(slots=True)
class Session:
    """One server, the model it is asked for, and every run so far.

    `steady` are fields that make two runs draft alike, where the server knows such: a policy measures time.
    """

    client: Client
    model: str = ""
    steady: JsonObject = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    def chat(self, name: str, prompt: str = TASK, stream: bool = False, **fields: Any) -> Run:
        messages = [{"role": "user", "content": prompt}]
        return self.run(name, CHAT, {"messages": messages, **fields}, stream)

    def run(self, name: str, path: str, fields: JsonObject, stream: bool = False) -> Run:
        """One greedy generation, whole or streamed; what it must have whatever it says is checked here."""
        body = {"model": self.model, "temperature": 0, "seed": 7, "max_tokens": TOKENS, **fields}
        run = Run(name)
        if stream:
            with closing(self.client.events(path, {**body, "stream_options": {"include_usage": True}})) as events:
                for event in events:
                    if event is None:
                        run.ended = True
                    else:
                        run.add(event)
        else:
            run.add(self.client.post(path, body))
        if stream and not run.ended:
            raise Broken(f"{name}: the stream ended without [DONE]")
        if not run.output:
            raise Broken(f"{name}: no text came back, neither content nor reasoning_content")
        if run.finish_reason is None:
            raise Broken(f"{name}: no finish_reason")
        self.runs.append(run)
        return run

    def entry(self) -> JsonObject:
        """What /v1/models says about the model."""
        return next((model for model in models(self.client) if model.get("id") == self.model), {})


def check_models(session: Session) -> Outcome:
    listed = models(session.client)
    names = [str(model["id"]) for model in listed]
    if not names:
        return Outcome("fail", "/v1/models lists nothing")
    if session.model and session.model not in names:
        return Outcome("fail", f"{session.model} is not among {', '.join(names)}")
    if not session.model:
        resident = [str(model["id"]) for model in listed if model.get("state") in ("ready", "loaded")]
        session.model = (resident or names)[0]
    many = f"{len(names)} models" if len(names) > 1 else "one model"
    return Outcome("pass", f"{many} listed; {session.model} is asked")


def check_drafter_listed(session: Session) -> Outcome:
    entry = session.entry()
    if "draft" not in entry or "mode" not in entry:
        raise _Skip("/v1/models does not say which drafter and mode are in effect")
    if not entry["draft"]:
        return Outcome("pass", f"{session.model} has no drafter, mode {entry['mode']}")
    return Outcome("pass", f"{session.model} is drafted for by {entry['draft']}, mode {entry['mode']}")


def check_chat(session: Session) -> Outcome:
    run = session.chat("chat")
    written = run.tokens("completion")
    if written is not None and not 0 < written <= TOKENS:
        return Outcome("fail", f"{written} completion tokens where 1 to {TOKENS} were asked for")
    thought = f", {len(run.reasoning)} characters of them reasoning" if run.reasoning else ""
    return Outcome("pass", f"{len(run.output)} characters{thought}, ended by {run.finish_reason}")


def check_completions(session: Session) -> Outcome:
    run = session.run("completions", COMPLETIONS, {"prompt": BEGINNING})
    return Outcome("pass", f"{len(run.output)} characters, ended by {run.finish_reason}")


def check_streaming(session: Session) -> Outcome:
    whole, streamed = session.chat("not streamed"), session.chat("streamed", stream=True)
    for what in ("content", "reasoning", "finish_reason"):
        if (said := getattr(whole, what)) != (came := getattr(streamed, what)):
            return Outcome("fail", f"{what} differs: {_difference(said or '', came or '')}")
    counted, also = whole.tokens("completion"), streamed.tokens("completion")
    if counted is not None and also is not None and counted != also:
        return Outcome("fail", f"{counted} completion tokens whole, {also} streamed")
    return Outcome("pass", f"the same {len(whole.output)} characters in {streamed.chunks} chunks")


def check_plain(session: Session) -> Outcome:
    usual = session.chat("as configured")
    if not usual.drafted:
        raise _Skip("nothing was drafted, or the server does not tell")
    try:
        plain = session.chat("plain", speculative={"mode": "plain"})
    except Refused as error:
        raise _Skip(f"the mode cannot be chosen per request ({error})") from None
    if plain.drafted:
        raise _Skip("the server drafts although plain decoding was asked for: it does not know the field")
    session.steady = {"speculative": {"mode": "chain"}}
    if plain.output != usual.output:
        return Outcome("fail", f"the text differs: {_difference(plain.output, usual.output)}")
    return Outcome("pass", "the same text with and without speculation")


def check_long_prompt(session: Session) -> Outcome:
    run = session.chat("long prompt", long_prompt(), stream=True)
    read = run.tokens("prompt")
    if read is None:
        return Outcome("fail", "the stream told no usage although stream_options.include_usage asked for it")
    if read <= LONG_PROMPT_TOKENS:
        return Outcome("fail", f"only {read} prompt tokens were counted where more than {LONG_PROMPT_TOKENS} were sent")
    return Outcome("pass", f"{read} prompt tokens, {len(run.output)} characters in {run.chunks} chunks")


def check_cache(session: Session) -> Outcome:
    """A prompt nobody has sent before, then again: the second answer must not have lost its drafts."""
    prompt = long_prompt()
    cold, warm = (session.chat(name, prompt, **session.steady) for name in ("cold", "after a cache hit"))
    if warm.cached is None:
        raise _Skip("timings do not say how much of the prompt was cached")
    if not warm.cached or (cold.cached or 0) >= warm.cached:
        raise _Skip("the same prompt was not taken from a cache the second time")
    if cold.output != warm.output:
        return Outcome("fail", f"the text differs after a cache hit: {_difference(cold.output, warm.output)}")
    before, after = _drafted_share(cold), _drafted_share(warm)
    if before is None or after is None:
        raise _Skip("timings do not say how many drafts were accepted")
    if before < TELLING_SHARE:
        raise _Skip(f"only {before:.0%} of the cold answer came from drafts, too little to compare")
    seen = f"{before:.0%} of the answer from drafts when cold, {after:.0%} with {warm.cached} prompt tokens cached"
    return Outcome("pass" if after >= KEPT_AFTER_HIT * before else "fail", seen)


def check_repeats(session: Session) -> Outcome:
    runs = [session.chat(f"repeat {index + 1}", **session.steady) for index in range(REPEATS)]
    for index, run in enumerate(runs):
        if run.output != runs[0].output:
            return Outcome("fail", f"answer {index + 1} differs: {_difference(runs[0].output, run.output)}")
    shares = [share for run in runs if (share := _drafted_share(run)) is not None]
    if shares and shares[0] >= TELLING_SHARE and min(shares) < KEPT_AFTER_HIT * shares[0]:
        told = ", ".join(f"{share:.0%}" for share in shares)
        return Outcome("fail", f"acceptance falls from answer to answer: {told} of the text came from drafts")
    return Outcome("pass", f"{REPEATS} identical prompts gave {REPEATS} identical answers")


def check_last_used(session: Session) -> Outcome:
    before = session.entry().get("last_used_ms")
    if not isinstance(before, int | float):
        raise _Skip("/v1/models has no last_used_ms")
    time.sleep(0.002)  # a millisecond clock must have had the chance to move
    session.chat("last used", max_tokens=TOKENS // 2)
    after = session.entry().get("last_used_ms")
    if not isinstance(after, int | float) or after <= before:
        return Outcome("fail", f"last_used_ms was {before} before a request and {after} after it")
    return Outcome("pass", "last_used_ms advanced")


def check_disconnect(session: Session) -> Outcome:
    """Leaves in the middle of a long answer; its slot must be free again and the next request served."""
    idle = running(session.client)
    body = {
        "model": session.model,
        "max_tokens": ENDLESS_TOKENS,
        "temperature": 0,
        "messages": [{"role": "user", "content": "Write a very long story about a river. Do not stop."}],
    }
    with closing(session.client.events(CHAT, body)) as events:
        for _ in zip(range(FEWEST_CHUNKS), events, strict=False):
            pass
        during = running(session.client)
    left = time.monotonic()
    ours = (during or set()) - (idle or set())
    while ours & (running(session.client) or set()):
        if time.monotonic() - left > SLOT_FREE_S:
            return Outcome("fail", f"the slot of a client that left was still taken after {SLOT_FREE_S:g} s")
        time.sleep(0.02)
    freed = f"its slot was free after {time.monotonic() - left:.2f} s" if ours else "no slot of it was seen in /slots"
    session.chat("after a disconnect")
    return Outcome("pass", f"a client left in mid-stream, {freed}, and the next was served")


def check_engaged(session: Session) -> Outcome:
    told = [run for run in session.runs if run.drafted is not None]
    if not told:
        raise _Skip("no answer tells timings.draft_n")
    drafted, accepted = sum(run.drafted or 0 for run in told), sum(run.accepted or 0 for run in told)
    if not drafted:
        entry = session.entry()
        if "draft" in entry and not entry["draft"] or entry.get("mode") == "plain":
            raise _Skip("the model runs without a drafter")
        return Outcome("fail", f"nothing was drafted in {len(told)} answers")
    return Outcome("pass", f"{drafted} tokens drafted, {accepted} accepted in {len(told)} answers")


def check_acceptance(session: Session) -> Outcome:
    """No run may have drafted for nothing: that is how a drafter fails silently."""
    told = [run for run in session.runs if run.drafted and run.accepted is not None]
    if not told:
        raise _Skip("nothing was drafted, or the server does not tell")
    for run in told:
        if not run.accepted:
            return Outcome("fail", f"{run.name}: 0 accepted of {run.drafted} drafted")
    worst = min(told, key=lambda run: (run.accepted or 0) / (run.drafted or 1))
    return Outcome("pass", f"at worst {worst.accepted} accepted of {worst.drafted} drafted ({worst.name})")


# The checks of every answer come last: they judge what the others saw.
CHECKS: Sequence[tuple[str, Callable[[Session], Outcome]]] = (
    ("models listed", check_models),
    ("drafter and mode listed", check_drafter_listed),
    ("chat", check_chat),
    ("completions", check_completions),
    ("streaming equals not streaming", check_streaming),
    ("same text without speculation", check_plain),
    ("long prompt streams", check_long_prompt),
    ("acceptance after a cache hit", check_cache),
    ("five identical prompts", check_repeats),
    ("last_used_ms advances", check_last_used),
    ("disconnect", check_disconnect),
    ("drafter engaged", check_engaged),
    ("acceptance in every answer", check_acceptance),
)


def smoke(
    urls: Sequence[str],
    api_key: str | None = None,
    model: str | None = None,
    timeout_s: float = 60.0,
    done: Callable[[], None] = lambda: None,
) -> list[ServerReport]:
    """Checks all servers at the same time, each of them one check after the other."""
    clients = [Client(url, api_key, timeout_s) for url in urls]
    with ThreadPoolExecutor(max(1, len(clients))) as pool:
        return list(pool.map(lambda client: check_server(client, model, done), clients))


def check_server(client: Client, model: str | None, done: Callable[[], None]) -> ServerReport:
    report = ServerReport(client.url)
    try:
        _wait_until_loaded(client)
    except Unreachable as error:
        report.unreachable = str(error)
        return report
    session = Session(client, model or "")
    for name, check in CHECKS:
        report.checks.append(_perform(name, check, session))
        done()
    report.model = session.model or None
    return report


def _perform(name: str, check: Callable[[Session], Outcome], session: Session) -> CheckResult:
    began = time.monotonic()
    try:
        if check is not check_models and not session.model:
            raise _Skip("no model to ask: name one with --model")
        outcome = check(session)
    except _Skip as reason:
        outcome = Outcome("skip", str(reason))
    except Refused as error:
        may_lack = error.not_offered and check not in (check_models, check_chat)
        outcome = Outcome("skip", "the server does not offer it") if may_lack else Outcome("fail", str(error))
    except SlipstreamError as error:
        outcome = Outcome("fail", str(error))
    return CheckResult(name, outcome.verdict, outcome.sentence, round(time.monotonic() - began, 3))


def _wait_until_loaded(client: Client) -> None:
    """Gives a server that is still loading its model the time of one request to get ready."""
    until = time.monotonic() + client.timeout_s
    while True:
        try:
            client.get("/health")
            return
        except Refused as error:
            if error.status != 503 or time.monotonic() > until:
                return
        except Broken:
            return  # an answer, though no health page worth the name: the checks will tell what works
        time.sleep(0.25)


def long_prompt() -> str:
    """More than 512 tokens in any tokenizer, never the same twice, so that no cache knows it."""
    nights = (f"Night {night}: the lamp of the lighthouse burned for {5 + night % 7} hours." for night in range(1, 45))
    return f"Logbook {secrets.token_hex(8)}.\n" + "\n".join(nights) + f"\n\n{TASK}"


def _drafted_share(run: Run) -> float | None:
    """How much of the text the drafter wrote: unlike the accepted share of drafts, it does not depend on the width."""
    written = run.timings.get("predicted_n") or run.tokens("completion")
    if run.accepted is None or not isinstance(written, int | float) or not written:
        return None
    return run.accepted / written


def _difference(one: str, other: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return f"at character {at}, {one[at : at + 20]!r} against {other[at : at + 20]!r}"

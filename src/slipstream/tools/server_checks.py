"""Checks a running server from the outside: the only source is what the server answers over HTTP.

A check of something that the server does not offer is skipped and reported; whatever it offers must work.
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
TOKENS = 64  # tokens of most answers; enough for drafts to be accepted, and quick on a slow machine
LONG_PROMPT_TOKENS = 512  # a long prompt must have more, so that it takes several chunks of prefill
ENDLESS_TOKENS = 1024  # tokens of the answer that the client leaves early; it must not end before that
FEWEST_CHUNKS = 3  # the client disconnects after this many chunks, when the stream is certainly running
SLOT_FREE_S = 3.0  # seconds within which the slot of a disconnected client must be free
REPEATS = 5  # identical prompts whose answers must be identical
# A cached prompt must keep at least this part of the share of text that came from drafts. If a cache loses its draft
# context almost nothing is left, while other differences between two runs are far smaller.
KEPT_AFTER_HIT = 0.5
TELLING_SHARE = 0.1  # If drafts made less of the first answer than this share, a comparison says nothing.
# Code has many words that follow from the words before, so that any working drafter has some of them accepted.
TASK = "Write a Python function that checks whether a word is a palindrome."
BEGINNING = "def is_palindrome(word):\n"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found, in a sentence."""

    name: str
    verdict: Verdict
    sentence: str
    seconds: float


@dataclass(slots=True)
class ServerReport:
    """Everything that was found out about one server; `unreachable` is the reason if no check could run."""

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
    """The server does not offer what the check is about. A check that fails raises `Broken`."""


@dataclass(slots=True)
class ServerSession:
    """One server, the model that it is asked for, and all runs so far.

    `steady` holds request fields that make two runs draft alike, if the server knows such fields; an adaptive policy
    measures time and so drafts differently in each run.
    """

    client: Client
    model: str = ""
    steady: JsonObject = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    def text_alone(self) -> bool:
        """Whether the model has no drafter and drafts from its own text."""
        return self.entry().get("draft") == "suffix"

    def chat(self, name: str, prompt: str = TASK, stream: bool = False, **fields: Any) -> Run:
        messages = [{"role": "user", "content": prompt}]
        return self.run(name, CHAT, {"messages": messages, **fields}, stream)

    def run(self, name: str, path: str, fields: JsonObject, stream: bool = False) -> Run:
        """Runs one greedy generation, whole or streamed, and checks what every answer must have."""
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
            run.add(self.client.ask(path, body))
        if stream and not run.ended:
            raise Broken(f"{name}: the stream ended without [DONE]")
        if not run.output:
            raise Broken(f"{name}: the answer has neither content nor reasoning_content")
        if run.finish_reason is None:
            raise Broken(f"{name}: the answer has no finish_reason")
        self.runs.append(run)
        return run

    def entry(self) -> JsonObject:
        """The entry of the model in /v1/models."""
        return next((model for model in models(self.client) if model.get("id") == self.model), {})


def check_models(session: ServerSession) -> str:
    listed = models(session.client)
    names = [str(model["id"]) for model in listed]
    if not names:
        raise Broken("/v1/models lists no models")
    if session.model and session.model not in names:
        raise Broken(f"{session.model} is not among {', '.join(names)}")
    if not session.model:
        resident = [str(model["id"]) for model in listed if model.get("state") in ("ready", "loaded")]
        session.model = (resident or names)[0]
    many = f"{len(names)} models" if len(names) > 1 else "one model"
    return f"{many} listed; {session.model} is checked"


def check_drafter_listed(session: ServerSession) -> str:
    entry = session.entry()
    if "draft" not in entry or "mode" not in entry:
        raise _Skip("/v1/models does not say which drafter and mode are in effect")
    if not entry["draft"]:
        return f"{session.model} has no drafter, mode {entry['mode']}"
    source = "its own text" if session.text_alone() else entry["draft"]
    return f"{source} drafts for {session.model}, mode {entry['mode']}"


def check_chat(session: ServerSession) -> str:
    run = session.chat("chat")
    written = run.tokens("completion")
    if written is not None and not 0 < written <= TOKENS:
        raise Broken(f"{written} completion tokens, but 1 to {TOKENS} were asked for")
    thought = f", {len(run.reasoning)} characters of them reasoning" if run.reasoning else ""
    return f"{len(run.output)} characters{thought}, ended by {run.finish_reason}"


def check_completions(session: ServerSession) -> str:
    run = session.run("completions", COMPLETIONS, {"prompt": BEGINNING})
    return f"{len(run.output)} characters, ended by {run.finish_reason}"


def check_streaming(session: ServerSession) -> str:
    whole, streamed = session.chat("not streamed"), session.chat("streamed", stream=True)
    for what in ("content", "reasoning", "finish_reason"):
        if (said := getattr(whole, what)) != (came := getattr(streamed, what)):
            raise Broken(f"{what} differs: {_difference(said or '', came or '')}")
    counted, also = whole.tokens("completion"), streamed.tokens("completion")
    if counted is not None and also is not None and counted != also:
        raise Broken(f"{counted} completion tokens whole, {also} streamed")
    return f"the same {len(whole.output)} characters in {streamed.chunks} chunks"


def check_plain(session: ServerSession) -> str:
    usual = session.chat("as configured")
    if not usual.drafted:
        raise _Skip("nothing was drafted, or the server does not report it")
    try:
        plain = session.chat("plain", speculative={"mode": "plain"})
    except Refused as error:
        raise _Skip(f"the mode cannot be chosen per request ({error})") from None
    if plain.drafted:
        raise _Skip("the server drafts although plain decoding was asked for, so it does not know the field")
    if not session.text_alone():
        session.steady = {"speculative": {"mode": "chain"}}
    if plain.output != usual.output:
        raise Broken(f"the text differs: {_difference(plain.output, usual.output)}")
    return "the same text with and without speculation"


def check_long_prompt(session: ServerSession) -> str:
    run = session.chat("long prompt", long_prompt(), stream=True)
    read = run.tokens("prompt")
    if read is None:
        raise Broken("the stream reported no usage although stream_options.include_usage asked for it")
    if read <= LONG_PROMPT_TOKENS:
        raise Broken(f"only {read} prompt tokens were counted, but more than {LONG_PROMPT_TOKENS} were sent")
    return f"{read} prompt tokens, {len(run.output)} characters in {run.chunks} chunks"


def check_cache(session: ServerSession) -> str:
    """Sends a new prompt twice: the second answer, whose prompt is cached, must not have lost its drafts."""
    prompt = long_prompt()
    cold, warm = (session.chat(name, prompt, **session.steady) for name in ("cold", "after a cache hit"))
    if warm.cached is None:
        raise _Skip("timings do not say how much of the prompt was cached")
    if not warm.cached or (cold.cached or 0) >= warm.cached:
        raise _Skip("the same prompt was not taken from a cache the second time")
    if cold.output != warm.output:
        raise Broken(f"the text differs after a cache hit: {_difference(cold.output, warm.output)}")
    if session.text_alone():
        return "the same text; drafts from the text have no context that a cache could lose"
    before, after = _drafted_share(cold), _drafted_share(warm)
    if before is None or after is None:
        raise _Skip("timings do not say how many drafts were accepted")
    if before < TELLING_SHARE:
        raise _Skip(f"only {before:.0%} of the cold answer came from drafts, too little to compare")
    seen = f"{before:.0%} of the answer from drafts when cold, {after:.0%} with {warm.cached} prompt tokens cached"
    if after < KEPT_AFTER_HIT * before:
        raise Broken(seen)
    return seen


def check_repeats(session: ServerSession) -> str:
    runs = [session.chat(f"repeat {index + 1}", **session.steady) for index in range(REPEATS)]
    for index, run in enumerate(runs):
        if run.output != runs[0].output:
            raise Broken(f"answer {index + 1} differs: {_difference(runs[0].output, run.output)}")
    shares = [share for run in runs if (share := _drafted_share(run)) is not None]
    if session.text_alone():
        shares = []  # only mode auto drafts then, and not alike in each run
    if shares and shares[0] >= TELLING_SHARE and min(shares) < KEPT_AFTER_HIT * shares[0]:
        told = ", ".join(f"{share:.0%}" for share in shares)
        raise Broken(f"acceptance falls from answer to answer: {told} of the text came from drafts")
    return f"{REPEATS} identical prompts gave {REPEATS} identical answers"


def check_last_used(session: ServerSession) -> str:
    before = session.entry().get("last_used_ms")
    if not isinstance(before, int | float):
        raise _Skip("/v1/models has no last_used_ms")
    time.sleep(0.002)  # a clock in milliseconds needs this time to move
    session.chat("last used", max_tokens=TOKENS // 2)
    after = session.entry().get("last_used_ms")
    if not isinstance(after, int | float) or after <= before:
        raise Broken(f"last_used_ms was {before} before a request and {after} after it")
    return "last_used_ms advanced"


def check_disconnect(session: ServerSession) -> str:
    """Disconnects in the middle of a long answer; its slot must become free, and the next request must be served."""
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
            raise Broken(f"the slot of a client that left was still taken after {SLOT_FREE_S:g} s")
        time.sleep(0.02)
    freed = f"its slot was free after {time.monotonic() - left:.2f} s" if ours else "/slots showed no slot of it"
    session.chat("after a disconnect")
    return f"a client left in mid-stream, {freed}, and the next request was served"


def check_engaged(session: ServerSession) -> str:
    told = [run for run in session.runs if run.drafted is not None]
    if not told:
        raise _Skip("no answer reports timings.draft_n")
    drafted, accepted = sum(run.drafted or 0 for run in told), sum(run.accepted or 0 for run in told)
    if not drafted:
        entry = session.entry()
        if "draft" in entry and not entry["draft"] or entry.get("mode") == "plain" or session.text_alone():
            raise _Skip("the model runs without a drafter")
        raise Broken(f"nothing was drafted in {len(told)} answers")
    return f"{drafted} tokens drafted, {accepted} accepted in {len(told)} answers"


def check_acceptance(session: ServerSession) -> str:
    """Checks that every run that drafted had a token accepted, because a drafter may fail without any error."""
    told = [run for run in session.runs if run.drafted and run.accepted is not None]
    if not told:
        raise _Skip("nothing was drafted, or the server does not report it")
    if session.text_alone():
        raise _Skip("a text that never repeats itself has no drafts that could be accepted")
    for run in told:
        if not run.accepted:
            raise Broken(f"{run.name}: 0 accepted of {run.drafted} drafted")
    worst = min(told, key=lambda run: (run.accepted or 0) / (run.drafted or 1))
    return f"at worst {worst.accepted} accepted of {worst.drafted} drafted ({worst.name})"


# The checks over all answers come last, because they judge the runs of the other checks.
CHECKS: Sequence[tuple[str, Callable[[ServerSession], str]]] = (
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
    """Checks all servers at the same time, and each server with one check after the other."""
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
    session = ServerSession(client, model or "")
    for name, check in CHECKS:
        report.checks.append(_perform(name, check, session))
        done()
    report.model = session.model or None
    return report


def _perform(name: str, check: Callable[[ServerSession], str], session: ServerSession) -> CheckResult:
    began = time.monotonic()
    verdict: Verdict = "pass"
    try:
        if check is not check_models and not session.model:
            raise _Skip("there is no model to ask: name one with --model")
        sentence = check(session)
    except _Skip as reason:
        verdict, sentence = "skip", str(reason)
    except SlipstreamError as error:
        verdict, sentence = "fail", str(error)
        if isinstance(error, Refused) and error.not_offered and check not in (check_models, check_chat):
            verdict, sentence = "skip", "the server does not offer it"
    return CheckResult(name, verdict, sentence, round(time.monotonic() - began, 3))


def _wait_until_loaded(client: Client) -> None:
    """Waits at most one request's timeout for a server that is still loading its model."""
    until = time.monotonic() + client.timeout_s
    while True:
        try:
            client.ask("/health")
            return
        except Refused as error:
            if error.status != 503 or time.monotonic() > until:
                return
        except Broken:
            return  # the server answers, though not with a proper health page; the checks show what works
        time.sleep(0.25)


def long_prompt() -> str:
    """A prompt of more than 512 tokens in any tokenizer; it is different each time, so that no cache knows it."""
    nights = (f"Night {night}: the lamp of the lighthouse burned for {5 + night % 7} hours." for night in range(1, 45))
    return f"Logbook {secrets.token_hex(8)}.\n" + "\n".join(nights) + f"\n\n{TASK}"


def _drafted_share(run: Run) -> float | None:
    """The share of the text that came from drafts; unlike the acceptance rate it is independent of the width."""
    written = run.timings.get("predicted_n") or run.tokens("completion")
    if run.accepted is None or not isinstance(written, int | float) or not written:
        return None
    return run.accepted / written


def _difference(one: str, other: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return f"at character {at}, {one[at : at + 20]!r} against {other[at : at + 20]!r}"

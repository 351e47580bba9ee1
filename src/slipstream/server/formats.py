"""What an answer is held to: its format, the form of the calls in it, or one of the two."""

from __future__ import annotations

from slipstream.errors import RequestError
from slipstream.grammar import notations as grammars
from slipstream.server.jobs import Job, OutputFormat, ToolChoice
from slipstream.types import Constraint


def constraint_of(job: Job) -> Constraint | None:
    """The constraint of a job's answer; an answer that must call has no room for a format."""
    calls = grammars.tool_constraint(job.tools, job.tool_choice, parallel=job.parallel_tools)
    must_call = calls is not None and (job.tool_choice.kind == "required" or job.tool_choice.name is not None)
    if job.format is None or must_call:
        return calls
    answer = _format(job.format)
    return answer if calls is None else _calls_or(job, answer)


def _format(wanted: OutputFormat) -> Constraint:
    if wanted.kind == "grammar":
        return grammars.lark(wanted.grammar or "")
    return grammars.json_object() if wanted.kind == "json_object" else grammars.json_schema(wanted.schema or {})


def _calls_or(job: Job, answer: Constraint) -> Constraint:
    """Calls and nothing else, or an answer in its format: with a format there is no free text to go before calls."""
    if answer.kind != "json_schema":
        raise RequestError("a grammar for the answer cannot be combined with tools", "leave one of them out")
    compelled = grammars.tool_constraint(job.tools, ToolChoice("required"), parallel=job.parallel_tools)
    assert compelled is not None and compelled.grammar.startswith("start: "), "calls have a rule to begin with"
    rules = compelled.grammar.replace("start: ", "start: calls | answer\ncalls: ", 1)
    return Constraint("lark", f"{rules}answer: %json {answer.grammar}\n")

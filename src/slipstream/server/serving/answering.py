"""How every API gets from a job to its answer: it leases a model, runs a generation and reports the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from slipstream.server.operations.errors_http import ApiError
from slipstream.server.operations.logs import note, note_answer
from slipstream.server.operations.server_state import ServerState
from slipstream.server.serving.generation import Generation, start
from slipstream.server.serving.jobs import DeadlineError, Job
from slipstream.types import BASE_VARIANT

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM


# The field that limits the length of an answer, for each API that does not call it max_tokens; errors name it.
_LENGTH_FIELDS = {"responses": "max_output_tokens"}


@asynccontextmanager
async def answering(state: ServerState, job: Job, api: str) -> AsyncIterator[Generation]:
    """Runs a job; leaving the block early cancels it. However the generation ends, `report` is called for it."""
    clock = asyncio.get_running_loop().time
    began = clock()
    try:
        async with asyncio.timeout(job.deadline_s):
            lease = await state.router.lease(job.model)
    except TimeoutError:
        raise DeadlineError("the request's time was up before its model was loaded", "allow more time") from None
    try:
        _check(job, lease.llm, _LENGTH_FIELDS.get(api, "max_tokens"))
    except BaseException:
        lease.release()
        raise
    if job.deadline_s is not None:
        job = replace(job, deadline_s=max(0.0, job.deadline_s - (clock() - began)))
    generation = await start(lease, job)
    try:
        yield generation
    finally:
        try:
            await generation.aclose()
        finally:
            report(state, api, job, generation)


def _check(job: Job, llm: LLM, field: str) -> None:
    """Refuses a length that the context cannot hold, and an unknown draft variant.

    The engine would write less without saying so, and its refusal of a variant would not name the field.
    """
    length, variant, known = job.settings.get("max_tokens"), job.settings.get("draft_lora"), llm.draft_variants
    if isinstance(length, int) and length > llm.max_context:
        raise ApiError(
            400,
            f"{field} is {length}, but the context holds {llm.max_context} tokens",
            "ask for fewer",
            param=field,
            code="context_length_exceeded",
        )
    if variant is not None and variant not in (BASE_VARIANT, *known):
        raise ApiError(
            400,
            f"unknown draft variant '{variant}'",
            f"known: {', '.join(known)}" if known else "this model has no drafter to have variants",
            param="draft_lora",
            code="draft_lora_not_found",
        )


def report(state: ServerState, api: str, job: Job, generation: Generation) -> None:
    """Reports an ended generation to metrics, canary, log and recorder, also one that failed or was cancelled.

    It must run in a task of the request, because the request's log line is a context variable.
    """
    answer = generation.answer
    state.metrics.answered(answer, api)
    if generation.promise is not None:
        state.metrics.canaries.observe(
            answer.model, generation.promise, generation.request, answer.stats, job.prompt_class
        )
    note(api=api)
    note_answer(job, answer, state.settings.log_prompts)
    if state.recorder is not None:
        state.recorder.record(job, answer, generation.request_id)

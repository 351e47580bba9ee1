"""The one call an API makes when a generation is over: count it, judge the drafter by it, log it, record it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.server.logs import note, note_answer

if TYPE_CHECKING:
    from slipstream.server.generation import Generation
    from slipstream.server.jobs import Job
    from slipstream.server.state import ServerState


def finished(state: ServerState, api: str, job: Job, generation: Generation) -> None:
    """Reports an ended generation, also one that failed or was cancelled; `api` is chat, completions, messages, ...

    To be called from a task of its HTTP request, so that the request's log line is found.
    """
    answer = generation.answer
    state.metrics.answered(answer, answer.model, api)
    if generation.promise is not None:
        state.metrics.canaries.observe(
            answer.model, generation.promise, generation.request, answer.stats, job.prompt_class
        )
    note(api=api)
    note_answer(job, answer, state.settings.log_prompts)
    if state.recorder is not None:
        state.recorder.record(job, answer, generation.request_id)

"""The part of `slipstream bench` that shows where a decoding step's time goes.

`slipstream bench --profile --prompts humaneval --limit 4 --max-tokens 64 --modes chain,tree:32`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING

from slipstream.cli.ui import Ui, columns_table
from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream.bench.measure import BenchPlan
    from slipstream.bench.workloads import Conversation
    from slipstream.engine.llm import LLM


def check_profile(unfit: Mapping[str, bool]) -> None:
    """Refuses options that do not go with a profile, before a model is loaded in vain."""
    for option, given in unfit.items():
        if given:
            raise RequestError(f"{option} does not go with --profile", "leave one of them out")


def profile(
    ui: Ui, load: Callable[[], LLM], conversations: list[Conversation], plan: BenchPlan, about: Mapping[str, object]
) -> None:
    """Decodes the prompts in every mode and prints how long each phase of their steps took."""
    from slipstream.bench import profiled_modes as bench
    from slipstream.bench.measure import turns_of

    with closing(load()) as llm, ui.counting("answers", turns_of(conversations, plan)) as advance:
        result = bench.profile_modes(llm, conversations, plan, advance)
    if ui.json_output:
        ui.print_json({**about, **result.to_json()})
        return
    title = f"{about['target']} on {about['prompts']}: milliseconds of a decoding step over {result.answers} answers"
    ui.table(title, columns_table(("phase", *result.columns), bench.phase_rows(result)))
    launches = bench.launch_rows(result)
    if launches:
        ui.table(bench.launch_title(result), columns_table(("phase", *result.columns), launches))
    for sentence in bench.sentences(result):
        ui.line(sentence)

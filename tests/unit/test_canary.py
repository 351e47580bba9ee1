"""The canary: what is due by depth and class, when it warns, when it recovers, what it does not judge."""

# mypy: disable-error-code="call-overload, operator, unused-ignore"

from __future__ import annotations

import json
import logging
import random
import shutil
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from scripts.set_expected_tau import rewrite
from slipstream.errors import ConfigError
from slipstream.formats.gguf import parse_header, read_gguf
from slipstream.formats.weight_files import open_weights
from slipstream.models.dflash import read_drafter_config
from slipstream.models.dflash_config import read_hf
from slipstream.server.operations.canary import Canary, CanaryBoard, Promise, is_telling, promise_of
from slipstream.stats import RequestStats
from slipstream.types import Constraint, Mode, Request, SamplingParams, Thinking
from tests.tiny import tiny_llm, write_pair

PROMISE = Promise({"code": 4.7, "chat": 1.8}, proposals=15)
ASKED = Request("r", (1, 2), SamplingParams(), Mode("chain"))


def steps(count: int, depth: int, accepted: int) -> RequestStats:
    stats = RequestStats()
    for _ in range(count):
        stats.record_step(depth, depth, accepted, accepted + 1)
    return stats


def chains(count: int, depth: int, chance: float, seed: int = 0) -> RequestStats:
    """Steps whose drafted tokens are each kept with the same chance."""
    chooser, stats = random.Random(seed), RequestStats()
    for _ in range(count):
        accepted = next((slot for slot in range(depth) if chooser.random() >= chance), depth)
        stats.record_step(depth, depth, accepted, accepted + 1)
    return stats


def test_tokens_of_the_text_do_not_hide_a_drafter_that_fails() -> None:
    stats = RequestStats()
    for _ in range(300):
        # The drafter's two nodes are wrong beside five of the text that are right, or the text drafts alone.
        stats.record_step(7, 5, 5, 6, drafter_depth=2, drafter_accepted=0)
        stats.record_step(5, 5, 5, 6, drafter_depth=0, drafter_accepted=0)
    canary = Canary(PROMISE)
    canary.observe(stats, "code")
    report = canary.report()
    assert (report.state, report.ratio, report.drafted_steps) == ("warning", 0.0, 300)
    alone = Canary(PROMISE)
    alone.observe(steps(300, 2, 0), "code")
    assert report == alone.report()


def test_the_survival_of_a_promise_gives_its_tau() -> None:
    for tau in (1.0, 1.8, 4.7, 12.0, 16.0):
        chance = Promise({"x": tau}, 15).survival("x")
        assert 1 + sum(chance**depth for depth in range(1, 16)) == pytest.approx(tau, abs=1e-6)


def test_an_unnamed_or_unknown_class_is_held_against_the_lowest_promise() -> None:
    chat = PROMISE.survival("chat")
    assert PROMISE.survival(None) == PROMISE.survival("poetry") == chat < PROMISE.survival("code")


@pytest.mark.parametrize("depth", [1, 3, 15])
def test_a_drafter_that_keeps_its_promise_is_fine_however_deep_it_drafts(depth: int) -> None:
    canary = Canary(PROMISE)
    canary.observe(chains(4000, depth, PROMISE.survival("code")), "code")
    report = canary.report()
    assert report.state == "ok"
    assert report.ratio == pytest.approx(1.0, abs=0.06)
    assert report.live_tau == pytest.approx(report.due_tau, rel=0.06)


def test_plain_steps_count_for_nothing() -> None:
    canary = Canary(PROMISE)
    canary.observe(steps(5000, 0, 0))
    assert canary.report().state == "learning"
    assert canary.report().drafted_steps == 0


def test_low_acceptance_warns_only_once_it_has_been_seen_for_long_enough() -> None:
    canary, weak = Canary(PROMISE), PROMISE.survival("chat") * 0.5
    canary.observe(chains(190, 15, weak, seed=1))
    assert canary.report().state == "learning"
    canary.observe(chains(20, 15, weak, seed=2))
    report = canary.report()
    assert report.state == "warning"
    assert "acceptance stays at" in report.reason
    assert report.ratio is not None and report.ratio < 0.7


def test_it_recovers_with_a_margin() -> None:
    canary, chance = Canary(PROMISE), PROMISE.survival("chat")
    canary.observe(chains(300, 15, chance * 0.4))
    assert canary.report().state == "warning"
    seen = []
    for seed in range(60):
        canary.observe(chains(50, 15, chance, seed))
        seen.append((canary.report().state, canary.report().ratio))
    states = [state for state, _ in seen]
    assert states[0] == "warning" and states[-1] == "ok"
    flipped = states.index("ok")
    assert set(states[flipped:]) == {"ok"}
    assert flipped > 2 and seen[flipped][1] >= 0.8


def test_a_late_fall_is_noticed_too() -> None:
    canary, chance = Canary(PROMISE), PROMISE.survival("chat")
    canary.observe(chains(20_000, 15, chance))
    for seed in range(10):
        assert canary.report().state == "ok" or seed >= 2
        canary.observe(chains(100, 15, chance * 0.3, seed))
    assert canary.report().state == "warning"


def test_nothing_accepted_warns_much_sooner_but_not_for_one_odd_request() -> None:
    canary = Canary(PROMISE)
    canary.observe(steps(100, 4, 0))
    assert canary.report().state == "learning"
    for _ in range(3):
        canary.observe(steps(5, 4, 0))
    report = canary.report()
    assert report.state == "warning" and report.drafted_steps < 200
    assert "hardly ever accepted" in report.reason


def test_odd_requests_among_good_ones_are_no_alarm() -> None:
    canary, chance = Canary(PROMISE), PROMISE.survival(None)
    for seed in range(200):
        canary.observe(steps(12, 4, 0) if seed % 5 == 0 else chains(20, 4, chance, seed))
        assert canary.report().state in ("learning", "ok"), seed


def test_a_dead_drafter_is_noticed_though_auto_hardly_drafts_with_it() -> None:
    """Mode auto gives up on it at once, except for trials: a step or two a request, now and then with luck."""
    chooser, canary, requests = random.Random(5), Canary(Promise({"chat": 2.77}, 15)), 0
    while canary.report().state != "warning":
        canary.observe(chains(chooser.choice((0, 1, 1, 2)), 1, 0.13, seed=chooser.randrange(10**6)))
        requests += 1
        assert requests < 40
    assert canary.report().drafted_steps < 40


def test_a_fine_drafter_under_auto_raises_no_alarm() -> None:
    chooser, canary = random.Random(6), Canary(Promise({"chat": 2.77}, 15))
    for _ in range(3000):
        stats = chains(
            chooser.choice((1, 2, 30)),
            chooser.choice((1, 3)),
            canary.promise.survival(None) * 0.95,
            seed=chooser.randrange(10**6),
        )
        canary.observe(stats)
        assert canary.report().state != "warning"


def test_drafts_that_were_no_numbers_count_as_lost() -> None:
    canary = Canary(PROMISE)
    for _ in range(4):
        canary.observe(RequestStats(steps=20, bad_drafts=20))
    assert canary.report().state == "warning"


def test_a_declared_class_is_held_against_its_own_promise() -> None:
    """Chat's acceptance is fine for chat and a broken drafter for code."""
    told, untold = Canary(PROMISE), Canary(PROMISE)
    for canary, name in ((told, "code"), (untold, None)):
        canary.observe(chains(1000, 15, PROMISE.survival("chat")), name)
    assert untold.report().state == "ok"
    assert told.report().state == "warning"


def test_sampling_is_allowed_to_lose_a_part() -> None:
    chance = PROMISE.survival("chat")
    greedy, sampled = Canary(PROMISE), Canary(PROMISE)
    for canary, samples in ((greedy, False), (sampled, True)):
        canary.observe(chains(2000, 15, chance * 0.7), sampled=samples)
    assert greedy.report().state == "warning"
    assert sampled.report().state == "ok"


def test_a_pair_without_promises_is_not_judged() -> None:
    canary = Canary(Promise({}, 15))
    canary.observe(steps(1000, 15, 0))
    assert canary.report().state == "no promise"
    assert canary.report().ratio is None


@pytest.mark.parametrize(
    ("request_", "telling"),
    [
        (ASKED, True),
        (replace(ASKED, sampling=SamplingParams(temperature=0.8, top_p=0.9)), True),
        (replace(ASKED, sampling=SamplingParams(temperature=1.3)), False),
        (replace(ASKED, sampling=SamplingParams(frequency_penalty=0.5)), False),
        (replace(ASKED, sampling=SamplingParams(temperature=0.8), share_noise=False), False),
        (replace(ASKED, share_noise=False), True),
        (replace(ASKED, sampling=SamplingParams(logit_bias=((5, -100.0),))), False),
        (replace(ASKED, constraint=Constraint("regex", "[a-z]+")), False),
        (replace(ASKED, thinking=Thinking(budget=10)), False),
        (replace(ASKED, thinking=Thinking()), True),
        (replace(ASKED, draft_lora="code"), False),
    ],
)
def test_steered_requests_say_nothing_about_the_drafter(request_: Request, telling: bool) -> None:
    assert is_telling(request_) is telling


def test_the_board_says_it_once_and_again_only_after_a_recovery(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "slipstream.server.canary")
    board, chance = CanaryBoard(), PROMISE.survival("chat")
    for quality in (0.2, 1.0, 0.2):
        for seed in range(40):
            board.observe("pair", PROMISE, ASKED, chains(50, 15, chance * quality, seed))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]
    assert "does not keep its promise" in caplog.records[0].getMessage()
    assert board.warnings == {"pair": 2}
    board.observe("pair", PROMISE, replace(ASKED, sampling=SamplingParams(temperature=2.0)), chains(9000, 15, chance))
    assert board.reports()["pair"].state == "warning", "a request that is not judged must change nothing"


def test_another_promise_under_the_same_name_starts_afresh() -> None:
    board = CanaryBoard()
    board.observe("pair", PROMISE, ASKED, chains(300, 15, 0.1))
    assert board.reports()["pair"].state == "warning"
    board.observe("pair", Promise({"chat": 1.2}, 15), ASKED, chains(10, 15, 0.2))
    assert board.reports()["pair"].state == "learning"


def test_a_loaded_pair_gives_its_promise(tmp_path: Path) -> None:
    _, draft = write_pair(tmp_path)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "expected_tau": {"code": 3.5, "chat": 2}}))
    llm = tiny_llm(tmp_path)
    assert llm.expected_tau == {"code": 3.5, "chat": 2.0}
    assert promise_of(llm) == Promise({"code": 3.5, "chat": 2.0}, 7)
    assert promise_of(tiny_llm(tmp_path, draft=False)) is None


@pytest.mark.parametrize("value", [{"code": 0.5}, {"code": 17.5}, {"": 2.0}, {"code": "4"}, {"code": None}, 4.2])
def test_promises_no_drafter_can_keep_are_refused(tmp_path: Path, value: object) -> None:
    _, draft = write_pair(tmp_path)
    config = json.loads((draft / "config.json").read_text())
    assert read_hf(config, "tiny").expected_tau == {}
    with pytest.raises(ConfigError, match="expected_tau"):
        read_hf({**config, "dflash_config": {**config["dflash_config"], "expected_tau": value}}, "tiny")


def test_promises_are_written_into_a_file_and_nothing_else_changes(tmp_path: Path) -> None:
    path = tmp_path / "drafter.gguf"
    shutil.copy(resources.files("slipstream").joinpath("data", "smollm2-135m-dflash.Q8_0.gguf"), path)  # type: ignore[arg-type]
    shipped = path.read_bytes()
    assert read_drafter_config(path, open_weights(path)).expected_tau.keys() == {"code", "maths", "chat"}
    rewrite(path, {"poetry": 2.5})
    assert read_drafter_config(path, open_weights(path)).expected_tau == {"poetry": 2.5}
    before, after = parse_header(shipped, "before"), read_gguf(path)
    assert after.metadata.keys() - before.metadata.keys() == {"dflash.expected_tau.poetry"}
    end = max(entry.end for entry in before.tensors) - before.data_offset
    now = path.read_bytes()
    assert now[after.data_offset :][:end] == shipped[before.data_offset :][:end]
    with pytest.raises(ConfigError, match="expected_tau of 'poetry' is 99"):
        rewrite(path, {"poetry": 99.0})
    assert path.read_bytes() == now and [file.name for file in tmp_path.iterdir()] == ["drafter.gguf"]

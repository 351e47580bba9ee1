"""What generate, chat, inspect and demo print and what they ask of the engine, on a stand-in engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.ui import DraftTint
from slipstream.types import TokenOut
from tests.fakes import FakeLLM

STATS = {
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "steps",
    "drafted",
    "accepted",
    "accepted_by_source",
    "tau",
    "tau_novel",
    "accept_rate",
    "accepted_per_position",
    "ttft_ms",
    "decode_ms",
    "tokens_per_second",
}


def test_generate_json_is_one_object(cli: Any, fake_engine: type[FakeLLM]) -> None:
    done = cli("generate", "--prompt", "hällo", "--json")
    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    assert done.out.count("\n") == 1
    assert set(result) == {"text", "token_ids", "finish_reason", "draft", "stats"}
    assert result["draft"] == "auto"
    assert result["text"] == "You said hällo, the 1th message."
    assert set(result["stats"]) >= STATS
    assert fake_engine.made[0].closed


def test_generate_passes_every_option_on(cli: Any, fake_engine: type[FakeLLM]) -> None:
    done = cli(
        "generate",
        "--prompt",
        "x",
        "--chat",
        "--target",
        "t",
        "--draft",
        "d",
        "--draft-lora",
        "l=x",
        "--max-tokens",
        "9",
        "--stop",
        "a",
        "--stop",
        "b",
        "--ignore-eos",
        "--mode",
        "chain:8",
        "--gate",
        "ema:margin=1.1",
        "--confidence",
        "0.25",
        "--temperature",
        "0.5",
        "--seed",
        "3",
        "--top-k",
        "4",
        "--top-p",
        "0.9",
        "--min-p",
        "0.1",
        "--repetition-penalty",
        "1.1",
        "--presence-penalty",
        "0.2",
        "--frequency-penalty",
        "0.3",
        "--logprobs",
        "2",
        "--dtype",
        "int8",
        "--threads",
        "1",
        "--max-context",
        "100",
        "--draft-window",
        "64",
        "--json",
    )
    assert done.code == 0, done.err
    llm = fake_engine.made[0]
    assert (llm.target, llm.draft) == ("t", "d")
    assert (llm.config.weight_format, llm.config.threads) == ("int8", 1)
    assert (llm.config.max_context, llm.config.draft_window) == (100, 64)
    assert llm.requests == [
        {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 9,
            "stop": ("a", "b"),
            "ignore_eos": True,
            "mode": "chain:8",
            "gate": "ema:margin=1.1",
            "min_confidence": 0.25,
            "draft_lora": "l",
            "temperature": 0.5,
            "seed": 3,
            "top_k": 4,
            "top_p": 0.9,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.3,
            "logprobs": 2,
        }
    ]
    first = json.loads(done.out)["logprobs"][0]
    assert first == {"token_id": 89, "logprob": -0.5, "top_logprobs": [{"token_id": 89, "logprob": -0.5}]}


def test_generate_leaves_the_mode_to_the_engine(cli: Any, fake_engine: type[FakeLLM]) -> None:
    cli("generate", "--prompt", "x", "--json")
    cli("generate", "--prompt", "x", "--draft", "none", "--json")
    cli("generate", "--prompt", "x", "--plain", "--json")
    assert ["mode" in llm.requests[0] for llm in fake_engine.made] == [False, False, True]
    assert fake_engine.made[1].draft is None
    assert fake_engine.made[2].requests[0]["mode"] == "plain"


def test_generate_streams_text_to_stdout_and_numbers_to_stderr(cli: Any, fake_engine: type[FakeLLM]) -> None:
    done = cli("generate", "--prompt", "[bold]x")
    assert done.out == "You said [bold]x, the 1th message.\n"
    assert "tok/s" in done.err and "tau 3." in done.err


def test_torch_kernels_are_announced_in_one_line(
    cli: Any, fake_engine: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "Running on torch's kernels: a test says so."
    assert line not in cli("generate", "--prompt", "x").err
    monkeypatch.setattr(fake_engine, "compiled", False)
    assert line in cli("generate", "--prompt", "x").err


def test_generate_reads_a_file_and_stdin(cli: Any, fake_engine: type[FakeLLM], tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes("é\r\nx".encode())
    assert json.loads(cli("generate", "--prompt-file", str(tmp_path / "p.txt"), "--json").out)["text"].startswith(
        "You said é\r\nx,"
    )
    assert json.loads(cli("generate", "--prompt-file", "-", "--json", stdin="ü\n").out)["text"].startswith("You said ü")
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe")
    assert cli("generate", "--prompt-file", str(tmp_path / "p.txt"), "--json").code == 2


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_an_engine_error_is_one_sentence(cli: Any, fake_engine: type[FakeLLM], as_json: list[str]) -> None:
    fake_engine.fail = "the prompt is too long"
    done = cli("generate", "--prompt", "x", *as_json)
    assert (done.code, done.out, done.err) == (2, "", "slipstream: the prompt is too long\n")
    assert fake_engine.made[0].closed


def test_chat_keeps_history_and_obeys_commands(cli: Any, fake_engine: type[FakeLLM], tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    lines = [
        "/system Be brief.",
        "one",
        "two",
        "/undo",
        "/mode plain",
        "/temperature 0.5",
        "/seed 9",
        "/max-tokens 12",
        "three",
        "/stats",
        f"/save {saved}",
        "/quit",
        "never reached",
    ]
    done = cli("chat", stdin="\n".join(lines) + "\n")
    assert done.code == 0, done.err
    asked = [request for request in fake_engine.made[0].requests if "top_k" in request]
    assert [[m["content"] for m in request["messages"]] for request in asked] == [
        ["Be brief.", "one"],
        ["Be brief.", "one", "You said one, the 2th message.", "two"],
        ["Be brief.", "one", "You said one, the 2th message.", "three"],
    ]
    assert [(r["mode"], r["temperature"], r["seed"], r["max_tokens"]) for r in asked] == [
        ("auto", 0.0, 0, 512),
        ("auto", 0.0, 0, 512),
        ("plain", 0.5, 9, 12),
    ]
    assert done.out.splitlines() == ["You said one, the 2th message.", "You said two, the 4th message.", "You said thr"]
    assert "x plain decoding" in done.err and "tokens_per_second" in done.err
    assert json.loads(saved.read_text())["messages"][-1] == {"role": "assistant", "content": "You said thr"}


def test_chat_keeps_mode_and_gate_together(cli: Any, fake_engine: type[FakeLLM]) -> None:
    lines = ["one", "/gate entropy:floor=0.8", "two", "/mode tree:16:seed", "three", "/mode auto", "four", "/gate ema"]
    done = cli("chat", "--mode", "chain", "--confidence", "0.5", stdin="\n".join(lines) + "\n")
    asked = [request for request in fake_engine.made[0].requests if "top_k" in request]
    assert [(request["mode"], request.get("gate")) for request in asked] == [
        ("chain", None),
        ("chain", "entropy:floor=0.8"),
        ("tree:16:seed", "entropy:floor=0.8"),
        ("auto", None),
    ]
    assert {request["min_confidence"] for request in asked} == {0.5}
    assert done.code == 2 and "gate ema does not go with mode auto" in done.err
    assert "mode tree:16:seed, gate entropy:floor=0.8" in done.err


def test_the_last_adapter_drafts_unless_the_user_says_otherwise(cli: Any, fake_engine: type[FakeLLM]) -> None:
    for given, loaded, drafts in (
        ([], [], "base"),
        (["a=x", "b=y@2"], ["a=x", "b=y@2"], "b"),
        (["a=x", "base"], ["a=x"], "base"),
    ):
        done = cli("generate", "--prompt", "p", *(part for source in given for part in ("--draft-lora", source)))
        assert done.code == 0, done.err
        assert list(fake_engine.made[-1].draft_lora) == loaded
        assert fake_engine.made[-1].requests[-1]["draft_lora"] == drafts


def test_chat_lists_and_switches_adapters(cli: Any, fake_engine: type[FakeLLM]) -> None:
    lines = ["one", "/lora", "/lora base", "two", "/lora none-such"]
    done = cli("chat", "--draft-lora", "poet=x.gguf", stdin="\n".join(lines) + "\n")
    asked = [request["draft_lora"] for request in fake_engine.made[0].requests if "top_k" in request]
    assert asked == ["poet", "base"]
    assert "drafting with poet, there is also base" in done.err and "drafting with base, there is also poet" in done.err
    assert done.code == 2 and "unknown draft variant 'none-such' (known: base, poet)" in done.err


def test_chat_json_prints_one_object_a_turn(cli: Any, fake_engine: type[FakeLLM]) -> None:
    done = cli("chat", "--json", stdin="one\n\n/help\n/reset\ntwo\n")
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert [answer["text"] for answer in answers] == [f"You said {word}, the 1th message." for word in ("one", "two")]
    assert all(set(answer["stats"]) >= STATS for answer in answers)


def test_chat_survives_a_bad_line_and_tells_a_script(cli: Any, fake_engine: type[FakeLLM]) -> None:
    done = cli("chat", stdin="/rest\n/mode warp\n/temperature hot\n/temperature -1\n/undo\nhello\n")
    assert done.code == 2
    assert "did you mean /reset?" in done.err and "warp" in done.err and "'hot' is not a number" in done.err
    assert done.out == "You said hello, the 1th message.\n"


def test_chat_without_a_drafter(cli: Any, fake_engine: type[FakeLLM]) -> None:
    done = cli("chat", "--draft", "none", stdin="hello\n/mode chain\n")
    assert "needs a drafter" in done.err and done.code == 2
    assert [request["mode"] for request in fake_engine.made[0].requests] == ["plain"]
    assert cli("chat", "--draft", "none", "--mode", "chain", stdin="hello\n").code == 2


def test_chat_ctrl_c_stops_the_answer_only(
    cli: Any, fake_engine: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FakeLLM.stream

    def interrupted(self: FakeLLM, *arguments: Any, **settings: Any) -> Any:
        for index, event in enumerate(whole(self, *arguments, **settings)):
            if index == 2 and len(self.requests) == 3:  # two requests measured plain decoding
                raise KeyboardInterrupt
            yield event

    monkeypatch.setattr(FakeLLM, "stream", interrupted)
    done = cli("chat", "--json", stdin="one\ntwo\n")
    first, second = [json.loads(line) for line in done.out.splitlines()]
    assert (done.code, first["text"], first["finish_reason"]) == (0, "You s", "cancelled")
    assert second["text"] == "You said two, the 3th message."


def test_tint_follows_the_tokens_even_when_text_is_held_back() -> None:
    tint, texts = DraftTint(), ["a", "B", "CC", "d", "E"]
    tokens = [TokenOut(index, text.isupper()) for index, text in enumerate(texts)]
    assert list(tint.spans(tokens[:3], texts[:3], "a")) == [("a", False)]
    assert list(tint.spans(tokens[3:], texts[3:], "BCCdE")) == [("BCC", True), ("d", False), ("E", True)]
    assert list(tint.spans([], [], "xy")) == [("xy", True)]


def test_demo_says_when_speculation_does_not_pay(cli: Any, fake_engine: type[FakeLLM]) -> None:
    fake_engine.speculative_ms = 8.0
    done = cli("demo", "--max-tokens", "64")
    assert done.code == 0, done.err
    said = " ".join(done.out.split())
    assert "it does not pay on this machine" in said and "All 3 texts are identical" in said and "Byte floor" in said
    assert "int4 was fastest." in said
    assert "plain 1000.0 tok/s" in said and "Mode auto chose chain:16 in" in said and said.count("same text") == 3
    auto = json.loads(cli("demo", "--max-tokens", "64", "--json").out)["modes"]["auto"]
    assert auto["speedup"] < 1 and auto["identical"] == {"same": 3, "of": 3, "near_ties": 0}


def test_a_closed_pipe_is_no_traceback() -> None:
    code = "import sys; sys.argv = ['slipstream', '--help']; from slipstream.cli.main import run; run()"
    done = subprocess.run(
        f'{sys.executable} -c "{code}" | true', shell=True, capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_inspect_draws_and_reports_a_model(cli: Any, tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    file = tmp_path / "model.safetensors"
    save_file({"a.weight": np.zeros((2, 3), np.float32), "b.weight": np.zeros(4, np.float16)}, str(file))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "name": "[bold]"}')
    done = cli("inspect", str(tmp_path))
    assert done.code == 0, done.err
    for part in (str(tmp_path), "llama", "[bold]", "a.weight", "2 x 3", "F16", "24 B", "complete", "yes"):
        assert part in done.out
    assert "a.weight" not in cli("inspect", str(tmp_path), "--no-tensors").out
    report = json.loads(cli("inspect", str(file), "--json").out)
    assert [tensor["name"] for tensor in report["tensors"]] == ["a.weight", "b.weight"]
    assert "tensors" not in json.loads(cli("inspect", str(file), "--json", "--no-tensors").out)


def test_inspect_tells_a_truncated_file(cli: Any, tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    file = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(64, np.float32)}, str(file))
    file.write_bytes(file.read_bytes()[:-10])
    done = cli("inspect", str(file))
    assert done.code == 1 and "10 bytes early" in done.err
    done = cli("inspect", str(file), "--json")
    assert done.code == 1 and json.loads(done.out)["missing_bytes"] == 10
    assert cli("inspect", str(tmp_path / "absent.gguf")).code == 2

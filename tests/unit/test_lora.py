"""Merged variants of a drafter: what they compute, what they share with the base, and what cannot be merged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.config import PAGE_TOKENS, WeightFormat
from slipstream.errors import ConfigError, FormatError
from slipstream.formats.adapters import AdapterSource, read_adapter
from slipstream.formats.weight_files import WeightFile, open_weights
from slipstream.kernels.cpu.native_library import library
from slipstream.kernels.rows import RowBatch, RowPlaces, make_group
from slipstream.models.dflash import DFlashDrafter, load_drafter, read_drafter_config
from slipstream.models.dflash_names import gguf_spellings, names_in
from slipstream.models.lora import Adapter, MergedWeights, load_adapter, merged_weights
from slipstream.models.weights import Weights
from tests.adapters import (
    EMBEDDINGS,
    EXTRA,
    LAYER_MODULES,
    RANK,
    factors,
    gguf_drafter,
    gguf_tensors,
    noise,
    peft_tensors,
    write_drafter,
    write_gguf_adapter,
    write_peft,
)
from tests.tiny import HIDDEN, MASK, VOCAB

SCALE, ALPHA = 0.5, 8
FACTOR = SCALE * ALPHA / RANK
CONTEXT = 70  # more than a page
EVERYWHERE = ("fc", *(f"layers.{index}.{module}" for index in range(2) for module in LAYER_MODULES))


@pytest.fixture(scope="module")
def drafter_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """One folder per kind of drafter."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = write_drafter(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return folder


def built(file: WeightFile, folder: Path, weight_format: WeightFormat = "fp32") -> DFlashDrafter:
    """A drafter as `load_drafter` makes it, from any view of its file."""
    return DFlashDrafter(
        read_drafter_config(folder, open_weights(folder)), Weights(file, weight_format, names_in(file), rough=True)
    )


@torch.inference_mode()
def answers(drafter: DFlashDrafter) -> Tensor:
    """Everything a drafter says after some context: logits of its block, its heads' corrections and confidence."""
    config, size = drafter.config, drafter.config.block_size
    shape = (config.layers, 3, config.kv_heads, PAGE_TOKENS, config.head_dim)
    keys, values = torch.zeros(shape), torch.zeros(shape)
    places = [(2 - position // PAGE_TOKENS, position % PAGE_TOKENS) for position in range(CONTEXT + size)]
    pages, offsets = zip(*places, strict=True)
    taps = noise(CONTEXT, drafter.tap_width, seed=3, size=1.0)
    drafter.write_context(taps, RowPlaces(range(CONTEXT), pages[:CONTEXT], offsets[:CONTEXT], CONTEXT), keys, values)
    span = range(CONTEXT, CONTEXT + size)
    groups = {pattern: [make_group(0, span, [2, 1], PAGE_TOKENS, pattern)] for pattern in set(config.patterns)}
    batch = RowBatch([65, *[MASK] * (size - 1)], span, pages[CONTEXT:], offsets[CONTEXT:], CONTEXT + size, groups)
    table = noise(VOCAB, HIDDEN, seed=4, size=1.0)
    hidden, _ = drafter.forward_logits((drafter.embed or table.__getitem__)(batch.token_ids), batch, keys, values)
    said = [drafter.head(hidden) if drafter.head is not None else hidden @ table.t()]
    if drafter.heads is not None:
        walk = drafter.heads.begin(hidden, torch.arange(VOCAB).repeat(size, 1))
        state = None
        for slot in range(size):
            added, state = walk.correct(slot, 66 + slot, state)
            said += [torch.from_numpy(np.asarray(added)), torch.tensor([walk.confidence(slot, 66 + slot) or 0.0])]
    return torch.cat([part.flatten() for part in said])


def explicit(folder: Path, place: Path, pairs: dict[str, tuple[Tensor, Tensor]], factor: float = FACTOR) -> Path:
    """A copy of a drafter with W + factor * B A written out in double precision."""
    shutil.copytree(folder, place)
    tensors = load_file(place / "model.safetensors")
    for module, (a, b) in pairs.items():
        delta = factor * (b.double() @ a.double())
        weight = tensors[f"{module}.weight"]
        tensors[f"{module}.weight"] = (weight.double() + (delta if delta.shape == weight.shape else delta.t())).float()
    save_file(tensors, place / "model.safetensors")
    return place


def pairs_for(folder: Path, modules: tuple[str, ...], seed: int = 1) -> dict[str, tuple[Tensor, Tensor]]:
    file = open_weights(folder)
    return {
        module: factors(file.tensor(f"{module}.weight").shape, seed=seed + 2 * number, embedding=module in EMBEDDINGS)
        for number, module in enumerate(modules)
    }


def peft(folder: Path, pairs: dict[str, tuple[Tensor, Tensor]], scale: float = SCALE) -> AdapterSource:
    tensors = peft_tensors(pairs, [module for module in pairs if module in EMBEDDINGS])
    return AdapterSource("mine", write_peft(folder, tensors, lora_alpha=ALPHA), scale)


def view_of(folder: Path, source: AdapterSource) -> MergedWeights:
    file = open_weights(folder)
    return merged_weights(file, load_adapter(source, file))


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    assert float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


# ---- what a variant computes


@pytest.mark.parametrize(
    ("kind", "module"),
    [("plain", "fc"), *(("plain", f"layers.1.{module}") for module in LAYER_MODULES)]
    + [(kind, module) for kind, modules in EXTRA.items() for module in modules],
)
def test_each_kind_of_matrix_is_merged(
    drafter_of: Callable[[str], Path], kind: str, module: str, tmp_path: Path
) -> None:
    folder = drafter_of(kind)
    pairs = pairs_for(folder, (module,))
    view = view_of(folder, peft(tmp_path / "adapter", pairs))
    found, wanted = answers(built(view, folder)), answers(load_drafter(explicit(folder, tmp_path / "w", pairs), "fp32"))
    base = answers(load_drafter(folder, "fp32"))
    assert float((wanted - base).abs().max()) > 1e-3 * float(base.abs().max()), "the adapter does not show"
    assert_close(found, wanted)
    assert view.adapted == {f"{module}.weight"}


@pytest.mark.parametrize("weight_format", ["fp32", "int8", "native"])
def test_a_whole_adapter_in_every_format(
    drafter_of: Callable[[str], Path], weight_format: WeightFormat, tmp_path: Path
) -> None:
    if weight_format == "native" and library() is None:
        pytest.skip("no compiled kernels")
    folder = drafter_of("plain")
    pairs = pairs_for(folder, EVERYWHERE)
    found = answers(built(view_of(folder, peft(tmp_path / "adapter", pairs)), folder, weight_format))
    wanted = answers(load_drafter(explicit(folder, tmp_path / "w", pairs), weight_format))
    base = answers(load_drafter(folder, weight_format))
    # a weight that rounds the other way by a hair may fall into the next code of a coarse format
    assert_close(found, wanted, 1e-5 if weight_format == "fp32" else 2e-2)
    assert float((found - base).abs().max()) > 0.1 * float(base.abs().max())


@pytest.mark.parametrize("container", ["safetensors", "Q8_0", "Q4_0", "F16"])
def test_an_adapter_that_adds_nothing_changes_nothing(
    drafter_of: Callable[[str], Path], container: str, tmp_path: Path
) -> None:
    folder = drafter_of("plain")
    file = open_weights(folder) if container == "safetensors" else gguf_drafter(tmp_path / "d.gguf", folder, container)
    pairs = {module: (a, torch.zeros_like(b)) for module, (a, b) in pairs_for(folder, EVERYWHERE).items()}
    view = merged_weights(file, load_adapter(peft(tmp_path / "adapter", pairs), file))
    assert not view.adapted
    base = answers(built(file, folder))
    assert torch.equal(answers(built(view, folder)), base)
    unscaled = load_adapter(peft(tmp_path / "other", pairs_for(folder, EVERYWHERE), scale=0.0), file)
    assert torch.equal(answers(built(merged_weights(file, unscaled), folder)), base)


@pytest.mark.parametrize("spelling", [0, -1], ids=["llama.cpp", "others"])
def test_containers_and_spellings_agree(drafter_of: Callable[[str], Path], spelling: int, tmp_path: Path) -> None:
    """The same adapter as PEFT and GGUF files, on the same drafter as safetensors and GGUF: one result."""
    folder = drafter_of("dspark")
    pairs = pairs_for(folder, (*EVERYWHERE, "markov_head.markov_w2", "confidence_head.proj"))
    gguf_file = gguf_drafter(tmp_path / "d.gguf", folder, spelling=spelling)
    as_peft = peft(tmp_path / "adapter", pairs)
    as_gguf = AdapterSource("g", write_gguf_adapter(tmp_path / "a.gguf", gguf_tensors(pairs, spelling), ALPHA), SCALE)
    wanted = answers(built(view_of(folder, as_peft), folder))
    assert torch.equal(answers(built(view_of(folder, as_gguf), folder)), wanted)
    for source in (as_peft, as_gguf):
        view = merged_weights(gguf_file, load_adapter(source, gguf_file))
        assert torch.equal(answers(built(view, folder)), wanted)


def test_llama_cpp_flips_the_pair_of_an_embedding(drafter_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = drafter_of("tables")
    a, b = factors((VOCAB, HIDDEN))
    stored = {"token_embd.weight.lora_a": b, "token_embd.weight.lora_b": a.t()}
    view = view_of(folder, AdapterSource("e", write_gguf_adapter(tmp_path / "a.gguf", stored, ALPHA), SCALE))
    assert_close(
        answers(built(view, folder)),
        answers(load_drafter(explicit(folder, tmp_path / "w", {"embed_tokens": (a, b)}), "fp32")),
    )


@pytest.mark.parametrize(
    ("fused", "modules"),
    [
        ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
    ],
)
def test_a_fused_pair_is_split(
    drafter_of: Callable[[str], Path], fused: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    folder = drafter_of("plain")
    outputs = [open_weights(folder).tensor(f"layers.0.{module}.weight").shape[0] for module in modules]
    a, b = factors((sum(outputs), HIDDEN))
    view = view_of(folder, peft(tmp_path / "adapter", {f"model.layers.0.{fused}": (a, b)}))
    split = {f"layers.0.{module}": (a, part) for module, part in zip(modules, b.split(outputs), strict=True)}
    wanted = answers(load_drafter(explicit(folder, tmp_path / "w", split), "fp32"))
    assert_close(answers(built(view, folder)), wanted)
    assert len(view.adapted) == len(modules)
    if fused == "self_attn.qkv_proj":
        stored = {"blk.0.attn_qkv.weight.lora_a": a, "blk.0.attn_qkv.weight.lora_b": b}
        other = view_of(folder, AdapterSource("g", write_gguf_adapter(tmp_path / "a.gguf", stored, ALPHA), SCALE))
        assert_close(answers(built(other, folder)), wanted)


def test_a_confidence_head_without_its_first_dimension(drafter_of: Callable[[str], Path], tmp_path: Path) -> None:
    source = drafter_of("dspark")
    folder = tmp_path / "flat"
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["confidence_head.proj.weight"] = tensors["confidence_head.proj.weight"].flatten()
    save_file(tensors, folder / "model.safetensors")
    adapter = peft(tmp_path / "adapter", pairs_for(source, ("confidence_head.proj",)))
    flat, full = (answers(built(view_of(place, adapter), place)) for place in (folder, source))
    assert torch.equal(flat, full)
    assert not torch.equal(full, answers(built(open_weights(source), source)))


# ---- quantised drafters


@pytest.mark.parametrize(("kind", "coarseness"), [("Q8_0", 1 / 254), ("Q5_0", 1 / 16), ("Q4_0", 1 / 8)])
def test_quantised_matrices_are_merged_and_quantised_again(
    drafter_of: Callable[[str], Path], kind: str, coarseness: float, tmp_path: Path
) -> None:
    folder = drafter_of("plain")
    file = gguf_drafter(tmp_path / "d.gguf", folder, kind)
    module = "layers.0.self_attn.k_proj"
    name = gguf_spellings(f"{module}.weight")[0]
    pairs = pairs_for(folder, (module,))
    adapter = load_adapter(peft(tmp_path / "adapter", pairs), file)
    view = merged_weights(file, adapter)
    a, b = pairs[module]
    wanted = file.tensor(name).dense().double() + FACTOR * (b.double() @ a.double())
    found = view.tensor(name).dense().double()
    peaks = wanted.view(len(wanted), -1, 32).abs().amax(dim=-1)
    error = (found - wanted).view(len(wanted), -1, 32).abs().amax(dim=-1) / peaks
    assert (view.tensor(name).type_name, file.tensor(name).type_name) == (kind, kind)
    assert float(error.max()) <= 1.02 * coarseness  # a block's scale is rounded too
    plain = file.tensor(name).dense()
    assert not torch.equal(found, plain.double()), "the adapter has changed it"
    if library() is not None:
        assert_close(answers(built(view, folder, "native")), answers(built(view, folder)), 0.05)


# ---- what is shared


def test_all_other_tensors_are_the_files_own(drafter_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = drafter_of("plain")
    file = open_weights(folder)
    module = "layers.0.mlp.down_proj"
    view = merged_weights(file, load_adapter(peft(tmp_path / "adapter", pairs_for(folder, (module,))), file))
    assert view.names() == file.names() and view.metadata is file.metadata and "nothing" not in view
    for name in file.names():
        shared = view.tensor(name).data is file.tensor(name).data
        assert shared == (name != f"{module}.weight")
    view.close()
    file.tensor("fc.weight").dense()  # closing a variant leaves the base open


def test_variants_stand_beside_each_other(drafter_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = drafter_of("plain")
    file = open_weights(folder)
    sources = [peft(tmp_path / str(number), pairs_for(folder, EVERYWHERE, seed=10 * number + 1)) for number in range(3)]
    together = [built(merged_weights(file, load_adapter(source, file)), folder) for source in sources]
    said = [answers(drafter) for drafter in (*together, built(file, folder))]
    for one in range(4):
        for other in range(one):
            assert not torch.allclose(said[one], said[other], atol=0.1)
    for source, own in zip(sources, said[:3], strict=True):
        assert torch.equal(answers(built(view_of(folder, source), folder)), own)


def test_a_key_names_bytes_and_scale(drafter_of: Callable[[str], Path], tmp_path: Path) -> None:
    file = open_weights(drafter_of("plain"))
    pairs = pairs_for(drafter_of("plain"), ("fc",))

    def adapter(folder: str, scale: float, seed: int = 1) -> Adapter:
        own = pairs if seed == 1 else pairs_for(drafter_of("plain"), ("fc",), seed)
        return load_adapter(peft(tmp_path / folder, own, scale), file)

    first = adapter("a", 1.0)
    assert first.key == adapter("b", 1.0).key
    assert len({first.key, adapter("a", 0.5).key, adapter("c", 1.0, seed=9).key}) == 3


# ---- what cannot be merged


def refusal(folder: Path, source: AdapterSource, kind: type[Exception] = FormatError) -> str:
    with pytest.raises(kind) as caught:
        view_of(folder, source)
    return str(caught.value)


def test_a_matrix_the_drafter_does_not_have(drafter_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = drafter_of("plain")
    for number, module in enumerate(
        (
            "layers.2.self_attn.q_proj",
            "markov_head.markov_w1",
            "layers.0.self_attn.q_norm",
            "layers.0.mlp.qkv_proj",
            "layers.7.self_attn.qkv_proj",
            "embed_tokens",
            "",
        )
    ):
        source = peft(tmp_path / str(number), {module: factors((HIDDEN, HIDDEN))})
        assert f"{module}.lora_" in refusal(folder, source, ConfigError)
    stored = gguf_tensors({"layers.9.mlp.up_proj": factors((48, HIDDEN))})
    path = write_gguf_adapter(tmp_path / "a.gguf", stored)
    assert "blk.9.ffn_up.weight.lora_a" in refusal(folder, AdapterSource("g", path), ConfigError)


@pytest.mark.parametrize(
    ("a", "b", "wrong"),
    [
        ((RANK, HIDDEN + 1), (48, RANK), "lora_A"),
        ((RANK, HIDDEN), (47, RANK), "lora_B"),
        ((RANK, 48), (HIDDEN, RANK), "lora_A"),
    ],
)
def test_shapes_that_do_not_fit(
    drafter_of: Callable[[str], Path], a: tuple[int, int], b: tuple[int, int], wrong: str, tmp_path: Path
) -> None:
    source = peft(tmp_path / "adapter", {"layers.0.mlp.up_proj": (noise(*a), noise(*b))})
    assert f"layers.0.mlp.up_proj.{wrong}.weight" in refusal(drafter_of("plain"), source)


def test_fused_shapes_that_do_not_fit(drafter_of: Callable[[str], Path], tmp_path: Path) -> None:
    source = peft(tmp_path / "adapter", {"layers.0.self_attn.qkv_proj": factors((65, HIDDEN))})
    assert "64 outputs" in refusal(drafter_of("plain"), source)


def test_a_matrix_may_be_adapted_once(drafter_of: Callable[[str], Path], tmp_path: Path) -> None:
    twice = {"layers.0.self_attn.qkv_proj": factors((64, HIDDEN)), "layers.0.self_attn.k_proj": factors((16, HIDDEN))}
    said = refusal(drafter_of("plain"), peft(tmp_path / "adapter", twice))
    assert "'layers.0.self_attn.k_proj.weight' a second time" in said


def test_a_rank_beyond_the_matrix(drafter_of: Callable[[str], Path], tmp_path: Path) -> None:
    tensors = peft_tensors({"fc": factors((HIDDEN, 2 * HIDDEN), rank=2 * HIDDEN + 1)})
    source = AdapterSource("a", write_peft(tmp_path / "a", tensors, r=2 * HIDDEN + 1))
    assert "fc.lora_A.weight' has rank 65" in refusal(drafter_of("plain"), source)


@pytest.mark.parametrize(("kind", "scale"), [("F16", 1e6), ("F32", 1e39), ("BF16", 1e39), ("Q8_0", 3e38)])
def test_an_overflow_names_the_tensor(
    drafter_of: Callable[[str], Path], kind: str, scale: float, tmp_path: Path
) -> None:
    file = gguf_drafter(tmp_path / "d.gguf", drafter_of("plain"), kind)
    pairs = pairs_for(drafter_of("plain"), ("layers.1.mlp.gate_proj",))
    adapter = load_adapter(peft(tmp_path / "adapter", pairs, scale), file)
    with pytest.raises(FormatError, match=r"'blk\.1\.ffn_gate\.weight' overflows"):
        merged_weights(file, adapter)
    assert merged_weights(file, load_adapter(peft(tmp_path / "adapter", pairs, 1.0), file)).adapted


def test_a_damaged_drafter_is_not_the_adapters_fault(drafter_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(drafter_of("plain"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"][3, 3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    said = refusal(folder, peft(tmp_path / "adapter", pairs_for(folder, ("fc",))))
    assert "the drafter's tensor 'fc.weight'" in said


def test_an_adapter_of_another_architecture(drafter_of: Callable[[str], Path], tmp_path: Path) -> None:
    pairs = gguf_tensors({"layers.0.mlp.up_proj": factors((48, HIDDEN))})
    path = write_gguf_adapter(tmp_path / "a.gguf", pairs, general__architecture="llama")
    assert "'llama' models" in refusal(drafter_of("plain"), AdapterSource("g", path), ConfigError)
    lucebox = write_gguf_adapter(tmp_path / "b.gguf", pairs, general__architecture="dflash-draft")
    assert view_of(drafter_of("plain"), AdapterSource("g", lucebox)).adapted


def test_an_adapter_meets_another_file_than_it_was_read_for(drafter_of: Callable[[str], Path], tmp_path: Path) -> None:
    with_head, plain = open_weights(drafter_of("dspark")), open_weights(drafter_of("plain"))
    pairs = pairs_for(drafter_of("dspark"), ("markov_head.markov_w2",))
    adapter = load_adapter(peft(tmp_path / "adapter", pairs), with_head)
    with pytest.raises(ConfigError, match="markov_w2"):
        merged_weights(plain, adapter)


def test_progress_counts_the_pairs(drafter_of: Callable[[str], Path], tmp_path: Path) -> None:
    file = open_weights(drafter_of("plain"))
    adapter = load_adapter(peft(tmp_path / "a", pairs_for(drafter_of("plain"), EVERYWHERE)), file)
    seen: list[tuple[str, int, int]] = []
    merged_weights(file, adapter, progress=lambda *step: seen.append(step))
    assert seen == [("merging mine", done, len(EVERYWHERE)) for done in range(1, len(EVERYWHERE) + 1)]


def test_reading_alone_does_not_need_the_drafter(tmp_path: Path) -> None:
    adapter = read_adapter(peft(tmp_path / "a", {"fc": factors((HIDDEN, 2 * HIDDEN))}))
    (pair,) = adapter.pairs
    assert (pair.name, pair.down.shape[0], pair.factor) == ("fc.weight", RANK, FACTOR)
    assert (pair.down.shape, pair.up.shape) == ((RANK, 2 * HIDDEN), (HIDDEN, RANK))

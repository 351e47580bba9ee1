"""Variants of the drafter: the drafter itself and its copies with LoRA adapters, which requests use by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.config import WeightFormat
from slipstream.errors import RequestError
from slipstream.formats.adapters import AdapterSource
from slipstream.formats.weight_files import WeightFile, open_weights
from slipstream.kernels.cpu.native_matrix import memory_of_its_own
from slipstream.models.dflash import DFlashDrafter, read_drafter_config
from slipstream.models.dflash_names import names_in
from slipstream.models.loading import MakeWeights
from slipstream.models.lora import MergedWeights, load_adapter, merged_weights
from slipstream.models.weights import BuiltParts, Weights
from slipstream.speculative.draft import BlockDrafter
from slipstream.types import BASE_VARIANT, Progress


@dataclass(frozen=True, slots=True)
class DraftVariant:
    """A drafter that is ready to draft under its name."""

    name: str
    context_key: str  # distinguishes its draft context from the base's; empty if both are the same
    drafter: BlockDrafter


class DraftVariants:
    """The variants that requests may name, the base first; empty if there is no drafter.

    One thread changes the variants and any thread may read them, because a change replaces the dictionary as a whole.
    """

    def __init__(self, base: BlockDrafter | None) -> None:
        self._variants = {} if base is None else {BASE_VARIANT: DraftVariant(BASE_VARIANT, "", base)}

    @property
    def drafter(self) -> BlockDrafter | None:
        """The drafter without an adapter; all variants have its shape."""
        base = self._variants.get(BASE_VARIANT)
        return base.drafter if base is not None else None

    @property
    def names(self) -> list[str]:
        return list(self._variants)

    def __getitem__(self, name: str) -> DraftVariant:
        return self._variants[name]

    def find(self, name: str) -> DraftVariant | None:
        """Returns the variant that a request names; None if there is no drafter and the request names only the base."""
        variant = self._variants.get(name)
        if variant is None and name != BASE_VARIANT:
            raise self._unknown(name)
        return variant

    def check_free(self, name: str) -> None:
        if name in self._variants:
            raise RequestError(f"there is a draft variant '{name}' already", "remove it first, or use NAME=PATH")

    def install(self, variant: DraftVariant) -> None:
        self.check_free(variant.name)
        self._variants = {**self._variants, variant.name: variant}

    def remove(self, name: str) -> DraftVariant:
        if name == BASE_VARIANT:
            raise RequestError(f"the variant '{BASE_VARIANT}' is the drafter itself", "it cannot be removed")
        if name not in self._variants:
            raise self._unknown(name)
        gone = self._variants[name]
        self._variants = {other: variant for other, variant in self._variants.items() if other != name}
        return gone

    def makes_context(self, key: str) -> bool:
        """Returns whether the draft context of any variant has this key."""
        return any(variant.context_key == key for variant in self._variants.values())

    def _unknown(self, name: str) -> RequestError:
        known = f"known: {', '.join(self.names)}" if self._variants else "there is no drafter to have variants"
        return RequestError(f"unknown draft variant '{name}'", known)


class DrafterFile:
    """An opened drafter file: builds the drafter, and variants that share with it what their adapters leave alone."""

    def __init__(
        self,
        path: Path,
        weight_format: WeightFormat,
        progress: Progress | None = None,
        make_weights: MakeWeights = Weights,
    ) -> None:
        self._file = open_weights(path)
        self._make_weights = make_weights
        self._format = weight_format
        self._config = read_drafter_config(path, self._file)
        self._parts: BuiltParts = {}
        self.key = _fingerprint(path)
        self.base = self._build(self._file, progress)

    def variant(
        self, source: AdapterSource, in_blocks: Callable[[DFlashDrafter], BlockDrafter], progress: Progress | None
    ) -> DraftVariant:
        """Reads an adapter and builds the merged variant; changes nothing that exists, so any thread may call it."""
        adapter = load_adapter(source, self._file)
        with memory_of_its_own():
            drafter = self._build(merged_weights(self._file, adapter, progress=progress))
        drafter.rotary = self.base.rotary
        shared = drafter.fc is self.base.fc and drafter.context_kv is self.base.context_kv
        return DraftVariant(source.name, "" if shared else f"+{adapter.key}", in_blocks(drafter))

    def _build(self, file: WeightFile, progress: Progress | None = None) -> DFlashDrafter:
        changed = file.adapted if isinstance(file, MergedWeights) else ()
        weights = self._make_weights(
            file, self._format, names_in(file), progress, rough=True, parts=self._parts, changed=changed
        )
        return DFlashDrafter(self._config, weights)


def _fingerprint(path: Path) -> str:
    """Returns a key of a file or folder from its path, size and time of change.

    It names the drafter that wrote a draft context.
    """
    stat = path.stat()
    return hashlib.sha256(f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()[:16]

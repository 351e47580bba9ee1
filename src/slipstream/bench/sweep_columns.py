"""The columns of a sweep: the pair's files in other weight types, which are made first, or adapters of its drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from slipstream.bench.pair_sweep import Column, LoadedPair
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError, RequestError
from slipstream.formats.sources import drafter_source, resolve
from slipstream.tools.quantize_recipes import RecipeName
from slipstream.types import BASE_VARIANT, Progress

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

Side = Literal["draft", "target"]
SIDES: tuple[Side, ...] = get_args(Side)
AS_IS = "as-is"
TYPES: tuple[str, ...] = (AS_IS, *get_args(RecipeName))
_EXACT_ENOUGH = ("F32", "F16", "BF16")  # types that are not quantised in blocks
_LEAST_SHARE = 0.005  # A type is not mentioned if it holds less than this share of a file's numbers.


def parse_sweep(words: Sequence[str]) -> dict[Side, tuple[str, ...]]:
    """The types of each side from `draft=bf16,q8_0` and `target=q4_1`; a side that is not named stays as it is."""
    asked: dict[Side, tuple[str, ...]] = {}
    for word in words:
        name, equals, listed = word.partition("=")
        side = next((known for known in SIDES if known == name), None)
        types = tuple(dict.fromkeys(kind.strip().lower() for kind in listed.split(",")))
        if not equals or side is None or side in asked:
            raise RequestError(f"'{word}' cannot be swept", "give draft=TYPE,... and target=TYPE,..., each once")
        unknown = [kind for kind in types if kind not in TYPES]
        if unknown:
            raise RequestError(f"there is no weight type '{unknown[0]}'", f"known: {', '.join(TYPES)}")
        asked[side] = types
    if all(len(types) < 2 for types in asked.values()):
        raise RequestError("a sweep needs at least two types of one side", "such as draft=bf16,q8_0,q4-mix")
    return asked


@dataclass(slots=True)
class QuantFiles:
    """A pair's files in the requested types; each file is made once and stays in `folder`."""

    target: str
    draft: str
    folder: Path
    config: EngineConfig
    context: int  # tokens for which a sequence must have room
    load: Callable[[str, str], LLM]
    watched: Callable[[], AbstractContextManager[Progress | None]] = nullcontext  # yields the progress callback
    _sources: dict[Side, Path] = field(default_factory=dict)
    _made: set[Path] = field(default_factory=set)

    def columns(self, asked: Mapping[Side, Sequence[str]]) -> list[Column]:
        """Every combination of the types, the drafter's type changing fastest; a name holds only what changes."""
        drafter = drafter_source(self.target, self.draft)
        if drafter is None:
            raise RequestError(f"{self.target} has no drafter to measure", "name one with --draft")
        for side, source in (("target", self.target), ("draft", drafter)):
            with self.watched() as progress:
                self._sources[side] = resolve(source, progress=progress).path  # type: ignore[index]
        types = {side: tuple(asked.get(side, (AS_IS,))) for side in SIDES}
        changing = [side for side in SIDES if len(types[side]) > 1]
        columns = []
        for target, draft in product(types["target"], types["draft"]):
            chosen: dict[Side, str] = {"draft": draft, "target": target}
            name = " ".join(f"{side}={chosen[side]}" for side in changing)
            columns.append(Column(name, partial(self._open, chosen)))
        return columns

    @contextmanager
    def _open(self, chosen: Mapping[Side, str]) -> Iterator[LoadedPair]:
        files = {side: self._file(side, chosen[side]) for side in SIDES}
        self._refuse_what_does_not_fit(files["target"], files["draft"])
        about: dict[str, object] = {side: {"type": chosen[side], **self._describe(side, files[side])} for side in SIDES}
        with self.load(str(files["target"]), str(files["draft"])) as llm:
            yield llm, about

    def _file(self, side: Side, kind: str) -> Path:
        source = self._sources[side]
        if kind == AS_IS:
            return source
        # The writer is imported here, because it needs numpy and refused options must not wait for that.
        from slipstream.tools.requantize import quantize_file

        out = self.folder / f"{side}-{source.stem}.{kind}.gguf"
        if out not in self._made:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.watched() as progress:
                quantize_file(source, out, kind, force=True, progress=progress)  # type: ignore[arg-type]
            self._made.add(out)
        return out

    def _describe(self, side: Side, path: Path) -> dict[str, object]:
        """Size and types of a file, and the types of its source if the file was made from another."""
        size, weights = _weights(path)
        about: dict[str, object] = {"path": str(path), "bytes": size, "weights": weights}
        if path != self._sources[side]:
            _, origin = _weights(self._sources[side])
            about |= {"source": origin, "how": _how(origin, weights)}
        return about

    def _refuse_what_does_not_fit(self, target: Path, draft: Path) -> None:
        from slipstream.tools.fit import available_bytes, fit

        if available_bytes() is None:
            return  # this system does not report its memory, so loading itself has to fail
        needs = fit(str(target), str(draft), context=self.context, weight_format=self.config.weight_format)
        if not needs.fits:
            raise ConfigError(
                f"the pair needs {needs.total_bytes >> 20} MiB and {needs.memory_bytes >> 20} MiB are free",
                "free some memory or ask for fewer tokens",
            )


def _how(source: Mapping[str, float], made: Mapping[str, float]) -> str:
    """What was done to a file's numbers; a file made from rounded numbers is not as good as its type suggests."""
    if list(source) == list(made):
        return "copied"
    if all(kind in _EXACT_ENOUGH for kind in source):
        return "quantised"
    return "unpacked" if all(kind in _EXACT_ENOUGH for kind in made) else "requantised"


def _weights(path: Path) -> tuple[int, dict[str, float]]:
    """The size of a file and the share of its numbers in each type, the most frequent type first."""
    from slipstream.tools.file_report import inspect_file

    report: Mapping[str, Any] = inspect_file(path)
    counts = {kind: total["parameters"] for kind, total in report["totals"].items()}
    shares = {kind: count / max(1, sum(counts.values())) for kind, count in counts.items()}
    shown = sorted(((share, kind) for kind, share in shares.items() if share >= _LEAST_SHARE), reverse=True)
    return report["size"], {kind: round(share, 4) for share, kind in shown}


def variant_columns(llm: LLM, adapters: Sequence[str]) -> list[Column]:
    """One column per adapter of `llm`, in order, and one for the drafter without adapter where `base` is named.

    A single adapter is compared with the drafter without one.
    """
    names = iter(llm.draft_variants[1:])
    columns = []
    for adapter in adapters if len(adapters) > 1 else (BASE_VARIANT, *adapters):
        name = BASE_VARIANT if adapter == BASE_VARIANT else next(names)
        about: dict[str, object] = {} if adapter == BASE_VARIANT else {"adapter": adapter}
        columns.append(Column(name, partial(_ready, (llm, about)), name))
    return columns


def _ready(pair: LoadedPair) -> AbstractContextManager[LoadedPair]:
    return nullcontext(pair)


def split_adapters(given: Sequence[str]) -> list[str]:
    """The adapters of a repeatable option whose values may be lists; it refuses empty and repeated names."""
    found = [item.strip() for value in given for item in value.split(",")]
    if "" in found or len(set(found)) < len(found):
        raise RequestError(
            f"'{','.join(given)}' holds an empty or a repeated name", "give adapters, or base, each once"
        )
    if found == [BASE_VARIANT]:
        raise RequestError(f"there is nothing to compare with {BASE_VARIANT}", "name an adapter")
    return found

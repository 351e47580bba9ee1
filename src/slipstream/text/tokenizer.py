"""The tokenizer of a model, from a tokenizer.json folder or GGUF metadata, behind one small interface."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from slipstream.errors import ConfigError, FormatError, RequestError
from slipstream.lazy import cached_property
from slipstream.text import cutting, gguf_vocab
from slipstream.text.token_bytes import TokenNotation

# Special tokens that end a turn in every model that has them. They are added to a model's own list of end tokens, which
# may be incomplete.
TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_turn|>",
    "<end_of_utterance>",
    "<|return|>",
    "<|call|>",
    "<EOT>",
    "<|EOT|>",
    "[EOT]",
)
_SAMPLE = "Aé 1.\n"  # has every kind of piece that tokenizers distinguish: letters, a digit, spaces, punctuation
_MAX_UTF8_BYTES = 4  # the longest UTF-8 character
_PROBE = "a"  # a text that shows which tokens a backend adds around every text


class TooLongError(RequestError):
    """A text has more tokens than it may have."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the text has more than {limit} tokens", "shorten it")


class Tokenizer:
    """Text to token ids and back; safe to share between threads."""

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        add_bos: bool | None = None,
        chat_template: str | None = None,
    ) -> None:
        """The first of `eos_ids` is the templates' `eos_token`. If `add_bos` is None, the backend decides about BOS."""
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.add_bos = add_bos
        self._notation = TokenNotation.of(backend.decoder)
        added = backend.get_added_tokens_decoder()
        self._added = {index: token.content for index, token in added.items()}
        self._special = frozenset(index for index, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self.bos_id = bos_id
        ends = {index for index in self._special if self._added[index] in TURN_ENDS}
        self.eos_ids: frozenset[int] = frozenset(eos_ids) | ends
        self.chat_template = chat_template
        self._first_eos = eos_ids[0] if eos_ids else None

    @classmethod
    def load(cls, path: Path, metadata: Mapping[str, object] | None = None) -> Tokenizer:
        """Loads a tokenizer from a folder with a tokenizer.json, or else from the metadata of the model's GGUF file."""
        folder = path if path.is_dir() else path.parent
        if (folder / "tokenizer.json").is_file() and not (path.is_file() and metadata):
            return cls._from_folder(folder)
        if metadata:
            return cls.from_gguf(metadata)
        raise ConfigError(f"{path} has no tokenizer", "put the model's tokenizer.json beside its weights")

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        vocab = gguf_vocab.build(metadata)
        return cls(
            vocab.backend,
            bos_id=vocab.bos_id,
            eos_ids=vocab.eos_ids,
            add_bos=vocab.add_bos,
            chat_template=vocab.chat_template,
        )

    @classmethod
    def _from_folder(cls, folder: Path) -> Tokenizer:
        try:
            backend = Backend.from_file(str(folder / "tokenizer.json"))
            backend.encode(_SAMPLE)  # some faults of a file appear only in use
        except BaseException as error:  # the library raises bare exceptions, and its panics are not Exceptions
            reason = _failure(error)
            raise FormatError(f"{folder / 'tokenizer.json'} cannot be read: {reason}", "fetch it again") from None
        config = _read_object(folder / "tokenizer_config.json")
        names = _read_object(folder / "special_tokens_map.json") | config
        eos_ids = _id_list(_named_id(backend, names.get("eos_token")))
        for file in ("generation_config.json", "config.json"):
            eos_ids += _id_list(_read_object(folder / file).get("eos_token_id"))
        return cls(
            backend,
            bos_id=_named_id(backend, names.get("bos_token")),
            eos_ids=eos_ids,
            chat_template=_folder_template(folder, config),
        )

    @property
    def vocab_size(self) -> int:
        """The number of tokens including added ones; the model's own embedding table may be padded beyond it."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def bos_token(self) -> str:
        return "" if self.bos_id is None else self.token_text(self.bos_id)

    @property
    def eos_token(self) -> str:
        return "" if self._first_eos is None else self.token_text(self._first_eos)

    @property
    def leading_spaces(self) -> int:
        """How many spaces at the start of a decoded text come from encoding; decoding removes them."""
        return self._notation.leading_spaces

    def encode(
        self, text: str, *, add_bos: bool | None = None, parse_special: bool = True, limit: int | None = None
    ) -> list[int]:
        """Returns the token ids of a text.

        `add_bos` None follows the model's own setting; `parse_special` False treats `<|...|>` as ordinary text. With a
        `limit`, a text of more tokens is refused as soon as that is certain: by its bytes, or while it is tokenised.
        """
        if limit is not None and self.fewest_tokens([text], limit) > limit:
            raise TooLongError(limit)
        ids: list[int] = []
        for more in self.encode_pieces(text, add_bos=add_bos, parse_special=parse_special):
            ids += more
            if limit is not None and len(ids) > limit:
                raise TooLongError(limit)
        return ids

    def encode_pieces(
        self, text: str, *, add_bos: bool | None = None, parse_special: bool = True
    ) -> Iterator[list[int]]:
        """Yields the ids of a text in parts, so that tokenising a long text takes memory for one part only."""
        backend = self.backend if parse_special else self.literal_backend
        wanted = self.add_bos if add_bos is None else add_bos
        own = wanted is None  # whether the backend itself adds the tokens around a text
        before: list[int] = [self.bos_id] if wanted and self.bos_id is not None else []
        after: list[int] = []
        texts: Iterable[str] = (text,)
        if len(text) > cutting.PIECE_CHARS and self.can_cut:
            texts = cutting.pieces(text)
            if own:
                own, (before, after) = False, self._surroundings
        yield before
        for piece in texts:
            yield _encoded(backend, piece, own)
        yield after

    @cached_property
    def _surroundings(self) -> tuple[list[int], list[int]]:
        """The tokens that the backend adds before and after every text."""
        alone, within = (self.backend.encode(_PROBE, add_special_tokens=special).ids for special in (False, True))
        place = next(i for i in range(len(within)) if within[i : i + len(alone)] == alone)
        return within[:place], within[place + len(alone) :]

    @cached_property
    def can_cut(self) -> bool:
        """Whether a long text may be tokenised piece by piece and has the same ids."""
        known = bool(self.backend.encode(_PROBE, add_special_tokens=False).ids)
        return known and cutting.can_cut(self.backend, self.vocabulary)

    def prepare_long_texts(self) -> None:
        """Computes now what the first long text needs: 6 MB, which would otherwise count as that text's memory."""
        _ = self.can_cut, self.token_shares

    @cached_property
    def token_shares(self) -> cutting.Shares | None:
        """What a byte of each kind adds to the fewest tokens of a text; None if nothing is certain."""
        return cutting.token_shares(self.backend, self.vocabulary)

    @property
    def vocabulary(self) -> list[bytes]:
        """The bytes of every token by its id."""
        return [self.token_bytes(index) for index in range(self.vocab_size)]

    def fewest_tokens(self, texts: Sequence[str], limit: int) -> int:
        """Returns a number of tokens that the texts certainly have together, without tokenising them.

        The result is 0 if nothing is certain, or if it cannot exceed `limit`.
        """
        if _MAX_UTF8_BYTES * sum(map(len, texts)) <= limit:
            return 0
        try:
            data = "".join(texts).encode()
        except UnicodeError:
            return 0  # tokenising such a text raises an error that says what is wrong
        if len(data) <= limit or self.token_shares is None:
            return 0
        return cutting.fewest_tokens(data, self.token_shares)

    def longest_piece(self, text: str) -> int:
        """Returns how many characters of a text are tokenised in one call, at most."""
        cut = len(text) > cutting.PIECE_CHARS and self.can_cut
        return max(map(len, cutting.pieces(text)), default=0) if cut else len(text)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Returns the text of tokens; bytes that are not UTF-8 become U+FFFD."""
        shown = [index for index in ids if not (skip_special and index in self._special)]
        text = b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")
        return text[count_leading(text, self.leading_spaces) :]

    def token_bytes(self, index: int) -> bytes:
        """Returns a token's bytes; an id outside the vocabulary, as padded models can produce, has none."""
        known = self._bytes.get(index)
        if known is None:
            added = self._added.get(index)
            token = self.backend.id_to_token(index) if added is None and index >= 0 else None
            known = added.encode() if added is not None else b"" if token is None else self._notation.to_bytes(token)
            self._bytes[index] = known
        return known

    def token_text(self, index: int) -> str:
        """Returns one token as text of its own, for display."""
        return self.token_bytes(index).decode("utf-8", "replace")

    def whole_texts(self, ids: Iterable[int]) -> list[str | None]:
        """Returns what each token adds to a text that ends with a whole character; None if it is not valid UTF-8."""
        known = self._texts
        return [known[index] if index in known else self._whole_text(index) for index in ids]

    def _whole_text(self, index: int) -> str | None:
        try:
            text = "" if index in self._special else self.token_bytes(index).decode()
        except UnicodeDecodeError:
            text = None
        self._texts[index] = text
        return text

    def is_special(self, index: int) -> bool:
        return index in self._special

    def serialized(self) -> str:
        """Returns everything another process needs to tokenise exactly as this tokenizer does."""
        text: str = self.backend.to_str()
        return text

    @cached_property
    def literal_backend(self) -> Backend:
        # This is a second copy, because the switch is a property of the backend and other threads use the first one.
        literal = Backend.from_str(self.serialized())
        literal.encode_special_tokens = True
        return literal


def count_leading(text: str, most: int) -> int:
    """Returns how many spaces a text begins with, at most `most`."""
    return min(most, len(text) - len(text.lstrip(" ")))


def _failure(error: BaseException) -> str:
    """Returns what went wrong in the tokenizers library, or raises `error` again if it is not from the library.

    The library's panics are not `Exception`s; nor are signals such as `KeyboardInterrupt`, which must not be swallowed.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return str(error)


def _encoded(backend: Backend, text: str, add_special: bool) -> list[int]:
    try:
        # this call of the library lets other threads run, and leaves out offsets, which are not needed
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
    except (TypeError, UnicodeError):
        raise RequestError("the text is not valid Unicode", "remove lone surrogates from it") from None
    except BaseException as error:
        reason = _failure(error)
        raise RequestError(f"the model's tokenizer fails on this text: {reason}", "shorten or change it") from None
    return ids


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} cannot be read: {error}", "fetch it again") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path} is not a JSON object", "fetch it again")
    return value


def _named_id(backend: Backend, token: Any) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(text) if isinstance(text, str) else None


def _id_list(value: Any) -> list[int]:
    return [index for index in (value if isinstance(value, list) else [value]) if type(index) is int]


def _folder_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise FormatError(f"{file} cannot be read: {error}", "fetch it again") from None
    template = config.get("chat_template") or _read_object(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) and template else None

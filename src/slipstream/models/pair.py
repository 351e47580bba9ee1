"""Refuses a drafter and a target that do not belong together; without this check only acceptance would show it."""

from __future__ import annotations

from slipstream.errors import PairError
from slipstream.models.decoder import DecoderConfig
from slipstream.models.dflash import DFlashDrafter

_HINT = "use the drafter that was trained for this target"


def check_pair(target: DecoderConfig, drafter: DFlashDrafter) -> None:
    """Raises PairError with the first reason why this target and this drafter cannot work together."""
    config = drafter.config
    if config.target_family is not None and config.target_family != target.family:
        said = f"the drafter was trained on a '{config.target_family}' target, this one is '{target.family}'"
        raise PairError(said, _HINT)
    if config.vocab_size != target.vocab_size:
        raise PairError(
            f"the drafter's vocabulary has {config.vocab_size} tokens, the target's {target.vocab_size}", _HINT
        )
    shares = drafter.embed is None or drafter.head is None
    if shares and config.hidden_size != target.hidden_size:
        raise PairError(
            f"the drafter is {config.hidden_size} wide and shares the embedding of a target {target.hidden_size} wide",
            _HINT,
        )
    width = drafter.tap_width // len(config.target_layer_ids)
    if width != target.hidden_size:
        raise PairError(f"the drafter reads taps {width} wide, the target's are {target.hidden_size}", _HINT)
    if config.num_target_layers is not None and config.num_target_layers != target.layers:
        raise PairError(
            f"the drafter was trained on a target of {config.num_target_layers} layers, this one has {target.layers}",
            _HINT,
        )
    outside = [layer for layer in config.target_layer_ids if not -1 <= layer < target.layers]
    if outside:
        raise PairError(f"the drafter taps layer {outside[0]}, the target has layers 0 to {target.layers - 1}", _HINT)
    if config.mask_token_id >= target.vocab_size:
        raise PairError(
            f"the drafter's mask token {config.mask_token_id} is not in the target's vocabulary of {target.vocab_size}",
            _HINT,
        )

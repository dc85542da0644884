"""What the files beside config.json say about generation: generation_config.json and
tokenizer_config.json.

An engine takes bos and eos from config.json and its sampling from the request. Another id in these
files would end or begin texts elsewhere, so it is refused. Their sampling defaults, which other
engines apply, are named in the log and not applied.
"""

from __future__ import annotations

import logging
import reprlib
from pathlib import Path
from typing import Any

from deepinfer.checkpoint.header import CheckpointError
from deepinfer.config import ModelConfig
from deepinfer.config.io import read_json
from deepinfer.config.wording import printable

__all__ = ["check_generation"]

# keys that say nothing about what is generated, or what the ids say already
_SILENT = {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "use_cache"}
# values with which a key changes nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "do_sample": (True,),
    "temperature": (1.0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "repetition_penalty": (1.0,),
    "length_penalty": (1.0,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "no_repeat_ngram_size": (0,),
}


def check_generation(path: Path, config: ModelConfig, tokenizer: Any) -> None:
    """Compare the two files in the folder `path`, if they are there, with the config.

    tokenizer: a `tokenizers.Tokenizer` or None. CheckpointError for another bos or eos, naming both
    files; sampling defaults are named in a warning.
    """
    generation = _read(path / "generation_config.json")
    for key in ("bos_token_id", "eos_token_id"):
        _check_id(path / "generation_config.json", key, generation.get(key), key, config)
    spelt = _read(path / "tokenizer_config.json") if tokenizer is not None else {}
    for name in ("bos_token", "eos_token"):
        text = spelt.get(name)
        text = text.get("content") if isinstance(text, dict) else text
        if text is not None:
            found = tokenizer.token_to_id(text) if isinstance(text, str) else None
            said = f"{name} {reprlib.repr(text)}"
            file = path / "tokenizer_config.json"
            _check_id(file, said, -1 if found is None else found, f"{name}_id", config)
    _name_defaults(path / "generation_config.json", generation)


def _read(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        return read_json(file)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{file}: {error}") from None


def _check_id(file: Path, said: str, found: Any, key: str, config: ModelConfig) -> None:
    """found: an id, a list of those, or None where the file says nothing."""
    expected = getattr(config, key)
    if found is None or found == expected or found == [expected]:
        return
    shown = (
        "which tokenizer.json does not have" if found == -1 else f"that is {reprlib.repr(found)}"
    )
    shown = reprlib.repr(found) if said == key else shown
    raise CheckpointError(
        f"{file}: {said}: {shown}; config.json has {key} {expected}. An engine uses that one alone, "
        f"so texts would {'end' if key.startswith('eos') else 'begin'} elsewhere than the files "
        "say: make both the same, or remove the key here"
    )


def _name_defaults(file: Path, generation: dict[str, Any]) -> None:
    named = [
        f"{key} {reprlib.repr(value)}"
        for key, value in generation.items()
        if value is not None
        and not key.startswith("_")
        and key not in _SILENT
        and value not in _NEUTRAL.get(key, ())
    ]
    if named:
        logging.getLogger("deepinfer").warning(
            "%s: defaults that are not applied: %s; give them as SamplingParams",
            printable(str(file)),
            printable(", ".join(named[:20])),
        )

"""The card on what the model is: purpose, architecture, storage, data, licence."""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.checkpoint.sizes import memory_table
from deepinfer.config import ModelConfig
from deepinfer.display.numbers import counted, fmt
from deepinfer.display.numbers import size as in_units
from experiments.nano.report.card import markdown as md

EXAMPLE = (
    "import deepinfer as di",
    "eng = di.Engine.nano()",
    "print(eng.generate(di.data.heldout()[0], max_tokens=64))",
)


def parts(config: ModelConfig) -> dict[str, dict[str, int]]:
    """{component: its row of sizes}, "total" among them."""
    return {str(row["component"]): row for row in memory_table(config, (1,))}  # type: ignore


def millions(n: int) -> str:
    return f"{fmt(n / 1e6)} M"


def introduction(checkpoint: Checkpoint) -> list[str]:
    size = parts(checkpoint.config)
    whole, drafter = size["total"]["parameters"], size["drafter"]["parameters"]
    kept = [f for f in checkpoint.path.iterdir() if f.suffix in (".json", ".safetensors")]
    files = sum(f.stat().st_size for f in kept)
    return [
        *md.paragraph(
            f"A language model of {millions(whole)} parameters ({millions(whole - drafter)} in the "
            f"backbone, {millions(drafter)} in the drafter) with every mechanism of the text model "
            "of DeepSeek-V4.1-Flash: window and compressed sparse attention with an indexer and "
            "candidate blocks, routed experts, hyper-connections, an n-gram memory (Engram) and a "
            "drafter for speculative decoding (DSpark). It is stored as the release is, in FP8 and "
            f"FP4, and takes {in_units(files)} with its tokenizer."
        ),
        *md.code(EXAMPLE),
        *md.paragraph(
            "**It is for** measuring an engine: how many drafts are accepted, how uneven the load "
            "of experts is, what an approximation costs, all of which mean nothing with random "
            "weights. It continues Python code."
        ),
        *md.paragraph(
            "**It is not** an assistant, and not a tool to write code with: it follows no "
            "instructions, knows nothing but the text of Python's standard library, and writes "
            "code that looks right and is not. It says nothing about the quality of the released "
            "model, and its figures do not carry over to models of that size."
        ),
    ]


# --------------------------------------------------------------------------------- architecture


def architecture(checkpoint: Checkpoint) -> list[str]:
    c, size = checkpoint.config, parts(checkpoint.config)
    lines = ["## Model", ""]
    lines += md.table(("what", "value"), [(what, value) for what, value in described(c)])
    lines += md.paragraph(f"Layers in order: {layers(c)}.")
    rows = [
        (name.replace("_", " "), md.number(row["parameters"]), md.number(row["disk"]))
        for name, row in size.items()
    ]
    lines += md.table(("part", "parameters", "bytes on disk"), rows)
    return lines


def described(c: ModelConfig) -> list[tuple[str, str]]:
    """What each mechanism's size is, from the config."""

    def plain(values: Any) -> str:
        return ", ".join(map(str, values))

    text = c.to_dict()["text_config"]
    return [
        ("hidden size, vocabulary", f"{c.hidden_size}, {c.vocab_size:,}"),
        (
            "layers",
            f"{len(c.encoder_layers)} encoder, {len(c.decoder_layers)} decoder, "
            f"{len(c.draft_layers)} draft",
        ),
        (
            "attention",
            f"{text['num_attention_heads']} heads of {c.head_dim}, "
            f"{text['qk_rope_head_dim']} of it rotated; window {c.sliding_window}",
        ),
        ("compression by layer", plain(text["compress_ratios"]) + " (the last of draft layers)"),
        ("compressed KV from layers", plain(text["kv_source_layer_ids"])),
        (
            "indexer",
            f"{text['index_n_heads']} heads of {text['index_head_dim']}, "
            f"picks {c.index_topk}, in layers {plain(text['index_source_layer_ids'])}",
        ),
        (
            "candidates",
            f"{text['candidate_topk_blocks']} blocks of {text['candidate_block_size']} "
            f"entries, from layer {text['candidate_source_layer_id']} on",
        ),
        (
            "experts",
            f"{c.n_routed_experts}, {c.num_experts_per_tok} a token, and "
            f"{text['n_shared_experts']} shared; width {text['moe_intermediate_size']}",
        ),
        ("hyper-connections", f"{c.hc_mult} streams, {text['hc_sinkhorn_iters']} Sinkhorn steps"),
        (
            "Engram",
            f"layers {plain(c.engram_layer_ids)}, n-grams up to "
            f"{text['engram_max_ngram_size']}, {text['engram_n_heads']} heads of "
            f"{text['engram_head_dim']}",
        ),
        (
            "drafter",
            f"{counted(text['dspark_block_size'], 'draft')} a step, reads layers "
            f"{plain(text['dspark_target_layer_ids'])}",
        ),
        (
            "its experts, Markov head",
            f"{text['dspark_n_routed_experts']}, "
            f"{text['dspark_num_experts_per_tok']} a token; rank "
            f"{text['dspark_markov_rank']}",
        ),
    ]


def layers(c: ModelConfig) -> str:
    """Runs of equal roles, counted."""
    runs: list[list[Any]] = []
    for role in c.roles:
        if runs and runs[-1][1] == role:
            runs[-1][0] += 1
        else:
            runs.append([1, role])
    return ", ".join(f"{n} {role}" if n > 1 else str(role) for n, role in runs)


# ------------------------------------------------------------------------------------------ data


def manifest() -> dict[str, Any]:
    return json.loads(
        resources.files("deepinfer.data").joinpath("manifest.json").read_text("utf-8")
    )


def data(checkpoint: Checkpoint, work: Path) -> list[str]:
    known = manifest()
    lines = ["## Data", ""]
    lines += md.paragraph(
        f"Source: the `.py` files of the standard library of {known['source']}, nothing else; "
        f"licence {known['licence']}. Whole modules are trained on or not. Modules that share text "
        "are on one side; those of a middle size are sorted by the SHA-1 of their name: the first "
        "are held out and measured once, the next are dev, on which every choice was made, the "
        "others are trained on. Test suites are trained on and never judge; tests of a held-out or "
        "dev module, copies and near copies of their text are in no part. Files that are tables "
        "of numbers or names are not trained on. The second domain, never trained on, is the prose "
        "of Python's help topics and its licence. The rule: `experiments/nano/data/split.py`; what held-"
        "out files still share with trained ones: `deepinfer/data/README.md`."
    )
    rows = []
    for name, each in known["sets"].items():
        modules = len({file["module"] for file in each["files"]})
        rows.append(
            (
                name,
                md.number(len(each["files"])),
                md.number(modules),
                md.number(each["bytes"]),
                f"`{each['sha256']}`",
            )
        )
    lines += md.table(("judges", "files", "modules", "bytes", "SHA-256 of the text"), rows)
    return lines + trained_on(checkpoint, work)


def trained_on(checkpoint: Checkpoint, work: Path) -> list[str]:
    corpus, tokenizer = work / "corpus.npz", work / "tokenizer.json"
    if not corpus.is_file() or not tokenizer.is_file():
        return md.paragraph(
            "Not counted: the trained tokens, for `corpus.npz` and `tokenizer.json` were not there."
        )
    mine = checkpoint.tokenizer_path
    if mine is None or mine.read_bytes() != tokenizer.read_bytes():
        raise ValueError(
            "the tokenizer beside corpus.npz is not the checkpoint's: the model was trained on "
            "another corpus; name that one's folder with --work"
        )
    rows = []
    with np.load(corpus) as arrays:
        for name in ("library", "renamed", "tests", "dev"):
            if f"{name}_ids" not in arrays:  # an older corpus has no renamed text
                continue
            ids, offsets = arrays[f"{name}_ids"], arrays[f"{name}_offsets"]
            rows.append((name, md.number(len(offsets) - 1), md.number(len(ids))))
    digests = [
        f"`{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}`" for f in (tokenizer, corpus)
    ]
    return [
        *md.table(("part", "files", "tokens"), rows),
        *md.paragraph(
            "library and tests are trained on, and so is renamed (library text with other names in it) "
            "where the recipe has a share of it. Tokenizer: byte-level BPE, learnt on the trained "
            "files alone. Tokens count a bos and an eos for each file. SHA-256 of the files:"
        ),
        *map(md.bullet, digests),
        "",
    ]


def licence() -> list[str]:
    return [
        "## Licence",
        "",
        *md.paragraph(
            "The weights, config and tokenizer: Apache-2.0, as the project. The texts in "
            f"`deepinfer/data`: {manifest()['licence']}, copyright of the Python Software "
            "Foundation and the other holders named in that file. What the model writes can repeat "
            "text that it was trained on, which stays under that licence."
        ),
    ]

"""The `deepinfer` command: demo, generate, inspect, make-tiny, doctor, lab.

Results go to standard output (`--json` where a program would read them), all else to standard
error. Exit status: 0 done, 1 refused or failed with one line that says why, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.engine.completion import Completion
    from deepinfer.engine.engine import Engine

MOST_THREADS = 1024  # torch starts as many as it is told to, whatever the machine has
RELEASE = "v41-flash"  # the released architecture, known without a checkpoint
NAMED = {  # models that are words, and what standard error says of them
    "nano": "the trained model of this package; it completes Python",
    "tiny": "random weights; its text is noise",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = _parse(sys.argv[1:] if argv is None else argv)
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        print("deepinfer: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `deepinfer inspect ... | head`
        sys.stderr.close()
        return 1
    except (ValueError, LookupError, OSError, ImportError, RuntimeError, MemoryError) as error:
        if args.traceback:
            raise
        said = error.args[0] if isinstance(error, KeyError) and error.args else error
        if args.command in ("demo", "generate"):
            said = _in_options(str(said))
        if isinstance(error, MemoryError):  # Python's own says nothing
            said = f"out of memory {error}".rstrip()
        print(f"deepinfer {args.command}: {said}", file=sys.stderr)
        return 1


# -- the commands ---------------------------------------------------------------------------------


def demo(args: argparse.Namespace) -> int:
    """The trained nano model completes Python that it has never seen, with drafts and without."""
    from deepinfer import demo as shown

    threads = _threads(args.threads)
    found = shown.run(device=args.device, max_tokens=args.max_tokens, seed=args.seed)
    if args.json:
        begun = [found.prompt] * len(found.plain)
        _dump(found.facts() | {"threads": threads, "completions": _plain(found.plain, begun)})
    else:
        print(shown.said(found, threads))
    return 0


def generate(args: argparse.Namespace) -> int:
    """Continue each prompt."""
    threads = _threads(args.threads)
    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    sampling |= {"top_p": args.top_p, "top_k": args.top_k, "seed": args.seed}
    with _engine(args) as engine:
        out, seconds = _timed(lambda: engine.generate(list(args.prompts), **sampling))
    from deepinfer.display.numbers import counted

    tokens = sum(len(c.token_ids) for c in out)
    failed = [c for c in out if c.error is not None]
    if args.json:
        _dump({"model": args.model, "threads": threads, "completions": _plain(out, args.prompts)})
    else:
        for prompt, completion in zip(args.prompts, out, strict=True):
            said = f"error: {completion.error}" if completion.error else completion.text
            print(f"{prompt}{said}" if completion.error is None else said)
    made = counted(tokens, "token")
    print(f"{made} in {seconds:.2f} s ({tokens / seconds:.1f} tokens/s)", file=sys.stderr)
    return 1 if failed else 0


def inspect(args: argparse.Namespace) -> int:
    """What a checkpoint holds and what a device needs, from its config alone."""
    from deepinfer.checkpoint import inspection

    report = inspection.inspect(_inspected(args.path))
    print(report.to_json() if args.json else report)
    return 0


def make_tiny(args: argparse.Namespace) -> int:
    """Write a tiny random checkpoint in the official layout."""
    path = Path(args.path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} is there already and not an empty folder: name another path")
    _make_tiny(path, args.seed)
    files = sorted(p for p in path.iterdir() if p.is_file())
    if args.json:
        _dump({"path": args.path, "files": {p.name: p.stat().st_size for p in files}})
    else:
        print("\n".join(f"{p.stat().st_size:>13,}  {p.name}" for p in files))
        named = "./tiny" if args.path == "tiny" else args.path  # the bare word is another model
        print(f"deepinfer generate --model {shlex.quote(named)} 'a prompt'   # runs it")
    return 0


def doctor(args: argparse.Namespace) -> int:
    """What this machine can run, each fact with its reason."""
    from deepinfer.doctor import examine

    report = examine()
    if args.json:
        _dump({"ok": not report.problems, "problems": report.problems, "rows": report.rows})
    else:
        print(report)
    return 1 if report.problems else 0


def lab(args: argparse.Namespace) -> int:
    """Open JupyterLab on the tutorials."""
    from deepinfer.lab import open_lab

    folder = None if args.folder is None else Path(args.folder)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    return open_lab(folder, start=not args.copy, options=args.options, say=say)


# -- the arguments --------------------------------------------------------------------------------


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; what follows `--` of `lab` is JupyterLab's and is not looked at."""
    command = next((word for word in argv if not word.startswith("-")), None)
    split = list(argv).index("--") if command == "lab" and "--" in argv else len(argv)
    args = _parser().parse_args(argv[:split])
    args.options = list(argv[split + 1 :])
    return args


def _parser() -> argparse.ArgumentParser:
    from deepinfer import __version__

    parser = argparse.ArgumentParser(
        prog="deepinfer",
        description="DeepInfer as a research framework: run, open and measure DeepSeek-V4.1-Flash.",
        epilog="example: deepinfer demo",
    )
    parser.add_argument("--version", action="version", version=f"deepinfer {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_generate(commands)
    _add_small(commands)
    return parser


def _add(commands: Any, name: str, run: Any, example: str) -> argparse.ArgumentParser:
    about = run.__doc__.splitlines()[0]
    parser = commands.add_parser(name, help=about, description=about, epilog=f"example: {example}")
    parser.set_defaults(run=run)
    return parser


def _add_demo(commands: Any) -> None:
    parser = _add(commands, "demo", demo, "deepinfer demo --max-tokens 32")
    parser.add_argument(
        "--max-tokens", type=int, default=48, metavar="N", help="default %(default)s"
    )
    _add_common(parser, seed=0)


def _add_generate(commands: Any) -> None:
    example = "deepinfer generate --max-tokens 32 --temperature 0.6 --seed 7 'def read(path):'"
    parser = _add(commands, "generate", generate, example)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="raw text; no chat template")
    parser.add_argument(
        "--model",
        default="nano",
        metavar="PATH",
        help="a checkpoint's folder, or 'nano' (default): the trained model of this package, or "
        "'tiny': random weights; folders of these names are ./nano and ./tiny",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="default %(default)s"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="0 is greedy; default %(default)s",
    )
    for name, letter, of, default in (("--top-p", "P", float, 1.0), ("--top-k", "K", int, -1)):
        about = "default %(default)s: keeps all"
        parser.add_argument(name, type=of, default=default, metavar=letter, help=about)
    parser.add_argument(
        "--draft",
        type=int,
        default=0,
        metavar="N",
        help="tokens drafted and verified a step; the text stays the same (default 0: off)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        default=None,
        help="default: float32 on a CPU, bfloat16 on an accelerator",
    )
    _add_common(parser, seed=None)


def _add_small(commands: Any) -> None:
    parser = _add(commands, "inspect", inspect, f"deepinfer inspect {RELEASE}")
    parser.add_argument(
        "path",
        metavar="PATH",
        help=f"a checkpoint's folder, a config.json, 'nano' for the trained model of this package, "
        f"or '{RELEASE}' for the released architecture",
    )
    _add_json(parser)

    parser = _add(commands, "make-tiny", make_tiny, "deepinfer make-tiny ./tiny --seed 1")
    parser.add_argument("path", metavar="PATH", help="a new or empty folder")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="default %(default)s")
    _add_json(parser)

    _add_json(_add(commands, "doctor", doctor, "deepinfer doctor --json"))

    parser = _add(commands, "lab", lab, "deepinfer lab my-tutorials -- --no-browser --port 8899")
    parser.usage = "deepinfer lab [-h] [--copy] [DIR] [-- OPTION ...]"
    parser.description += (
        " What follows -- goes to JupyterLab as it is: --allow-root (needed as root), "
        "--no-browser, --port N and all else that `jupyter lab --help` lists. The exit status is "
        "JupyterLab's."
    )
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="DIR",
        help="copy the tutorials there; a changed notebook is kept (default: deepinfer-tutorials)",
    )
    parser.add_argument("--copy", action="store_true", help="only copy, do not start JupyterLab")


def _add_common(parser: argparse.ArgumentParser, seed: int | None) -> None:
    chosen = "a new one each time" if seed is None else seed
    about = f"0 or more; the same seed gives the same text; default: {chosen}"
    parser.add_argument("--seed", type=_seed, default=seed, metavar="N", help=about)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default auto)")
    parser.add_argument(
        "--threads",
        type=_thread_count,
        default=1,
        metavar="N",
        help=f"of the CPU, 1 to {MOST_THREADS}; decode-sized work wants 1 (default %(default)s)",
    )
    _add_json(parser)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


# -- inside ---------------------------------------------------------------------------------------


def _thread_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:10]) <= MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r}: an integer in 1..{MOST_THREADS} is needed")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or not int(text[:21]) < 2**64:
        raise argparse.ArgumentTypeError(f"{text!r}: an integer in 0..2**64-1 is needed")
    return int(text)


def _threads(count: int) -> int:
    """Set torch's threads and say so."""
    import torch

    torch.set_num_threads(count)
    print(f"threads: {torch.get_num_threads()}", file=sys.stderr)
    return count


def _engine(args: argparse.Namespace) -> Engine:
    import deepinfer as di

    folder = None if args.model in NAMED else _located(args.model)
    if args.draft:
        _check_draft(args.draft, args.model, folder)
    verifier = di.verifier.Fixed(args.draft) if args.draft else "off"
    settings = {"device": args.device, "dtype": args.dtype, "verifier": verifier}
    if folder is not None:
        return di.Engine.from_pretrained(args.model, **settings)
    word = args.model
    there = f"; the folder ./{word} is --model ./{word}" if Path(word).is_dir() else ""
    print(f"model: {word}, {NAMED[word]}{there}", file=sys.stderr)
    return di.Engine.nano(**settings) if word == "nano" else di.Engine.tiny(seed=0, **settings)


def _located(model: str) -> Path:
    """The folder of `--model`; the command downloads nothing."""
    from deepinfer.checkpoint.hub import locate

    try:
        return locate(model)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"--model {model}: no such folder, and no owner/name in the local Hugging Face cache; "
            "name a checkpoint's folder, nano, or tiny for random weights"
        ) from None


def _inspected(path: str) -> str | Path | None:
    """What `inspection.inspect` looks at."""
    if path == "nano":
        from deepinfer.checkpoint import nano

        return nano.folder()
    if path == RELEASE or Path(path).exists():
        return None if path == RELEASE else path
    if path == "tiny":
        raise FileNotFoundError(
            "tiny: no such file or folder; its weights are made when it runs: `deepinfer make-tiny "
            "./tiny` writes them, and nano is the trained model of this package"
        )
    near = difflib.get_close_matches(path, ("nano", RELEASE), 1)
    hint = f"name a checkpoint's folder, a config.json, nano or {RELEASE}"
    hint = f"did you mean {near[0]}?" if near else hint
    raise FileNotFoundError(f"{path}: no such file or folder; {hint}")


def _check_draft(count: int, model: str, folder: Path | None) -> None:
    """ValueError, before any weight is read, where the model drafts fewer tokens a step."""
    from deepinfer.checkpoint import nano
    from deepinfer.checkpoint.tiny import tiny_config
    from deepinfer.config import ModelConfig

    tiny = folder is None and model == "tiny"
    most = (tiny_config() if tiny else ModelConfig.from_file(folder or nano.folder())).max_draft
    if not 0 <= count <= most:
        raise ValueError(f"--draft {count}: this model drafts 0 to {most} tokens a step")


def _in_options(said: str) -> str:
    """An error of the library in the command's words: top_p=0.0 is --top-p 0.0."""
    said = re.sub(
        r"^SamplingParams\((\w+)=(.*?)\): \1 must be (?:None or )?(.*), got .*$",
        r"\1=\2: \3 is needed",
        said,
    )
    return re.sub(
        r"\b(device|dtype|seed|temperature|top_p|top_k|max_tokens)=(['\"]?)([\w.+-]+(?::\w+)?)\2",
        lambda m: f"--{m[1].replace('_', '-')} {m[3]}",
        said,
    )


def _make_tiny(path: Path, seed: int) -> None:
    from deepinfer.checkpoint.tiny import write_tiny

    write_tiny(path, seed=seed)


def _timed(work: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def _plain(out: Sequence[Completion], prompts: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": prompt,
            "text": c.text,
            "token_ids": list(c.token_ids),
            "finish_reason": c.finish_reason,
            "logprobs": list(c.logprobs),
            "error": None if c.error is None else str(c.error),
        }
        for c, prompt in zip(out, prompts, strict=True)
    ]


def _dump(value: object) -> None:
    print(json.dumps(value, indent=1, allow_nan=False))


if __name__ == "__main__":
    sys.exit(main())

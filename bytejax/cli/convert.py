"""The `python -m bytejax.conversion` command: a released checkpoint into our layout, and back."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from bytejax import loading
from bytejax.cli import common
from bytejax.conversion import convert, hub, mtpc, parity, pickles
from bytejax.conversion.released import open_released
from bytejax.errors import InputError

DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float32", "bfloat16", "float16")}
DESCRIPTION = """Converts a checkpoint as it was released (a directory with safetensors or pickled weights, a .gguf
file, a hub id) into a directory that loads fast, or such a directory back into the released layout. A released MtPC
drafter (config.yaml beside model@STEP.pt) becomes a directory for --drafter."""
EPILOG = "Exit status: 0 done, 1 --check found other logits, 2 wrong input. Nothing is written unless it is 0."


class _DiffersError(Exception):
    """The converted model is not the one that PyTorch makes of the checkpoint."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with the given arguments (those of the process if None). -> exit status."""
    return common.run(lambda: _convert(argv))


def _convert(argv: Sequence[str] | None) -> int:
    args = _parser().parse_args(argv)
    if args.drafter or mtpc.is_drafter(Path(args.checkpoint)):
        return _drafter(args)
    out, dtype = Path(args.out), DTYPES.get(args.dtype)
    pickled = pickles.is_pickled(Path(args.checkpoint))
    source = Path(args.checkpoint) if pickled else loading.target_path(args.checkpoint)
    ours = not pickled and loading.is_saved_target(source)
    to = args.to or ("reference" if ours else "bytejax")
    if ours == (to == "bytejax"):
        raise InputError(f"{args.checkpoint} is in the layout {to!r} already")
    found = None
    model = parity.model_of(source) if args.check and not ours and not pickled else None  # before the work, not after
    if args.check:
        parity.require()
    try:
        with convert.written_whole(out) as part:
            if ours:
                convert.to_reference(*loading.saved_target(source), part, dtype)
            else:
                weights = pickles.open_pickles(source) if pickled else None
                home = source.parent if pickled and not source.is_dir() else source
                convert.to_bytejax(open_released(home, weights), part, dtype)
            if args.check:
                model = model or parity.model_of(part if ours else source)
                found = parity.compare(loading.load_target(source if ours else part), model)
                if not parity.agrees(found):
                    raise _DiffersError
    except _DiffersError:
        print(json.dumps({"out": None, "to": to, **found}))
        print(f"error: {args.checkpoint}: PyTorch computes other logits from it", file=sys.stderr)
        return 1
    print(json.dumps({"out": str(out), "to": to, **(found or {})}))
    return 0


def _drafter(args: argparse.Namespace) -> int:
    """Converts a released drafter; its adapters only beside the target that they belong to."""
    if args.check or args.to == "reference":
        raise InputError("--check and --to reference are of targets; a drafter is only read")
    path = Path(args.checkpoint)
    if not path.exists() and hub.is_id(args.checkpoint):
        path = hub.download(args.checkpoint, hub.DRAFTER_FILES)
    released = mtpc.read(path, hmm_bias=args.hmm_bias, ignore=args.ignore)
    layers = released.lora_layers
    if layers and args.target is None:
        raise InputError(f"{path} has adapters on layers {layers[0]} to {layers[-1]}; name their target with --target")
    target = loading.load_target(args.target, unroll=True) if args.target else None
    if target is not None:
        mtpc.check_target(released, target, str(path))
    with convert.written_whole(Path(args.out)) as part:
        dtype = DTYPES[args.dtype or "bfloat16"]
        if layers:
            loading.save_lora(part, target, released.adapters, (released.head, released.params), dtype)
        else:
            loading.save_head(part, released.head, released.params, dtype)
    circuit = released.head.circuit
    found = {"circuit": circuit.name, "window": circuit.window, "rank": circuit.rank, "gamma": released.gamma}
    print(json.dumps({"out": args.out, "to": "bytejax", **found, "lora_layers": len(layers)}))
    return 0


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as e:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression ({e})") from None
    return text


def _parser() -> common.Parser:
    prog = "python -m bytejax.conversion"
    parser = common.Parser(prog=prog, description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("checkpoint", help='a directory, a .gguf, .bin, .pt or .pth file, or a hub id ("owner/name")')
    parser.add_argument("out", help="the directory to write; it must not exist, or be empty")
    parser.add_argument("--to", choices=("bytejax", "reference"), help="layout to write (default: the other one)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the weights written (default: as they are)")
    parser.add_argument("--check", action="store_true", help="compare logits with PyTorch, through transformers")
    drafters = parser.add_argument_group("MtPC drafters")
    add = drafters.add_argument
    add("--drafter", action="store_true", help="the hub id is a drafter's (directories and files are recognised)")
    add("--target", help="the target of a drafter with adapters, or one to check a drafter against")
    add(
        "--hmm-bias",
        type=_pattern,
        metavar="REGEX",
        help="tensors that bias an HMM's transitions; the file's are named if unknown",
    )
    add("--ignore", type=_pattern, metavar="REGEX", help="tensors to leave out")
    return parser

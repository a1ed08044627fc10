"""Writes the config and the tokenizer of a BERT of any size, for exercises that train it from
scratch. The heads have 64 dimensions each, and the inner layers four times the hidden size, as in
BERT-base.

python docs/lab/make_bert.py runs/lab/bert-11m --layers 6 --hidden_size 384
"""

import argparse
import json
import shutil
from pathlib import Path

TINY = Path(__file__).resolve().parents[2] / "tests" / "data" / "tiny_bert"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--hidden_size", type=int, required=True, help="a multiple of 64")
    parser.add_argument("--vocab_size", type=int, help="(that of the tests' small vocabulary)")
    args = parser.parse_args()
    if args.hidden_size % 64:
        parser.error("--hidden_size has to be a multiple of 64")
    shutil.copytree(TINY, args.folder, dirs_exist_ok=True)
    config = json.loads((TINY / "config.json").read_text())
    config |= {
        "num_hidden_layers": args.layers,
        "hidden_size": args.hidden_size,
        "num_attention_heads": args.hidden_size // 64,
        "intermediate_size": 4 * args.hidden_size,
        "vocab_size": args.vocab_size or config["vocab_size"],
    }
    (args.folder / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    main()

"""Compare two tokenizers on your text: tokens, and bytes per token. `tokenmill compare-tokenizers` shows more."""

import tokenmill as tm

TEXTS = [
    "The miller listens to the stones.",
    "Der Müller hört auf die Steine.",
    "def grind(sacks: int) -> float:\n    return sacks * 0.8\n",
]
TOKENIZERS = ["o200k_harmony", "cl100k_base"]  # also Hub ids, folders and files

if __name__ == "__main__":
    size = sum(len(text.encode()) for text in TEXTS)
    for name in TOKENIZERS:
        rows = ({"text": text} for text in TEXTS)
        settings = {"tokenizer": {"model": name, "add_eos": False}, "holdout": {"valid": 0, "test": 0}}
        tokens = tm.pretrain(rows, f"out/{name}", **settings)["pretrain"]["tokens"]
        print(f"{name:15} {tokens:4} tokens, {size / tokens:.2f} bytes per token")

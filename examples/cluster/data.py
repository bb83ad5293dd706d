"""Instructions, inputs and answers in Alpaca's shape, made here: nothing is downloaded.

The tasks have one right answer, so a model can learn them: sort, reverse or count words, add
numbers, repeat a text. Lengths are as such sets have them: most answers are short, some are ten
times as long, and more than half of the rows have no input.

python data.py --out data.jsonl --rows 2000
"""

import argparse
import json
import random
from pathlib import Path

WORDS = """
    apple bridge candle dinner engine forest garden harbor island jacket kitchen ladder
    market needle orange pencil quarry river silver table uncle valley window yellow zebra
    basket copper desert empire falcon
""".split()
TASKS = {
    "Sort these words": lambda words: " ".join(sorted(words)),
    "Write these words in reverse order": lambda words: " ".join(reversed(words)),
    "Count these words": lambda words: str(len(words)),
    "Write these words in capital letters": lambda words: " ".join(words).upper(),
}


def row(chance):
    """A dict of three texts: instruction, input (often empty), output."""
    count = min(
        200, max(2, round(chance.lognormvariate(2.5, 0.9)))
    )  # words: half of the rows have less than 13
    task = chance.choice([*TASKS, "add", "repeat"])
    if task == "add":
        a, b = chance.randrange(1000), chance.randrange(1000)
        return dict(
            instruction=f"What is {a} plus {b}?", input="", output=f"{a} plus {b} is {a + b}."
        )
    words = chance.choices(WORDS, k=count)
    if task == "repeat":
        word, times = words[0], min(count, 40)
        return dict(
            instruction=f"Write {word} {times} times.", input="", output=" ".join([word] * times)
        )
    answer = TASKS[task](words)
    if chance.random() < 0.4:
        return dict(instruction=f"{task}: {' '.join(words)}", input="", output=answer)
    return dict(instruction=f"{task}.", input=" ".join(words), output=answer)


def write(path, rows=2000, seed=0):
    """The same file for the same rows and seed."""
    chance = random.Random(seed)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row(chance)) + "\n" for _ in range(rows)))
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="data.jsonl")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(write(args.out, args.rows, args.seed))

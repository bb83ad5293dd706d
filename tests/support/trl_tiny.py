"""A tokenizer, a model in a folder and a few lines of data for TRL's trainers: nothing comes from a
network."""

import tiny
import tokenizers
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

WORDS = """
    the a river lamp stone garden letter winter window kettle market tailor runs waits sings bends turns opens falls
    slowly early twice again under over beside after quiet bright cold small and but so
""".split()
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<user>", "<assistant>"]
CHAT = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


def tokenizer():
    """A word is a token."""
    words = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT,
    )


def folder(path, seed=0, family="llama", **config):
    """Where a tiny model and the tokenizer are saved, as the path that a trainer takes."""
    tiny.model(family, seed=seed, **config).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def words(first, count):
    return " ".join(WORDS[(first * 5 + i * (i + 3)) % len(WORDS)] for i in range(count))


def pairs(rows=8):
    """Completions of unequal length."""
    return Dataset.from_list(
        [
            dict(
                prompt=words(i, 3),
                chosen=" " + words(i + 1, 3 + i % 3),
                rejected=" " + words(i + 2, 6 - i % 4),
            )
            for i in range(rows)
        ]
    )


def unpaired(rows=8):
    return Dataset.from_list(
        [
            dict(prompt=words(i, 3), completion=" " + words(i + 1, 3 + i % 4), label=i % 3 != 1)
            for i in range(rows)
        ]
    )


def prompts(rows=8):
    return Dataset.from_list([dict(prompt=words(i, 3 + i % 2)) for i in range(rows)])


def chats(rows=8):
    said = [(words(i, 3), words(i + 1, 4 + i % 3)) for i in range(rows)]
    return Dataset.from_list(
        [
            dict(messages=[dict(role="user", content=a), dict(role="assistant", content=b)])
            for a, b in said
        ]
    )

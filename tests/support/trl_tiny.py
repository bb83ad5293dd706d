"""A tokenizer, a saved model and a few lines of data for TRL's trainers, without a network."""

import tiny
import tokenizers
from datasets import Dataset
from hardware import DEVICE
from transformers import PreTrainedTokenizerFast

WORDS = """
    the a river lamp stone garden letter winter window kettle market tailor runs waits sings bends
    turns opens falls slowly early twice again under over beside after quiet bright cold small and
    but so
""".split()
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<user>", "<assistant>"]
CHAT = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)

# of a trainer's config: few steps, logged one by one, the same ones each time
CONFIG = dict(
    logging_steps=1,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    seed=0,
    use_cpu=DEVICE == "cpu",
    bf16=False,
    gradient_checkpointing=False,
    per_device_train_batch_size=4,
)


def tokenizer():
    """Return a tokenizer to which each word is a token."""
    ids = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    word_level = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    word_level.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=word_level,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT,
    )


def save_model(path, seed=0, family="llama", **config):
    """Save a tiny model and the tokenizer, and return the path for a trainer."""
    tiny.model(family, seed=seed, **config).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def words(first, count):
    return " ".join(WORDS[(first * 5 + i * (i + 3)) % len(WORDS)] for i in range(count))


def pairs(rows=8):
    """Return pairs of completions of unequal length."""
    examples = []
    for i in range(rows):
        chosen = " " + words(i + 1, 3 + i % 3)
        rejected = " " + words(i + 2, 6 - i % 4)
        examples.append(dict(prompt=words(i, 3), chosen=chosen, rejected=rejected))
    return Dataset.from_list(examples)


def unpaired(rows=8):
    """Return completions with the label that they are wanted or not."""
    examples = []
    for i in range(rows):
        completion = " " + words(i + 1, 3 + i % 4)
        examples.append(dict(prompt=words(i, 3), completion=completion, label=i % 3 != 1))
    return Dataset.from_list(examples)


def prompts(rows=8):
    return Dataset.from_list([dict(prompt=words(i, 3 + i % 2)) for i in range(rows)])


def chats(rows=8):
    examples = []
    for i in range(rows):
        question = dict(role="user", content=words(i, 3))
        answer = dict(role="assistant", content=words(i + 1, 4 + i % 3))
        examples.append(dict(messages=[question, answer]))
    return Dataset.from_list(examples)

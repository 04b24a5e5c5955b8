"""The tiny model's tokenizer: byte-level BPE over the task sentences, action tokens at the end of the vocabulary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rlvla.models.vla.prompts import PROMPT_TEMPLATE
from rlvla.utils.data_files import read_json
from rlvla.utils.errors import ConfigError

UNK, BOS, EOS, PROMPT_END = "<unk>", "<s>", "</s>", "<prompt_end>"
PAD = "<pad>"
MAX_TEXT_TOKENS = 2048


# Class of a tokenizer that needs no file but tokenizer.json, known to every version of transformers.
TOKENIZER_CLASS = "PreTrainedTokenizerFast"


def train_tokenizer(sentences: Sequence[str], *, n_action_bins: int = 256) -> PreTrainedTokenizerFast:
    """A tokenizer with special tokens, 256 bytes, words of the sentences and action tokens, in this order.

    Every string can be encoded because unknown words fall back to bytes. The fixed parts of the prompt are single
    tokens, which keeps sequences short. The padding token is the first id after the vocabulary, as in the public
    checkpoints, so `len(tokenizer)` is the vocabulary size plus one.

    Args:
        sentences: task instructions to learn words from.
        n_action_bins: number of action tokens.

    Raises:
        ConfigError: there are no non-empty sentences.
    """
    sentences = [sentence.lower() for sentence in sentences]
    if not any(sentence.strip() for sentence in sentences):
        raise ConfigError("the tokenizer needs at least one task sentence to learn its words from")
    before, after = PROMPT_TEMPLATE.split("{instruction}")
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_TEXT_TOKENS,
        min_frequency=1,
        special_tokens=[UNK, BOS, EOS, PROMPT_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # In a prompt the sentence follows a fixed part that ends with a space, so its first word has no leading space.
    tokenizer.train_from_iterator(sentences, trainer)
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in (before, after)])
    tokenizer.add_special_tokens([AddedToken(f"<action_{k}>", normalized=False) for k in range(n_action_bins)])
    tokenizer.add_special_tokens([AddedToken(PAD, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNK,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer to `folder` so that transformers and tokenizers from 4.40 and 0.19 on read it.

    Newer versions write another class name, and merges as pairs, which older ones do not know.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = read_json(path)
    settings.pop("backend", None)
    _write_json(path, settings | {"tokenizer_class": TOKENIZER_CLASS})
    path = folder / "tokenizer.json"
    content = read_json(path)
    merges = content["model"]["merges"]
    content["model"]["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
    _write_json(path, content)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

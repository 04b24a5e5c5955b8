"""A tiny vision-language model with random weights, in a folder that `transformers serve` can serve."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}\n{% endfor %}assistant:"
)


def build_tiny_llava(folder: Path) -> Path:
    """Write the model, its tokenizer and its processor; returns the folder."""
    from transformers import CLIPImageProcessor

    torch.manual_seed(0)
    special = ["<pad>", "<s>", "</s>", "<image>"]
    tokenizer = byte_tokenizer(special, pad_token="<pad>", bos_token="<s>", eos_token="</s>", image_token="<image>")
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        ),
        text_config=LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder


def byte_tokenizer(special: list[str], **names: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and a few words; `names` are the roles of special tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(["lift the cube"], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **names)

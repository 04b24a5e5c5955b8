"""A tiny vision-language model with random weights, in a folder that `transformers serve` can serve."""

from __future__ import annotations

from collections.abc import Sequence
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


def build_tiny_llava(folder: Path, *, width: int = 32, words: Sequence[str] = ()) -> Path:
    """Write the model, its tokenizer and its processor; returns the folder.

    Args:
        folder: created.
        width: of tower and decoder, which have two attention heads each.
        words: tokens of their own, which begin every answer that no schema restrains.
    """
    from transformers import CLIPImageProcessor

    torch.manual_seed(0)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<image>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(["lift the cube"], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>", image_token="<image>"
    )
    tokenizer.add_tokens(list(words))
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=width,
            intermediate_size=width,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        ),
        text_config=LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=width,
            num_hidden_layers=1,
            num_attention_heads=2,
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    model = LlavaForConditionalGeneration(config)
    if words:
        _prefer(model, tokenizer.convert_tokens_to_ids(list(words)))
    model.save_pretrained(folder)
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


@torch.no_grad()
def _prefer(model: LlavaForConditionalGeneration, ids: list[int]) -> None:
    """Make tokens more likely than all others: they are read from a channel that is 1 after every word."""
    decoder = model.model.language_model
    decoder.embed_tokens.weight[:, 0] = 1.0
    for layer in decoder.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    model.lm_head.weight[:, 0] = 0.0
    model.lm_head.weight[ids, 0] = 1.0

"""A tiny vision-language model with random weights, in a folder that vLLM can serve on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from tests.support.tiny_llava import byte_tokenizer

# vLLM's attention on a CPU takes heads of this width, not narrower ones of a tower.
WIDTH, HEADS = 128, 2
IMAGE, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}" + START + IMAGE + END + "{% endif %}{% endfor %}\n"
    "{% endfor %}assistant:"
)
PREPROCESSOR = {
    "processor_class": "Qwen2VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 28 * 28,
    "max_pixels": 112 * 112,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def build_tiny_qwen_vl(folder: Path) -> Path:
    """Write the model, its tokenizer and its preprocessor; returns the folder.

    Without a schema it answers "True" or "False".
    """
    torch.manual_seed(0)
    special = ["<pad>", "<s>", "</s>", IMAGE, VIDEO, START, END]
    tokenizer = byte_tokenizer(special, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens(["True", "False"])
    tokenizer.chat_template = TEMPLATE
    ids = tokenizer.convert_tokens_to_ids
    text = {"vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1}
    text |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 4096}
    text |= {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 8, 8], "rope_theta": 10000.0}}
    text |= {"bos_token_id": ids("<s>"), "eos_token_id": ids("</s>"), "pad_token_id": ids("<pad>")}
    tower = {"depth": 1, "embed_dim": WIDTH, "hidden_size": WIDTH, "num_heads": HEADS, "mlp_ratio": 1}
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=ids(IMAGE),
        video_token_id=ids(VIDEO),
        vision_start_token_id=ids(START),
        vision_end_token_id=ids(END),
        tie_word_embeddings=False,
    )
    model = Qwen2VLForConditionalGeneration(config)
    _prefer(model, ids(["True", "False"]))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


@torch.no_grad()
def _prefer(model: Qwen2VLForConditionalGeneration, ids: list[int]) -> None:
    """Make tokens more likely than all others: they are read from a channel that is 1 after every word."""
    decoder = model.model.language_model
    decoder.embed_tokens.weight[:, 0] = 1.0
    for layer in decoder.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    model.lm_head.weight[:, 0] = 0.0
    model.lm_head.weight[ids, 0] = 1.0

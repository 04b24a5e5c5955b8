"""A small OpenVLA with random weights and its own tokenizer, as a checkpoint folder in the public layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from rlvla.models.action_heads import smooth_action_rows
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.image_processing import DINO_MEAN, DINO_STD, SIGLIP_MEAN, SIGLIP_STD
from rlvla.models.vla.inputs import PROMPT_TEMPLATE
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.models.vla.vision import VisionTower
from rlvla.utils.data_files import read_json
from rlvla.utils.errors import ConfigError

# Padding rows after the vocabulary; the padding token is the first of them.
PAD_TO_MULTIPLE_OF = 8
SINCOS_TEMPERATURE = 10000.0
# Default widths of attention heads; narrower ones underuse the vector units of a CPU.
VISION_HEAD_WIDTH = 16
LLM_HEAD_WIDTH = 32
UNK, BOS, EOS, PROMPT_END = "<unk>", "<s>", "</s>", "<prompt_end>"
PAD = "<pad>"
MAX_TEXT_TOKENS = 2048


def build_tiny(
    folder: str | Path,
    *,
    sentences: Sequence[str],
    dataset_statistics: dict[str, Any],
    image_size: int = 64,
    patch_size: int = 8,
    vision_dim: int = 48,
    vision_depth: int = 3,
    vision_heads: int | None = None,
    llm_dim: int = 64,
    llm_mlp_dim: int = 192,
    llm_layers: int = 3,
    llm_heads: int | None = None,
    rope_theta: float = 10000.0,
    model_variant: str = "oft",
    action_chunk_len: int | None = None,
    action_dim: int = 7,
    num_images_in_input: int = 1,
    use_proprio: bool = False,
    proprio_dim: int | None = None,
    center_crop: bool = False,
    action_normalization: str = "q99",
    action_std: str | None = None,
    action_std_init: float | None = None,
    seed: int = 0,
) -> Path:
    """Write the tiny model to `folder` and return the folder; the same arguments give identical files.

    A model of this size learns only with a suitable initialization: Xavier weights, sine-cosine position embeddings in
    the towers, LayerScale of 1, and an action head in which neighboring bins start out similar.

    Args:
        folder: created if absent; existing checkpoint files in it are replaced.
        sentences: task instructions to train the tokenizer on.
        dataset_statistics: statistics by key, each with "action" (and "proprio") entries.
        image_size: side of the square image in pixels.
        patch_size: side of a patch in pixels; must divide `image_size`.
        vision_dim: width of each tower; a multiple of 4.
        vision_depth: blocks of each tower; the last one is never used.
        vision_heads: attention heads of each tower; None gives one per 16 channels.
        llm_dim: width of the decoder.
        llm_mlp_dim: hidden width of the decoder's MLPs.
        llm_layers: layers of the decoder.
        llm_heads: attention heads of the decoder; None gives one per 32 channels.
        rope_theta: base of the rotary position embedding.
        model_variant: see `OpenVLAConfig`, like the arguments up to `action_std_init`.
        action_chunk_len: A.
        action_dim: D.
        num_images_in_input: N.
        use_proprio: whether a proprio token follows the patches.
        proprio_dim: P.
        center_crop: whether images are cropped.
        action_normalization: "q99" or "bounds".
        action_std: kind of the standard deviation of "oft_regression".
        action_std_init: its initial value.
        seed: of the random weights.

    Raises:
        ConfigError: incompatible sizes.
    """
    folder = Path(folder)
    tokenizer = train_tokenizer(sentences)
    vocab_size, bos, eos, prompt_end = (_token_id(tokenizer, token) for token in (PAD, BOS, EOS, PROMPT_END))
    vision_heads = vision_heads or default_heads(vision_dim, VISION_HEAD_WIDTH)
    tower = {"patch_size": patch_size, "embed_dim": vision_dim, "depth": vision_depth, "num_heads": vision_heads}
    config = OpenVLAConfig(
        text_config={
            "vocab_size": vocab_size + PAD_TO_MULTIPLE_OF,
            "hidden_size": llm_dim,
            "intermediate_size": llm_mlp_dim,
            "num_hidden_layers": llm_layers,
            "num_attention_heads": llm_heads or default_heads(llm_dim, LLM_HEAD_WIDTH),
            "rope_theta": rope_theta,
            "pad_token_id": vocab_size,
            "bos_token_id": bos,
            "eos_token_id": eos,
        },
        timm_model_ids=["tiny_dinov2", "tiny_siglip"],
        image_sizes=[image_size, image_size],
        timm_model_kwargs=[
            {**tower, "init_values": 1.0, "reg_tokens": 0, "no_embed_class": True},
            {**tower, "class_token": False, "global_pool": "map"},
        ],
        pad_token_id=vocab_size,
        pad_to_multiple_of=PAD_TO_MULTIPLE_OF,
        action_chunk_len=action_chunk_len,
        action_dim=action_dim,
        num_images_in_input=num_images_in_input,
        use_proprio=use_proprio,
        proprio_dim=proprio_dim,
        model_variant=model_variant,
        prompt_end_token_id=prompt_end,
        center_crop=center_crop,
        action_normalization=action_normalization,
        action_std=action_std,
        action_std_init=action_std_init,
    )
    model = OpenVLAForActionPrediction(config)
    initialize(model, torch.Generator().manual_seed(seed))
    model.dataset_statistics = dataset_statistics
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    preprocessor = {
        "image_processor_type": "PrismaticImageProcessor",
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, size, size] for size in config.image_sizes],
        "interpolations": ["bicubic", "bicubic"],
        "means": [list(DINO_MEAN), list(SIGLIP_MEAN)],
        "processor_class": "PrismaticProcessor",
        "stds": [list(DINO_STD), list(SIGLIP_STD)],
        "use_fused_vision_backbone": True,
    }
    _write_json(folder / "preprocessor_config.json", preprocessor)
    return folder


def _token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    token_id = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(token_id, int)
    return token_id


@torch.no_grad()
def initialize(model: OpenVLAForActionPrediction, generator: torch.Generator) -> None:
    """Xavier weights, zero biases, sine-cosine positions, embeddings of std 1/sqrt(width), smooth action head."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight.view(module.weight.shape[0], -1), generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, module.embedding_dim**-0.5, generator=generator)
        elif isinstance(module, VisionTower):
            _initialize_tower_tokens(module, generator)
    rows = smooth_action_rows(model.config.n_action_bins, model.config.text_config.hidden_size, generator)
    if model.action_head is not None:
        model.action_head.initialize(generator)
    head = model.language_model.lm_head
    head.weight[head.first_row : head.first_row + head.num_rows] = rows


def _initialize_tower_tokens(tower: VisionTower, generator: torch.Generator) -> None:
    config = tower.config
    grid = config.img_size // config.patch_size
    patches = tower.pos_embed.shape[1] - config.num_patches
    tower.pos_embed.zero_()
    tower.pos_embed[0, patches:] = sincos_positions(grid, config.embed_dim)
    for token in (tower.cls_token, tower.reg_token, tower.attn_pool.latent if tower.attn_pool else None):
        if token is not None:
            token.normal_(0.0, 0.02, generator=generator)


def sincos_positions(grid: int, dim: int) -> Tensor:
    """Sine-cosine embeddings [grid * grid, dim] of a square grid in row-major order (MAE, arXiv 2111.06377).

    Raises:
        ValueError: `dim` is not a multiple of 4.
    """
    if dim % 4:
        raise ValueError(f"vision_dim is {dim}; sine-cosine position embeddings need a multiple of 4")
    frequencies = SINCOS_TEMPERATURE ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    angles = torch.arange(grid, dtype=torch.float64)[:, None] * frequencies
    axis = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows, columns = axis[:, None].expand(-1, grid, -1), axis[None].expand(grid, -1, -1)
    return torch.cat([columns, rows], dim=-1).reshape(grid * grid, dim).float()


def default_heads(dim: int, width: int) -> int:
    """The largest number of heads that divides `dim` into at least `width` channels each."""
    return next(heads for heads in range(max(1, dim // width), 0, -1) if dim % heads == 0)


def train_tokenizer(sentences: Sequence[str], *, n_action_bins: int = 256) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: special tokens, 256 bytes, words of the sentences, action tokens, in this order.

    Unknown words fall back to bytes. The fixed parts of the prompt are single tokens, which keeps sequences short. The
    padding token is the first id after the vocabulary, as in the public checkpoints, so `len(tokenizer)` is the
    vocabulary size plus one.

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
    # In a prompt the sentence follows a fixed text that ends with a space, so its first word has no leading space.
    tokenizer.train_from_iterator(sentences, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (before, after)])
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

    Newer versions write another class name, and merges as pairs, which older ones cannot read.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = read_json(path)
    settings.pop("backend", None)
    _write_json(path, settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
    path = folder / "tokenizer.json"
    content = read_json(path)
    merges = content["model"]["merges"]
    content["model"]["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
    _write_json(path, content)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

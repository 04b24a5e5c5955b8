"""Instruction encoder: embeddings of hashed words and trigrams, and attention."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

MAX_WORDS = 64  # of an instruction; the rest is ignored
_MAX_FEATURES = 24  # of a word
_MAX_SENTENCES = 4096  # in a cache; cheap to encode again
# Words without underscores; a Chinese or Japanese character is one word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")


@dataclass(frozen=True)
class Sentences:
    """Instructions ready for a `TextEncoder`.

    Attributes:
        features: [T, W, F] int64, rows of the embedding table for the W words of T distinct sentences; 0: none.
        rows: [B] int64, the sentence of each decision.
    """

    features: Tensor
    rows: Tensor


def word_features(word: str, buckets: int) -> list[int]:
    """Rows of the embedding table, in 1..`buckets` - 1, for a word and its trigrams.

    Related words ("push", "pushing") share trigrams, so new forms of training words have trained embeddings.
    """
    padded = f"<{word}>"
    strings = [padded, *(padded[i : i + 3] for i in range(len(padded) - 2))]
    return [1 + zlib.crc32(string.encode()) % (buckets - 1) for string in strings[:_MAX_FEATURES]]


def words_of(sentence: str) -> list[str]:
    """The lower-case words of a sentence, without punctuation; at least one, at most `MAX_WORDS`."""
    return _WORD.findall(sentence.lower())[:MAX_WORDS] or [""]


def encode_sentence(sentence: str, buckets: int) -> Tensor:
    """[W, F] int64: the features of each word."""
    features = [torch.tensor(word_features(word, buckets)) for word in words_of(sentence)]
    return pad_sequence(features, batch_first=True)


def stack_sentences(encoded: Sequence[Tensor]) -> Tensor:
    """`Sentences.features` [T, W, F] of encoded sentences."""
    length, width = (max(features.shape[axis] for features in encoded) for axis in (0, 1))
    table = torch.zeros(len(encoded), length, width, dtype=torch.long)
    for row, features in zip(table, encoded):
        row[: len(features), : features.shape[1]] = features
    return table


class SentenceCache:
    """Cache of encoded sentences, and of the table of the last batch; `buckets`: rows of the embedding table."""

    def __init__(self, buckets: int):
        self._buckets = buckets
        self._encoded: dict[str, Tensor] = {}  # on the host
        self._last: tuple[tuple[tuple[str, ...], torch.device], Tensor] | None = None

    def __call__(self, instructions: Sequence[str], device: torch.device) -> Sentences:
        """The instructions of a batch, each distinct sentence once."""
        distinct = {text: row for row, text in enumerate(sorted(set(instructions)))}
        rows = torch.tensor([distinct[text] for text in instructions], device=device)
        key = tuple(distinct), device
        if self._last is None or self._last[0] != key:
            with torch.inference_mode(False):  # also used in later training passes
                self._last = key, stack_sentences([self._features(text) for text in distinct]).to(device)
        return Sentences(self._last[1], rows)

    def _features(self, sentence: str) -> Tensor:
        if sentence not in self._encoded:
            if len(self._encoded) >= _MAX_SENTENCES:
                self._encoded.clear()
            self._encoded[sentence] = encode_sentence(sentence, self._buckets)
        return self._encoded[sentence]


class TextEncoder(nn.Module):
    """A sentence to a vector: embeddings of its words and one attention block.

    Args:
        buckets: rows of the embedding table.
        width: of embeddings and result; a multiple of `heads`.
        heads: attention heads.
    """

    def __init__(self, buckets: int, width: int, heads: int = 2):
        super().__init__()
        self._heads = heads
        self.embedding = nn.Embedding(buckets, width, padding_idx=0)
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, features: Tensor) -> Tensor:
        """[T, W, F] features -> [T, width]."""
        present = features > 0
        counts = present.sum(-1, keepdim=True).clamp(min=1)
        hidden = self.embedding(features).sum(-2)
        hidden = hidden / counts.to(hidden.dtype).sqrt()
        real = present.any(-1)  # [T, W]
        hidden = hidden + _positions(hidden.shape[1], hidden.shape[2], hidden)
        query, key, value = (
            part.unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(hidden)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=real[:, None, None, :])
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + self.mlp(self.norm(hidden))
        return (hidden * real.unsqueeze(-1)).sum(1) / real.sum(1, keepdim=True).to(hidden.dtype).sqrt()


def _positions(length: int, width: int, like: Tensor) -> Tensor:
    """Sine-cosine position embeddings [length, width] (Vaswani et al. 2017)."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(1e3) / width))
    angles = torch.arange(length)[:, None] * rates
    return 0.3 * torch.cat([angles.sin(), angles.cos()], -1)[:, :width].to(like)

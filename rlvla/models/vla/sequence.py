"""Layout of the decoder's input: BOS, patches, proprio, prompt, action positions and padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Text:
    """Token ids of a batch without images: prompt, then tail, then padding.

    Attributes:
        ids: [B, L + K] int64; the real tokens of each row come first.
        num_real: [B, 1] number of real prompt tokens; None if no prompt is padded (then all L are real).
        prompt_length: L, length of the padded prompts.
        tail_length: K, number of tokens after the prompt.
    """

    ids: Tensor
    num_real: Tensor | None
    prompt_length: int
    tail_length: int

    def tail_mask(self, start: int, stop: int) -> Tensor:
        """Bool [B or 1, L + K]: positions `start` to `stop` (exclusive) of the tail."""
        position = torch.arange(self.ids.shape[1], device=self.ids.device)[None]
        offset = position - (self.prompt_length if self.num_real is None else self.num_real)
        return (offset >= start) & (offset < stop)

    def read_positions(self, num_visual: int, count: int) -> Tensor | slice:
        """Positions in the whole sequence that predict the next `count` tokens, starting with the last prompt token.

        A slice if they are the same for all rows, else [B, count].
        """
        if self.num_real is None:
            start = num_visual + self.prompt_length - 1
            return slice(start, start + count)
        return (num_visual - 1 + self.num_real) + torch.arange(count, device=self.ids.device)

    def lengths(self, num_visual: int) -> Tensor | None:
        """[B] number of real positions in the whole sequence; None if nothing is padded."""
        return None if self.num_real is None else self.num_real[:, 0] + (num_visual + self.tail_length)

    def mean_embedding(self, embeddings: Tensor, without: Tensor | None) -> Tensor:
        """[B, d]: mean of embeddings [B, L + K, d] over the real tokens, excluding the mask `without`."""
        counted = self.tail_mask(-self.ids.shape[1], self.tail_length)
        if without is not None:
            counted = counted & ~without
        weight = counted.to(embeddings.dtype)[..., None]
        return (embeddings * weight).sum(1) / weight.sum(1)


def arrange(input_ids: Tensor, attention_mask: Tensor, tail: Tensor, pad_token_id: int) -> Text:
    """Append `tail` [B, K] to left-padded prompts [B, L] and move the padding to the end.

    Raises:
        ValueError: a prompt is empty or padded on the right.
    """
    joined = torch.cat([input_ids, tail], 1)
    length, tail_length = input_ids.shape[1], tail.shape[1]
    if bool(attention_mask.all()):
        return Text(joined, None, length, tail_length)
    if not bool(attention_mask[:, -1].all()):
        raise ValueError("attention_mask ends with padding; prompts must be padded on the left and not be empty")
    num_real = attention_mask.sum(1, keepdim=True)
    padding = joined.new_full((len(joined), 1), pad_token_id)
    source = torch.arange(joined.shape[1], device=joined.device)[None] + (length - num_real)
    ids = torch.cat([joined, padding], 1).gather(1, source.clamp_max(joined.shape[1]))
    return Text(ids, num_real, length, tail_length)

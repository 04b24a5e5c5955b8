"""Instructions as vectors: order, unknown words, and padding."""

from __future__ import annotations

import copy

import pytest
import torch

from rlvla.models.compact.text import (
    MAX_WORDS,
    SentenceCache,
    TextEncoder,
    encode_sentence,
    stack_sentences,
    word_features,
    words_of,
)

BUCKETS = 512
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    torch.manual_seed(0)
    return TextEncoder(BUCKETS, 32).eval()


def features(*sentences: str) -> torch.Tensor:
    return stack_sentences([encode_sentence(sentence, BUCKETS) for sentence in sentences])


def vectors(encoder: TextEncoder, *sentences: str) -> torch.Tensor:
    with torch.no_grad():
        return encoder(features(*sentences))


def test_word_order_counts_case_and_punctuation_do_not(encoder: TextEncoder) -> None:
    left, right = vectors(encoder, "push the red disc past the blue disc", "push the blue disc past the red disc")
    assert (left - right).abs().max() > 0.01
    same, loud = vectors(encoder, "pick up the mug", "Pick up the MUG!")
    torch.testing.assert_close(same, loud, rtol=0, atol=0)


def test_a_sentence_does_not_depend_on_those_beside_it(encoder: TextEncoder) -> None:
    alone = vectors(encoder, "reach it")[0]
    beside = vectors(encoder, "reach it", "reach for the extraordinarily yellow disc at the end of the table")[0]
    torch.testing.assert_close(alone, beside, rtol=0, atol=1e-6)


def test_related_words_share_features_and_none_is_the_padding() -> None:
    push, pushing, grasp = (set(word_features(word, BUCKETS)) for word in ("push", "pushing", "grasp"))
    assert len(push & pushing) >= 3 > len(push & grasp)
    assert all(0 < row < BUCKETS for row in push | pushing | grasp)
    assert word_features("push", BUCKETS) == word_features("push", BUCKETS)


def test_joined_words_and_characters_are_words(encoder: TextEncoder) -> None:
    plate, drawer = vectors(
        encoder, "pick_up_the_bowl_and_place_it_on_the_plate", "pick_up_the_bowl_and_put_it_in_the_drawer"
    )
    spaces = vectors(encoder, "pick up the bowl and place it on the plate")[0]
    assert (plate - drawer).abs().max() > 0.1
    torch.testing.assert_close(plate, spaces, rtol=0, atol=1e-6)
    assert features("把红色的圆盘推到左边").shape[1] == 10


def test_bfloat16(encoder: TextEncoder) -> None:
    encoded = copy.deepcopy(encoder).bfloat16()(features("reach the disc"))
    assert encoded.dtype == torch.bfloat16
    torch.testing.assert_close(encoded[0].float(), vectors(encoder, "reach the disc")[0], rtol=0.1, atol=0.1)


@pytest.mark.parametrize("sentence", ["", "?!", "把红色的圆盘推到左边", "word " * 500, "x" * 10_000])
def test_any_text_has_a_finite_vector(sentence: str, encoder: TextEncoder) -> None:
    assert torch.isfinite(vectors(encoder, sentence, "reach")).all()


def test_words_after_the_limit_are_not_read(encoder: TextEncoder) -> None:
    start = "go " * MAX_WORDS
    left, right = vectors(encoder, start, start + "left")
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def test_each_sentence_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []

    def count(sentence: str, buckets: int) -> torch.Tensor:
        encoded.append(sentence)
        return encode_sentence(sentence, buckets)

    monkeypatch.setattr("rlvla.models.compact.text.encode_sentence", count)
    cache = SentenceCache(BUCKETS)
    with torch.inference_mode():
        sentences = cache(["reach it", "lift", "reach it"], CPU)
    assert len(sentences.features) == 2 and sentences.rows.tolist() == [1, 0, 1]
    assert cache(["lift", "reach it"], CPU).features is sentences.features and not sentences.features.is_inference()
    again = cache(["push the disc", "reach it"], CPU)
    assert sorted(encoded) == ["lift", "push the disc", "reach it"]
    assert torch.equal(again.features, features("push the disc", "reach it"))


def test_words_are_counted_like_they_are_encoded() -> None:
    for sentence in ("", "?!", "Pick_up the mug!", "word " * 500, "把红色"):
        assert len(words_of(sentence)) == len(encode_sentence(sentence, BUCKETS))

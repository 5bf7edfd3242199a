"""Make the trained models' tokenisers: byte-fallback BPE in Llama's style."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from configs.models.mini import VOCABULARY
from jaxspec.prompts.placeholders import PLACEHOLDER
from picturebook import train_sample

SAMPLES = 4000
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the mini models' tokeniser, trained on the texts of the first training samples."""
    return train_tokenizer(_texts(), VOCABULARY, (PLACEHOLDER,))


def train_tokenizer(
    texts: Iterable[str], vocabulary: int, extra: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """Return a tokeniser of so many tokens, the same on every machine.

    Args:
      extra: Special tokens in addition to Llama's.
    """
    special = (*SPECIAL, *extra)
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Metaspace(prepend_scheme="first"),
            pre_tokenizers.Punctuation("isolated"),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    core.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in special]
        + [f"<0x{byte:02X}>" for byte in range(256)],
        initial_alphabet=[chr(c) for c in range(33, 127)] + ["\n"],
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    spec = json.loads(core.to_str())
    # The trainer only takes byte pieces as special tokens, which decoding would leave out.
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in special]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(spec)),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": PLACEHOLDER} if PLACEHOLDER in extra else {},
        clean_up_tokenization_spaces=False,
    )


def _texts() -> Iterator[str]:
    for i in range(SAMPLES):
        for question, answer in train_sample(0, i).turns:
            yield f"USER: {question.replace(PLACEHOLDER, '')} ASSISTANT:"
            yield answer

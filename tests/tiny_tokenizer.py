"""A character tokenizer for the tiny checkpoints (256 ids, EOS 2), with a chat template, written beside them."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Ids: the special tokens, then characters from U+0020 on."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *(chr(32 + i) for i in range(256 - len(SPECIAL)))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    wrapped.add_special_tokens({"additional_special_tokens": SPECIAL[3:]})
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    return folder

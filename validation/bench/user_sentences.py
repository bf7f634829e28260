"""A sentence-transformers model as a function of tensors."""

from __future__ import annotations

import tempfile
from pathlib import Path

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import AutoModel, BertTokenizer, PreTrainedConfig

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def encoder(config: PreTrainedConfig) -> SentenceTransformer:
    """A model of this config with random weights and words for tokens, the mean over its tokens, and a normalisation."""
    with tempfile.TemporaryDirectory() as folder:  # sentence-transformers takes its parts from files alone
        AutoModel.from_config(config).save_pretrained(folder)
        words = (f"word{number}" for number in range(config.vocab_size - len(SPECIAL_TOKENS)))
        vocabulary = Path(folder, "vocab.txt")
        vocabulary.write_text("\n".join([*SPECIAL_TOKENS, *words]))
        BertTokenizer(str(vocabulary)).save_pretrained(folder)
        transformer = Transformer(folder)
    return SentenceTransformer(modules=[transformer, Pooling(config.hidden_size), Normalize()])

"""A sentence-transformers model as a function of tensors."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from torch import Tensor, nn
from transformers import AutoModel, BertConfig, BertTokenizer, PreTrainedConfig

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class SentenceEncoder(nn.Module):
    """Token numbers to one vector a sentence.

    The forward of sentence-transformers writes its results into the dict that the caller gives it, which no
    graph does: here that dict is made inside the forward.
    """

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        features = self.model({"input_ids": input_ids, "attention_mask": attention_mask})
        return {name: features[name] for name in ("token_embeddings", "sentence_embedding")}


def bert_encoder(**config: Any) -> SentenceEncoder:
    """A BERT of this `BertConfig` as a function of tensors."""
    return SentenceEncoder(encoder(BertConfig(**config)))


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

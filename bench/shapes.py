# SPDX-License-Identifier: Apache-2.0
"""Attention as models call it: batch, heads, queries, keys and head dimension, in the order of the table.

A line is one call of a layer in a usual training or generation step. Heads are (query heads, kv heads) where
keys have heads of their own, lengths (queries, keys) where they differ.
"""

import dataclasses
from typing import Tuple, Union

Pair = Union[int, Tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Shape:
    model: str
    batch: int
    heads: Pair
    length: Pair
    head_dim: int
    causal: bool = False
    option: str = ""  # bias: [1, H, Nq, Nk]; dbias: with its gradient; padding: bool [B, 1, 1, Nk]
    quick: bool = False  # in the short list, too


def _shape(model, batch, heads, length, head_dim, *words):
    option = "".join(word for word in words if word not in ("causal", "quick"))
    return Shape(model, batch, heads, length, head_dim, "causal" in words, option, "quick" in words)


SHAPES = [
    # Encoders of text.
    _shape("BERT base, 128 tokens", 8, 12, 128, 64, "quick"),
    _shape("BERT base, padded", 8, 12, 128, 64, "padding", "quick"),
    _shape("BERT large, SQuAD", 4, 16, 384, 64, "quick"),
    _shape("BERT base, 512 tokens", 2, 12, 512, 64),
    _shape("BERT base, sentences", 64, 12, 64, 64, "quick"),
    _shape("BERT base, titles", 256, 12, 32, 64, "quick"),
    _shape("MiniLM, sentences", 64, 12, 32, 32, "quick"),
    _shape("MiniLM, passages", 16, 12, 256, 32),
    _shape("ModernBERT, global layer", 1, 12, 1024, 64),
    _shape("T5 small encoder", 2, 8, 512, 64, "bias", "quick"),
    _shape("T5 small encoder, bias learned", 2, 8, 512, 64, "dbias"),
    _shape("T5 base cross", 2, 12, (128, 512), 64),
    # Images.
    _shape("ViT-Ti/16", 16, 3, 197, 64, "quick"),
    _shape("ViT-B/16", 8, 12, 197, 64, "quick"),
    _shape("ViT-L/14", 4, 16, 257, 64, "quick"),
    _shape("ViT-H/14", 2, 16, 257, 80),
    _shape("DINOv2 L/14, 518 pixels", 1, 16, 1370, 64),
    _shape("SigLIP so400m, 384 pixels", 1, 16, 729, 72),
    _shape("CLIP B/32 image", 32, 12, 50, 64, "quick"),
    _shape("CLIP text", 32, 8, 77, 64, "causal", "quick"),
    _shape("CLIP L text", 4, 12, 77, 64, "causal"),
    _shape("Swin-T stage 1", 256, 3, 49, 32, "bias", "quick"),
    _shape("Swin-T stage 2", 64, 6, 49, 32, "bias"),
    _shape("Swin-T stage 3", 16, 12, 49, 32, "bias", "quick"),
    _shape("Swin-T stage 1, bias learned", 256, 3, 49, 32, "dbias"),
    _shape("SwinV2 window 16", 16, 6, 256, 32, "bias"),
    _shape("Video Swin", 8, 6, 392, 32, "bias"),
    _shape("SAM B window", 25, 12, 196, 64, "bias", "quick"),
    _shape("SAM decoder, tokens to image", 1, 8, (7, 4096), 16, "quick"),
    _shape("SAM decoder, image to tokens", 1, 8, (4096, 7), 16, "quick"),
    _shape("DETR decoder self", 2, 8, 100, 32),
    _shape("DETR decoder cross", 2, 8, (100, 850), 32, "quick"),
    # Diffusion.
    _shape("Stable Diffusion self, 64²", 1, 8, 4096, 40),
    _shape("Stable Diffusion self, 32²", 2, 8, 1024, 80),
    _shape("Stable Diffusion self, 16²", 2, 8, 256, 160, "quick"),
    _shape("Stable Diffusion self, 8²", 2, 8, 64, 160, "quick"),
    _shape("Stable Diffusion cross, 64²", 1, 8, (4096, 77), 40, "quick"),
    _shape("Stable Diffusion cross, 32²", 2, 8, (1024, 77), 80),
    _shape("Stable Diffusion cross, 16²", 2, 8, (256, 77), 160),
    _shape("SDXL self, 32²", 1, 20, 1024, 64),
    _shape("SDXL cross, 64²", 1, 10, (4096, 77), 64),
    _shape("DiT-XL/2", 4, 16, 256, 72),
    # Sound.
    _shape("Whisper base encoder", 1, 8, 1500, 64),
    _shape("Whisper small decoder", 1, 12, 448, 64, "causal"),
    _shape("Whisper small cross", 1, 12, (448, 1500), 64),
    _shape("Whisper small cross, 5 beams", 5, 12, (1, 1500), 64, "quick"),
    _shape("wav2vec 2.0 base, 10 s", 2, 12, 499, 64),
    # Latents.
    _shape("Perceiver IO, bytes to latents", 1, 8, (256, 2048), 32),
    _shape("Perceiver, 16 latents", 1, 16, (16, 4096), 64, "quick"),
    _shape("Q-Former cross", 8, 12, (32, 257), 64, "quick"),
    _shape("Set Transformer, inducing points", 16, 4, (16, 512), 32),
    # Language models in training.
    _shape("GPT-2, 1024 tokens", 1, 12, 1024, 64, "causal"),
    _shape("GPT-2, 256 tokens", 4, 12, 256, 64, "causal", "quick"),
    _shape("nanoGPT, characters", 12, 6, 256, 64, "causal"),
    _shape("Llama 3 8B, 1024 tokens", 1, (32, 8), 1024, 128, "causal"),
    _shape("Llama 3 8B, 128 tokens", 4, (32, 8), 128, 128, "causal", "quick"),
    _shape("TinyLlama, 2048 tokens", 1, (32, 4), 2048, 64, "causal"),
    _shape("Qwen2 0.5B, 512 tokens", 2, (14, 2), 512, 64, "causal"),
    _shape("Gemma 2B (MQA)", 1, (8, 1), 512, 256, "causal", "quick"),
    # Few queries: generation, roll-outs, speculation.
    _shape("Llama 3 8B decode, 256 keys", 1, (32, 8), (1, 256), 128, "quick"),
    _shape("Llama 3 8B decode, 2048 keys", 1, (32, 8), (1, 2048), 128, "quick"),
    _shape("Llama 3 8B decode, 8192 keys", 1, (32, 8), (1, 8192), 128, "quick"),
    _shape("Llama 3 8B decode, batch 16", 16, (32, 8), (1, 512), 128, "quick"),
    _shape("Llama 3 8B decode, batch 64", 64, (32, 8), (1, 128), 128),
    _shape("GPT-2 decode", 1, 12, (1, 1024), 64, "quick"),
    _shape("GPT-2 decode, batch 16", 16, 12, (1, 512), 64),
    _shape("Falcon 7B decode (MQA)", 1, (71, 1), (1, 2048), 64, "quick"),
    _shape("Llama 3 8B, 4 drafted", 1, (32, 8), (4, 2048), 128, "quick"),
    _shape("Llama 3 8B, 8 drafted", 1, (32, 8), (8, 4096), 128),
    _shape("Llama 3 8B, a chunk of the prompt", 1, (32, 8), (64, 2048), 128),
    # Proteins.
    _shape("AlphaFold triangle attention", 128, 4, 128, 32, "bias", "quick"),
    _shape("AlphaFold rows of the MSA", 64, 8, 128, 32, "bias"),
    _shape("AlphaFold columns of the MSA", 128, 8, 64, 32),
    _shape("AlphaFold extra MSA", 64, 8, 128, 8, "quick"),
    _shape("ESM-2 650M", 2, 20, 256, 64),
    # Points, tables, series, recommendations.
    _shape("Point cloud, groups of 32", 512, 4, 32, 16, "quick"),
    _shape("Point Transformer V3 patch", 8, 4, 1024, 16),
    _shape("FT-Transformer, 24 features", 256, 8, 25, 24, "quick"),
    _shape("TabPFN, between features", 1024, 6, 10, 32, "quick"),
    _shape("TabPFN, between rows", 8, 6, 1024, 32),
    _shape("PatchTST", 224, 16, 42, 8, "quick"),
    _shape("Decision Transformer", 64, 1, 60, 128, "causal"),
    _shape("SASRec", 128, 2, 50, 25, "causal", "quick"),
]
